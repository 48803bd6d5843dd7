"""Tests of exhausted device memory: smaller groups repeat a step with equal results, and no charge
covers two attempts that drew noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth import FedDM, Observer, RunResult, resolve, simulate
from fedsynth.core.client import Group, PrivateClientView
from fedsynth.errors import DeviceMemoryError
from fedsynth.federation.client_runtime import ClientBudget, ClientRuntime
from fedsynth.privacy import Release
from fedsynth.privacy.errors import UnplannedReleaseError
from fedsynth.privacy.report.build import write_report
from fedsynth.results.verification import unfinished_report, verify_run
from tests.quick_runs import NoteRecorder, quick_sections, verified
from tests.simulation.test_recorded_numbers import SAME_MACHINE, differences, ledger_rows, numbers

CLIENTS = 5
Fails = Callable[[Group], bool]


def run(observer: Observer | None = None, output: Path | None = None, **sections: Any) -> RunResult:
    """Runs three rounds of FedDM with five clients."""
    method = {"ipc": 1, "iterations": 2, "batch": 8}
    rounds, clients = {"rounds": 3}, {"clients": CLIENTS}
    base = quick_sections("feddm", run=rounds, partition=clients, method=method, **sections)
    return simulate(resolve(base), observer=observer, output=output)


PRIVATE = {"privacy": {"noise_multiplier": 2.0, "sample_rate": 0.1}}


def exhaust(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> list[int]:
    """Lets FedDM's image pairs run out of memory for groups for which `fails` is true, and returns
    the sizes of all groups that completed a step."""
    sizes: list[int] = []
    pairs, step = FedDM.pairs, FedDM.client_step

    def without_memory(self: FedDM, *args: Any) -> Any:
        if fails(next(argument for argument in args if hasattr(argument, "ids"))):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return pairs(self, *args)

    def recorded_step(self: FedDM, message: Any, clients: Any, *rest: Any) -> Any:
        result = step(self, message, clients, *rest)
        sizes.append(len(clients.ids))
        return result

    monkeypatch.setattr(FedDM, "pairs", without_memory)
    monkeypatch.setattr(FedDM, "client_step", recorded_step)
    return sizes


def equal_results(expected: RunResult, actual: RunResult) -> bool:
    """Returns whether models and uploads agree up to rounding."""
    first, second = ({**numbers(result), "rows": []} for result in (expected, actual))
    return not list(differences("", first, second, *SAME_MACHINE))


@pytest.mark.parametrize("sections", [{}, PRIVATE])
def test_steps_before_noise_are_repeated_in_smaller_groups(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Results are equal, and private runs are not charged again."""
    expected = run(**sections)
    sizes = exhaust(monkeypatch, lambda group: len(group.ids) > 2)
    notes = NoteRecorder()
    actual = run(notes, tmp_path, **sections)
    assert sizes == [2, 2, 1] * 3  # five, then three, do not fit; later rounds begin with two
    logs = [line for line in notes.lines if "ran out of memory" in line]
    assert ["of 5 client(s)" in logs[0], "of 3 client(s)" in logs[1], len(logs)] == [True, True, 2]
    if not sections:
        assert equal_results(expected, actual)
        return
    assert expected.privacy is not None
    assert actual.privacy is not None
    assert ledger_rows(actual.privacy) == ledger_rows(expected.privacy)
    verified(actual)


def test_only_failed_groups_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads of earlier groups are kept."""
    expected = run()
    sizes = exhaust(monkeypatch, lambda group: len(group.ids) > 1 and group.ids[-1] == CLIENTS - 1)
    monkeypatch.setattr(FedDM, "client_bytes", lambda self, context: context.memory_bytes // 6)
    assert equal_results(expected, run())
    assert sizes[:3] == [3, 1, 1]


def test_single_client_without_memory_ends_run(monkeypatch: pytest.MonkeyPatch) -> None:
    exhaust(monkeypatch, lambda group: True)
    with pytest.raises(DeviceMemoryError, match=r"of 1 client\(s\)\. Use a smaller batch"):
        run()


def exhaust_after_noise(monkeypatch: pytest.MonkeyPatch, round: int) -> list[tuple[int, Release]]:
    """Lets passes of a round run out of memory after noise was drawn, and returns the later charges
    with the clients' numbers."""
    charges: list[tuple[int, Release]] = []
    charge = ClientBudget.charge
    sums = PrivateClientView.class_sums

    def recorded_charge(self: ClientBudget, context: Any, phase: str) -> Any:
        count = len(self.ledger.history().releases)
        granted = charge(self, context, phase)
        charges.extend((self.client, row) for row in self.ledger.history().releases[count:])
        return granted

    def without_memory(self: PrivateClientView, series: Any, *args: Any, **kwargs: Any) -> Any:
        released = sums(self, series, *args, **kwargs)
        if charges[-1][1].round == round:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return released

    monkeypatch.setattr(ClientBudget, "charge", recorded_charge)
    monkeypatch.setattr(PrivateClientView, "class_sums", without_memory)
    return charges


def test_steps_after_noise_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run ends with a one-line error, and a report built from the ledgers, including the failed
    round, is verified. A forced repetition releases nothing, as a series cannot be taken twice."""
    charges = exhaust_after_noise(monkeypatch, 2)
    with pytest.raises(DeviceMemoryError, match=r"round 2: cpu .* of 5 client.* .*memory_gb"):
        run(None, tmp_path, **PRIVATE)
    for client in range(CLIENTS):
        assert [row.round for number, row in charges if number == client] == [1, 2]
    (folder,) = tmp_path.iterdir()
    report: Any = unfinished_report(folder)
    write_report(report, folder)
    assert verify_run(folder).problems == []
    assert {number for row in ledger_rows(report) for number in row["rounds"]} == {1, 2}
    monkeypatch.setattr(ClientRuntime, "may_try_again", lambda *args: True)
    with pytest.raises(UnplannedReleaseError):
        run(**PRIVATE)
