"""Tests of ledger files under reopening, concurrent writers and damage, of the guard's cap, and of
folders, whose ledgers follow their records independent of order, client and name."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.errors import BudgetExceededError, LedgerError, OutputError, PrivacySettingError
from fedsynth.files import lock, open_regular
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.ledger.folder import Digests, LedgerFolder, check_names
from fedsynth.privacy.ledger.ledger import encode, repair_ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, EpsilonCap
from fedsynth.privacy.releases import Release
from tests.privacy.support import guard, in_threads, release
from tests.raising import raises

DELTA = 1e-5


def row(number: int = 0) -> Release:
    return release(round=number, noise_multiplier=5.0, steps=2)


def rounds(ledger: Any) -> list[int]:
    return [release.round for release in ledger.releases]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledgers" / "alice.jsonl"


def charged(path: Path, *numbers: int) -> Ledger:
    """Returns the ledger after charges of these rounds."""
    ledger = Ledger("alice", path, dataset="digits/0")
    for number in numbers:
        ledger.charge(row(number))
    return ledger


def test_reopened_ledger_has_same_releases(path: Path) -> None:
    first = charged(path, 0, 1, 2)
    reopened = charged(path)
    assert reopened.releases == first.releases == (row(0), row(1), row(2))
    reopened.charge(row(3))
    assert rounds(first) == [0, 1, 2, 3]  # an open ledger sees later charges
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert reopened.lines.chains == tuple(line["chain"] for line in lines)
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(path.parent) == [path.name]  # no temporary file is left
    for client, dataset in (("bob", "digits/0"), ("alice", "mnist")):
        with pytest.raises(LedgerError, match=r"belongs to data set|is the ledger of 'alice'"):
            Ledger(client, path, dataset=dataset)


def test_charges_are_synced_before_return(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = charged(path, 0)
    synced: list[bytes] = []
    full_disk = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    ledger.charge(row(1))
    assert synced == [path.read_bytes()]  # one fsync, and nothing written after it
    assert b'"round": 1' in synced[0]
    monkeypatch.setattr(os, "fsync", full_disk)
    with raises(LedgerError, "ledger.write"):
        ledger.charge(row(2))
    monkeypatch.undo()
    assert len(ledger.releases) == 3  # the line reached the file, so it counts


def with_invalid_release(text: str) -> str:
    """Returns a ledger with one more line, a release of no steps with a valid hash."""
    entry = json.loads(text.splitlines()[-1])
    chain = entry.pop("chain")
    return text + encode({**entry, "steps": 0}, chain)[0].decode()


DAMAGE: dict[str, Callable[[str], str]] = {
    "invalid release": with_invalid_release,
    "edited": lambda text: text.replace('"round": 2', '"round": 3'),
    "header": lambda text: text.replace('"client": "alice"', '"client": "alicf"'),
    "schema": lambda text: text.replace('"fedsynth_ledger": 4', '"fedsynth_ledger": 3'),
    "line removed": lambda text: re.sub(r"\n.*\n", "\n", text, count=1),
    "not JSON": lambda text: text + "hello\n",
    "list": lambda text: text + "[]\n",
    "emptied": lambda text: "",
    "client is no string": lambda text: encode(  # with a valid hash
        {"fedsynth_ledger": 4, "client": ["alice"], "dataset": "d"}, ""
    )[0].decode(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_ledgers_are_rejected_unchanged(path: Path, damage: str) -> None:
    """The file is unchanged, with and without a torn last line."""
    charged(path, 0, 1, 2)
    damaged = DAMAGE[damage](path.read_text())
    for tail in ("", '{"round": 3, "quan'):
        path.write_text(damaged + tail)
        for reader in (repair_ledger, read_ledger):
            with pytest.raises(LedgerError, match="ledger"):
                reader(path)
        assert path.read_text() == damaged + tail
        assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("kept", range(5))
def test_lines_cut_from_end_are_found_by_earlier_history_only(path: Path, kept: int) -> None:
    """A header and three rows are written; docs/threat-model.md states this limit."""
    earlier, ledger = charged(path, 0).history(), charged(path, 1, 2)
    assert ledger.lines.chains[len(earlier.releases)] == earlier.chain
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    if kept == 0:
        with pytest.raises(LedgerError, match="is empty"):
            read_ledger(path)
        return
    cut = read_ledger(path)
    assert rounds(cut) == [0, 1, 2][: kept - 1]  # opens, with less spent
    chains = cut.lines.chains
    assert (len(chains) > 1 and chains[1] == earlier.chain) == (kept > 1)
    if kept < 4:
        with pytest.raises(LedgerError, match="was truncated"):
            ledger.charge(row(3))  # which was open
    for number in range(kept - 1, 3):
        cut.charge(row(number))  # the same rows again
    assert cut.releases == ledger.lines.releases
    assert (cut.history() == ledger.history()) == (kept == 4)


def test_open_ledger_detects_damage(path: Path) -> None:
    ledger = charged(path, 0, 1, 2)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(LedgerError, match="was truncated"):
        ledger.charge(row(3))
    path.unlink()
    with pytest.raises(LedgerError, match="cannot open"):
        ledger.charge(row(3))
    assert not path.exists()  # a deleted ledger is not recreated


def test_lines_name_their_run_which_notes_its_files_once(path: Path) -> None:
    first, second = (Ledger("alice", path, dataset="digits/0") for _ in range(2))
    first.charge_id, second.charge_id = "1", "2"
    for ledger in (first, second, first):
        ledger.charge(row())
    for ledger in (second, first, first):
        ledger.note_files(f"of {ledger.charge_id}")
    second.note_resumption(3)
    lines = read_ledger(path).lines
    assert lines.runs == ("1", "2", "1")
    assert lines.files == (("2", "of 2"), ("1", "of 1"))
    assert lines.resumptions == (("2", 3),)


def test_open_ledger_sees_new_records_and_rejects_unknown_entries(path: Path) -> None:
    other = Ledger("alice", path, dataset="digits/0", records="aa")
    ledger = charged(path, 0)
    ledger.carry_over()
    ledger.take_records("bb", "mnist/1")
    ledger.charge(row(1))
    assert other.releases == (row(0), row(1))
    assert (other.lines.records, other.lines.may_change, other.bound) == (("aa", "bb"), False, True)
    with raises(LedgerError, "ledger.unusable"):
        ledger._note({"entry": "forgiven"})  # of a later version; it is in the file now
    with raises(LedgerError, "ledger.unusable"):
        read_ledger(path)


@pytest.mark.parametrize("kept", [False, True])
def test_threads_share_a_budget(path: Path, kept: bool) -> None:
    """Each thread charges through its own enforcer, and reads in between."""
    ledger = charged(path) if kept else Ledger("alice")
    cap = EpsilonCap(epsilon([row()] * 30, DELTA) * 1.0001, DELTA)
    histories = []

    def charge() -> None:
        enforcer = BudgetEnforcer(ledger, [cap])
        for _ in range(10):
            enforcer.charge(row())
            histories.append(ledger.history())
            enforcer.check([])

    assert len(in_threads(charge)) < 4  # 40 charges do not fit
    assert len(ledger.releases) == 30
    chains = ledger.lines.chains
    assert all(h.chain == (chains[len(h.releases)] if kept else None) for h in histories)


def test_threads_read_while_another_ledger_writes(path: Path) -> None:
    """Regression: readers share the lock, and mistook the offsets of each other for damage."""
    writer, ledger = charged(path), charged(path)
    for number in range(100):
        writer.charge(row(number))
        assert in_threads(lambda: len(ledger.releases)) == [number + 1] * 4


def test_guard_rejects_releases_above_cap(path: Path) -> None:
    """Two guards on one file share the budget."""
    three, four = (epsilon([row(n) for n in range(count)], DELTA) for count in (3, 4))
    first, other = (
        BudgetEnforcer(charged(path), [EpsilonCap(three * 1.0001, DELTA)]) for _ in range(2)
    )
    with pytest.raises(BudgetExceededError):
        first.check([row(number) for number in range(4)])  # a whole plan
    for number in range(3):
        first.check([row(number)])
        first.charge(row(number))
    for enforcer in (other, first):
        with pytest.raises(BudgetExceededError) as caught:
            enforcer.charge(row(3))
    spent, required = re.search(r" from (\S+) to (\S+), above", str(caught.value)).groups()
    # rounded up: what is printed is never smaller than what was computed
    assert three <= float(spent) <= three * 1.01
    assert four <= float(required) <= four * 1.01
    assert rounds(first.ledger) == [0, 1, 2]  # the rejected release was not charged


def test_guard_rejects_unaccounted_releases() -> None:
    leak = release(unaccounted="batch clipping")
    with raises(BudgetExceededError, "budget.exceeded"):
        BudgetEnforcer(Ledger("alice"), [EpsilonCap(100.0, DELTA)]).charge(leak)
    guard().charge(leak)  # recorded, and ε is infinite
    for cap in (0.0, float("nan"), float("inf")):
        with raises(PrivacySettingError, "privacy.epsilon"):
            EpsilonCap(cap, DELTA)
    with raises(PrivacySettingError, "privacy.delta"):
        EpsilonCap(1.0, 1.0)


def test_partial_writes_are_reverted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial line on a full disk must neither block the ledger nor count."""
    ledger = charged(path, 0, 1)
    intact = path.read_bytes()

    class FullDiskFile(FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            return super().write(data[:40])

    def opened(path: Path, **options: object) -> FileIO:
        return FullDiskFile(os.open(path, os.O_RDWR | os.O_APPEND), "r+")

    monkeypatch.setattr("fedsynth.privacy.ledger.ledger.open_regular", opened)
    with raises(LedgerError, "ledger.write"):
        ledger.charge(row(2))
    monkeypatch.undo()
    assert path.read_bytes() == intact
    ledger.charge(row(2))
    assert read_ledger(path).releases == (row(0), row(1), row(2))


@pytest.mark.parametrize("counts", [True, False])
def test_torn_lines_are_repaired_without_loss(path: Path, counts: bool) -> None:
    """A line that lacks only its line break counts."""
    ledger = charged(path, 0, 1, 2)
    intact = path.read_bytes()
    last = intact.splitlines()[-1]
    torn = intact[:-1] if counts else intact + last[:50]
    path.write_bytes(torn)
    with pytest.raises(LedgerError, match=r"torn.*fedsynth privacy repair|was truncated"):
        ledger.charge(row(3))
    repair = repair_ledger(path)
    assert (repair.line, repair.counts) == ((last if counts else last[:50]).decode(), counts)
    assert path.read_bytes() == intact
    assert repair.copy.read_bytes() == torn
    assert repair.copy.suffix != ".jsonl"  # no ledger of a folder
    ledger.charge(row(3))
    assert rounds(read_ledger(path)) == [0, 1, 2, 3]
    assert repair_ledger(path) is None  # nothing is left to repair


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_special_files_are_rejected_as_ledgers(path: Path, make: Callable[[Path], None]) -> None:
    """Opening a pipe would wait for a writer forever."""
    ledger = charged(path, 0)
    path.unlink()
    make(path)
    for use in (partial(ledger.charge, row(1)), ledger.check_writable):
        with pytest.raises(LedgerError, match=r"regular file|directory"):
            use()
    for reader in (read_ledger, repair_ledger):
        with pytest.raises((LedgerError, OSError), match=r"regular file|directory"):
            reader(path)


def test_held_locks_raise_one_line_errors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = charged(path, 0)
    monkeypatch.setattr("fedsynth.files.LOCK_SECONDS", 0.1)
    with open_regular(path, writing=True) as stopped:
        lock(stopped, path)
        for use in (lambda: ledger.charge(row(1)), lambda: ledger.releases):
            with raises(OutputError, "files.lock"):
                use()
    ledger.charge(row(1))
    assert len(ledger.releases) == 2


# --------------------------------------------------------------------------- folders of ledgers


def hashes(parts: Sequence[str], key: bytes) -> list[Digests]:
    """Hashes the clients' records, a letter each."""
    digest = partial(hashlib.blake2b, key=key, digest_size=16)
    joined = [b"".join(digest(record.encode()).digest() for record in part) for part in parts]
    return [np.frombuffer(digests, np.uint8).reshape(-1, 16) for digests in joined]


def opened(folder: Path, *parts: str, names: str = "", dataset: str = "d") -> list[Ledger]:
    """Opens the ledgers of clients with these records, and names if given."""
    return LedgerFolder(folder).open(names.split() or None, partial(hashes, parts), dataset)


def rejects(text: str, *arguments: Any, **values: Any) -> None:
    """Checks that `opened` raises a one-line error with this text."""
    with pytest.raises(LedgerError, match=text) as caught:
        opened(*arguments, **values)
    assert "\n" not in str(caught.value)


def charge_all(folder: Path, *parts: str, names: str = "") -> list[str]:
    """Charges the ledgers of these clients and returns their names."""
    ledgers = opened(folder, *parts, names=names)
    for ledger in ledgers:
        ledger.charge(row())
    return [ledger.client for ledger in ledgers]


def spent(folder: Path) -> dict[str, int]:
    return {name: len(ledger.releases) for name, ledger in LedgerFolder(folder).ledgers().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ledgers"


def test_threads_charge_records_to_one_ledger(folder: Path) -> None:
    """Each thread opens the folder for the same records, half of them under another name."""
    for number in range(20):
        names = iter(["a", "b", "a", "b"])
        place = folder / str(number)
        charges = in_threads(lambda p=place, n=names: charge_all(p, "xyz", names=next(n)))
        assert set(spent(place).values()) in ({len(charges)}, {0, len(charges)})


def test_records_keep_ledger_in_any_order(folder: Path) -> None:
    """Regression: the same records under another number were charged to an empty ledger."""
    assert charge_all(folder, "abc", "de") == ["client-000", "client-001"]
    assert charge_all(folder, "bca", "ed") == ["client-000", "client-001"]
    for parts in (("ed", "bca"), ("xy", "cab", "de"), ("abcde",), ("ab", "cde"), ("ad", "bce")):
        rejects(r"are already in ledger|do not match ledger", folder, *parts)
    assert charge_all(folder, "xy", "cab", names="client-002 client-000")
    assert spent(folder) == {"client-000": 3, "client-001": 2, "client-002": 1}


def file_contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def test_declared_names_must_match_records(folder: Path) -> None:
    charge_all(folder, "abc", "de", names="north south")
    assert charge_all(folder, "de", names="south") == ["south"]
    contents = file_contents(folder)
    for names, parts, text in (
        (
            "north south",
            "de abc",
            r"2 records of client 'north' are already in ledger .*south\.jsonl",
        ),
        ("west", "abc", r"3 records of client 'west' are already in ledger .*north\.jsonl"),
        ("north", "abx", r"1 are new and 1 are missing\. .* carry-over .* north$"),
        ("north south", "xyz de", r"3 are new and 3 are missing"),
    ):
        rejects(text, folder, *parts.split(), names=names)
    assert file_contents(folder) == contents  # a rejected run changes no file


def test_changed_records_need_confirmation(folder: Path) -> None:
    """Charges and removed records stay; a confirmation holds once."""
    charge_all(folder, "abcd", "ef", names="north south")
    rejects("carry-over", folder, "abcx", names="north")
    assert LedgerFolder(folder).carry_over("north") == 1
    # records of another client are rejected still
    rejects(r"1 records of client.* are already in ledger .*south", folder, "abce", names="north")
    assert charge_all(folder, "abcx", names="north") == ["north"]
    assert spent(folder)["north"] == 2
    charge_all(folder, "abcx", names="north")
    for part in ("abcd", "abc", "abcxy"):
        rejects("do not match ledger", folder, part, names="north")
    # 'd' left north, with its charges
    rejects(r"1 records of client .* are already in ledger .*north", folder, "dz", names="west")
    unknown = "ledger.client"
    with raises(LedgerError, unknown):
        LedgerFolder(folder).carry_over("west")
    rejects(
        "belongs to data set and partition 'd', .* uses 'e'",
        folder,
        "abcx",
        names="north",
        dataset="e",
    )
    LedgerFolder(folder).carry_over("north")
    assert opened(folder, "abcx", names="north", dataset="e")[0].dataset == "e"


def test_second_concurrent_run_is_rejected(folder: Path) -> None:
    """Regression: both runs opened their ledgers before either charged."""
    (north,), (west,) = opened(folder, "abc", names="north"), opened(folder, "cd", names="west")
    north.charge(row())
    shared_record = "ledger.moved_records"
    with raises(LedgerError, shared_record):
        west.charge(row())
    north.charge(row())
    assert spent(folder) == {"north": 2, "west": 0}
    opened(folder, "xy", names="south")[0].charge(row())


def test_uncharged_ledgers_accept_other_records(folder: Path) -> None:
    """A rejected first run, or wrong parts, must not bind the ledgers; the last run to open an
    uncharged ledger charges it."""
    first, second = opened(folder, "abcd", "efgh"), opened(folder, "abef", "cdgh")
    with raises(LedgerError, "ledger.lock"):
        first[0].charge(row())
    for ledger in (*second, *opened(folder, "abef", "cdgh")):
        ledger.charge(row())
    assert spent(folder) == {"client-000": 2, "client-001": 2}
    rejects("are already in ledger", folder, "abcd", "efgh")


@pytest.mark.parametrize("stopped", ["before the ledger", "after the ledger", "new records"])
def test_runs_that_end_while_a_ledger_is_opened_can_be_repeated(
    folder: Path, stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the list of records remained, and counted as that of a missing ledger."""
    records = "abc"
    if stopped == "new records":
        charge_all(folder, "abx")
        LedgerFolder(folder).carry_over("client-000")
    with monkeypatch.context() as patched:
        failing: dict[str, tuple[type, str]] = {
            "before the ledger": (Ledger, "_start"),
            "after the ledger": (Path, "replace"),
            "new records": (Ledger, "_append"),
        }
        patched.setattr(*failing[stopped], Mock(side_effect=OSError("No space left on device")))
        with pytest.raises((OSError, LedgerError)):
            opened(folder, records)
    charge_all(folder, records)
    assert not list((folder / "private").glob(".[0-9a-f]*"))
    (folder / "client-000.jsonl").unlink()
    rejects("does not contain the ledger", folder, records)  # as before


def test_equal_records_of_clients_are_separate_examples(folder: Path) -> None:
    """Equal records, such as blank images, count as unmoved while both clients are present."""
    charge_all(folder, "abb", "bc")
    charge_all(folder, "abb", "bc")
    charge_all(folder, "abb", "bc", "bd")
    # the number of equal records counts too
    rejects("do not match ledger", folder, "ab", "bc", "bd")
    moved = r"1 records of client .* are already in ledger .*client-000"
    rejects(moved, folder, "bc", "bz", names="client-001 new")


def test_ledgers_without_fingerprint_need_confirmation(folder: Path) -> None:
    """Such ledgers are from the first version, or copied from a run folder."""
    for name in ("north", "south"):
        Ledger(name, folder / f"{name}.jsonl", dataset="old").charge(row())
    unknown = "was copied from a run folder"
    rejects(unknown, folder, "abc", "de", names="north south")
    rejects(unknown, folder, "abc", names="west")
    assert not (folder / "private").exists()
    for name in ("north", "south"):
        LedgerFolder(folder).carry_over(name)
    charge_all(folder, "abc", "de", names="north south")
    assert spent(folder) == {"north": 2, "south": 2}
    rejects("3 records of client", folder, "abc", names="west")


def test_private_files_are_readable_only_by_their_owner(folder: Path) -> None:
    charge_all(folder, "abc", "de")
    private = folder / "private"
    assert private.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in private.iterdir()] == [0o600] * 3
    key = (private / "records.key").read_bytes()
    assert len(key) == 32
    for ledger in folder.glob("*.jsonl"):
        assert key not in ledger.read_bytes()
        assert key.hex() not in ledger.read_text()


def test_fingerprints_are_keyed_and_independent_of_order(tmp_path: Path) -> None:
    """A broken version would use a plain hash, which confirms guesses of the records, or reveal
    clients without records."""

    def fingerprint(name: str, part: str) -> str:
        names = [item.lines.records[-1] for item in opened(tmp_path / name, part, "", "")]
        assert len(set(names)) == 3
        return names[0]

    assert fingerprint("one", "abca") == fingerprint("one", "caab")
    assert fingerprint("one", "abca") != fingerprint("one", "abc")  # multiplicity counts
    assert fingerprint("one", "abc") != fingerprint("two", "abc")
    for _ in range(2):
        charge_all(tmp_path / "one", "abc", "", "")


def test_missing_keys_and_lists_are_detected(folder: Path, tmp_path: Path) -> None:
    charge_all(folder, "abc", "de")
    private, backup = folder / "private", tmp_path / "away"
    key = private / "records.key"
    key.rename(backup)
    rejects(r"records\.key is missing.* from a backup", folder, "abc", "de")
    assert not key.exists()
    backup.rename(key)
    first, second = LedgerFolder(folder).ledgers().values()
    (private / second.lines.records[0]).rename(backup)
    for names, parts in (("", "abc dex"), ("west", "de"), ("client-000 west", "abc de")):
        missing = "record list of client .client-001. is missing"  # so they cannot be compared
        rejects(missing, folder, *parts.split(), names=names)
    opened(folder, "abc", "de")  # the same records restore the list
    (private / first.lines.records[0]).write_bytes(b"x" * 48)
    rejects("'client-000' is missing or damaged", folder, "abx", "de")
    key.write_bytes(b"short")
    rejects(r"must have 32 bytes|damaged", folder, "abc", "de")
    key.unlink()  # is replaced after all confirmations
    LedgerFolder(folder).carry_over("client-000")
    rejects("is missing", folder, "abc", "de")
    LedgerFolder(folder).carry_over("client-001")
    assert charge_all(folder, "abc", "de") == ["client-000", "client-001"]


def test_deleted_ledgers_are_detected(folder: Path) -> None:
    LedgerFolder(folder).check_whole()  # no folder yet: nothing is missing
    charge_all(folder, "abc", "de")
    LedgerFolder(folder).check_whole()
    (folder / "client-000.jsonl").unlink()
    for names in ("", "north client-001"):
        with raises(LedgerError, "ledger.missing"):
            opened(folder, "abc", "de", names=names)
    assert spent(folder) == {"client-001": 1}
    with raises(LedgerError, "ledger.missing"):
        LedgerFolder(folder).check_whole()  # plans call it, which have no records
    charge_all(folder, "xyz", "de", names="north client-001")  # new records


def test_run_folders_receive_no_key(tmp_path: Path) -> None:
    """Run folders are published, so `--dp-ledger runs/NAME/ledger` must not write a key there."""
    (tmp_path / "ledger").mkdir()
    (tmp_path / "config.toml").write_text("")
    rejects("part of a run folder", tmp_path / "ledger", "abc")
    assert list((tmp_path / "ledger").iterdir()) == []


@given(st.lists(st.lists(st.text("abcd", max_size=6), max_size=4), min_size=4, max_size=4))
@settings(max_examples=8, deadline=None)
def test_records_are_charged_in_single_ledger(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[str]]
) -> None:
    """A run has each record at most once here, so that every exposure is traceable."""
    folder = tmp_path_factory.mktemp("ledgers")
    exposed: dict[str, Counter[str]] = {}
    for run in runs:
        distinct: list[str] = []
        for part in run:  # each letter at one client only
            distinct.append("".join(sorted(set(part).difference(*distinct))))
        try:
            names = charge_all(folder, *distinct)
        except LedgerError:
            continue
        for name, part in zip(names, distinct, strict=True):
            for record in part:
                exposed.setdefault(record, Counter())[name] += 1
    for record, charges in exposed.items():
        ((name, times),) = charges.items()  # of a single ledger
        assert spent(folder)[name] >= times, record


def _charge_together(folder: Path, start: multiprocessing.synchronize.Barrier) -> None:
    start.wait()
    charge_all(folder, "abc", "de")
    charged(folder.with_name("alice.jsonl"), *range(25))


def test_concurrent_processes_lose_no_charges(folder: Path) -> None:
    """They share a new folder and a new ledger."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    workers = [context.Process(target=_charge_together, args=(folder, start)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert spent(folder) == {"client-000": 4, "client-001": 4}
    shared = read_ledger(folder.with_name("alice.jsonl"))
    assert sorted(rounds(shared)) == sorted([*range(25)] * 4)


@pytest.mark.parametrize(
    "names",
    ["ab", ["Clinic", "clinic"], *(["a", wrong] for wrong in ("../b", ".b", "x" * 65, "b\n", 3))],
)
def test_invalid_client_names_are_rejected(names: Any) -> None:
    with pytest.raises(PrivacySettingError):
        check_names(names, 2)
    assert check_names(["St.Mary_s-2", "0"], 2) == ("St.Mary_s-2", "0")
