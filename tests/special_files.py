"""Files that must never be read: pipes, devices and other endless files."""

from __future__ import annotations

import os
from pathlib import Path


def make_special_file(path: Path, kind: str) -> Path:
    """Creates a file of a kind that must never be read."""
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "proc":  # a regular file without a size; some are endless
            path.symlink_to("/proc/cpuinfo")
        case "large":
            with path.open("wb") as file:
                file.truncate(2**40)  # a hole: it takes no space
    return path


SPECIAL_KINDS = ("pipe", "folder", "device", "proc", "large")
