"""Sets how the process allocates memory and how its CPU threads wait."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_large_allocations() -> bool:
    """Keeps up to 2 GiB of freed memory in the process. Returns True if the C library allows it.

    By default, glibc requests every allocation over 32 MB from the operating system, and returns it
    when it is freed. Each training step on a CPU then causes page faults for all its activations.
    For a ConvNet-32 on batches of 256 28×28 images, this was half of the CPU time (959 against 490
    µs per image, one thread, measured once). `tests/cli/test_process.py` counts the page faults.
    The setting applies to the whole process, so only the command line makes it, and not the
    library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, such as musl
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def wait_passively() -> None:
    """Lets waiting threads sleep, unless the user has configured this.

    OpenMP reads the environment variable when torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
