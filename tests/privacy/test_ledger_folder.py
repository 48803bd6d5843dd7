"""A kept ledger is charged for its own records, whatever their order, place and name."""

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
    """Returns clients' records, a letter each, as the folder asks for them."""

    def digest(record: str, key: bytes) -> bytes:
        return hashlib.blake2b(record.encode(), key=key, digest_size=16).digest()

    def under(key: bytes) -> list[Digests]:
        joined = [b"".join(digest(record, key) for record in part) for part in parts]
        return [np.frombuffer(each, np.uint8).reshape(-1, 16) for each in joined]

    return under


def opened(
    folder: Path, *parts: str, names: Sequence[str] | None = None, dataset: str = "d"
) -> list[Ledger]:
    return LedgerFolder(folder).open(names, hashes(parts), dataset)


def refused(text: str, *given: Any, **values: Any) -> None:
    """`opened` ends in one line with this text."""
    with pytest.raises(LedgerError, match=text) as caught:
        opened(*given, **values)
    assert "\n" not in str(caught.value)


def charged(folder: Path, *parts: str, names: Sequence[str] | None = None) -> list[str]:
    """The names of the ledgers that a run on these clients charges."""
    ledgers = opened(folder, *parts, names=names)
    for ledger in ledgers:
        ledger.charge(ROW)
    return [ledger.client for ledger in ledgers]


