"""Tests that ledgers of a folder follow their records, independent of order, client and name."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.privacy.errors import LedgerError, PrivacySettingError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.folder import Digests, LedgerFolder, check_names
from tests.privacy.support import release

ROW = release()


def hashes(parts: Sequence[str]) -> Callable[[bytes], list[Digests]]:
    """Returns the function that hashes the clients' records, a letter each."""

    def digest(record: str, key: bytes) -> bytes:
        return hashlib.blake2b(record.encode(), key=key, digest_size=16).digest()

    def client_digests(key: bytes) -> list[Digests]:
        joined = [b"".join(digest(record, key) for record in part) for part in parts]
        return [np.frombuffer(digests, np.uint8).reshape(-1, 16) for digests in joined]

    return client_digests


def opened(
    folder: Path, *parts: str, names: Sequence[str] | None = None, dataset: str = "d"
) -> list[Ledger]:
    return LedgerFolder(folder).open(names, hashes(parts), dataset)


def rejects(text: str, *arguments: Any, **values: Any) -> None:
    """Checks that `opened` raises a one-line error with this text."""
    with pytest.raises(LedgerError, match=text) as caught:
        opened(*arguments, **values)
    assert "\n" not in str(caught.value)


def charged(folder: Path, *parts: str, names: Sequence[str] | None = None) -> list[str]:
    """Charges the ledgers of these clients and returns their names."""
    ledgers = opened(folder, *parts, names=names)
    for ledger in ledgers:
        ledger.charge(ROW)
    return [ledger.client for ledger in ledgers]


