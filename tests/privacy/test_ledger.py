"""Tests of ledger files under reopening, concurrent writers and damage, and of the guard's cap."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.errors import BudgetExceededError, LedgerError, PrivacySettingError
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.ledger.ledger import encode, repair_ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer
from fedsynth.privacy.releases import Release
from tests.privacy.support import release

DELTA = 1e-5


def row(number: int = 0) -> Release:
    return release(round=number, noise_multiplier=5.0, steps=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledgers" / "alice.jsonl"


def charged(path: Path, rounds: int) -> Ledger:
    ledger = Ledger("alice", path, dataset="digits/0")
    for number in range(rounds):
        ledger.charge(row(number))
    return ledger


def test_reopened_ledger_has_same_releases(path: Path) -> None:
    first = charged(path, 3)
    reopened = Ledger("alice", path, dataset="digits/0")
    assert reopened.releases == first.releases == (row(0), row(1), row(2))
    reopened.charge(row(3))
    assert [r.round for r in first.releases] == [0, 1, 2, 3]  # an open ledger sees later charges
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert reopened.lines.chains == tuple(line["chain"] for line in lines)
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(path.parent) == [path.name]  # no temporary file is left
    for client, dataset in (("bob", "digits/0"), ("alice", "mnist")):
        with pytest.raises(LedgerError, match=r"belongs to ('alice'|data set)"):
            Ledger(client, path, dataset=dataset)


def test_charges_are_synced_before_return(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = charged(path, 1)
    synced: list[bytes] = []
    original_fsync = os.fsync

    def recorded_fsync(descriptor: int) -> None:
        original_fsync(descriptor)
        synced.append(path.read_bytes())

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    ledger.charge(row(1))
    assert synced == [path.read_bytes()]  # one fsync, and nothing written after it
    assert b'"round": 1' in synced[0]
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(LedgerError, match="No space left"):
        ledger.charge(row(2))
    monkeypatch.undo()
    assert len(ledger.releases) == 3  # the line reached the file, so it counts


def line_removed(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([lines[0], *lines[2:]])


def with_client(client: Any) -> bytes:
    """Returns a header with a valid hash."""
    return encode({"fedsynth_ledger": 2, "client": client, "dataset": "d"}, "")[0]


DAMAGE: dict[str, Callable[[str], str]] = {
    "edited": lambda text: text.replace('"round": 2', '"round": 3'),
    "header": lambda text: text.replace('"client": "alice"', '"client": "alicf"'),
    "schema": lambda text: text.replace('"fedsynth_ledger": 2', '"fedsynth_ledger": 3'),
    "line removed": line_removed,
    "not JSON": lambda text: text + "hello\n",
    "list": lambda text: text + "[]\n",
    "emptied": lambda text: "",
    "client is no string": lambda text: with_client(["alice"]).decode(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_ledgers_are_rejected_unchanged(path: Path, damage: str) -> None:
    """The file is unchanged, with and without a torn last line."""
    charged(path, 3)
    damaged = DAMAGE[damage](path.read_text())
    for tail in ("", '{"round": 3, "quan'):
        path.write_text(damaged + tail)
        for reader in (repair_ledger, read_ledger):
            with pytest.raises(LedgerError, match="ledger"):
                reader(path)
        assert path.read_text() == damaged + tail
        assert os.listdir(path.parent) == [path.name]


def test_open_ledger_detects_damage(path: Path) -> None:
    ledger = charged(path, 3)
    intact = path.read_text()
    path.write_text("".join(intact.splitlines(keepends=True)[:3]))
    with pytest.raises(LedgerError, match="lacks earlier lines"):
        ledger.charge(row(3))
    path.unlink()
    with pytest.raises(LedgerError, match="cannot open"):
        ledger.charge(row(3))
    assert not path.exists()  # a deleted ledger is not recreated


def test_open_ledger_sees_new_records_and_rejects_unknown_entries(path: Path) -> None:
    other = Ledger("alice", path, dataset="digits/0", records="aa")
    ledger = charged(path, 1)
    ledger.carry_over()
    ledger.take_records("bb", "mnist/1")
    ledger.charge(row(1))
    assert other.releases == (row(0), row(1))
    assert (other.lines.records, other.lines.may_change, other.bound) == (("aa", "bb"), False, True)
    with pytest.raises(LedgerError, match="unknown kind"):
        ledger._note({"entry": "forgiven"})  # of a later version; it is in the file now
    with pytest.raises(LedgerError, match="unknown kind"):
        read_ledger(path)


def _charge_many(path: Path, first: int) -> None:
    ledger = Ledger("alice", path, dataset="digits/0")
    for number in range(first, first + 25):
        ledger.charge(row(number))


def test_concurrent_processes_lose_no_charges(path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap(_charge_many, [(path, 0), (path, 100)])
    rounds = [r.round for r in read_ledger(path).releases]
    assert [n for n in rounds if n < 100] == list(range(25))
    assert [n for n in rounds if n >= 100] == list(range(100, 125))


def test_concurrent_threads_lose_no_charges() -> None:
    ledger = Ledger("alice")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ledger.charge, [row()] * 1200))
    finally:
        sys.setswitchinterval(interval)
    assert len(ledger.releases) == 1200


def test_guard_rejects_releases_above_cap(path: Path) -> None:
    """Two guards on one file share the budget."""
    ledger = Ledger("alice", path)
    three, four = (epsilon([row(n) for n in range(rounds)], DELTA) for rounds in (3, 4))
    guard, other = (
        BudgetEnforcer(opened, DELTA, three * 1.0001) for opened in (ledger, Ledger("alice", path))
    )
    with pytest.raises(BudgetExceededError):
        guard.check([row(number) for number in range(4)])  # a whole plan
    for number in range(3):
        guard.check([row(number)])
        guard.charge(row(number))
    with pytest.raises(BudgetExceededError) as caught:
        guard.charge(row(3))
    with pytest.raises(BudgetExceededError):
        other.charge(row(3))
    spent, required = re.search(r" from (\S+) to (\S+), above", str(caught.value)).groups()
    # rounded up: what is printed is never smaller than what was computed
    assert three <= float(spent) <= three * 1.01
    assert four <= float(required) <= four * 1.01
    assert len(ledger.releases) == 3  # the rejected release was not charged


def test_guard_rejects_unaccounted_releases() -> None:
    leak = release(unaccounted="batch clipping")
    with pytest.raises(BudgetExceededError, match="to ∞"):
        BudgetEnforcer(Ledger("alice"), DELTA, 100.0).charge(leak)
    BudgetEnforcer(Ledger("alice"), DELTA, None).charge(leak)  # recorded, and ε is infinite
    for cap in (0.0, float("nan"), float("inf")):
        with pytest.raises(PrivacySettingError, match="must be finite"):
            BudgetEnforcer(Ledger("alice"), DELTA, cap)
    with pytest.raises(PrivacySettingError, match="delta"):
        BudgetEnforcer(Ledger("alice"), 1.0, None)


def test_partial_writes_are_reverted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial line on a full disk must neither block the ledger nor count."""
    ledger = charged(path, 2)
    intact = path.read_bytes()
    original_write = FileIO.write

    class FullDiskFile(FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            return original_write(self, data[:40])

    def opened(path: Path, **options: object) -> FileIO:
        return FullDiskFile(os.open(path, os.O_RDWR | os.O_APPEND), "r+")

    with monkeypatch.context() as patch:
        patch.setattr("fedsynth.privacy.ledger.ledger.open_regular", opened)
        with pytest.raises(LedgerError, match="only a part of the line"):
            ledger.charge(row(2))
    assert path.read_bytes() == intact
    ledger.charge(row(2))
    assert read_ledger(path).releases == (row(0), row(1), row(2))


@pytest.mark.parametrize("counts", [True, False])
def test_torn_lines_are_repaired_without_loss(path: Path, counts: bool) -> None:
    """A line that lacks only its line break counts."""
    ledger = charged(path, 3)
    intact = path.read_bytes()
    last = intact.splitlines()[-1]
    torn = intact[:-1] if counts else intact + last[:50]
    path.write_bytes(torn)
    with pytest.raises(LedgerError, match=r"torn.*fedsynth privacy repair|lacks earlier lines"):
        ledger.charge(row(3))
    repair = repair_ledger(path)
    assert repair is not None
    assert (repair.line, repair.counts) == ((last if counts else last[:50]).decode(), counts)
    assert path.read_bytes() == intact
    assert repair.copy.read_bytes() == torn
    assert repair.copy.suffix != ".jsonl"  # no ledger of a folder
    ledger.charge(row(3))
    assert [r.round for r in read_ledger(path).releases] == [0, 1, 2, 3]
    assert repair_ledger(path) is None  # nothing is left to repair


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_special_files_are_rejected_as_ledgers(path: Path, make: Callable[[Path], None]) -> None:
    """Opening a pipe would wait for a writer forever."""
    ledger = charged(path, 1)
    path.unlink()
    make(path)
    with pytest.raises(LedgerError, match=r"regular file|directory"):
        ledger.charge(row(1))
    with pytest.raises(LedgerError, match=r"regular file|directory"):
        ledger.check_writable()
    for reader in (read_ledger, repair_ledger):
        with pytest.raises((LedgerError, OSError), match=r"regular file|directory"):
            reader(path)


@pytest.mark.parametrize("writing", [True, False])
def test_held_locks_raise_one_line_errors(
    path: Path, writing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = charged(path, 1)
    monkeypatch.setattr("fedsynth.privacy.files.LOCK_SECONDS", 0.1)
    with path.open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match=r"has held the lock on .* for 0.1 s"):
            ledger.charge(row(1)) if writing else ledger.releases
    ledger.charge(row(1))
    assert len(ledger.releases) == 2
