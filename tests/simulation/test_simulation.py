"""Tests of the round loop: reproducibility, accounting, refusals, failures, and client state."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedsynth as fs
from fedsynth.config.participation import CRASHED, KINDS, LATE, TIMED_OUT, Failure, Failures
from fedsynth.core.client import Group, PrivateClientView
from fedsynth.errors import (
    DataError,
    DeviceMemoryError,
    PartitionError,
    PrivacySettingError,
    SettingError,
    UnplannedReleaseError,
)
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.federation.in_process import InProcess
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy import BudgetExceededError, Release, epsilon, read_ledger
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.report.build import write_report
from fedsynth.results.later_reports import unfinished_report
from fedsynth.results.verification import verify_run
from fedsynth.simulation.run import Simulation
from tests.digits import digits
from tests.quick_runs import NoteRecorder, by_family, folder_of, quick_sections, read_rows, verified
from tests.raising import raises
from tests.simulation import test_recorded_numbers as recorded


def tiny(**privacy: Any) -> fs.RunSettings:
    return fs.resolve(quick_sections("feddm", partition={"subset": 1.0}, privacy=privacy))


def same_parameters(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_seeds_reproduce_runs_without_privacy() -> None:
    """Runs leave the global generators unchanged."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    first = fs.simulate(tiny()).model
    assert same_parameters(first, fs.simulate(tiny()).model)
    assert not same_parameters(first, fs.simulate(replace(tiny(), seed=5)).model)
    private = tiny(noise_multiplier=3.0)
    assert not same_parameters(fs.simulate(private).model, fs.simulate(private).model)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


