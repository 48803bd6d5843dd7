"""Tests of the round loop: reproducibility, accounting, refusals, failing figures and clients, and
memory."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedsynth import FedDM, Observer, RoundContext, RunSettings, load_dataset, resolve, simulate
from fedsynth.config.participation import CRASHED, KINDS, LATE, TIMED_OUT, Failure, Failures
from fedsynth.errors import DataError, PartitionError, SettingError
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.server import Server, needed_uploads
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy import BudgetExceededError, Release, epsilon, read_ledger
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.results.verification import verify_run
from fedsynth.simulation.run import Simulation
from tests.digits import digits
from tests.quick_runs import NoteRecorder, by_family, folder_of, quick_sections, read_rows, verified
from tests.simulation.test_recorded_numbers import CLIENTS, case, private
from tests.simulation.test_recorded_numbers import settings_of as settings_for


def settings_of(method: str, /, **sections: Any) -> RunSettings:
    """Returns the settings of two rounds, with splits for tests of the clients' models."""
    partition = {"local_test": 0.2, **sections.pop("partition", {})}
    return resolve(quick_sections(method, partition=partition, **sections))


def tiny(**privacy: Any) -> RunSettings:
    return resolve(quick_sections("feddm", partition={"subset": 1.0}, privacy=privacy))


