"""Files that a user names: only regular ones are opened, and nobody waits for a lock without
end."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from io import FileIO
from pathlib import Path

from fedsynth.privacy.errors import LedgerError

LOCK_SECONDS = 60.0
"""How long a lock is waited for: a charge holds it for milliseconds, opening a folder of ledgers
for as long as hashing takes."""
_LONGEST_PAUSE = 0.02
MOST_TEXT_BYTES = 2**28
"""Of a config, a report or a key: a report on 10,000 clients and 200 rounds has some 100 MB."""


def open_regular(path: Path, *, writing: bool = False) -> FileIO:
    """An existing file, for reading, or for reading and appending.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device: reading one may never end.
    """
    flags = os.O_RDWR | os.O_APPEND if writing else os.O_RDONLY
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait
    except ValueError as error:  # a zero byte in the name, or half a character
        raise OSError(errno.EINVAL, str(error)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return FileIO(descriptor, "r+" if writing else "r")


def read_regular(path: Path, most: int | None = None) -> bytes:
    """What is in a file, of at most `most` bytes. Raises OSError, as `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and may have {most:,}", str(path))
        return file.readall()


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises OSError, as `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path) -> str:
    """The text in a file that may come from anybody, of at most `MOST_TEXT_BYTES`.

    Raises:
        OSError: as `open_regular`, or the file is larger.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_regular(path, MOST_TEXT_BYTES).decode("utf-8")


def write_durably(path: Path, content: bytes) -> None:
    """Make, or replace, a file in one step: it appears whole, and on the disk, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: fsync of a file alone need not keep its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(file: FileIO, path: Path, *, shared: bool = False) -> None:
    """Lock an open file until it is closed.

    Raises:
        LedgerError: the lock cannot be had, or not within `LOCK_SECONDS`.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until = time.monotonic() + LOCK_SECONDS
    pause = 0.001
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise LedgerError(
                    f"another process has held the lock on {path} for {LOCK_SECONDS:g} s: one that "
                    "is "
                    "stopped or hangs must go on or be ended (`fuser` or `lsof` names it)"
                ) from None
        except OSError as error:
            raise LedgerError(f"cannot lock {path}: {error}") from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