def spent(folder: Path) -> dict[str, int]:
    return {name: len(ledger.releases) for name, ledger in LedgerFolder(folder).ledgers().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ledgers"


def test_records_keep_ledger_in_any_order(folder: Path) -> None:
    """Regression: the same records under another number were charged to an empty ledger."""
    assert charged(folder, "abc", "de") == ["client-000", "client-001"]
    assert charged(folder, "bca", "ed") == ["client-000", "client-001"]
    for parts in (("ed", "bca"), ("xy", "cab", "de"), ("abcde",), ("ab", "cde"), ("ad", "bce")):
        rejects(r"belong to ledger|records of the ledger are missing", folder, *parts)
    assert charged(folder, "xy", "cab", names=["client-002", "client-000"])
    assert spent(folder) == {"client-000": 3, "client-001": 2, "client-002": 1}


def test_declared_names_must_match_records(folder: Path) -> None:
    charged(folder, "abc", "de", names=["north", "south"])
    assert charged(folder, "de", names=["south"]) == ["south"]
    contents = file_contents(folder)
    for parts, names, text in (
        (
            ("de", "abc"),
            ["north", "south"],
            r"2 records of client 'north' belong to ledger .*south\.jsonl",
        ),
        (("abc",), ["west"], r"3 records of client 'west' belong to ledger .*north\.jsonl"),
        (("abx",), ["north"], r"1 records that .* 1 records of the ledger .* carry-over .* north$"),
        (("xyz", "de"), ["north", "south"], r"3 records that .* 3 records of the ledger"),
    ):
        rejects(text, folder, *parts, names=names)
    assert file_contents(folder) == contents  # a rejected run changes no file


def file_contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def test_changed_records_need_confirmation(folder: Path) -> None:
    """Charges and removed records stay; a confirmation holds once."""
    charged(folder, "abcd", "ef", names=["north", "south"])
    rejects("carry-over", folder, "abcx", names=["north"])
    assert LedgerFolder(folder).carry_over("north") == 1
    # records of another client are rejected still
    rejects(r"1 records of client.* belong to ledger .*south", folder, "abce", names=["north"])
    assert charged(folder, "abcx", names=["north"]) == ["north"]
    assert spent(folder)["north"] == 2
    charged(folder, "abcx", names=["north"])
    for part in ("abcd", "abc", "abcxy"):
        rejects("records of the ledger are missing", folder, part, names=["north"])
    # 'd' left north, with its charges
    rejects(r"1 records of client .* belong to ledger .*north", folder, "dz", names=["west"])
    with pytest.raises(
        LedgerError, match=r"no ledger of client 'west'. Clients with a ledger: north, south"
    ):
        LedgerFolder(folder).carry_over("west")
    rejects("belongs to data set 'd', .* uses 'e'", folder, "abcx", names=["north"], dataset="e")
    LedgerFolder(folder).carry_over("north")
    assert opened(folder, "abcx", names=["north"], dataset="e")[0].dataset == "e"


def test_uncharged_ledgers_accept_other_records(folder: Path) -> None:
    """A rejected first run, or wrong parts, must not bind the ledgers."""
    opened(folder, "abcd", "efgh")
    assert charged(folder, "abef", "cdgh") == ["client-000", "client-001"]
    rejects("belong to ledger", folder, "abcd", "efgh")


def test_second_concurrent_run_is_rejected(folder: Path) -> None:
    """Regression: both runs opened their ledgers before either charged."""
    (north,), (west,) = opened(folder, "abc", names=["north"]), opened(folder, "cd", names=["west"])
    north.charge(ROW)
    with pytest.raises(
        LedgerError, match=r"1 records of client 'west' belong to ledger .*north\.jsonl"
    ):
        west.charge(ROW)
    north.charge(ROW)
    assert spent(folder) == {"north": 2, "west": 0}
    opened(folder, "xy", names=["south"])[0].charge(ROW)


def test_ledger_used_by_another_run_is_not_charged(folder: Path) -> None:
    first, second = opened(folder, "abcd", "efgh"), opened(folder, "abef", "cdgh")
    with pytest.raises(LedgerError, match="another run has opened ledger"):
        first[0].charge(ROW)
    for ledger in (*second, *opened(folder, "abef", "cdgh")):
        ledger.charge(ROW)
    assert spent(folder) == {"client-000": 2, "client-001": 2}


def test_equal_records_of_clients_are_separate_examples(folder: Path) -> None:
    """Equal records, such as blank images, count as unmoved while both clients are present."""
    charged(folder, "abb", "bc")
    charged(folder, "abb", "bc")
    charged(folder, "abb", "bc", "bd")
    # the number of equal records counts too
    rejects("records of the ledger are missing", folder, "ab", "bc", "bd")
    rejects(
        r"1 records of client .* belong to ledger .*client-000",
        folder,
        "bc",
        "bz",
        names=["client-001", "new"],
    )


def test_ledgers_without_fingerprint_need_confirmation(folder: Path) -> None:
    """Such ledgers are from the first version, or copied from a run folder."""
    for name in ("north", "south"):
        Ledger(name, folder / f"{name}.jsonl", dataset="old").charge(ROW)
    for names in (["north", "south"], ["west"]):
        rejects(
            "the records of ledger .* are unknown",
            folder,
            *("abc", "de")[: len(names)],
            names=names,
        )
    assert not (folder / "private").exists()
    for name in ("north", "south"):
        LedgerFolder(folder).carry_over(name)
    charged(folder, "abc", "de", names=["north", "south"])
    assert spent(folder) == {"north": 2, "south": 2}
    rejects("3 records of client", folder, "abc", names=["west"])


def test_private_files_are_readable_only_by_their_owner(folder: Path) -> None:
    charged(folder, "abc", "de")
    private = folder / "private"
    assert private.stat().st_mode & 0o777 == 0o700
    files = list(private.iterdir())
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    key = (private / "records.key").read_bytes()
    assert len(key) == 32
    for ledger in folder.glob("*.jsonl"):
        assert key not in ledger.read_bytes()
        assert key.hex() not in ledger.read_text()


def test_fingerprints_are_keyed_and_independent_of_order(tmp_path: Path) -> None:
    """A broken version would use a plain hash, which confirms guesses of the records, or reveal
    clients without records."""

    def fingerprint(name: str, part: str) -> str:
        ledger, *rest = opened(tmp_path / name, part, "", "")
        assert len({ledger.lines.records[-1], *(item.lines.records[-1] for item in rest)}) == 3
        return ledger.lines.records[-1]

    assert fingerprint("one", "abca") == fingerprint("one", "caab")
    assert fingerprint("one", "abca") != fingerprint("one", "abc")  # multiplicity counts
    assert fingerprint("one", "abc") != fingerprint("two", "abc")
    for _ in range(2):
        charged(tmp_path / "one", "abc", "", "")


def test_missing_keys_and_lists_are_detected(folder: Path, tmp_path: Path) -> None:
    charged(folder, "abc", "de")
    private, backup = folder / "private", tmp_path / "away"
    key = private / "records.key"
    key.rename(backup)
    rejects(r"records\.key is missing.* from a backup", folder, "abc", "de")
    assert not key.exists()
    backup.rename(key)
    first, second = (
        Ledger(f"client-00{k}", folder / f"client-00{k}.jsonl", dataset=None) for k in (0, 1)
    )
    (private / second.lines.records[0]).rename(backup)
    rejects("records of client 'client-001' is missing", folder, "abc", "dex")
    for names, parts in ((["west"], ["de"]), (["client-000", "west"], ["abc", "de"])):
        rejects(
            "records of client 'client-001' is missing", folder, *parts, names=names
        )  # the records cannot be compared
    opened(folder, "abc", "de")  # the same records restore the list
    (private / first.lines.records[0]).write_bytes(b"x" * 48)
    rejects("'client-000' is missing or damaged", folder, "abx", "de")
    key.write_bytes(b"short")
    rejects(r"must have 32 bytes|damaged", folder, "abc", "de")


def test_deleted_ledgers_are_detected(folder: Path) -> None:
    LedgerFolder(folder).check_whole()  # no folder yet: nothing is missing
    charged(folder, "abc", "de")
    LedgerFolder(folder).check_whole()
    (folder / "client-000.jsonl").unlink()
    for names in (None, ["north", "client-001"]):
        rejects(
            r"is missing in folder .* Restore the ledger from", folder, "abc", "de", names=names
        )
    assert spent(folder) == {"client-001": 1}
    with pytest.raises(LedgerError, match="a ledger is missing in folder"):
        LedgerFolder(folder).check_whole()  # plans call it, which have no records
    charged(folder, "xyz", "de", names=["north", "client-001"])  # new records


def test_lost_key_is_replaced_after_all_confirmations(folder: Path) -> None:
    charged(folder, "abc", "de")
    (folder / "private" / "records.key").unlink()
    LedgerFolder(folder).carry_over("client-000")
    rejects("is missing", folder, "abc", "de")
    LedgerFolder(folder).carry_over("client-001")
    assert charged(folder, "abc", "de") == ["client-000", "client-001"]


def test_run_folders_receive_no_key(tmp_path: Path) -> None:
    """Run folders are published, so `--dp-ledger runs/NAME/ledger` must not write a key there."""
    (tmp_path / "ledger").mkdir()
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(LedgerError, match="part of a run folder"):
        opened(tmp_path / "ledger", "abc")
    assert list((tmp_path / "ledger").iterdir()) == []


@given(st.lists(st.text("abcd", max_size=6), min_size=1, max_size=4), st.data())
@settings(max_examples=8, deadline=None)
def test_records_are_charged_in_single_ledger(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], data: st.DataObject
) -> None:
    """A run has each record at most once here, so that every exposure is traceable."""
    folder = tmp_path_factory.mktemp("ledgers")
    exposed: dict[str, Counter[str]] = {}
    other_runs = st.lists(st.text("abcd", max_size=6), max_size=4)
    for run in (parts, *(data.draw(other_runs) for _ in range(3))):
        assigned: set[str] = set()
        distinct = []
        for part in run:  # each letter at one client only
            distinct.append("".join(sorted(set(part) - assigned)))
            assigned |= set(part)
        try:
            names = charged(folder, *distinct)
        except LedgerError:
            continue
        for name, part in zip(names, distinct, strict=True):
            for record in part:
                exposed.setdefault(record, Counter())[name] += 1
    for record, charges in exposed.items():
        assert len(charges) == 1, (record, charges)
        ((name, times),) = charges.items()
        assert spent(folder)[name] >= times


def _open_and_charge(folder: Path, start: multiprocessing.synchronize.Barrier) -> None:
    start.wait()
    charged(folder, "abc", "de")


def test_concurrent_processes_share_new_folder(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    workers = [context.Process(target=_open_and_charge, args=(folder, start)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert spent(folder) == {"client-000": 4, "client-001": 4}


@pytest.mark.parametrize(
    "names",
    ["ab", ["Clinic", "clinic"], *(["a", wrong] for wrong in ("../b", ".b", "x" * 65, "b\n", 3))],
)
def test_invalid_client_names_are_rejected(names: Any) -> None:
    with pytest.raises(PrivacySettingError):
        check_names(names, 2)
    assert check_names(["St.Mary_s-2", "0"], 2) == ("St.Mary_s-2", "0")
