"""Tests of failing clients: losses, charges, memories and the rest of the run."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import RoundContext, RunResult, simulate
from fedsynth.config.participation import CRASHED, KINDS, LATE, TIMED_OUT, Failure, Failures
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.server import Server, needed_uploads
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy import read_ledger
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.results.verification import verify_run
from fedsynth.simulation.run import Simulation
from tests.families import by_family
from tests.quick_settings import verified
from tests.simulation.test_recorded_numbers import CLIENTS, case, private, settings_of

ROUNDS = 4
FAILING = {"rounds": ROUNDS, "client_failures": 0.5, "quorum": 0.25, "seed": 2}
PRIVATE = [name for name in METHODS if method_class(name).dp_mechanisms]


def failing_case(name: str, make: Any = case, **run: Any) -> Any:
    """Returns settings with which about half of the clients fail in each round."""
    first = {"method": {"knowledge_from": "first-phase"}} if name == "fedaf" else {}
    return settings_of(make(name, run={**FAILING, **run}, **first))


@functools.cache
def failing_run(name: str) -> RunResult:
    return simulate(failing_case(name))


# ---------------------------------------------------------------------------------------- failures


def test_failures_are_reproducible_shares_of_each_kind() -> None:
    def draw(seed: int, share: float) -> list[Failure | None]:
        drawn = Failures(seed, share)
        return [drawn.of(number, client) for number in range(1, 41) for client in range(100)]

    every = draw(1, 0.3)
    assert draw(1, 0.3) == every != draw(2, 0.3)
    failures = [failure for failure in every if failure is not None]
    assert len(failures) == pytest.approx(1200, abs=4 * np.sqrt(4000 * 0.3 * 0.7))
    for kind in KINDS:
        for phase in (FIRST, MAIN):
            count = sum(failure == Failure(kind, phase) for failure in failures)
            assert count == pytest.approx(200, abs=60)
    assert not any(draw(1, 0.0))
    assert all(draw(1, 1.0))


# ----------------------------------------------------------------------------------- every method


def expected_losses(seed: int, number: int) -> dict[str, str]:
    drawn = Failures(seed, 0.5)
    failures = {str(client): drawn.of(number, client) for client in range(CLIENTS)}
    return {client: failure.kind for client, failure in failures.items() if failure is not None}


@pytest.mark.parametrize("name", by_family(METHODS, ("fedavg", "fedaf", "fedstats")))
def test_methods_continue_with_the_remaining_clients(name: str) -> None:
    result = failing_run(name)
    assert [row["round"] for row in result.metrics] == list(range(1, ROUNDS + 1))
    losses = [row.get("lost", {}) for row in result.metrics]
    assert losses == [expected_losses(2, number) for number in range(1, ROUNDS + 1)]
    assert {reason for lost in losses for reason in lost.values()} == set(KINDS)
    assert not any("rejected" in row for row in result.metrics)
    assert all(bool(torch.isfinite(t).all()) for t in result.model.state_dict().values())
    remaining = [CLIENTS - len(lost) for lost in losses]
    assert max(remaining) > min(remaining) >= 1


@pytest.mark.parametrize("name", ["fedaf", "fedfm"])
def test_clients_lost_in_the_first_exchange_skip_the_second(name: str) -> None:
    """Clients lost in the second exchange have replied in the first."""
    settings = failing_case(name)
    replied: dict[tuple[int, str], list[int]] = {}

    class Watching(Server):
        def check(self, phase: str, replies: Any, context: RoundContext) -> Any:
            replied[context.round, phase] = sorted(replies)
            return super().check(phase, replies, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsynth.simulation.run.Server", Watching)
        simulate(settings)
    phases = set()
    for number in range(1, ROUNDS + 1):
        drawn = {client: settings.failures.of(number, client) for client in range(CLIENTS)}
        phases |= {failure.phase for failure in drawn.values() if failure is not None}
        in_first = [k for k, failure in drawn.items() if failure is None or failure.phase == MAIN]
        assert replied[number, FIRST] == in_first
        if len(in_first) >= needed_uploads(0.25, CLIENTS):
            assert replied[number, MAIN] == [k for k, failure in drawn.items() if failure is None]
    assert phases == {FIRST, MAIN}


def test_uploads_are_those_of_the_last_round_with_a_quorum() -> None:
    """If no round has a quorum, the run ends with the first model (test_malicious_uploads.py tests the
    rounds)."""
    result = simulate(failing_case("fedfm", quorum=0.75))
    counted = [row for row in result.metrics if "not_counted" not in row]
    assert 0 < len(counted) < ROUNDS
    lost = counted[-1].get("lost", {})
    assert list(result.uploads) == [k for k in range(CLIENTS) if str(k) not in lost]
    result = simulate(failing_case("fedavg", client_failures=1))
    assert [row["not_counted"]["needed"] for row in result.metrics] == [1] * ROUNDS
    assert result.uploads == {}


@pytest.mark.parametrize(("kind", "moves"), [(CRASHED, False), (TIMED_OUT, False), (LATE, True)])
def test_only_late_clients_update_their_memory(
    kind: str, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Failures, number: int, client: int) -> Failure | None:
        return Failure(kind, MAIN) if client == 1 and number == 2 else None

    monkeypatch.setattr(Failures, "of", fails)
    memories = []
    original = Simulation.play

    def watch(self: Simulation, context: RoundContext) -> Any:
        memories.append(self.exchange.clients[1].memory)
        result = original(self, context)
        memories.append(self.exchange.clients[1].memory)
        return result

    monkeypatch.setattr(Simulation, "play", watch)
    simulate(settings_of(case("scaffold")))
    assert memories[1] is not memories[0]
    assert (memories[3] is not memories[2]) == moves


# ------------------------------------------------------------------------------------------ privacy


@pytest.mark.parametrize("name", by_family(PRIVATE, ("feddm", "fedfm")))
def test_private_runs_with_failures_are_verified(name: str, tmp_path: Path) -> None:
    """Includes rounds below the quorum, with or without their second exchange."""
    result = simulate(failing_case(name, private, quorum=0.75, rounds=3), output=tmp_path)
    verified(result)
    assert any("lost" in row for row in result.metrics)
    missed = [row["not_counted"]["exchange"] for row in result.metrics if "not_counted" in row]
    assert missed
    assert (FIRST in missed) == (name in ("fedfm", "fedaf", "fedstats"))


@pytest.fixture(scope="module")
def charged(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Runs FedFM, which has two exchanges in each round."""
    return simulate(failing_case("fedfm", private), output=tmp_path_factory.mktemp("runs"))


