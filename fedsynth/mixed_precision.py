"""Passes of networks in bfloat16, with weights, sums and losses in float32: `--precision bf16`.

What torch decides is kept (`torch.autocast`): convolutions and matrix products in bfloat16, the
rest in what it is given. Losses are computed in float32: callers take a network's output through
`widened` first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def mixed(device: torch.device, precision: torch.dtype) -> AbstractContextManager[object]:
    """A context in which networks compute in `precision`; in float32 nothing is changed.

    Weights are cast at each use. autocast would keep the cast ones until the outermost context
    ends, a caller's perhaps, beyond a step that an optimiser takes inside.

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
    """In float32 what came out of a mixed pass; anything else as it is.

    >>> widened(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x.float() if x.dtype == torch.bfloat16 else x
