"""The device's memory runs out in a pass over many clients: smaller groups go on with the same
numbers, and no charge ever pays for two attempts that drew noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth import FedDM, Observer, RunResult, resolve, simulate
from fedsynth.core.client import ClientGroup, PrivateClientView
from fedsynth.errors import DeviceMemoryError
from fedsynth.federation.client_runtime import ClientBudget, ClientRuntime
from fedsynth.privacy import Release
from fedsynth.privacy.errors import UnplannedReleaseError
from fedsynth.privacy.report.build import write_report
from fedsynth.results.verification import unfinished_report, verify_run
from tests.observers import NoteRecorder
from tests.quick_settings import quick_sections, verified
from tests.simulation.test_unchanged import HERE, differences, ledger_rows, numbers

CLIENTS = 5
Fails = Callable[[ClientGroup], bool]


def run(observer: Observer | None = None, output: Path | None = None, **sections: Any) -> RunResult:
    """FedDM, three rounds of five clients."""
    method = {"ipc": 1, "iterations": 2, "batch": 8}
    rounds, clients = {"rounds": 3}, {"clients": CLIENTS}
    given = quick_sections("feddm", run=rounds, partition=clients, method=method, **sections)
    return simulate(resolve(given), observer=observer, output=output)


PRIVATE = {"privacy": {"noise_multiplier": 2.0, "sample_rate": 0.1}}


def runs_out(monkeypatch: pytest.MonkeyPatch, where: str, fails: Fails) -> list[int]:
    """Makes steps of groups for which `fails` run out of memory, at the function of FedDM's that is
    named; returns the sizes of all groups that took a step to its end."""
    done: list[int] = []
    whole = getattr(FedDM, where)
    step = FedDM.client_step

    def without_memory(self: FedDM, *args: Any) -> Any:
        group = next(one for one in args if hasattr(one, "ids"))
        made = whole(self, *args)
        if fails(group):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made

    def counted(self: FedDM, message: Any, clients: Any, *others: Any) -> Any:
        made = step(self, message, clients, *others)
        done.append(len(clients.ids))
        return made

    monkeypatch.setattr(FedDM, where, without_memory)
    if where != "client_step":
        monkeypatch.setattr(FedDM, "client_step", counted)
    return done


def same(expected: RunResult, found: RunResult) -> bool:
    """Whether models and uploads agree but for rounding."""
    one, other = ({**numbers(result), "rows": []} for result in (expected, found))
    return not list(differences("", one, other, *HERE))


@pytest.mark.parametrize("sections", [{}, PRIVATE])
def test_a_step_without_noise_so_far_is_repeated_in_smaller_groups(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the same numbers, and in a private run on the charge that it has paid."""
    expected = run(**sections)
    done = runs_out(monkeypatch, "pairs", lambda group: len(group.ids) > 2)
    notes = NoteRecorder()
    found = run(notes, tmp_path, **sections)
    assert done == [2, 2, 1] * 3  # five, then three, do not fit; later rounds begin with two
    said = [line for line in notes.lines if "ran out of memory" in line]
    assert ["of 5 client(s)" in said[0], "of 3 client(s)" in said[1], len(said)] == [True, True, 2]
    if not sections:
        assert same(expected, found)
        return
    assert expected.privacy is not None
    assert found.privacy is not None
    assert ledger_rows(found.privacy) == ledger_rows(expected.privacy)
    verified(found)


def test_only_a_later_group_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the round's earlier groups have sent stays."""
    expected = run()
    done = runs_out(
        monkeypatch, "pairs", lambda group: len(group.ids) > 1 and group.ids[-1] == CLIENTS - 1
    )
    monkeypatch.setattr(FedDM, "client_bytes", lambda self, context: context.memory_bytes // 6)
    found = run()
    assert same(expected, found)
    assert done[:3] == [3, 1, 1]


def test_one_client_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_out(monkeypatch, "pairs", lambda group: True)
    with pytest.raises(DeviceMemoryError, match=r"of 1 client\(s\)\. Use a smaller batch"):
        run()


def out_after_noise(monkeypatch: pytest.MonkeyPatch, round: int) -> list[tuple[int, Release]]:
    """The given round's passes run out of memory once noise was drawn; returns what is charged from
    now on, with the client's number."""
    made: list[tuple[int, Release]] = []
    charge = ClientBudget.charge
    sums = PrivateClientView.class_sums

    def charged(self: ClientBudget, context: Any, phase: str) -> Any:
        before = len(self.ledger.history().releases)
        granted = charge(self, context, phase)
        made.extend((self.client, row) for row in self.ledger.history().releases[before:])
        return granted

    def without_memory(self: PrivateClientView, series: Any, *args: Any, **kwargs: Any) -> Any:
        released = sums(self, series, *args, **kwargs)
        if made[-1][1].round == round:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return released

    monkeypatch.setattr(ClientBudget, "charge", charged)
    monkeypatch.setattr(PrivateClientView, "class_sums", without_memory)
    return made


def test_a_private_step_that_drew_noise_is_charged_once_and_not_taken_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run ends with one line; a report is built of what the ledgers hold, with the round that
    failed in it, and verifies."""
    charges = out_after_noise(monkeypatch, 2)
    with pytest.raises(DeviceMemoryError, match=r"round 2: cpu .* of 5 client.* .*memory_gb"):
        run(None, tmp_path, **PRIVATE)
    for client in range(CLIENTS):
        assert [row.round for number, row in charges if number == client] == [1, 2]
    (folder,) = tmp_path.iterdir()
    report: Any = unfinished_report(folder)
    write_report(report, folder)
    assert verify_run(folder).problems == []
    assert {number for row in ledger_rows(report) for number in row["rounds"]} == {1, 2}


def test_a_twin_that_forgets_its_cost_releases_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The series cannot be handed out a second time."""
    out_after_noise(monkeypatch, 1)
    monkeypatch.setattr(ClientRuntime, "may_try_again", lambda *args: True)
    with pytest.raises(UnplannedReleaseError):
        run(**PRIVATE)