def test_budget_caps_end_the_run(tmp_path: Path) -> None:
    rows = [Release(1, "x", "x", "x", 3.0, 1.0, 1.0, "full", 3, 1)]
    cap = epsilon(rows, 1e-5) * 1.05  # one round fits, two do not
    result = fs.simulate(tiny(noise_multiplier=3.0, epsilon=cap))
    assert len(result.metrics) == 1
    assert result.summary["differential_privacy"]["epsilon"] <= cap
    with raises(BudgetExceededError, "budget.exceeded"):
        fs.simulate(tiny(noise_multiplier=3.0, epsilon=cap / 3), output=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_missing_classes_and_few_records_are_refused() -> None:
    """With DP the presence of a class is private: no rule may depend on it."""
    train = digits(np.arange(200) % 9)
    with raises(DataError, "data.absent_classes"):
        fs.simulate(tiny(), data=(train, train))
    fs.simulate(tiny(noise_multiplier=3.0), data=(train, train))
    few = digits(np.concatenate([np.arange(180) % 9, [9, 9]]))  # too few of class 9
    notes = NoteRecorder()
    fs.simulate(tiny(), data=(few, few), parts=[np.arange(182)], observer=notes)
    assert notes.lines[0].startswith("no differential privacy")
    assert "no client sends images of these classes: 9" in notes.lines[1]
    many = replace(tiny(), partition=replace(tiny().partition, clients=500, min_size=0))
    with raises(SettingError, "method.min_examples"):
        fs.simulate(many)
    with raises(PrivacySettingError, "privacy.max_records"):
        fs.simulate(tiny(noise_multiplier=3.0, max_records=1000))


def test_custom_partitions_are_validated_and_used() -> None:
    labels = np.arange(200) % 10
    data = digits(labels)
    parts = [np.flatnonzero(labels < 3), np.flatnonzero(labels >= 3)]
    uploads = fs.simulate(tiny(), data=(data, data), parts=parts).uploads
    sent = [set(dict(uploads[k].arrays())["labels"].tolist()) for k in (0, 1)]
    assert sent == [{0, 1, 2}, {3, 4, 5, 6, 7, 8, 9}]
    for bad, text in (
        ([[0, 1], [1, 2]], "client 1's example indices contain an example twice"),
        ([[0, 200]], r"must be in \[0, 20"),
        ([[0.5]], "a vector of integers"),
        ([], "at least one client"),
    ):
        with pytest.raises(PartitionError, match=text):
            fs.simulate(tiny(), data=(data, data), parts=bad)  # type: ignore[arg-type]


def test_memory_bounds_split_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = create_autospec(fs.FedDM.client_step, side_effect=fs.FedDM.client_step)
    monkeypatch.setattr(fs.FedDM, "client_step", spy)
    settings = replace(tiny(), rounds=1)
    for bound in (1.0, 0.0001):
        fs.simulate(replace(settings, memory_gb=bound))
    assert [len(call.args[2].ids) for call in spy.call_args_list] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("target", "figure"),
    [
        ("fedsynth.evaluation.classification.classification_measures", "test accuracy"),
        ("fedsynth.results.measure.local_metrics", "accuracy on the clients' splits"),
        ("fedsynth.data.picture.image_grid_png", "picture"),
        ("fedsynth.methods.fedavg.FedAvg.facts", "metrics of the server"),
        ("fedsynth.methods.fedavg.FedAvg.client_metrics", "metrics of the clients"),
    ],
)
def test_failing_figures_do_not_end_runs(
    target: str, figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an error after the round's charge, so that `--resume` charges and fails again."""
    monkeypatch.setattr(target, Mock(side_effect=ZeroDivisionError))
    notes = NoteRecorder()
    more = {"partition": {"local_test": 0.2}, "privacy": {"noise_multiplier": 2.0}}
    method = "fedavg" if "FedAvg" in target else "feddm"
    settings = fs.resolve(quick_sections(method, **more))
    result = fs.simulate(settings, output=tmp_path, observer=notes)
    assert len(result.metrics) == 2
    charged = (verified(result) / "ledger" / "client-000.jsonl").read_text().splitlines()
    assert len(charged) == 4  # the header, a row for each round, and the hash of the files
    warnings = [line for line in notes.lines if line.startswith("warning: cannot record the ")]
    assert len(warnings) == 1
    assert f"{figure}: ZeroDivisionError" in warnings[0]


def test_non_finite_figures_are_null_and_closed_pipes_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: JSON without NaN refuses the row of a charged round."""
    facts = {"a": math.nan, "b": [1.0, -math.inf], "c": {"d": math.inf}}
    matrix = {"matrix": torch.tensor([[math.nan, 1.0]])}
    monkeypatch.setattr(fs.FedAvg, "facts", lambda *args: facts)
    monkeypatch.setattr(fs.FedAvg, "artefacts", lambda *args: matrix)
    closed = Mock(side_effect=BrokenPipeError(32, "Broken pipe"))  # stderr
    monkeypatch.setattr("fedsynth.results.run_messages.print", closed, raising=False)
    folder = folder_of(fs.simulate(fs.resolve(quick_sections("fedavg")), output=tmp_path))
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
    settings = fs.resolve(quick_sections("fedavg", partition={"local_test": 0.97}))
    divided = [np.arange(*ends) for ends in pairwise(UNUSUAL_SPLITS[split])]
    result = fs.simulate(settings, data=fs.load_dataset("digits"), parts=divided)
    for row in result.metrics:
        if "local" in row:  # of clients with test records, weighted by all their records
            tested = np.ma.masked_invalid(np.array(row["local"]["client_accuracy"], float))
            weighted = np.ma.average(tested, weights=list(map(len, divided)))
            assert row["local"]["amp"] == pytest.approx(weighted)
            assert row["local"]["wlp"] == tested.min()


ROUNDS = 4
FAILING = {"rounds": ROUNDS, "client_failures": 0.5, "quorum": 0.25, "seed": 2}
PRIVATE = [name for name in METHODS if method_class(name).dp_mechanisms]


def failing_case(name: str, make: Any = recorded.case, **run: Any) -> Any:
    """Returns settings with which about half of the clients fail in each round."""
    first = {"method": {"knowledge_from": "first-exchange"}} if name == "fedaf" else {}
    return recorded.settings_of(make(name, run={**FAILING, **run}, **first))


def test_failures_are_reproducible_shares_of_each_kind() -> None:
    def draw(seed: int, share: float) -> list[Failure | None]:
        drawn = Failures(seed, share)
        return [drawn.of(number, client) for number in range(1, 41) for client in range(100)]

    every = draw(1, 0.3)
    assert draw(1, 0.3) == every != draw(2, 0.3)
    assert every.count(None) == pytest.approx(2800, abs=4 * np.sqrt(4000 * 0.3 * 0.7))
    for kind, exchange in product(KINDS, (FIRST, MAIN)):
        assert every.count(Failure(kind, exchange)) == pytest.approx(200, abs=60)
    assert not any(draw(1, 0.0))
    assert all(draw(1, 1.0))


@pytest.mark.parametrize("name", by_family(METHODS, ("fedavg", "fedaf", "fedstats")))
def test_methods_continue_with_the_remaining_clients(name: str) -> None:
    result = fs.simulate(failing_case(name))
    assert [row["round"] for row in result.metrics] == list(range(1, ROUNDS + 1))
    losses = [row.get("lost", {}) for row in result.metrics]
    for number, lost in enumerate(losses, 1):
        failures = {str(k): Failures(2, 0.5).of(number, k) for k in range(recorded.CLIENTS)}
        assert lost == {k: failure.kind for k, failure in failures.items() if failure is not None}
    assert {reason for lost in losses for reason in lost.values()} == set(KINDS)
    assert not any("rejected" in row for row in result.metrics)
    assert all(bool(torch.isfinite(t).all()) for t in result.model.state_dict().values())
    remaining = [recorded.CLIENTS - len(lost) for lost in losses]
    assert max(remaining) > min(remaining) >= 1


def test_uploads_are_those_of_the_last_round_with_a_quorum() -> None:
    """test_malicious_uploads.py tests the rounds."""
    result = fs.simulate(failing_case("fedfm", quorum=0.75))
    counted = [row for row in result.metrics if "not_counted" not in row]
    assert 0 < len(counted) < ROUNDS
    lost = counted[-1].get("lost", {})
    assert list(result.uploads) == [k for k in range(recorded.CLIENTS) if str(k) not in lost]
    result = fs.simulate(failing_case("fedavg", client_failures=1))
    assert [row["not_counted"]["needed"] for row in result.metrics] == [1] * ROUNDS
    assert result.uploads == {}


@pytest.mark.parametrize(("kind", "moves"), [(CRASHED, False), (TIMED_OUT, False), (LATE, True)])
def test_only_late_clients_update_their_state(
    kind: str, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {(2, 1): Failure(kind, MAIN)}
    monkeypatch.setattr(Failures, "of", lambda self, *place: failures.get(place))
    moved = []
    original = Simulation.play

    def watch(self: Simulation, context: fs.RoundContext) -> Any:
        earlier = self.backend.clients[1].client_state
        result = original(self, context)
        moved.append(self.backend.clients[1].client_state is not earlier)
        return result

    monkeypatch.setattr(Simulation, "play", watch)
    fs.simulate(recorded.settings_of(recorded.case("scaffold")))
    assert moved == [True, moves]


@pytest.mark.parametrize("name", by_family(PRIVATE, ("feddm", "fedfm")))
def test_private_runs_with_failures_are_verified(name: str, tmp_path: Path) -> None:
    """Includes rounds below the quorum, with or without their second exchange."""
    settings = failing_case(name, recorded.private, quorum=0.75, rounds=3)
    result = fs.simulate(settings, output=tmp_path)
    verified(result)
    assert any("lost" in row for row in result.metrics)
    missed = [row["not_counted"]["exchange"] for row in result.metrics if "not_counted" in row]
    assert missed
    assert (FIRST in missed) == (name in ("fedfm", "fedaf", "fedstats"))


def test_clients_are_charged_for_computed_releases_and_losses_are_verified(tmp_path: Path) -> None:
    """FedFM has two exchanges. A client that crashes before an exchange is not charged for it; a
    client whose answer is lost is charged in full."""
    charged = fs.simulate(failing_case("fedfm", recorded.private), output=tmp_path)
    kinds = set()
    folder, rows = folder_of(charged), read_rows(folder_of(charged))
    for client in range(recorded.CLIENTS):
        file = folder / "ledger" / f"client-{client:03d}.jsonl"
        releases = [(row.round, row.mechanism) for row in read_ledger(file).releases]
        for number in range(1, ROUNDS + 1):
            failure = charged.settings.failures.of(number, client)
            in_first = failure is not None and failure.exchange == FIRST
            crashed = failure is not None and failure.kind == CRASHED
            sums = 0 if in_first and crashed else 2
            assert releases.count((number, "sums")) == sums
            assert releases.count((number, "dp-sgd")) == (not in_first and not crashed)
            if failure is not None:
                kinds.add((failure.kind, failure.exchange))
    assert len(kinds) >= 4

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
        problems = "\n".join(map(str, verify_run(folder).problems))
        assert f"metrics.jsonl: round {index + 1}" in problems, false_fields


def test_private_runs_record_rejections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason depends only on the message, which was released."""
    honest = InProcess.step

    def step(self: InProcess, *arguments: Any) -> Any:
        replies = honest(self, *arguments)
        invalid = {k: replace(m, weight=-1.0) if k == 2 else m for k, m in replies.messages.items()}  # type: ignore[call-arg]
        return replace(replies, messages=invalid)

    monkeypatch.setattr(InProcess, "step", step)
    result = fs.simulate(recorded.settings_of(recorded.private("fedavg")), output=tmp_path)
    row = read_rows(verified(result))[0]
    assert list(row["rejected"]) == ["2"]
    assert "weight" in row["rejected"]["2"]


MEASURED = (12, 21, 30)  # after the first of these rounds nothing new may stay
# Bytes of Python objects that a round may leave: its row of metrics, and with privacy the
# ledgers' rows, whose texts are shared. Measured: 1,300 to 4,200 (of which a cached distribution of
# the accountant is the largest part), and 1,000 to 2,400.
ROUND_BYTES = {"fedavg": 6_000, "feddm": 3_500}

SHORT_STEPS: dict[str, dict[str, Any]] = {
    "fedavg": {"local_steps": 1, "batch": 64},
    "feddm": {"ipc": 1, "iterations": 1},
}


def live_tensors() -> tuple[int, int]:
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [t for t in gc.get_objects() if type(t) in kinds and t.layout is torch.strided]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values())


