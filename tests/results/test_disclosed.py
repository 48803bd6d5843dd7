"""What a private run's metrics and summary may say: what is declared, and nothing else."""

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
    own = {"local_epochs": 1, "batch": 128, **({"fills": fills} if fills else {})}
    return resolve(
        {
            "run": {"rounds": 2, "device": "cpu"},
            "partition": {"clients": 3},
            "model": {"width": 4, "depth": 2},
            "method": own,
            "privacy": privacy,
        },
        own_method=method,
    )


def test_a_row_is_split_by_what_is_declared() -> None:
    row = {
        "round": 3,
        "test_accuracy": 0.5,
        "seconds": 1.0,
        "models": {"aca": {"test_accuracy": 0.4, "local": {"amp": 0.3}}},
    }
    told = disclosed(row, ROW)
    shown = {"round": 3, "test_accuracy": 0.5, "models": {"aca": {"test_accuracy": 0.4}}}
    assert told.public == shown
    assert told.simulation_only == {"seconds": 1.0, "models": row["models"]}
    open_run = disclosed({**row, "anything": 1}, None)
    assert (open_run.public, open_run.simulation_only) == ({**row, "anything": 1}, {})
    for undeclared in ({"loss": 0.5}, {"models": {"aca": {"loss": 0.5}}}):
        with pytest.raises(UnaccountedReleaseError, match="'loss' must be in"):
            disclosed({"round": 1, **undeclared}, ROW)


@dataclass(frozen=True)
class Telling(FedAvg):
    """Says more of a round than it has declared."""

    name: ClassVar[str] = "telling"

    def facts(self, state: ServerState, context: RoundContext) -> Mapping[str, Any]:
        return {**super().facts(state, context), "clean_loss": 0.25}


@dataclass(frozen=True)
class Declaring(Telling):
    name: ClassVar[str] = "declaring"
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **FedAvg.metric_privacy,
        "clean_loss": released("it is made of uploads"),
    }


def test_a_method_that_tells_what_it_has_not_declared_is_stopped(tmp_path: Path) -> None:
    """Through the engine, to its observers and to metrics.jsonl."""
    told: list[Mapping[str, Any]] = []

    class Listening(Observer):
        def round_ended(self, row: Mapping[str, Any]) -> None:
            told.append(row)

    telling = settings(Telling, noise_multiplier=3.0)
    with pytest.raises(UnaccountedReleaseError, match="'clean_loss'"):
        simulate(telling, output=tmp_path / "private", observer=Listening())
    assert told == []
    assert not list((tmp_path / "private").glob("*/metrics.jsonl"))
    opened = simulate(settings(Telling), observer=Listening())
    assert told == opened.metrics
    assert opened.metrics[0]["clean_loss"] == 0.25
    run = simulate(settings(Declaring, noise_multiplier=3.0), output=tmp_path / "declared")
    assert run.folder is not None
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["clean_loss"] for line in lines] == [0.25, 0.25]
    assert verify_run(run.folder, method=Declaring).problems == []


@dataclass(frozen=True)
class Overbearing(FedAvg):
    """Fills, and declares, what is the engine's."""

    name: ClassVar[str] = "overbearing"
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **FedAvg.metric_privacy,
        "seconds": public("says the method"),
        "test_accuracy": public("says the method"),
    }
    fills: str = ""

    def facts(self, state: ServerState, context: RoundContext) -> Mapping[str, Any]:
        return {self.fills: 0.5} if self.fills else {}


def test_a_method_does_not_decide_on_the_engines_keys() -> None:
    assert not declared_row(Overbearing)["seconds"].may_be_shown
    with pytest.raises(UnaccountedReleaseError, match="'test_accuracy'"):
        simulate(settings(Overbearing, "test_accuracy", noise_multiplier=3.0))


def test_every_declaration_has_a_reason_and_no_engines_key() -> None:
    for method in map(method_class, METHODS):
        assert all(one.reason for one in declared_row(method).values())
        assert not method.metric_privacy.keys() & ROW.keys()