def test_clients_are_charged_for_computed_releases(charged: RunResult) -> None:
    """A client that crashes before an exchange is not charged for it; a client whose answer is lost
    is charged in full."""
    kinds = set()
    for client in range(CLIENTS):
        file = Path(str(charged.folder)) / "ledger" / f"client-{client:03d}.jsonl"
        releases = [(row.round, row.mechanism) for row in read_ledger(file).releases]
        for number in range(1, ROUNDS + 1):
            failure = charged.settings.failures.of(number, client)
            in_first = failure is not None and failure.phase == FIRST
            crashed = failure is not None and failure.kind == CRASHED
            sums = 0 if in_first and crashed else 2
            assert releases.count((number, "sums")) == sums
            assert releases.count((number, "dp-sgd")) == (not in_first and not crashed)
            if failure is not None:
                kinds.add((failure.kind, failure.phase))
    assert len(kinds) >= 4


FALSE_ROWS: list[dict[str, Any]] = [
    {"lost": None},
    {"lost": {"3": "crashed", "0": "too late", "7": "crashed"}},
    {"lost": ["all"]},
    {"not_counted": {"exchange": "first", "uploads": 0, "needed": 1}},
    {"rejected": {"9": "weight is -1"}},
]


def test_losses_in_a_row_are_verified(charged: RunResult, tmp_path: Path) -> None:
    number = next(row["round"] for row in charged.metrics if "lost" in row)
    shutil.copytree(str(charged.folder), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    for false_fields in FALSE_ROWS:
        changed = {**json.loads(lines[number - 1]), **false_fields}
        row = json.dumps({key: value for key, value in changed.items() if value is not None})
        file.write_text("\n".join([*lines[: number - 1], row, *lines[number:], ""]))
        problems = "\n".join(verify_run(tmp_path).problems)
        assert f"metrics.jsonl: round {number}" in problems, false_fields


def test_rejections_are_recorded_in_private_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason depends only on the message, which was released."""
    honest = InProcess.step

    def step(self: InProcess, *arguments: Any) -> Any:
        replies = honest(self, *arguments)
        invalid = {k: replace(m, weight=-1.0) if k == 2 else m for k, m in replies.messages.items()}  # type: ignore[call-arg]
        return replace(replies, messages=invalid)

    monkeypatch.setattr(InProcess, "step", step)
    result = simulate(settings_of(private("fedavg")), output=tmp_path)
    row = json.loads((verified(result) / "metrics.jsonl").read_text().splitlines()[0])
    assert list(row["rejected"]) == ["2"]
    assert "weight" in row["rejected"]["2"]