def same_parameters(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_seeds_reproduce_runs_without_privacy() -> None:
    """Runs leave the global generators unchanged."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    first = simulate(tiny()).model
    assert same_parameters(first, simulate(tiny()).model)
    assert not same_parameters(first, simulate(replace(tiny(), seed=5)).model)
    private = tiny(noise_multiplier=3.0)
    assert not same_parameters(simulate(private).model, simulate(private).model)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


def test_budget_caps_end_the_run(tmp_path: Path) -> None:
    rows = [Release(1, "x", "x", "x", 3.0, 1.0, 1.0, "full", 3, 1)]
    cap = epsilon(rows, 1e-5) * 1.05  # one round fits, two do not
    result = simulate(tiny(noise_multiplier=3.0, epsilon=cap))
    assert len(result.metrics) == 1
    assert result.summary["differential_privacy"]["epsilon"] <= cap
    with pytest.raises(BudgetExceededError, match="above the cap"):
        simulate(tiny(noise_multiplier=3.0, epsilon=cap / 3), output=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_missing_classes_are_refused_only_without_privacy() -> None:
    """With DP the presence of a class is private: no rule may depend on it."""
    train = digits(np.arange(200) % 9)
    with pytest.raises(DataError, match="class"):
        simulate(tiny(), data=(train, train))
    simulate(tiny(noise_multiplier=3.0), data=(train, train))
    few = digits(np.concatenate([np.arange(180) % 9, [9, 9]]))  # too few of class 9
    notes = NoteRecorder()
    simulate(tiny(), data=(few, few), parts=[np.arange(182)], observer=notes)
    assert notes.lines[0].startswith("no differential privacy")
    assert "no client sends images of these classes: 9" in notes.lines[1]


def test_runs_without_images_or_with_too_few_records_are_refused() -> None:
    many = replace(tiny(), partition=replace(tiny().partition, clients=500, min_size=0))
    with pytest.raises(SettingError, match=r"method\.min_examples"):
        simulate(many)
    with pytest.raises(PrivacySettingError, match="must be at least 1438"):
        simulate(tiny(noise_multiplier=3.0, max_records=1000))


def test_custom_partitions_are_validated_and_used() -> None:
    labels = np.arange(200) % 10
    data = digits(labels)
    parts = [np.flatnonzero(labels < 3), np.flatnonzero(labels >= 3)]
    uploads = simulate(tiny(), data=(data, data), parts=parts).uploads
    sent = [set(dict(uploads[k].arrays())["labels"].tolist()) for k in (0, 1)]
    assert sent == [{0, 1, 2}, {3, 4, 5, 6, 7, 8, 9}]
    for bad, text in (
        ([[0, 1], [1, 2]], "client 1 has an example twice"),
        ([[0, 200]], r"must be in \[0, 20"),
        ([[0.5]], "whole numbers"),
        ([], "at least one client"),
    ):
        with pytest.raises(PartitionError, match=text):
            simulate(tiny(), data=(data, data), parts=bad)  # type: ignore[arg-type]


def test_memory_bounds_split_clients_without_changing_uploads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--memory-gb=0.0001 runs one client at a time; the uploads are the same."""
    sizes: list[int] = []
    step = FedDM.client_step

    def counted_step(self: FedDM, message: Any, clients: Any, *others: Any) -> Any:
        sizes.append(len(clients.ids))
        return step(self, message, clients, *others)

    monkeypatch.setattr(FedDM, "client_step", counted_step)
    settings = replace(tiny(), rounds=1)
    wide = simulate(settings).uploads
    narrow = simulate(replace(settings, memory_gb=0.0001)).uploads
    assert sizes == [3, 1, 1, 1]
    for k, upload in wide.items():
        for name, tensor in upload.arrays():
            torch.testing.assert_close(tensor, dict(narrow[k].arrays())[name], atol=1e-4, rtol=1e-4)


def raise_error(*args: object, **kwargs: object) -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("target", "figure"),
    [
        ("fedsynth.results.measure.classification_measures", "test accuracy"),
        ("fedsynth.results.measure.local_metrics", "accuracy on the clients' splits"),
        ("fedsynth.data.picture.image_grid_png", "picture"),
        ("fedsynth.methods.feddm.FedDM.facts", "metrics of the server"),
        ("fedsynth.methods.feddm.FedDM.aggregate_metrics", "metrics of the clients"),
    ],
)
def test_failing_figures_do_not_end_runs(
    target: str, figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an error after the round's charge, so that `--resume` charges and fails again."""
    monkeypatch.setattr(target, raise_error)
    notes = NoteRecorder()
    settings = settings_of("feddm", privacy={"noise_multiplier": 2.0})
    result = simulate(settings, output=tmp_path, observer=notes)
    assert len(result.metrics) == 2
    charged = (verified(result) / "ledger" / "client-000.jsonl").read_text().splitlines()
    assert len(charged) == 3  # the header, and a row for each round
    warnings = [line for line in notes.lines if line.startswith("warning: cannot record the ")]
    assert len(warnings) == 1
    assert f"{figure}: ZeroDivisionError" in warnings[0]


def test_non_finite_figures_are_null_and_closed_pipes_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: JSON without NaN refuses the row of a charged round."""
    facts = {"a": math.nan, "b": [1.0, -math.inf], "c": {"d": math.inf}}
    matrix = {"matrix": torch.tensor([[math.nan, 1.0]])}
    monkeypatch.setattr(FedDM, "facts", lambda *args: facts)
    monkeypatch.setattr(FedDM, "artefacts", lambda *args: matrix, raising=False)
    closed = Mock(side_effect=BrokenPipeError(32, "Broken pipe"))  # stderr
    monkeypatch.setattr("fedsynth.results.run_messages.print", closed, raising=False)
    folder = folder_of(simulate(settings_of("feddm"), output=tmp_path))
    closed.assert_called()
    row = read_rows(folder)[0]
    assert (row["a"], row["b"], row["c"]) == (None, [1.0, None], {"d": None})
    assert torch.equal(load_file(folder / "artefacts.safetensors")["matrix"][:, 1], torch.ones(1))


UNUSUAL_SPLITS: dict[str, tuple[int, ...]] = {
    "a client without records": (0, 0, 1000),
    "one client": (0, 1000),
    "a client of only test records": (0, 1, 2, 1000),
    "no test records": (0, 10, 20),
}


@pytest.mark.parametrize("split", UNUSUAL_SPLITS)
def test_unusual_partitions_do_not_end_runs(split: str) -> None:
    settings = settings_of("fedavg", partition={"local_test": 0.97})
    divided = [np.arange(*ends) for ends in pairwise(UNUSUAL_SPLITS[split])]
    result = simulate(settings, data=load_dataset("digits"), parts=divided)
    for row in result.metrics:
        if "local" in row:  # of clients with test records, weighted by all their records
            pairs = zip(divided, row["local"]["client_accuracy"], strict=True)
            sizes, tested = zip(
                *[(len(part), a) for part, a in pairs if a is not None], strict=True
            )
            assert row["local"]["amp"] == pytest.approx(np.average(tested, weights=sizes))
            assert row["local"]["wlp"] == min(tested)


def test_stratification_of_one_client_is_written(tmp_path: Path) -> None:
    settings = settings_of("fedhydra", run={"rounds": 1})
    one_client: dict[str, Any] = {"data": load_dataset("digits"), "parts": [np.arange(400)]}
    result = simulate(settings, **one_client, output=tmp_path)
    assert (folder_of(result) / "artefacts.safetensors").is_file()


ROUNDS = 4
FAILING = {"rounds": ROUNDS, "client_failures": 0.5, "quorum": 0.25, "seed": 2}
PRIVATE = [name for name in METHODS if method_class(name).dp_mechanisms]


def failing_case(name: str, make: Any = case, **run: Any) -> Any:
    """Returns settings with which about half of the clients fail in each round."""
    first = {"method": {"knowledge_from": "first-phase"}} if name == "fedaf" else {}
    return settings_for(make(name, run={**FAILING, **run}, **first))


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


@pytest.mark.parametrize("name", by_family(METHODS, ("fedavg", "fedaf", "fedstats")))
def test_methods_continue_with_the_remaining_clients(name: str) -> None:
    result = simulate(failing_case(name))
    assert [row["round"] for row in result.metrics] == list(range(1, ROUNDS + 1))
    losses = [row.get("lost", {}) for row in result.metrics]
    for number, lost in enumerate(losses, 1):
        failures = {str(k): Failures(2, 0.5).of(number, k) for k in range(CLIENTS)}
        assert lost == {k: failure.kind for k, failure in failures.items() if failure is not None}
    assert {reason for lost in losses for reason in lost.values()} == set(KINDS)
    assert not any("rejected" in row for row in result.metrics)
    assert all(bool(torch.isfinite(t).all()) for t in result.model.state_dict().values())
    remaining = [CLIENTS - len(lost) for lost in losses]
    assert max(remaining) > min(remaining) >= 1


@pytest.mark.parametrize("name", ["fedaf", "fedfm"])
def test_clients_lost_in_the_first_exchange_skip_the_second(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients lost in the second exchange have replied in the first."""
    settings = failing_case(name)
    replied: dict[tuple[int, str], list[int]] = {}

    class Watching(Server):
        def check(self, phase: str, replies: Any, context: RoundContext) -> Any:
            replied[context.round, phase] = sorted(replies)
            return super().check(phase, replies, context)

    monkeypatch.setattr("fedsynth.simulation.run.Server", Watching)
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
    """If no round has a quorum, the run ends with the first model (test_malicious_uploads.py tests
    the rounds)."""
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
    moved = []
    original = Simulation.play

    def watch(self: Simulation, context: RoundContext) -> Any:
        earlier = self.exchange.clients[1].memory
        result = original(self, context)
        moved.append(self.exchange.clients[1].memory is not earlier)
        return result

    monkeypatch.setattr(Simulation, "play", watch)
    simulate(settings_for(case("scaffold")))
    assert moved == [True, moves]


@pytest.mark.parametrize("name", by_family(PRIVATE, ("feddm", "fedfm")))
def test_private_runs_with_failures_are_verified(name: str, tmp_path: Path) -> None:
    """Includes rounds below the quorum, with or without their second exchange."""
    result = simulate(failing_case(name, private, quorum=0.75, rounds=3), output=tmp_path)
    verified(result)
    assert any("lost" in row for row in result.metrics)
    missed = [row["not_counted"]["exchange"] for row in result.metrics if "not_counted" in row]
    assert missed
    assert (FIRST in missed) == (name in ("fedfm", "fedaf", "fedstats"))


def test_clients_are_charged_for_computed_releases_and_losses_are_verified(tmp_path: Path) -> None:
    """FedFM has two exchanges. A client that crashes before an exchange is not charged for it; a
    client whose answer is lost is charged in full."""
    charged = simulate(failing_case("fedfm", private), output=tmp_path)
    kinds = set()
    for client in range(CLIENTS):
        file = folder_of(charged) / "ledger" / f"client-{client:03d}.jsonl"
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

    folder, rows = folder_of(charged), read_rows(folder_of(charged))
    index = next(index for index, row in enumerate(rows) if "lost" in row)
    honest = rows[index]
    for false_fields in (
        {"lost": None},
        {"lost": {"3": "crashed", "0": "too late", "7": "crashed"}},
        {"lost": ["all"]},
        {"not_counted": {"exchange": "first", "uploads": 0, "needed": 1}},
        {"rejected": {"9": "weight is -1"}},
    ):
        changed = {**honest, **false_fields}
        rows[index] = {key: value for key, value in changed.items() if value is not None}
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / "metrics.jsonl").write_text(text)
        problems = "\n".join(verify_run(folder).problems)
        assert f"metrics.jsonl: round {index + 1}" in problems, false_fields


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
    result = simulate(settings_for(private("fedavg")), output=tmp_path)
    row = read_rows(verified(result))[0]
    assert list(row["rejected"]) == ["2"]
    assert "weight" in row["rejected"]["2"]


