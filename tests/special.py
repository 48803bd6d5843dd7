"""Files that nothing may read: pipes, devices and others that do not end."""

from __future__ import annotations

import os
from pathlib import Path


def special_file(path: Path, kind: str) -> Path:
    """Makes a file of a kind that nothing may read."""
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "proc":  # a regular file without a size, of which some never end
            path.symlink_to("/proc/cpuinfo")
        case "large":
            with path.open("wb") as file:
                file.truncate(2**40)  # a hole: it takes no space
    return path


SPECIAL = ("pipe", "folder", "device", "proc", "large")
