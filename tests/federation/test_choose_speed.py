"""Tests of the values "auto" of run.precision and run.compile."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth import resolve, simulate
from fedsynth.federation import context
from fedsynth.federation.context import choose_speed

CPU = torch.device("cpu")
FEDDM = {"method": "feddm", "rounds": 2}


@pytest.fixture(autouse=True)
def able_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AMX and a C++ compiler."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(context.shutil, "which", lambda name: name)


def choice(run: dict[str, Any], **sections: Any) -> tuple[str, str]:
    defaults = {"model": {"width": 128}}
    if run["method"] == "feddm":
        defaults["method"] = {"iterations": 1000}
    settings = choose_speed(resolve({"run": run, **defaults, **sections}), CPU)
    return settings.precision, settings.compile


@pytest.mark.parametrize(
    ("run", "sections", "expected"),
    [
        (FEDDM, {}, ("bf16", "on")),
        (FEDDM, {"method": {"iterations": 10}}, ("bf16", "off")),
        (FEDDM, {"model": {"width": 32}}, ("fp32", "off")),
        (FEDDM, {"model": {"name": "lenet5"}}, ("fp32", "off")),
        (FEDDM, {"privacy": {"noise_multiplier": 3.0}}, ("fp32", "off")),
        ({"method": "fedavg", "rounds": 2000}, {}, ("fp32", "off")),
        ({**FEDDM, "precision": "fp32"}, {}, ("fp32", "on")),
        ({**FEDDM, "compile": "off"}, {}, ("bf16", "off")),
    ],
    ids=str,
)
def test_only_wide_condensation_is_accelerated(
    run: dict[str, Any], sections: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert choice(run, **sections) == expected


def test_machines_without_amx_or_compiler_use_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(context.shutil, "which", lambda name: None)
    assert choice(FEDDM) == ("fp32", "off")


def test_choice_is_printed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = {"iterations": 1, "ipc": 1, "batch": 2, "server_epochs": 1}
    settings = resolve(
        {
            "run": {**FEDDM, "rounds": 1, "device": "cpu"},
            "method": quick,
            "model": {"width": 64, "depth": 1},
            "partition": {"clients": 1},
        }
    )
    result = simulate(settings, output=tmp_path)
    assert "speed: run.precision=bf16, run.compile=off" in capsys.readouterr().err
    assert result.folder is not None
    recorded = tomllib.loads((result.folder / "config.toml").read_text())["run"]
    assert (recorded["precision"], recorded["compile"]) == ("bf16", "off")
