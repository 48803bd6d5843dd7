"""Ledgers' files: only regular ones are opened, and nobody waits for a lock without end."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from io import FileIO
from pathlib import Path

from fedsynth.privacy.errors import LedgerError

LOCK_SECONDS = 60.0
"""How long a lock is waited for: a charge holds it for milliseconds, opening a folder of ledgers
for as long as hashing takes."""
_LONGEST_PAUSE = 0.02


def open_regular(path: Path, *, writing: bool = False) -> FileIO:
    """An existing file, for reading, or for reading and appending.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device: reading one may never end.
    """
    flags = os.O_RDWR | os.O_APPEND if writing else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return FileIO(descriptor, "r+" if writing else "r")


def read_regular(path: Path) -> bytes:
    """What is in a file. Raises OSError, as `open_regular`."""
    with open_regular(path) as file:
        return file.readall()


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
