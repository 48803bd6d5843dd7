"""glibc's allocator, told to keep what training frees.

By default glibc maps every allocation over 32 MB anew and gives it back when freed, so each step of
training on a CPU faults all its activations in again: for a ConvNet-32 on batches of 256 28×28
images that was half of the CPU time (959 against 490 µs an image, one thread, timed once by hand;
`tests/cli/test_memory.py` counts the page faults). The setting belongs to the process, so only the
command line makes it, not the library.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_large_allocations() -> bool:
    """Keeps freed memory up to 2 GiB in the process; True if the C library is one that can be
    told.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
