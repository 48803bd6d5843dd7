"""What a private run's metrics and summary may say: what is declared, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fedsynth.config.resolve import resolve
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.federation.protocol import Observer
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fedavg import FedAvg
from fedsynth.privacy.disclosure import Disclosure, public, released
from fedsynth.privacy.errors import UnaccountedReleaseError
from fedsynth.results.disclosed import ROW, declared_row, disclosed
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate


def sections(method: str = "fedavg", **privacy: Any) -> dict[str, dict[str, Any]]:
    return {
        "run": {"method": method, "rounds": 2, "device": "cpu"},
        "partition": {"clients": 3, "local_test": 0.2},
        "model": {"width": 4, "depth": 2},
        "method": {"local_epochs": 1, "batch": 64},
        "privacy": privacy,
    }


def test_a_row_is_split_by_what_is_declared() -> None:
    row = {
        "round": 3,
        "test_accuracy": 0.5,
        "seconds": 1.0,
        "models": {"aca": {"test_accuracy": 0.4, "local": {"amp": 0.3}}},
    }
    told = disclosed(row, ROW)
    assert told.public == {
        "round": 3,
        "test_accuracy": 0.5,
        "models": {"aca": {"test_accuracy": 0.4}},
    }
    assert told.simulation_only == {"seconds": 1.0, "models": row["models"]}
    open_run = disclosed({**row, "anything": 1}, None)
    assert (open_run.public, open_run.simulation_only) == ({**row, "anything": 1}, {})


def test_an_undeclared_key_is_refused_also_within_a_models_row() -> None:
    for row in ({"round": 1, "loss": 0.5}, {"round": 1, "models": {"aca": {"loss": 0.5}}}):
        with pytest.raises(UnaccountedReleaseError, match="'loss' must be in"):
            disclosed(row, ROW)


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
    """Through the engine. Old form: a deny-list of three keys, and the loss stood in
    metrics.jsonl."""
    told: list[Mapping[str, Any]] = []

    class Listening(Observer):
        def round_ended(self, row: Mapping[str, Any]) -> None:
            told.append(row)

    private = sections(noise_multiplier=3.0)
    values = {"local_epochs": 1, "batch": 64}
    telling = resolve({**private, "method": values}, own_method=Telling)
    with pytest.raises(UnaccountedReleaseError, match="'clean_loss'"):
        simulate(telling, output=tmp_path / "private", observer=Listening())
    assert told == []
    assert not list((tmp_path / "private").glob("*/metrics.jsonl"))
    opened = simulate(resolve({**sections(), "method": values}, own_method=Telling))
    assert opened.metrics[0]["clean_loss"] == 0.25
    declaring = resolve({**private, "method": values}, own_method=Declaring)
    run = simulate(declaring, output=tmp_path / "declared", observer=Listening())
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
    values = {"local_epochs": 1, "batch": 64, "fills": "test_accuracy"}
    run = resolve({**sections(noise_multiplier=3.0), "method": values}, own_method=Overbearing)
    with pytest.raises(UnaccountedReleaseError, match="'test_accuracy'"):
        simulate(run)


def test_observers_hear_of_a_private_run_what_is_written() -> None:
    """Old form: everything, and the terminal took out what it knew of."""
    told: list[Mapping[str, Any]] = []

    class Listening(Observer):
        def round_ended(self, row: Mapping[str, Any]) -> None:
            told.append(row)

    result = simulate(resolve(sections(noise_multiplier=3.0)), observer=Listening())
    assert all(not {"seconds", "local"} & row.keys() for row in told)
    assert all({"seconds", "local"} <= row.keys() for row in result.metrics)
    assert not {"seconds", "local"} & result.summary.keys()
    told.clear()
    result = simulate(resolve(sections()), observer=Listening())
    assert told == result.metrics
    assert {"seconds", "local"} <= result.summary.keys()


def test_every_declaration_has_a_reason_and_no_engines_key() -> None:
    for method in map(method_class, METHODS):
        assert all(one.reason for one in declared_row(method).values())
        assert not method.metric_privacy.keys() & ROW.keys()
