"""The ledger rows that a privacy report speaks of: as its own ledger section states them, compared
with the ledger files where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsynth.privacy.errors import LedgerError, PrivacyError
from fedsynth.privacy.ledger import Ledger, chain_hashes, read_ledger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report_file import HOSTILE, SHORT


@dataclass(frozen=True)
class Held:
    """The ledger rows that a report speaks of.

    Attributes:
        rows: of each client, in the order of the file where there is one.
        chains: client → the chain hash over them, for the clients whose file is the one that the
            report speaks of.
        starts: client → the chain hash over the rows from before the run.
        data_sets: client → what its file says that it is of.
        problems: where files and report differ.
        note: which files were compared.
    """

    rows: dict[str, tuple[Release, ...]]
    chains: dict[str, str | None]
    starts: dict[str, str | None]
    data_sets: dict[str, str]
    problems: list[str]
    note: str


def held_rows(report: Mapping[str, Any], files: Path | None, *, exact: bool) -> Held:
    """The rows that the report speaks of, from its ledger files.

    Args:
        files: folder of the ledger files; None: there is none to compare with, and the report's own
            rows are taken.
        exact: the files hold these rows and no others; else (a ledger that is kept over runs) they
            may have grown since.

    Raises:
        PrivacyError: the report's own ledger section is damaged.
    """
    heads = report["ledger_heads"]
    stated = stated_rows(report)
    problems = [
        f"the report's ledger names {client}, its ledger_heads do not"
        for client in stated
        if client not in heads
    ]
    if files is None:
        note = (
            "no ledger file was compared: the ledger is kept elsewhere (--ledger DIR compares it)"
        )
        rows = {client: tuple(stated.get(client, ())) for client in heads}
        problems += [
            f"{client}: the report has {len(rows[client])} rows, and its ledger head {head['rows']}"
            for client, head in heads.items()
            if head["rows"] != len(rows[client])
        ]
        chains = {client: head["chain"] for client, head in heads.items()}
        return Held(rows, chains, {}, {}, problems, note)
    found, bad = _ledgers_in(files)
    if exact or not set(heads) <= set(found):
        problems += bad
    if exact:
        problems += [
            f"{files} has a ledger of {client}, whom the report does not name"
            for client in found
            if client not in heads
        ]
    held = Held(
        {}, {}, {}, {}, problems, f"its rows were compared with the ledger files in {files}"
    )
    for client, head in heads.items():
        own = tuple(stated.get(client, ()))
        if client in found:
            ledger, hashes = found[client]
            held.data_sets[client] = ledger.dataset
            _compare_file(held, client, head, own, ledger.releases, hashes, exact)
        else:
            problems.append(f"{files} has no ledger of {client}")
            held.rows[client] = own
    return held


def stated_rows(report: Mapping[str, Any]) -> dict[str, list[Release]]:
    """Each client's rows as the report's ledger section, unfolded, has them.

    They are in the order of its entries, and fold to the same entries again.

    Raises:
        PrivacyError: the section is damaged.
    """
    rows: dict[str, list[Release]] = {}
    apart = ("rounds", "clients", "noise_standard_deviation")
    try:
        for entry in report["ledger"]:
            if not entry["rounds"] or not entry["clients"]:
                raise KeyError("a ledger entry without rounds or clients")
            fields = {key: value for key, value in entry.items() if key not in apart}
            some = [Release.from_json({**fields, "round": number}) for number in entry["rounds"]]
            for client in entry["clients"]:
                rows.setdefault(client, []).extend(some)
    except (*HOSTILE, PrivacyError) as error:
        raise PrivacyError(f"the report's ledger section is damaged: {error}") from None
    return rows


def _ledgers_in(folder: Path) -> tuple[dict[str, tuple[Ledger, list[str]]], list[str]]:
    """Ledgers and their chain hashes by client, and what is wrong with files."""
    found: dict[str, tuple[Ledger, list[str]]] = {}
    problems: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            ledger = read_ledger(path)
            hashes = chain_hashes(path)
        except LedgerError as error:
            problems.append(str(error))
            continue
        if path.stem == ledger.client:
            found[ledger.client] = ledger, hashes
        else:
            problems.append(f"{path} is the ledger of {SHORT.repr(ledger.client)}")
    return found, problems


def _compare_file(
    held: Held,
    client: str,
    head: Mapping[str, Any],
    stated: tuple[Release, ...],
    file: tuple[Release, ...],
    hashes: list[str],
    exact: bool,
) -> None:
    """One client's file against the report's rows and head; fills in `held`."""
    count = head["rows"]
    before = head["rows_before"]
    held.rows[client] = stated
    if count > len(file) or (exact and count != len(file)):
        held.problems.append(
            f"{client}: the ledger file has {len(file)} rows, the report speaks of {count}"
        )
    elif hashes[count] != head["chain"]:
        held.problems.append(
            f"{client}: the chain hash of the ledger file's first {count} rows is not the "
            "report's: they are other rows"
        )
    else:
        held.chains[client] = hashes[count]
    if before <= min(count, len(file)):
        held.starts[client] = hashes[before]
    own = file if exact else file[:count]
    missing = Counter(stated) - Counter(own)
    more = Counter(own) - Counter(stated)
    held.problems.extend(
        f"{client}: the ledger file lacks {_row(row)}" for row in missing.elements()
    )
    held.problems.extend(
        f"{client}: the report lacks {_row(row)}, which the ledger file holds"
        for row in more.elements()
    )
    if not missing and not more:
        held.rows[client] = own


def _row(row: Release) -> str:
    return f"{SHORT.repr(row.quantity)[1:-1]} of round {row.round}"
