"""The order in which a CPU holds feature maps while convolutions and pools work on them."""

from __future__ import annotations

from torch import Tensor


def channels_last(x_NCHW: Tensor) -> Tensor:
    """The same values with a pixel's channels side by side in memory, on a CPU; on a GPU as they
    are.

    A CPU's max-pool is then vectorised over channels, and its convolutions and batch norms need no
    reordering (docs/speed.md has its times). Layers hand the order on. Group and instance
    norms are slower in it: their networks stay without.

    `Tensor.contiguous(memory_format=...)` would leave images of one channel alone, whose two orders
    differ in strides only, and convolutions go by the strides; nor does it work inside of `vmap`.
    """
    if x_NCHW.device.type != "cpu":
        return x_NCHW
    n, channels, height, width = x_NCHW.shape
    rows = x_NCHW.permute(0, 2, 3, 1).reshape(-1)  # a view, where this is already the order
    return rows.view(n, height, width, channels).permute(0, 3, 1, 2)