def spent(folder: Path) -> dict[str, int]:
    return {name: len(each.releases) for name, each in LedgerFolder(folder).ledgers().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ledgers"


def test_records_keep_their_ledger_in_any_order_but_not_under_another_number(folder: Path) -> None:
    """Catches: the same records under another number, charged to an empty ledger."""
    assert charged(folder, "abc", "de") == ["client-000", "client-001"]
    assert charged(folder, "bca", "ed") == ["client-000", "client-001"]
    for parts in (("ed", "bca"), ("xy", "cab", "de"), ("abcde",), ("ab", "cde"), ("ad", "bce")):
        refused(r"must stay with the ledger|records of the ledger are missing", folder, *parts)
    assert charged(folder, "xy", "cab", names=["client-002", "client-000"])
    assert spent(folder) == {"client-000": 3, "client-001": 2, "client-002": 1}


def test_declared_names_must_be_those_of_the_records(folder: Path) -> None:
    charged(folder, "abc", "de", names=["north", "south"])
    assert charged(folder, "de", names=["south"]) == ["south"]
    before = everything(folder)
    for parts, names, text in (
        (
            ("de", "abc"),
            ["north", "south"],
            r"client 'north' has 2 of the records of ledger .*south\.jsonl",
        ),
        (("abc",), ["west"], r"client 'west' has 3 of the records of ledger .*north\.jsonl"),
        (("abx",), ["north"], r"1 records that .* 1 records of the ledger .* carry-over .* north$"),
        (("xyz", "de"), ["north", "south"], r"3 records that .* 3 records of the ledger"),
    ):
        refused(text, folder, *parts, names=names)
    assert everything(folder) == before  # a refusal leaves nothing behind


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def test_a_changed_data_set_continues_its_ledger_after_confirmation(folder: Path) -> None:
    """What was spent stays spent; who left is remembered; saying so once is not for ever."""
    charged(folder, "abcd", "ef", names=["north", "south"])
    refused("carry-over", folder, "abcx", names=["north"])
    assert LedgerFolder(folder).carry_over("north") == 1
    # another's records all the same
    refused(r"1 of the records of ledger .*south", folder, "abce", names=["north"])
    assert charged(folder, "abcx", names=["north"]) == ["north"]
    assert spent(folder)["north"] == 2
    charged(folder, "abcx", names=["north"])
    for part in ("abcd", "abc", "abcxy"):
        refused("records of the ledger are missing", folder, part, names=["north"])
    # 'd' left the north, with what was spent
    refused(r"1 of the records of ledger .*north", folder, "dz", names=["west"])
    with pytest.raises(
        LedgerError, match=r"no ledger of client 'west'. Clients with a ledger: north, south"
    ):
        LedgerFolder(folder).carry_over("west")
    refused("belongs to data set 'd', .* uses 'e'", folder, "abcx", names=["north"], dataset="e")
    LedgerFolder(folder).carry_over("north")
    assert opened(folder, "abcx", names=["north"], dataset="e")[0].dataset == "e"


def test_a_ledger_without_charges_accepts_other_records(folder: Path) -> None:
    """A first run that was refused, or with a slip in its parts, must not bind anybody."""
    opened(folder, "abcd", "efgh")
    assert charged(folder, "abef", "cdgh") == ["client-000", "client-001"]
    refused("of the records of ledger", folder, "abcd", "efgh")


def test_of_two_runs_that_begin_at_once_one_is_refused(folder: Path) -> None:
    """Catches: both opened their ledgers before either had charged."""
    (north,), (west,) = opened(folder, "abc", names=["north"]), opened(folder, "cd", names=["west"])
    north.charge(ROW)
    with pytest.raises(
        LedgerError, match=r"client 'west' has 1 of the records of ledger .*north\.jsonl"
    ):
        west.charge(ROW)
    north.charge(ROW)
    assert spent(folder) == {"north": 2, "west": 0}
    opened(folder, "xy", names=["south"])[0].charge(ROW)


def test_a_ledger_that_another_run_took_meanwhile_is_not_charged(folder: Path) -> None:
    first, second = opened(folder, "abcd", "efgh"), opened(folder, "abef", "cdgh")
    with pytest.raises(LedgerError, match="another run has opened ledger"):
        first[0].charge(ROW)
    for ledger in (*second, *opened(folder, "abef", "cdgh")):
        ledger.charge(ROW)
    assert spent(folder) == {"client-000": 2, "client-001": 2}


def test_equal_records_at_two_clients_are_two_examples(folder: Path) -> None:
    """Blank images, say: they are no record that has moved, as long as both clients are there."""
    charged(folder, "abb", "bc")
    charged(folder, "abb", "bc")
    charged(folder, "abb", "bc", "bd")
    # as often as before, not only as such
    refused("records of the ledger are missing", folder, "ab", "bc", "bd")
    refused(
        r"1 of the records of ledger .*client-000", folder, "bc", "bz", names=["client-001", "new"]
    )


def test_a_ledger_without_fingerprint_is_used_only_after_confirmation(folder: Path) -> None:
    """Of the first version, or copied from a run folder."""
    for name in ("north", "south"):
        Ledger(name, folder / f"{name}.jsonl", dataset="old").charge(ROW)
    for names in (["north", "south"], ["west"]):
        refused("does not identify its records", folder, *("abc", "de")[: len(names)], names=names)
    assert not (folder / "private").exists()
    for name in ("north", "south"):
        LedgerFolder(folder).carry_over(name)
    charged(folder, "abc", "de", names=["north", "south"])
    assert spent(folder) == {"north": 2, "south": 2}
    refused("has 3 of the records", folder, "abc", names=["west"])


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


def test_fingerprints_are_keyed_and_order_free(tmp_path: Path) -> None:
    """Catches: a plain hash, with which anybody could test a guess of all records; and one that
    shows who has none."""

    def stated(where: str, part: str) -> str:
        ledger, *others = opened(tmp_path / where, part, "", "")
        assert len({ledger.records[-1], *(one.records[-1] for one in others)}) == 3
        return ledger.records[-1]

    assert stated("one", "abca") == stated("one", "caab")
    assert stated("one", "abca") != stated("one", "abc")  # how often counts
    assert stated("one", "abc") != stated("two", "abc")
    for _ in range(2):
        charged(tmp_path / "one", "abc", "", "")


def test_a_key_or_list_or_ledger_that_is_gone_is_noticed(folder: Path, tmp_path: Path) -> None:
    charged(folder, "abc", "de")
    private, away = folder / "private", tmp_path / "away"
    key = private / "records.key"
    key.rename(away)
    refused(r"records\.key is missing.* from a backup", folder, "abc", "de")
    assert not key.exists()
    away.rename(key)
    first, second = (
        Ledger(f"client-00{k}", folder / f"client-00{k}.jsonl", dataset=None) for k in (0, 1)
    )
    (private / second.records[0]).rename(away)
    refused("records of client 'client-001' is missing", folder, "abc", "dex")
    for names, parts in ((["west"], ["de"]), (["client-000", "west"], ["abc", "de"])):
        refused(
            "records of client 'client-001' is missing", folder, *parts, names=names
        )  # nobody could tell that these are its records
    opened(folder, "abc", "de")  # the same records make the same list again
    (private / first.records[0]).write_bytes(b"x" * 48)
    refused("'client-000' is missing or damaged", folder, "abx", "de")
    key.write_bytes(b"short")
    refused(r"must have 32 bytes|damaged", folder, "abc", "de")


def test_a_deleted_ledger_is_noticed_by_what_is_left(folder: Path) -> None:
    LedgerFolder(folder).check_whole()  # no folder yet: nothing is gone
    charged(folder, "abc", "de")
    LedgerFolder(folder).check_whole()
    (folder / "client-000.jsonl").unlink()
    for names in (None, ["north", "client-001"]):
        refused(
            r"is missing in folder .* Restore the ledger from", folder, "abc", "de", names=names
        )
    assert spent(folder) == {"client-001": 1}
    with pytest.raises(LedgerError, match="a ledger is missing in folder"):
        LedgerFolder(folder).check_whole()  # as a plan asks, which has no records to compare
    charged(folder, "xyz", "de", names=["north", "client-001"])  # nobody's


def test_a_lost_key_is_replaced_once_each_client_is_said_to_be_the_same(folder: Path) -> None:
    charged(folder, "abc", "de")
    (folder / "private" / "records.key").unlink()
    LedgerFolder(folder).carry_over("client-000")
    refused("is missing", folder, "abc", "de")
    LedgerFolder(folder).carry_over("client-001")
    assert charged(folder, "abc", "de") == ["client-000", "client-001"]


def test_a_run_folder_gets_no_key(tmp_path: Path) -> None:
    """It is published: `--dp-ledger runs/NAME/ledger` must not put a key there."""
    (tmp_path / "ledger").mkdir()
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(LedgerError, match="part of a run folder"):
        opened(tmp_path / "ledger", "abc")
    assert list((tmp_path / "ledger").iterdir()) == []


@given(st.lists(st.text("abcd", max_size=6), min_size=1, max_size=4), st.data())
@settings(max_examples=8, deadline=None)
def test_no_record_is_ever_charged_in_two_ledgers(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], data: st.DataObject
) -> None:
    """A run has each record at most once here, so that every exposure can be followed."""
    folder = tmp_path_factory.mktemp("ledgers")
    exposed: dict[str, Counter[str]] = {}
    more = st.lists(st.text("abcd", max_size=6), max_size=4)
    for run in (parts, *(data.draw(more) for _ in range(3))):
        taken: set[str] = set()
        distinct = []
        for part in run:  # each letter at one client only
            distinct.append("".join(sorted(set(part) - taken)))
            taken |= set(part)
        try:
            names = charged(folder, *distinct)
        except LedgerError:
            continue
        for name, part in zip(names, distinct, strict=True):
            for record in part:
                exposed.setdefault(record, Counter())[name] += 1
    for record, where in exposed.items():
        assert len(where) == 1, (record, where)
        ((name, times),) = where.items()
        assert spent(folder)[name] >= times


def _open_and_charge(folder: Path, start: multiprocessing.synchronize.Barrier) -> None:
    start.wait()
    charged(folder, "abc", "de")


def test_two_processes_open_one_new_folder(folder: Path) -> None:
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
def test_names_that_cannot_be_files(names: Any) -> None:
    with pytest.raises(PrivacySettingError):
        check_names(names, 2)
    assert check_names(["St.Mary_s-2", "0"], 2) == ("St.Mary_s-2", "0")
