"""Tests that a private run's metrics and summary contain declared values only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.federation.protocol import Observer
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fedavg import FedAvg
from fedsynth.privacy.disclosure import Disclosure, public, released
from fedsynth.privacy.errors import UnaccountedReleaseError
from fedsynth.results.disclosed import ROW, declared_row, disclosed
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate


def settings(method: type[FedAvg], fills: str = "", **privacy: Any) -> RunSettings:
    method_settings = {"local_epochs": 1, "batch": 128, **({"fills": fills} if fills else {})}
    return resolve(
        {
            "run": {"rounds": 2, "device": "cpu"},
            "partition": {"clients": 3},
            "model": {"width": 4, "depth": 2},
            "method": method_settings,
            "privacy": privacy,
        },
        own_method=method,
    )


def test_rows_are_split_by_declaration() -> None:
    row = {
        "round": 3,
        "test_accuracy": 0.5,
        "seconds": 1.0,
        "models": {"aca": {"test_accuracy": 0.4, "local": {"amp": 0.3}}},
    }
    split = disclosed(row, ROW)
    public_row = {"round": 3, "test_accuracy": 0.5, "models": {"aca": {"test_accuracy": 0.4}}}
    assert split.public == public_row
    assert split.simulation_only == {"seconds": 1.0, "models": row["models"]}
    open_run = disclosed({**row, "anything": 1}, None)
    assert (open_run.public, open_run.simulation_only) == ({**row, "anything": 1}, {})
    for undeclared in ({"loss": 0.5}, {"models": {"aca": {"loss": 0.5}}}):
        with pytest.raises(UnaccountedReleaseError, match="must declare metric 'loss'"):
            disclosed({"round": 1, **undeclared}, ROW)


@dataclass(frozen=True)
class Undeclared(FedAvg):
    """Reports an undeclared metric."""

    name: ClassVar[str] = "undeclared"

    def facts(self, state: ServerState, context: RoundContext) -> Mapping[str, Any]:
        return {**super().facts(state, context), "clean_loss": 0.25}


@dataclass(frozen=True)
class Declared(Undeclared):
    name: ClassVar[str] = "declared"
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **FedAvg.metric_privacy,
        "clean_loss": released("computed from uploads"),
    }


def test_undeclared_metrics_are_rejected(tmp_path: Path) -> None:
    """Checks the observers and metrics.jsonl."""
    rows: list[Mapping[str, Any]] = []

    class RowRecorder(Observer):
        def round_ended(self, row: Mapping[str, Any]) -> None:
            rows.append(row)

    undeclared = settings(Undeclared, noise_multiplier=3.0)
    with pytest.raises(UnaccountedReleaseError, match="'clean_loss'"):
        simulate(undeclared, output=tmp_path / "private", observer=RowRecorder())
    assert rows == []
    assert not list((tmp_path / "private").glob("*/metrics.jsonl"))
    public_run = simulate(settings(Undeclared), observer=RowRecorder())
    assert rows == public_run.metrics
    assert public_run.metrics[0]["clean_loss"] == 0.25
    run = simulate(settings(Declared, noise_multiplier=3.0), output=tmp_path / "declared")
    assert run.folder is not None
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["clean_loss"] for line in lines] == [0.25, 0.25]
    assert verify_run(run.folder, method=Declared).problems == []


@dataclass(frozen=True)
class Conflicting(FedAvg):
    """Declares and reports keys of the engine."""

    name: ClassVar[str] = "conflicting"
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **FedAvg.metric_privacy,
        "seconds": public("by the method"),
        "test_accuracy": public("by the method"),
    }
    fills: str = ""

    def facts(self, state: ServerState, context: RoundContext) -> Mapping[str, Any]:
        return {self.fills: 0.5} if self.fills else {}


def test_methods_cannot_declare_engine_keys() -> None:
    assert not declared_row(Conflicting)["seconds"].may_be_shown
    with pytest.raises(UnaccountedReleaseError, match="'test_accuracy'"):
        simulate(settings(Conflicting, "test_accuracy", noise_multiplier=3.0))


def test_declarations_have_reasons_and_no_engine_keys() -> None:
    for method in map(method_class, METHODS):
        assert all(rule.reason for rule in declared_row(method).values())
        assert not method.metric_privacy.keys() & ROW.keys()
