"""Settings of the run's process: glibc's allocator, and torch's CPU threads."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_large_allocations() -> bool:
    """Keeps freed memory up to 2 GiB in the process; returns True if the C library allows it.

    By default glibc maps every allocation over 32 MB from the system and unmaps it when it is
    freed, so each training step on a CPU faults all its activations in again: for a ConvNet-32 on
    batches of 256 28×28 images that was half of the CPU time (959 against 490 µs an image, one
    thread, timed once by hand; `tests/cli/test_memory.py` counts the page faults). The setting
    belongs to the process, so only the command line makes it, not the library.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


CPU_TIMES = Path("/proc/stat")
CGROUPS = Path("/sys/fs/cgroup")
_IDLE = slice(3, 5)  # idle, and waiting for a disk
_GUEST = 8  # included in the user time, too


def wait_passively() -> None:
    """Makes waiting threads sleep, unless the user configures it.

    OpenMP reads the variable when torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@dataclass(frozen=True)
class CpuUse:
    """The CPU seconds used since the machine was started, of all processes and of this one.

    Attributes:
        at: the time of the measurement, seconds.
        machine: of all processes, on the CPUs that this process may use.
        process: of this process.
    """

    at: float
    machine: float
    process: float

    @classmethod
    def now(cls) -> CpuUse | None:
        """Measures; None where the system does not provide it."""
        try:
            machine = _busy_seconds(CPU_TIMES.read_text(encoding="ascii"))
        except (OSError, ValueError, AttributeError):  # not Linux
            return None
        return cls(time.monotonic(), machine, time.process_time())

    def others(self, end: CpuUse) -> float:
        """Returns how many CPUs other processes used from this measurement to a later one."""
        used = (end.machine - self.machine) - (end.process - self.process)
        return max(0.0, used / max(end.at - self.at, 1e-3))


def fewer_threads(began: CpuUse | None, usual: int) -> int | None:
    """Returns the number of threads that other programs leave; None: the usual number.

    Args:
        began: a measurement when the program began; None: what others use is unknown.
        usual: the number of threads that torch has.
    """
    if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return None  # the user's choice
    free = min(float(usual), cpu_quota())
    usage = CpuUse.now()
    if began is not None and usage is not None:
        free = min(free, len(os.sched_getaffinity(0)) - began.others(usage))
    threads = max(1, math.floor(free + 0.5))
    return threads if threads < usual else None


def cpu_quota(root: Path = CGROUPS) -> float:
    """Returns the CPUs that the container's quota allows; infinity without one."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            parts = " ".join((root / name).read_text(encoding="ascii") for name in names).split()
            quota, period = (float(word) for word in parts)
        except (OSError, ValueError):  # none, or "max"
            continue
        if quota > 0:
            return quota / period
    return math.inf


def _busy_seconds(text: str) -> float:
    """Returns the seconds in which this process's CPUs were busy, from the text of /proc/stat."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in text.splitlines():
        name, *columns = line.split()
        if name in cores:
            times = [int(word) for word in columns][:_GUEST]
            ticks += sum(times) - sum(times[_IDLE])
    return ticks / os.sysconf("SC_CLK_TCK")
