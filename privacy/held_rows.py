"""The ledger rows that a privacy report is about: from the ledger files where there are any, else
from the report's own ledger section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsynth.privacy.errors import LedgerError, PrivacyError
from fedsynth.privacy.ledger import Ledger, chain_hashes, read_ledger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report_file import HOSTILE, SHORT


@dataclass(frozen=True)
class HeldRows:
    """The rows that a report is about.

    Attributes:
        rows: of each client.
        chains: client → the hashes on its file's header and rows, for clients with a file.
        ledgers: client → its file's ledger.
        problems: where files and report differ.
        note: what was compared; empty: no file.
    """

    rows: dict[str, tuple[Release, ...]] = field(default_factory=dict)
    chains: dict[str, list[str]] = field(default_factory=dict)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    note: str = ""


def held_rows(report: Mapping[str, Any], files: Path | None, *, exact: bool) -> HeldRows:
    """Returns the rows that the report is about.

    Args:
        report: of a sound shape.
        files: the folder of the ledger files; None: there is none to compare with, and the
            report's own rows are taken.
        exact: the files hold these rows and no others; else (a ledger that is kept over runs) they
            may have grown since.

    Raises:
        PrivacyError: the report's own ledger section is damaged.
    """
    heads = report["ledger_heads"]
    stated = stated_rows(report)
    if files is None:
        held = HeldRows()
        for client, head in heads.items():
            held.rows[client] = tuple(stated.get(client, ()))
            if len(held.rows[client]) != head["rows"]:
                count = len(held.rows[client])
                held.problems.append(
                    f"{client}: the report has {count} rows, and its ledger head {head['rows']}"
                )
        return held
    held = HeldRows(note=f"the report's rows were compared with the ledger files in {files}")
    ledgers, damaged = _ledgers_in(files)
    if exact or not set(heads) <= set(ledgers):
        held.problems.extend(damaged)
    for client in ledgers:
        if exact and client not in heads:
            held.problems.append(f"{files} has a ledger of {client}, which the report lacks")
    for client, head in heads.items():
        if client in ledgers:
            _compare(held, head, *ledgers[client], exact=exact)
        else:
            held.problems.append(f"{files} has no ledger of {client}")
            held.rows[client] = tuple(stated.get(client, ()))
    return held


def stated_rows(report: Mapping[str, Any]) -> dict[str, list[Release]]:
    """Returns each client's rows as the report's ledger section has them, unfolded.

    Raises:
        PrivacyError: the section is damaged.
    """
    rows: dict[str, list[Release]] = {}
    try:
        for entry in report["ledger"]:
            fields = {
                key: value for key, value in entry.items() if key not in ("rounds", "clients")
            }
            releases = [Release.from_json({**fields, "round": n}) for n in entry["rounds"]]
            for client in entry["clients"]:
                rows.setdefault(client, []).extend(releases)
    except (*HOSTILE, PrivacyError) as error:
        raise PrivacyError(f"the report's ledger section is damaged: {error}") from None
    return rows


def _ledgers_in(folder: Path) -> tuple[dict[str, tuple[Ledger, list[str]]], list[str]]:
    """Returns the ledgers and their chain hashes by client, and what is wrong with files."""
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


def _compare(
    held: HeldRows, head: Mapping[str, Any], ledger: Ledger, hashes: list[str], *, exact: bool
) -> None:
    """Adds one client's rows to `held`, and compares its file with the report's head."""
    rows = ledger.releases
    count = head["rows"]
    if count > len(rows) or (exact and count != len(rows)):
        held.problems.append(
            f"{ledger.client}: the ledger file has {len(rows)} rows, and the report states {count}"
        )
    elif hashes[count] != head["chain"]:
        held.problems.append(
            f"{ledger.client}: the chain hash of the ledger file's first {count} rows is not the "
            "report's: they are other rows"
        )
    held.rows[ledger.client] = rows if exact else rows[:count]
    held.chains[ledger.client] = hashes
    held.ledgers[ledger.client] = ledger
