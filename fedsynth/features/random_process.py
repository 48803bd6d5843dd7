"""Features of an encoder that was trained on random-process images alone: a prior from no data.

A small convolutional network with group norm, trained by alignment and uniformity
(`random_process_training.py`) on what `random_images.py` draws. Its weights came from a seed and a
procedure, so they are as public as an architecture: a private release of these features costs what
one of raw pixels costs. DP-RandP (Tang et al. 2023, arXiv 2306.06076) showed what such a prior is
worth to central private training.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = 8
WIDTHS = (48, 64, 128, 128)
"""Channels of the four convolutions; the first and the third halve the image."""
KERNELS = (4, 3, 3, 3)
STRIDES = (2, 1, 2, 1)
SIDE = 32
"""Images are brought to this size: what the encoder was trained at."""
CELLS = 3
"""Overlapping cells along each side that the last map is averaged in: with an 8×8 map cells of 4,
two apart."""


class Encoder(nn.Module):
    """Images [N, 3, 32, 32] with pixels in [0, 1] to maps [N, 128, 8, 8].

    >>> import torch
    >>> list(Encoder()(torch.zeros(2, 3, 32, 32)).shape)
    [2, 128, 8, 8]
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width, kernel, stride in zip(WIDTHS, KERNELS, STRIDES, strict=True):
            layers += [
                nn.Conv2d(before, width, kernel, stride, padding=1, bias=False),
                nn.GroupNorm(GROUPS, width),
                nn.ReLU(),
            ]
            before = width
        self.layers = nn.Sequential(*layers)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        maps: Tensor = self.layers(2 * x_NCHW - 1)
        return maps


def as_trained(pixels_NCHW: Tensor) -> Tensor:
    """Images of any size, grey or colour, as the encoder was trained on: [N, 3, 32, 32]."""
    x = pixels_NCHW
    if x.shape[1] == 1:
        x = x.expand(-1, 3, -1, -1)
    if x.shape[-2:] == (28, 28):  # framed, as ConvNets of the literature take them
        return F.pad(x, (2, 2, 2, 2))
    if x.shape[-2:] != (SIDE, SIDE):
        x = F.interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False, antialias=True)
    return x


def pooled(maps_NCHW: Tensor) -> Tensor:
    """Averages in overlapping cells, [N, C·CELLS²]."""
    return F.avg_pool2d(maps_NCHW, 4, 2).flatten(1)