MEASURED = (12, 21, 30)  # after the first of these rounds nothing new may stay
ROUND_BYTES = {"fedavg": 6_000, "feddm": 3_500}
"""Bytes of Python objects that a round may leave: its row of metrics, and with privacy the
ledgers' rows, whose texts are shared. Measured: 1,300 to 4,200 (of which a cached distribution of
the accountant is the largest part), and 1,000 to 2,400."""
SHORT_STEPS: dict[str, dict[str, Any]] = {
    "fedavg": {"local_steps": 1, "batch": 64},
    "feddm": {"ipc": 1, "iterations": 1},
}


def live_tensors() -> tuple[int, int]:
    """Returns the number of live tensors and their bytes."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [t for t in gc.get_objects() if type(t) in kinds and t.layout is torch.strided]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values())


class MemoryRecorder(Observer):
    def __init__(self, *rounds: int) -> None:
        self.rounds = rounds
        self.tensors: list[tuple[int, int]] = []
        self.python: list[int] = []
        self.files: list[int] = []

    def round_ended(self, row: Mapping[str, Any]) -> None:
        if row["round"] in self.rounds:
            self.tensors.append(live_tensors())
            self.python.append(tracemalloc.get_traced_memory()[0])
            if sys.platform == "linux":
                self.files.append(len(os.listdir("/proc/self/fd")))


@pytest.mark.slow
@pytest.mark.parametrize("private", [False, True], ids=["open", "private"])
@pytest.mark.parametrize("name", sorted(SHORT_STEPS))
def test_rounds_leak_no_memory(name: str, private: bool, tmp_path: Path) -> None:
    recorder = MemoryRecorder(*MEASURED)
    more = {"privacy": {"noise_multiplier": 50.0}} if private else {}
    more |= {"partition": {"kind": "iid", "subset": 1.0}, "method": SHORT_STEPS[name]}
    sections = quick_sections(name, run={"rounds": MEASURED[-1]}, **more)
    tracemalloc.start()
    try:
        simulate(resolve(sections), observer=recorder, output=tmp_path)
    finally:
        tracemalloc.stop()
    assert recorder.tensors[0] == recorder.tensors[1] == recorder.tensors[2]
    assert len(set(recorder.files)) <= 1
    first, second = recorder.python[1] - recorder.python[0], recorder.python[2] - recorder.python[1]
    # one-time allocations (a module, a cache) are in one of the two; leaks of rounds are in both
    assert min(first, second) / (MEASURED[2] - MEASURED[1]) < ROUND_BYTES[name]


@pytest.mark.slow
def test_inactive_clients_hold_only_their_indices() -> None:
    """Compares ten of 50 with ten of 800 clients: a model takes 13 kB, an index eight bytes."""
    final_bytes = []
    for clients in (50, 800):
        sections = quick_sections(
            "fedavg",
            run={"participation": 10 / clients},
            partition={"clients": clients, "kind": "iid", "subset": 1.0},
            model={"width": 16},
            method={"local_steps": 1, "batch": 4},
        )
        recorder = MemoryRecorder(2)
        simulate(resolve(sections), observer=recorder)
        final_bytes.append(recorder.tensors[0][1])
    assert abs(final_bytes[1] - final_bytes[0]) < 13_000
