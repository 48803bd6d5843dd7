"""The memory layout of feature maps for convolutions and pooling on a CPU."""

from __future__ import annotations

from torch import Tensor


def channels_last(x_NCHW: Tensor) -> Tensor:
    """Returns the tensor in channels-last layout on a CPU; on a GPU, unchanged.

    On a CPU, max-pooling is then vectorised over channels, and convolutions and batch norms need no
    reordering (times: docs/speed.md). Layers preserve the layout. Group and instance norms are
    slower in it, so networks with them do not use it.

    `Tensor.contiguous(memory_format=...)` would not change images of one channel, whose two layouts
    differ only in strides, which convolutions read; it also fails inside `vmap`.
    """
    if x_NCHW.device.type != "cpu":
        return x_NCHW
    n, channels, height, width = x_NCHW.shape
    rows = x_NCHW.permute(0, 2, 3, 1).reshape(-1)  # a view if the layout is already channels-last
    return rows.view(n, height, width, channels).permute(0, 3, 1, 2)
