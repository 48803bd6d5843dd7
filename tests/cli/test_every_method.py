"""One method of each family through the command line, in process: open, and with a budget either
charged or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fedsynth.methods import method_class

PRIVATE = ("fedavg", "feddm", "fedstats", "real")


@pytest.mark.parametrize("method", ["fedbn", "feddm", "fedhydra", "real"])
def test_it_runs(method: str, train: Callable[..., Any]) -> None:
    run = train(f"{method} --json --local-test 0.2")
    assert run.code == 0, run.stderr
    summary = json.loads(run.stdout)
    assert summary["method"] == method
    personal = method_class(method).personal  # no model is common: only its owner sees a result
    assert (summary["test_accuracy"] is None) == personal
    assert 0 <= summary["local"]["amp"] <= 1
    assert (run.folder / "model.safetensors").is_file()


@pytest.mark.parametrize("method", PRIVATE)
def test_with_a_budget_it_is_charged_or_refused(method: str, train: Callable[..., Any]) -> None:
    run = train(f"{method} --json --dp-epsilon 8")
    if not method_class(method).protects:
        assert run.code == 2
        assert f"{method} cannot run with differential privacy" in run.stderr
        return
    assert run.code == 0, run.stderr
    private = json.loads(run.stdout)["differential_privacy"]
    assert 7.9 < private["epsilon"] <= 8
    report = json.loads((run.folder / "privacy_report.json").read_text())
    assert report["verdict"]["formal"]
    assert report["ledger"]