class MemoryRecorder(fs.Observer):
    def __init__(self, *rounds: int) -> None:
        self.rounds, self.records = rounds, list[Any]()

    def round_ended(self, row: Mapping[str, Any]) -> None:
        if row["round"] in self.rounds:
            files = os.listdir("/proc/self/fd") if sys.platform == "linux" else ()
            python, _ = tracemalloc.get_traced_memory()
            self.records.append((live_tensors(), python, len(files)))


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
        fs.simulate(fs.resolve(sections), observer=recorder, output=tmp_path)
    finally:
        tracemalloc.stop()
    tensors, python, files = zip(*recorder.records, strict=True)
    assert len(set(tensors)) == len(set(files)) == 1
    first, second = python[1] - python[0], python[2] - python[1]
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
        fs.simulate(fs.resolve(sections), observer=recorder)
        final_bytes.append(recorder.records[0][0][1])
    assert abs(final_bytes[1] - final_bytes[0]) < 13_000


def simulate_five(
    observer: fs.Observer | None = None, output: Path | None = None, **sections: Any
) -> fs.RunResult:
    method = {"ipc": 1, "iterations": 2, "batch": 8}
    rounds, clients = {"rounds": 3}, {"clients": 5}
    base = quick_sections("feddm", run=rounds, partition=clients, method=method, **sections)
    return fs.simulate(fs.resolve(base), observer=observer, output=output)


