"""Downscaled images as feature vectors of norm 1, whose class sums and Gram matrix are released.

An image is averaged in cells to v, which is divided by its norm and extended by a constant:
u = (√(1 − c²)·v/‖v‖, c). Every example therefore has norm 1, whatever its brightness, so the bound
of 1 needs no data and no further proof. The class sums of u also contain the classes' counts.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.features.feature_map import FeatureMap, Shape

CONSTANT = math.sqrt(0.1)
"""c: a tenth of a vector's squared norm is used to count examples."""
GREY_SIDE, COLOUR_SIDE = 14, 8
"""The maximum number of cells in each direction. The noise of a sum grows with the square root of
the number of its coordinates."""
DARKEST = 1e-6


def cells_of(shape: Shape) -> tuple[int, int, int]:
    """Returns (channels, rows, columns) of the downscaled images for images of this shape.

    >>> cells_of((1, 28, 28)), cells_of((3, 32, 32))
    ((1, 14, 14), (3, 8, 8))
    """
    channels, height, width = shape
    side = GREY_SIDE if channels == 1 else COLOUR_SIDE
    return channels, min(side, height), min(side, width)


@lru_cache(maxsize=8)
def low_pass(shape: Shape) -> FeatureMap:
    """Returns the map u for images of this shape.

    >>> u = low_pass((1, 28, 28))(torch.rand(2, 1, 28, 28))
    >>> u.shape, u.norm(dim=1)
    (torch.Size([2, 197]), tensor([1.0000, 1.0000]))
    """
    cells = cells_of(shape)

    def function(x_NCHW: Tensor) -> Tensor:
        v = F.adaptive_avg_pool2d(x_NCHW, cells[1:]).flatten(1)
        size = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        constant = torch.full_like(size, CONSTANT)
        return torch.cat(
            [math.sqrt(1 - CONSTANT**2) * v / size.clamp_min(DARKEST), constant], dim=1
        )

    return FeatureMap(
        name="low-pass",
        image_shape=shape,
        dimension=math.prod(cells) + 1,
        norm_bound=1.0,
        radius=1.0,
        source="each vector is divided by its norm: analytic",
        function=function,
    )
