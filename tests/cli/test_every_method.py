"""One method of each family through the command line, in process: open, and with a budget either
charged or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fedsynth.methods import METHODS, method_class

FAMILIES = (
    "fedavg",  # trains local models
    "fedbn",  # personal models
    "solo",  # nothing is shared
    "feddm",  # condenses
    "fedsum",  # condenses on the server
    "fedkf",  # a generator and clients that train on its images
    "fedhydra",  # distils without data
    "fedstats",  # sends statistics
    "real",  # sends images
)


def test_the_families_have_methods() -> None:
    assert set(FAMILIES) <= set(METHODS)


@pytest.mark.parametrize("method", FAMILIES)
def test_it_runs(method: str, train: Callable[..., Any]) -> None:
    run = train(f"{method} --json --local-test 0.2")
    assert run.code == 0, run.stderr
    summary = json.loads(run.stdout)
    assert summary["method"] == method
    if method_class(method).personal:  # no model is common: only what their owners see is a result
        assert summary["test_accuracy"] is None
        assert "test accuracy" not in run.stderr
        assert 0 <= summary["local"]["amp"] <= 1
    else:
        assert 0 <= summary["test_accuracy"] <= 1
    assert (run.folder / "model.safetensors").is_file()


@pytest.mark.parametrize("method", FAMILIES)
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
