"""What a run computes with: the device, its memory bound, a compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedsynth.errors import DeviceError, SettingError, unknown_value

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA if there is one, else the CPU; "cuda" without one is a DeviceError. "cuda:1"
    and the like are fine too."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in DEVICES:
        raise unknown_value("run", "device", name, DEVICES)
    if name != "cpu" and not torch.cuda.is_available():
        raise DeviceError(
            f"run.device={name} was asked for, but torch {torch.__version__} finds no CUDA device "
            "here; use run.device=cpu"
        )
    try:
        return torch.empty(0, device=name).device
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise DeviceError(f"run.device={name} cannot be used: {why}") from None


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Within it torch has `count` threads on the CPU; None leaves the number as it is."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_compiler(device: torch.device) -> None:
    """Refuses `compile` where torch.compile has nothing to compile with.

    Raises:
        SettingError: no C++ compiler ($CXX, or one on the path), or on a GPU no Triton.
    """
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise SettingError(
                "run",
                "compile",
                "on a GPU needs the triton package, which is not installed; leave it out",
            )
    elif not any(
        shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name
    ):
        raise SettingError(
            "run",
            "compile",
            "needs a C++ compiler (g++ or clang++, or $CXX), and none is on the path; leave it out",
        )


def memory_bytes(gigabytes: float | None, device: torch.device) -> int:
    """The memory bound in bytes; None is 4 GiB on a CPU and half of the card's memory on a GPU (not
    of what is free: runs must repeat)."""
    if gigabytes is not None:
        return int(gigabytes * 2**30)
    return (
        torch.cuda.get_device_properties(device).total_memory // 2
        if device.type == "cuda"
        else 4 * 2**30
    )
