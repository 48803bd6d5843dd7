"""Figures about a run never end it, nor charge it twice: accuracies, facts, pictures, loggers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import load_dataset, resolve, simulate
from fedsynth.config.settings import RunSettings
from fedsynth.methods.feddm import FedDM
from fedsynth.methods.fedhydra import FedHydra
from fedsynth.results.verification import verify_run
from tests.observers import NoteRecorder
from tests.quick_settings import quick_settings

OUTPUTS = "fedsynth.results"


def fail(*args: object, **kwargs: object) -> Any:
    raise ZeroDivisionError("division by zero")


def settings_of(method: str, **sections: Any) -> RunSettings:
    given = {
        "run": {"method": method, "rounds": 2, "device": "cpu"},
        "partition": {"kind": "iid", "clients": 2, "local_test": 0.2},
        "model": {"width": 4, "depth": 1},
        "method": {**quick_settings(method), "ipc": 1} if method == "feddm" else {},
    }
    return resolve({**given, **sections})


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (f"{OUTPUTS}.measure.correct", "test accuracy"),
        (f"{OUTPUTS}.measure.local_metrics", "accuracy on the clients' splits"),
        (f"{OUTPUTS}.run_folder.image_grid_png", "picture"),
        ("fedsynth.methods.feddm.FedDM.facts", "metrics of the server"),
        ("fedsynth.methods.feddm.FedDM.aggregate_metrics", "metrics of the clients"),
    ],
)
def test_a_figure_that_fails_costs_only_itself(
    target: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an error after the round's charge, so that `--resume` charges and fails again."""
    monkeypatch.setattr(target, fail)
    notes = NoteRecorder()
    settings = settings_of("feddm", privacy={"noise_multiplier": 2.0})
    result = simulate(settings, output=tmp_path, observer=notes)
    assert result.folder is not None
    assert len(result.metrics) == 2
    charged = (result.folder / "ledger" / "client-000.jsonl").read_text().splitlines()
    assert len(charged) == 3  # the header, and a row for each round
    assert verify_run(result.folder).problems == []
    warned = [line for line in notes.lines if line.startswith("warning: cannot record the ")]
    assert warned == [
        f"warning: cannot record the {what}: ZeroDivisionError: division by zero"
    ]  # said once


def test_figures_that_are_no_numbers_are_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: JSON without NaN, which refuses the row of a round that was charged."""
    facts = {"a": math.nan, "b": [1.0, -math.inf], "c": {"d": math.inf}}
    monkeypatch.setattr(FedDM, "facts", lambda *args: facts)
    folder = simulate(settings_of("feddm"), output=tmp_path, quiet=True).folder
    assert folder is not None
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert (row["a"], row["b"], row["c"]) == (None, [1.0, None], {"d": None})
    matrix = {"matrix": torch.tensor([[math.nan, 1.0]])}
    monkeypatch.setattr(FedDM, "artefacts", lambda *args: matrix, raising=False)
    folder = simulate(settings_of("feddm"), output=tmp_path, quiet=True).folder
    assert folder is not None
    assert json.loads((folder / "artefacts.json").read_text()) == {"matrix": [[None, 1.0]]}


PARTS: dict[str, Callable[[int], list[np.ndarray]]] = {
    "a client without records": lambda n: [np.arange(0), np.arange(n)],
    "one client": lambda n: [np.arange(n)],
    "a client whose records all test": lambda n: [np.arange(1), np.arange(1, 2), np.arange(2, n)],
    "nobody tests": lambda n: [np.arange(10), np.arange(10, 20)],
}


@pytest.mark.parametrize("parts", PARTS)
def test_odd_clients_do_not_end_a_run(parts: str) -> None:
    train, test = load_dataset("digits")
    settings = settings_of("fedavg", partition={"local_test": 0.97})
    divided = PARTS[parts](len(train))
    result = simulate(settings, data=(train, test), parts=divided, quiet=True)
    for row in result.metrics:
        if "local" in row:  # of those that test, by all their records
            pairs = zip(divided, row["local"]["client_accuracy"], strict=True)
            tested = [(len(part), a) for part, a in pairs if a is not None]
            size = sum(n for n, _ in tested)
            assert row["local"]["amp"] == pytest.approx(sum(n * a for n, a in tested) / size)
            assert row["local"]["wlp"] == min(a for _, a in tested)


def test_an_observer_that_fails_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a closed pipe on stderr, a full disk under a log."""

    def closed(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("fedsynth.simulation.run_messages.print", closed, raising=False)
    assert len(simulate(settings_of("fedavg")).metrics) == 2


def test_stratification_of_one_client_and_one_class_is_drawn(tmp_path: Path) -> None:
    train, test = load_dataset("digits")
    settings = resolve(
        {
            "run": {"method": "fedhydra", "rounds": 1, "device": "cpu"},
            "model": {"width": 4, "depth": 1},
            "method": quick_settings("fedhydra"),
        }
    )
    assert isinstance(settings.method, FedHydra)
    result = simulate(
        settings, data=(train, test), parts=[np.arange(400)], output=tmp_path, quiet=True
    )
    assert result.folder is not None
    assert list(result.folder.glob("*.png"))
