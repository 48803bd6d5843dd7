"""Settings of the run's process: glibc's allocator, and waiting CPU threads."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_large_allocations() -> bool:
    """Keeps freed memory up to 2 GiB in the process; returns True if the C library allows it.

    By default glibc maps every allocation over 32 MB from the system and unmaps it when it is
    freed, so each training step on a CPU faults all its activations in again: for a ConvNet-32 on
    batches of 256 28×28 images that was half of the CPU time (959 against 490 µs an image, one
    thread, timed once by hand; `tests/cli/test_process.py` counts the page faults). The setting
    belongs to the process, so only the command line makes it, not the library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, such as musl
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def wait_passively() -> None:
    """Makes waiting threads sleep, unless the user configures it.

    OpenMP reads the variable when torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
