"""Tests that a private run's metrics and summary contain declared values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

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
from tests.quick_settings import folder_of, quick_sections, read_rows


def settings(method: type[FedAvg], key: str = "clean_loss", **privacy: Any) -> RunSettings:
    sections = quick_sections("fedavg", method={"key": key}, privacy=privacy)
    del sections["run"]["method"]
    return resolve(sections, own_method=method)


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
    key: str = "clean_loss"

    def facts(self, state: ServerState, context: RoundContext) -> Mapping[str, Any]:
        return {**super().facts(state, context), self.key: 0.25}


@dataclass(frozen=True)
class Declared(Undeclared):
    name: ClassVar[str] = "declared"
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **FedAvg.metric_privacy,
        "clean_loss": released("computed from uploads"),
        "seconds": public("of the engine, which shows it in simulations only"),
    }


def test_undeclared_metrics_are_rejected(tmp_path: Path) -> None:
    """Checks the observers and metrics.jsonl."""
    recorder = Mock(spec=Observer)
    undeclared = settings(Undeclared, noise_multiplier=3.0)
    with pytest.raises(UnaccountedReleaseError, match="'clean_loss'"):
        simulate(undeclared, output=tmp_path / "private", observer=recorder)
    recorder.round_ended.assert_not_called()
    assert not list((tmp_path / "private").glob("*/metrics.jsonl"))
    public_run = simulate(settings(Undeclared), observer=recorder)
    assert [call.args[0] for call in recorder.round_ended.mock_calls] == public_run.metrics
    assert public_run.metrics[0]["clean_loss"] == 0.25
    run = simulate(settings(Declared, noise_multiplier=3.0), output=tmp_path / "declared")
    assert [row["clean_loss"] for row in read_rows(folder_of(run))] == [0.25, 0.25]
    assert verify_run(folder_of(run), method=Declared).problems == []


@dataclass(frozen=True)
class Conflicting(Undeclared):
    name: ClassVar[str] = "conflicting"
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {"test_accuracy": public("by the method")}


def test_methods_cannot_declare_engine_keys() -> None:
    assert not declared_row(Declared)["seconds"].may_be_shown
    with pytest.raises(UnaccountedReleaseError, match="'test_accuracy'"):
        simulate(settings(Conflicting, "test_accuracy", noise_multiplier=3.0))


def test_declarations_have_reasons_and_no_engine_keys() -> None:
    for method in map(method_class, METHODS):
        assert all(rule.reason for rule in declared_row(method).values())
        assert not method.metric_privacy.keys() & ROW.keys()
