"""Which device a run uses."""

from __future__ import annotations

import torch

from fedsynth.errors import DeviceError, unknown_name

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA if there is one, else the CPU; "cuda" without one is a DeviceError. "cuda:1" and the like are fine too."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    if name != "cpu" and not torch.cuda.is_available():
        raise DeviceError(
            f"--device {name} was asked for, but torch {torch.__version__} finds no CUDA device here; use --device cpu"
        )
    try:
        return torch.empty(0, device=name).device
    except RuntimeError as error:
        raise DeviceError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None


def memory_bytes(gigabytes: float | None, device: torch.device) -> int:
    """The memory bound in bytes; None is 4 GiB on a CPU and half of the card's memory on a GPU (not of what is free: runs must repeat)."""
    if gigabytes is not None:
        return int(gigabytes * 2**30)
    return torch.cuda.get_device_properties(device).total_memory // 2 if device.type == "cuda" else 4 * 2**30
