"""Whether a function of a batch treats each example by itself, as a bound on one example's
influence takes for granted: but for rounding (`mixes_rows`), or to the last bit
(`moves_with_place`).

It is tried on random images, which are public: what it finds is a fault, and what it does not find
is no proof.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedsynth.seeding import forked_rng, torch_generator

ROWS = 6
SHIFTS = (1, 3)
"""Places by which a batch is moved on: not multiples of what a register or a thread takes."""
CPU_ROUNDING = 1e-4
DEVICE_ROUNDING = 1e-2
"""Of the largest value: other batches may take other kernels, on an accelerator coarser ones."""


def mixes_rows(
    function: Callable[[Tensor], Tensor], shape: tuple[int, int, int], device: torch.device
) -> bool:
    """Whether an example's value depends on which others are in its batch, or on their number.

    Args:
        function: images [N, C, H, W] -> values [N, …].
        shape: (C, H, W).
        device: where it takes them.

    >>> shape = (1, 4, 4)
    >>> mixes_rows(lambda x: x.flatten(1), shape, torch.device("cpu"))
    False
    >>> mixes_rows(lambda x: (x - x.mean(0)).flatten(1), shape, torch.device("cpu"))
    True
    """
    generator = torch_generator(0, "examples by themselves")
    images = torch.rand(ROWS, *shape, generator=generator).to(device)
    others = images.clone()
    others[1::2] = (torch.rand(ROWS // 2, *shape, generator=generator) > 0.8).to(images)
    with torch.no_grad():
        first = _values(function, images, 0)
        if _differ(first[::2], _values(function, others, 0)[::2]):
            return True
        if _differ(first, _values(function, images, 1)):
            return False  # it draws, and one example alone would draw other things
        alone = torch.cat([_values(function, images[k : k + 1], 0) for k in range(ROWS)])
    return _differ(first, alone)


def moves_with_place(
    function: Callable[[Tensor], Tensor],
    shape: tuple[int, int, int],
    device: torch.device,
    places: int,
) -> bool:
    """Whether an example's bits depend on its place in a batch of constant length, or on what the
    others are.

    Args:
        function: images [N, C, H, W] -> values [N, …]; it draws nothing.
        shape: (C, H, W).
        device: where it takes them.
        places: the batch's length, at least 1.

    >>> shape = (1, 4, 4)
    >>> moves_with_place(lambda x: x.flatten(1), shape, torch.device("cpu"), 8)
    False
    >>> last = torch.tensor([0.0] * 7 + [2.0**-20]).view(8, 1)
    >>> moves_with_place(lambda x: x.flatten(1) + last, shape, torch.device("cpu"), 8)
    True
    """
    generator = torch_generator(0, "examples in other places")
    images = torch.randn(places, *shape, generator=generator).to(device)
    first = function(images).detach()
    moved = (function(images.roll(shift, 0)).detach().roll(-shift, 0) for shift in SHIFTS)
    if not all(torch.equal(first, other) for other in moved):
        return True
    others = torch.randn(places - 1, *shape, generator=generator).to(device)
    among = function(torch.cat([images[:1], others])).detach()
    return not torch.equal(first[:1], among[:1])


def _values(function: Callable[[Tensor], Tensor], images: Tensor, draw: int) -> Tensor:
    with forked_rng(draw, "examples by themselves"):
        return function(images.clone()).detach().double()


def _differ(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return True
    rounding = CPU_ROUNDING if a.device.type == "cpu" else DEVICE_ROUNDING
    most = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return not torch.allclose(a, b, rtol=0.0, atol=rounding * most, equal_nan=True)
