"""What a process holds: resident memory, its peak, and open files (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

STATUS = Path("/proc/self/status")
KIB = 1024


def resident() -> int:
    """Bytes that are resident now."""
    return _status("VmRSS")


def peak() -> int:
    """The most bytes that were resident since `forget_peak`, or since the start."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Begins to look for a new peak."""
    Path("/proc/self/clear_refs").write_text("5")


def open_files() -> int:
    """Open file descriptors."""
    return len(os.listdir("/proc/self/fd"))


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * KIB
    raise OSError(f"{STATUS} does not have {field}")
