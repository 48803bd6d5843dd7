"""Reading, checking and repairing the lines of a ledger file.

The first line is a header. Each further line is a release, or a note, for example that the client's
records have changed. Each line contains a hash over itself and all lines before it, so that edits
are detected. This protects against accidents and careless repairs. It does not protect against the
owner of the file, who can compute all hashes again or remove whole lines at the end.
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
    """The content of a ledger file, up to the position that has been read.

    Attributes:
        client: the client's name. Empty before the header is read.
        releases: the rows, oldest first.
        dataset: the identifier of the data set.
        records: a keyed hash of each set of records for which the ledger was used. The last hash is
            that of the current records.
        charged: `records` without the sets that were replaced before the first charge.
        may_change: True if the owner has declared that the client's records may change.
        resumptions: a pair for each time that a run was resumed. It states the number of rows that
            the ledger had then, and the number of finished rounds.
        size: the number of bytes that have been read.
        chain: the chain hash over all lines that have been read.
        chains: the chain hashes after the header and after each release. Entry n, counted from 0,
            identifies the first n releases, whatever has been added since.
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
    """Encodes an entry as a line of the ledger file. The line contains the chain hash.

    Args:
        entry: the content of the line.
        chain: the chain hash over all lines before it.

    Returns:
        The line, and the chain hash over this line and all lines before it.
    """
    digest = hashlib.sha256((chain + json.dumps(entry, sort_keys=True)).encode()).hexdigest()[:32]
    return json.dumps({**entry, "chain": digest}, allow_nan=False).encode() + b"\n", digest


def read_on(lines: Lines, data: bytes, client: str | None, path: Path | None) -> Lines:
    """Reads and checks the lines that follow the part of a ledger file that has been read.

    Args:
        lines: the content that has been read so far.
        data: the bytes of the file that follow.
        client: the client to which the ledger must belong. None accepts any client.
        path: the path of the file, for error messages.

    Returns:
        The content including the new lines.

    Raises:
        LedgerError: a line is incomplete, damaged or of an unknown kind, or the ledger belongs to
            another client.
    """
    if lines.size + len(data) == 0:
        raise LedgerError(f"ledger {path} is empty. Restore the ledger from a backup")
    if data and not data.endswith(b"\n"):
        raise LedgerError(
            f"the last line of ledger {path} is incomplete, because a charge was interrupted. Run "
            f"fedsynth privacy repair {shlex.quote(str(path))}"
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


def _decode(line: bytes, chain: str, path: Path | None) -> tuple[dict[str, Any], str]:
    """Decodes a line and checks its hash.

    Returns:
        The content of the line, and the chain hash over this line and all lines before it.
    """
    try:
        entry = decode_json(line)
        if not isinstance(entry, dict):
            raise ValueError("a line must be a JSON object")
    except ValueError as error:
        raise LedgerError(f"ledger {path} has a line that is not valid JSON: {error}") from error
    stated = entry.pop("chain", None)
    expected = encode(entry, chain)[1]
    if stated != expected:
        raise LedgerError(
            f"ledger {path} was edited: the hash of a line is wrong. Restore the ledger from a "
            "backup"
        )
    return entry, expected


def _header(header: dict[str, Any], client: str | None, path: Path | None) -> Lines:
    dataset: Any = header.get("dataset")
    owner: Any = header.get("client")
    valid = isinstance(dataset, str) and isinstance(owner, str)
    if header.get("fedsynth_ledger") != LEDGER_SCHEMA or not valid:
        raise LedgerError(
            f"{path} is not a ledger of schema {LEDGER_SCHEMA}, which this version of fedsynth reads"
        )
    if client is not None and owner != client:
        raise LedgerError(
            f"ledger {path} belongs to client {short_repr(owner)}, not {short_repr(client)}"
        )
    records = (str(header["records"]),) if "records" in header else ()
    return Lines(owner, dataset=dataset, records=records, charged=records)


def _noted(lines: Lines, entry: dict[str, Any], rows: int, path: Path | None) -> Lines:
    """Adds a note to the content that has been read. A note is a line that is not a release.

    Args:
        lines: the content before the line.
        entry: the content of the line.
        rows: the number of releases before the line.
        path: the path of the file, for error messages.
    """
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
    raise LedgerError(
        f"ledger {path} has a line of an unknown kind. Use the version of fedsynth that wrote the "
        "ledger"
    )


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
        line: the incomplete line.
        counts: True if only the line break was missing. The line was then kept, and its release
            counts.
        copy: the path of a copy of the file as it was before the repair.
    """

    line: str
    counts: bool
    copy: Path


def repair_ledger(path: Path) -> Repair | None:
    """Repairs a ledger whose last line is incomplete because a charge was interrupted.

    The incomplete line is removed. Its release was never made, because noise is drawn only after
    the complete line is on the disk. If only the line break is missing, the line break is added
    instead, because the line may have been read as complete. A copy of the original file is kept in
    the same folder.

    Returns:
        The repair. None if the last line is complete.

    Raises:
        LedgerError: the file has other damage, which is not repaired.
        OSError: the file cannot be read or written.
    """
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
