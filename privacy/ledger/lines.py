"""The lines of a ledger file: reading, checking, and repairing a torn last line.

The first line is a header. Each further line is a release, or an entry about the records that the
ledger is for. Each line carries a hash over itself and all lines before it, so that an edit is
detected. This guards against accidents and hasty repairs; the owner of the file can still rebuild
it, or cut whole lines off its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsynth.privacy.errors import LedgerError, PrivacySettingError, short_repr
from fedsynth.privacy.files import MAX_TEXT_BYTES, create_once, decode_json, lock, open_regular
from fedsynth.privacy.releases import Release

LEDGER_SCHEMA = 2
RECORDS, MAY_CHANGE, RESUMED = "records", "carry-over", "resumed"  # entries that are not releases


@dataclass(frozen=True)
class Lines:
    """The content of a ledger that has been read so far.

    Attributes:
        client: the client's name; empty before the header is read.
        releases: the rows, oldest first.
        dataset: the identifier of the data set.
        records: fingerprints of all record sets that it was kept for, the current one last.
        charged: `records` without those that were replaced before any budget was spent.
        may_change: whether the spent budget also counts for other records of the client.
        resumptions: for each resumption of a run, the number of rows before it and the number of
            finished rounds.
        size: the number of bytes that have been read.
        chain: the chain hash over the lines that were read.
        chains: the chain hashes of the header and of each release: the n-th identifies the first n
            releases, whatever has been added since.
    """

    client: str = ""
    releases: tuple[Release, ...] = ()
    dataset: str = ""
    records: tuple[str, ...] = ()
    charged: tuple[str, ...] = ()
    may_change: bool = False
    resumptions: tuple[tuple[int, int], ...] = ()
    size: int = 0
    chain: str = ""
    chains: tuple[str, ...] = ()


def encode(entry: dict[str, Any], chain: str) -> tuple[bytes, str]:
    """Returns one line, and the hash over it and all lines before it."""
    digest = hashlib.sha256((chain + json.dumps(entry, sort_keys=True)).encode()).hexdigest()[:32]
    return json.dumps({**entry, "chain": digest}, allow_nan=False).encode() + b"\n", digest


def read_on(lines: Lines, data: bytes, client: str | None, path: Path | None) -> Lines:
    """Returns the content after `data`, the bytes of the file that follow those already read.

    Args:
        lines: the content so far.
        data: the new bytes.
        client: the client that the ledger must belong to; None: any.
        path: the file's path, for errors.

    Raises:
        LedgerError: a line is torn, damaged or unknown, or the header is another client's.
    """
    if lines.size + len(data) == 0:
        raise LedgerError(f"ledger {path} is empty: an append-only file was edited")
    if data and not data.endswith(b"\n"):
        raise LedgerError(
            f"the last line of ledger {path} is incomplete, because a charge was "
            f"interrupted: remove it with {repair_command(path)}"
        )
    releases = list(lines.releases)
    chains = list(lines.chains)
    for number, line in enumerate(data.splitlines()):
        entry, chain = _decode(line, lines.chain, path)
        if lines.size == 0 and number == 0:
            lines = _header(entry, client, path)
            chains.append(chain)
        elif "entry" in entry:
            lines = _noted(lines, entry, len(releases), path)
        else:
            releases.append(_release(entry, len(releases) + 2, path))
            chains.append(chain)
        lines = replace(lines, chain=chain)
    size = lines.size + len(data)
    return replace(lines, releases=tuple(releases), chains=tuple(chains), size=size)


def repair_command(path: Path | None) -> str:
    """Returns the command that removes a torn line."""
    return f"fedsynth privacy repair {shlex.quote(str(path))}"


def _decode(line: bytes, chain: str, path: Path | None) -> tuple[dict[str, Any], str]:
    """Returns a line's entry and its hash, which is checked."""
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
            f"ledger {path} was edited or is not a fedsynth ledger: the hash of a line does "
            "not match"
        )
    return entry, expected


def _header(header: dict[str, Any], client: str | None, path: Path | None) -> Lines:
    dataset: Any = header.get("dataset")
    owner: Any = header.get("client")
    valid = isinstance(dataset, str) and isinstance(owner, str)
    if header.get("fedsynth_ledger") != LEDGER_SCHEMA or not valid:
        raise LedgerError(f"{path} is not a fedsynth ledger of schema {LEDGER_SCHEMA}")
    if client is not None and owner != client:
        raise LedgerError(
            f"ledger {path} belongs to client {short_repr(owner)}, not {short_repr(client)}"
        )
    records = (str(header["records"]),) if "records" in header else ()
    return Lines(owner, dataset=dataset, records=records, charged=records)


def _noted(lines: Lines, entry: dict[str, Any], rows: int, path: Path | None) -> Lines:
    """Returns the content after a line that is not a release and that follows `rows` releases."""
    if entry["entry"] == RESUMED and type(entry.get("after")) is int:
        return replace(lines, resumptions=(*lines.resumptions, (rows, entry["after"])))
    if entry["entry"] == MAY_CHANGE:
        return replace(lines, may_change=True)
    if entry["entry"] == RECORDS and {"records", "dataset"} <= entry.keys():
        new = str(entry["records"])
        return replace(
            lines,
            dataset=str(entry["dataset"]),
            records=(*lines.records, new),
            charged=(*lines.charged, new) if rows else (new,),
            may_change=False,
        )
    raise LedgerError(f"ledger {path} has an entry that this version of fedsynth does not support")


def _release(entry: dict[str, Any], number: int, path: Path | None) -> Release:
    try:
        return Release.from_json(entry)
    except PrivacySettingError as error:
        raise LedgerError(
            f"line {number} of ledger {path} is not a valid release: {error}"
        ) from error


@dataclass(frozen=True)
class Repair:
    """The result of `repair_ledger`.

    Attributes:
        line: the torn line.
        counts: whether it lacked only its line break, and was kept.
        copy: a copy of the file before the repair.
    """

    line: str
    counts: bool
    copy: Path


def repair_ledger(path: Path) -> Repair | None:
    """Removes a torn last line from a ledger; a copy of the original is kept in the same folder.

    No release belongs to a torn line: noise is drawn only after the line is complete and durable.
    A line that lacks only its line break may have been read as complete, so it counts and gets its
    line break.

    Returns:
        The repair; None if no line is torn.

    Raises:
        LedgerError: the file cannot be read or written, or has other damage, which is not repaired.
    """
    try:
        with open_regular(path, writing=True, max_bytes=MAX_TEXT_BYTES) as file:
            lock(file, path)
            data = file.readall()
            complete_size = data.rfind(b"\n") + 1
            if complete_size == len(data):
                read_on(Lines(), data, None, path)
                return None
            try:
                read_on(Lines(), data + b"\n", None, path)
                counts = True
            except LedgerError:
                read_on(Lines(), data[:complete_size], None, path)
                counts = False
            timestamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
            copy = path.with_name(f"{path.name}.torn-{timestamp}")
            create_once(copy, data)
            if counts:
                file.write(b"\n")
            else:
                file.truncate(complete_size)
            os.fsync(file.fileno())
            return Repair(data[complete_size:].decode(errors="replace"), counts, copy)
    except OSError as error:
        raise LedgerError(f"cannot repair ledger {path}: {error}") from error
