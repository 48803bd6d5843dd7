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
from tests.quick_runs import quick_sections

FEDDM = {"method": "feddm", "rounds": 2}


@pytest.fixture
def able_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AMX and a C++ compiler, or without both."""
    able = getattr(request, "param", True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: able)
    monkeypatch.setattr(context.shutil, "which", lambda name: name if able else None)


@pytest.mark.parametrize(
    ("run", "sections", "able_machine", "expected"),
    [
        (FEDDM, {}, True, ("bf16", "on")),
        (FEDDM, {}, False, ("fp32", "off")),
        (FEDDM, {"method": {"iterations": 10}}, True, ("bf16", "off")),
        (FEDDM, {"model": {"width": 32}}, True, ("fp32", "off")),
        (FEDDM, {"model": {"name": "lenet5"}}, True, ("fp32", "off")),
        (FEDDM, {"privacy": {"noise_multiplier": 3.0}}, True, ("fp32", "off")),
        ({"method": "fedavg", "rounds": 2000}, {"method": {}}, True, ("fp32", "off")),
        ({**FEDDM, "precision": "fp32"}, {}, True, ("fp32", "on")),
        ({**FEDDM, "compile": "off"}, {}, True, ("bf16", "off")),
    ],
    indirect=["able_machine"],
)
@pytest.mark.usefixtures("able_machine")
def test_only_wide_condensation_is_accelerated(
    run: dict[str, Any], sections: dict[str, Any], expected: tuple[str, str]
) -> None:
    defaults = {"model": {"width": 128}, "method": {"iterations": 1000}}
    settings = choose_speed(resolve({"run": run, **defaults, **sections}), torch.device("cpu"))
    assert (settings.precision, settings.compile) == expected


@pytest.mark.usefixtures("able_machine")
def test_choice_is_printed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"width": 64, "depth": 1}
    result = simulate(resolve(quick_sections("feddm", model=model)), output=tmp_path)
    assert "speed: run.precision=bf16, run.compile=off" in capsys.readouterr().err
    assert result.folder is not None
    recorded = tomllib.loads((result.folder / "config.toml").read_text())["run"]
    assert (recorded["precision"], recorded["compile"]) == ("bf16", "off")
