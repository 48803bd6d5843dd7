"""The allocator's setting: taken where there is glibc, passed over elsewhere."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from fedsynth.cli.process import keep_large_allocations
if sys.argv[1] == "keep":
    assert keep_large_allocations()
import numpy as np
for step in range(25):
    if step == 5:  # memory once taken is there by now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(10_000_000, dtype=np.float32).fill(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc here")
def test_freed_memory_is_not_faulted_in_again() -> None:
    faults = {}
    for mode in ("default", "keep"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True
        )
        faults[mode] = int(done.stdout)
    assert faults["keep"] < 0.3 * faults["default"]
