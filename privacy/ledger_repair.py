"""Takes a torn last line out of a ledger, which a crash in the middle of a charge leaves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedsynth.privacy.errors import LedgerError
from fedsynth.privacy.files import MAX_TEXT_BYTES, lock, open_regular
from fedsynth.privacy.ledger_lines import check_content


@dataclass(frozen=True)
class Repair:
    """What `repair_ledger` did.

    Attributes:
        line: the torn one.
        counts: it lacked only its line break.
        copy: the file as it was.
    """

    line: str
    counts: bool
    copy: Path


def repair_ledger(path: Path) -> Repair | None:
    """Take a torn last line out of a ledger; the file as it was is kept beside it.

    No release belongs to a torn line: noise is drawn only after the line is whole and durable. One
    that lacks nothing but its line break may have been read as whole: it counts, and gets its
    break.

    Returns:
        None where no line is torn.

    Raises:
        LedgerError: the file cannot be read or written, or has other damage, which is not repaired.
    """
    try:
        with open_regular(path, writing=True, max_bytes=MAX_TEXT_BYTES) as file:
            lock(file, path)
            data = file.readall()
            whole = data.rfind(b"\n") + 1
            if whole == len(data):
                check_content(path, data)
                return None
            counts = _is_whole(path, data + b"\n")
            if not counts:
                check_content(path, data[:whole])
            repair = Repair(data[whole:].decode(errors="replace"), counts, _keep_copy(path, data))
            if counts:
                file.write(b"\n")
            else:
                file.truncate(whole)
            os.fsync(file.fileno())
            return repair
    except OSError as error:
        raise LedgerError(f"cannot repair ledger {path}: {error}") from error


def _is_whole(path: Path, content: bytes) -> bool:
    try:
        check_content(path, content)
    except LedgerError:
        return False
    return True


def _keep_copy(path: Path, content: bytes) -> Path:
    """A durable copy of a ledger, under a name that no ledger has."""
    copy = path.with_name(f"{path.name}.torn-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%f')}")
    with open(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return copy
