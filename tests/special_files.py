"""Files that must never be read: pipes, devices and other endless files."""

from __future__ import annotations

import os
from pathlib import Path


def make_special_file(path: Path, kind: str) -> Path:
    """Creates a file of a kind that must never be read."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.touch()
        os.truncate(path, 2**40)  # a hole: it takes no space
    else:  # /proc/cpuinfo is a regular file without a size; some are endless
        path.symlink_to({"device": "/dev/zero", "proc": "/proc/cpuinfo"}[kind])
    return path


SPECIAL_KINDS = ("pipe", "folder", "device", "proc", "large")
