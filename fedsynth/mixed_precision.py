"""Runs networks in bfloat16 (`--precision bf16`).

Weights, sums and losses stay in float32. `torch.autocast` computes convolutions and matrix products
in bfloat16, and other operations in their inputs' precision. Convert a network's output to float32
with `widened` before computing a loss, as `computed` does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def mixed(device: torch.device, precision: torch.dtype) -> AbstractContextManager[object]:
    """Returns a context manager that runs networks in the given precision (autocast).

    It does nothing for float32. Weights are converted at each use. autocast's cache is off, because
    it would keep converted weights until the outermost context ends, and an optimiser step makes
    them outdated.

    >>> layer = torch.nn.Linear(2, 2)
    >>> x = torch.rand(1, 2)
    >>> with mixed(x.device, torch.bfloat16):
    ...     layer(x).dtype
    torch.bfloat16
    """
    if precision == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, precision, cache_enabled=False)


def computed(network: Callable[[Tensor], Tensor], x: Tensor, precision: torch.dtype) -> Tensor:
    """Runs a network in the given precision, and converts its output to float32.

    >>> computed(torch.nn.Linear(2, 2), torch.rand(1, 2), torch.bfloat16).dtype
    torch.float32
    """
    with mixed(x.device, precision):
        return widened(network(x))


def widened(x: Tensor) -> Tensor:
    """Converts a bfloat16 tensor to float32. Returns other tensors unchanged.

    >>> widened(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    if x.dtype == torch.bfloat16:
        return x.float()
    return x
