"""Passes of networks in bfloat16, with weights, sums and losses in float32: `--precision bf16`.

`torch.autocast` decides the precision of each operation: bfloat16 for convolutions and matrix
products, the input's for the rest. Losses are computed in float32: callers pass a network's output
through `widened` first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def mixed(device: torch.device, precision: torch.dtype) -> AbstractContextManager[object]:
    """Returns a context in which networks compute in `precision`; float32 changes nothing.

    Weights are cast at each use. autocast's cache would keep cast weights until the outermost
    context ends, which may be a caller's: they would be stale after an optimiser step inside it.

    >>> layer = torch.nn.Linear(2, 2)
    >>> x = torch.rand(1, 2)
    >>> with mixed(x.device, torch.bfloat16):
    ...     layer(x).dtype
    torch.bfloat16
    """
    if precision == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, precision, cache_enabled=False)


def widened(x: Tensor) -> Tensor:
    """Returns a bfloat16 tensor in float32, any other tensor unchanged.

    >>> widened(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    if x.dtype == torch.bfloat16:
        return x.float()
    return x