SAMPLED = {"privacy": {"noise_multiplier": 2.0, "sample_rate": 0.1}}


def exhaust(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Group], bool]) -> list[int]:
    """Lets FedDM's image pairs run out of memory for groups for which `fails` is true, and returns
    the sizes of all groups that completed a step."""
    sizes: list[int] = []
    pairs, step = fs.FedDM.pairs, fs.FedDM.client_step

    def without_memory(self: fs.FedDM, *args: Any) -> Any:
        if fails(next(argument for argument in args if hasattr(argument, "ids"))):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return pairs(self, *args)

    def recorded_step(self: fs.FedDM, message: Any, clients: Any, *rest: Any) -> Any:
        result = step(self, message, clients, *rest)
        sizes.append(len(clients.ids))
        return result

    monkeypatch.setattr(fs.FedDM, "pairs", without_memory)
    monkeypatch.setattr(fs.FedDM, "client_step", recorded_step)
    return sizes


def equal_results(expected: fs.RunResult, actual: fs.RunResult) -> bool:
    first, second = ({**recorded.numbers(result), "rows": []} for result in (expected, actual))
    return not list(recorded.differences("", first, second, *recorded.SAME_MACHINE))


@pytest.mark.parametrize("sections", [{}, SAMPLED])
def test_steps_before_noise_are_repeated_in_smaller_groups(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = simulate_five(**sections)
    sizes = exhaust(monkeypatch, lambda group: len(group.ids) > 2)
    notes = NoteRecorder()
    actual = simulate_five(notes, tmp_path, **sections)
    assert sizes == [2, 2, 1] * 3  # five, then three, do not fit; later rounds begin with two
    logs = [line for line in notes.lines if "ran out of memory" in line]
    assert ["of 5 client(s)" in logs[0], "of 3 client(s)" in logs[1], len(logs)] == [True, True, 2]
    if not sections:
        assert equal_results(expected, actual)
        return
    ledgers = [recorded.ledger_rows(result.privacy or {}) for result in (expected, actual)]
    assert ledgers[0] == ledgers[1]
    verified(actual)


def test_only_failed_groups_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads of earlier groups are kept."""
    expected = simulate_five()
    sizes = exhaust(monkeypatch, lambda group: len(group.ids) > 1 and group.ids[-1] == 4)
    monkeypatch.setattr(fs.FedDM, "client_bytes", lambda self, context: context.memory_bytes // 6)
    weights, again = expected.model.state_dict(), simulate_five().model.state_dict()
    # not the same bits on every processor, as other clients share a pass
    torch.testing.assert_close(again, weights, rtol=1e-3, atol=1e-4)
    assert sizes[:3] == [3, 1, 1]


def test_single_client_without_memory_ends_run(monkeypatch: pytest.MonkeyPatch) -> None:
    exhaust(monkeypatch, lambda group: True)
    with raises(DeviceMemoryError, "device.memory"):
        simulate_five()


def test_steps_after_noise_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run ends with a one-line error, and a report built from the ledgers, including the failed
    round, is verified. A forced repetition releases nothing, as a mechanism cannot be taken
    twice."""
    sums = PrivateClientView.class_sums

    def without_memory(self: PrivateClientView, mechanism: Any, *args: Any, **kwargs: Any) -> Any:
        released = sums(self, mechanism, *args, **kwargs)
        if mechanism[0]._release.round == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return released

    monkeypatch.setattr(PrivateClientView, "class_sums", without_memory)
    with raises(DeviceMemoryError, "device.memory"):
        simulate_five(None, tmp_path, **SAMPLED)
    (folder,) = tmp_path.iterdir()
    for client in range(5):
        charged = read_ledger(folder / "ledger" / f"client-{client:03d}.jsonl")
        assert [row.round for row in charged.releases] == [1, 2]
    report: Any = unfinished_report(folder)
    write_report(report, folder)
    assert verify_run(folder).problems == []
    assert {number for row in recorded.ledger_rows(report) for number in row["rounds"]} == {1, 2}
    monkeypatch.setattr(ClientRuntime, "may_try_again", lambda *args: True)
    with pytest.raises(UnplannedReleaseError):
        simulate_five(**SAMPLED)
