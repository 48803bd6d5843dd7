"""The allocator's setting, and the policy of waiting threads."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from fedsynth.cli.application import keep_large_allocations
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


@pytest.mark.parametrize("policy", [None, "active"])
def test_threads_wait_passively_by_default(policy: str | None) -> None:
    """The policy is set before torch is imported, which reads it then."""
    code = (
        "import os, sys; from fedsynth.cli import app as a;"
        "a.app = lambda: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules); a.main()"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if policy is not None:
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert shown.stdout.split() == [policy or "PASSIVE", "False"]
