"""What the lines of a ledger's file say, read on from what is known; damaged ones are refused.

The first line is a header; each further one is a release, or an entry that says whose records the
ledger is for. Each carries a hash over itself and all lines before it, so that an edit is noticed.
This guards against accidents and hasty repairs: who owns the file can still rebuild it, or cut
whole lines off its end.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsynth.privacy.errors import LedgerError, PrivacySettingError, shown
from fedsynth.privacy.files import decode_json
from fedsynth.privacy.releases import Release

LEDGER_SCHEMA = 2
RECORDS, MAY_CHANGE, RESUMED = "records", "carry-over", "resumed"  # entries that are no release


@dataclass(frozen=True)
class Lines:
    """What has been read of a ledger.

    Attributes:
        releases: the rows, oldest first.
        dataset: whose rows they are.
        records: fingerprints of the records that it was and is for, the present ones last.
        charged: those without what was replaced before anything was spent.
        may_change: whether what was spent counts for other records of the client, too.
        resumptions: of each resumption of a run the number of rows before it, and the rounds that
            had ended.
        size: bytes that have been read.
        chain: the hash over their lines.
        rows_chain: the hash on the last release's line, or without any on the header's.
    """

    releases: tuple[Release, ...] = ()
    dataset: str = ""
    records: tuple[str, ...] = ()
    charged: tuple[str, ...] = ()
    may_change: bool = False
    resumptions: tuple[tuple[int, int], ...] = ()
    size: int = 0
    chain: str = ""
    rows_chain: str = ""


def encode(entry: dict[str, Any], chain: str) -> tuple[bytes, str]:
    """One line, and the hash over it and all lines before it."""
    digest = hashlib.sha256((chain + json.dumps(entry, sort_keys=True)).encode()).hexdigest()[:32]
    return json.dumps({**entry, "chain": digest}, allow_nan=False).encode() + b"\n", digest


def read_on(known: Lines, data: bytes, client: str, path: Path | None) -> Lines:
    """What is known with `data`, the bytes of the file after those that were read.

    Args:
        client: whose ledger it must be.
        path: of the file, for errors.

    Raises:
        LedgerError: a line is torn, damaged or unknown, or the header is another client's.
    """
    if data and not data.endswith(b"\n"):
        raise LedgerError(
            f"the last line of ledger {path} is torn, so that a charge was under way: "
            f"{repair_command(path)} takes it out"
        )
    releases = list(known.releases)
    for number, line in enumerate(data.splitlines()):
        entry, chain = _decode(line, known.chain, path)
        if known.size == 0 and number == 0:
            known = replace(_header(entry, client, path), rows_chain=chain)
        elif "entry" in entry:
            known = _noted(known, entry, len(releases), path)
        else:
            releases.append(_release(entry, len(releases) + 2, path))
            known = replace(known, rows_chain=chain)
        known = replace(known, chain=chain)
    return replace(known, releases=tuple(releases), size=known.size + len(data))


def repair_command(path: Path | None) -> str:
    """What a person may type to take a torn line out."""
    return f"fedsynth privacy repair {shlex.quote(str(path))}"


def check_content(path: Path, content: bytes) -> None:
    """Refuse what is no whole ledger.

    Args:
        path: of the ledger, for errors.
        content: what may be its bytes.

    Raises:
        LedgerError: it is damaged, or no ledger.
    """
    try:
        client = str(decode_json(content.split(b"\n", 1)[0])["client"])
    except (ValueError, TypeError, KeyError) as error:
        raise LedgerError(f"{path} is not a fedsynth ledger: {error}") from None
    read_on(Lines(), content, client, path)


def _decode(line: bytes, chain: str, path: Path | None) -> tuple[dict[str, Any], str]:
    """A line's entry, and the hash that it has and must have."""
    try:
        entry = decode_json(line)
    except ValueError as error:
        raise LedgerError(f"ledger {path} has a line that is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise LedgerError(f"ledger {path} has a line that is not a JSON object")
    stated = entry.pop("chain", None)
    expected = encode(entry, chain)[1]
    if stated != expected:
        raise LedgerError(
            f"ledger {path} was edited, or is no fedsynth ledger: a line's hash does not match"
        )
    return entry, expected


def _header(header: dict[str, Any], client: str, path: Path | None) -> Lines:
    dataset = header.get("dataset")
    if header.get("fedsynth_ledger") != LEDGER_SCHEMA or not isinstance(dataset, str):
        raise LedgerError(f"{path} is no fedsynth ledger of schema {LEDGER_SCHEMA}")
    if header.get("client") != client:
        raise LedgerError(
            f"ledger {path} belongs to client {shown(header.get('client'))}, not {shown(client)}"
        )
    records = (str(header["records"]),) if "records" in header else ()
    return Lines(dataset=dataset, records=records, charged=records)


def _noted(known: Lines, entry: dict[str, Any], rows: int, path: Path | None) -> Lines:
    """What is known after a line that is no release, and comes after so many releases."""
    if entry["entry"] == RESUMED and type(entry.get("after")) is int:
        return replace(known, resumptions=(*known.resumptions, (rows, entry["after"])))
    if entry["entry"] == MAY_CHANGE:
        return replace(known, may_change=True)
    if entry["entry"] == RECORDS and {"records", "dataset"} <= entry.keys():
        new = str(entry["records"])
        return replace(
            known,
            dataset=str(entry["dataset"]),
            records=(*known.records, new),
            charged=(*known.charged, new) if rows else (new,),
            may_change=False,
        )
    raise LedgerError(f"ledger {path} has an entry that this fedsynth does not know")


def _release(entry: dict[str, Any], number: int, path: Path | None) -> Release:
    try:
        return Release.from_json(entry)
    except PrivacySettingError as error:
        raise LedgerError(
            f"line {number} of ledger {path} is not a valid release: {error}"
        ) from error
