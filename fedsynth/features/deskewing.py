"""Deskews images: shears the rows of each image so that its columns do not lean on average.

LeCun et al. 1998, "Gradient-Based Learning Applied to Document Recognition", deslant digits before
a linear classifier. The slant of handwriting depends on the writer rather than on the class. A
shear is a function of one image, so it costs no budget.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.privacy.row_products import two_sided

# The largest shear, in columns a row. Less than one row of variance counts as this much, so that
# flat and empty images stay as they are.
LARGEST_SHEAR = 1.0
LEAST_VARIANCE = 1.0


def deskewed(x_NCHW: Tensor) -> Tensor:
    """Shears each image horizontally by its `shear_of`, [N, C, H, W].

    >>> diagonal = torch.eye(8)[None, None]
    >>> deskewed(diagonal)[0, 0].sum(dim=0).tolist()
    [0.0, 0.0, 0.0, 4.0, 4.0, 0.0, 0.0, 0.0]
    """
    return sheared(x_NCHW, shear_of(x_NCHW))


def shear_of(x_NCHW: Tensor) -> Tensor:
    """Returns the number of columns a row by which each image leans, [N], at most `LARGEST_SHEAR`.

    It is cov(x, y)/var(y), where pixels are weights on a dark background.

    >>> shear_of(torch.eye(8)[None, None])
    tensor([1.])
    """
    x, y, xy, yy = _moments(x_NCHW)
    shear = (xy - x * y) / (yy - y.square()).clamp_min(LEAST_VARIANCE)
    return shear.clamp(-LARGEST_SHEAR, LARGEST_SHEAR)


def sheared(x_NCHW: Tensor, shear_N: Tensor) -> Tensor:
    """Shears each image horizontally about its centre of mass, [N, C, H, W].

    Row y moves to the left by shear·(y − m_y) columns. Values between columns are interpolated
    linearly, and are 0 outside the image.
    """
    _, mean_y, _, _ = _moments(x_NCHW)
    rows_NH = _places(x_NCHW, 2) - mean_y[:, None]
    return _shifted(x_NCHW, (shear_N[:, None] * rows_NH)[:, :, None])


def _places(x_NCHW: Tensor, dimension: int) -> Tensor:
    """Returns the positions of rows or columns, relative to the centre of the image."""
    size = x_NCHW.shape[dimension]
    return torch.arange(size, dtype=x_NCHW.dtype, device=x_NCHW.device) - (size - 1) / 2


def _moments(x_NCHW: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the means of x, y, x·y and y² over each image's pixels, which are weights."""
    weights_NHW = x_NCHW.mean(dim=1).clamp_min(0)
    y_H, x_W = _places(x_NCHW, 2), _places(x_NCHW, 3)
    rows = torch.stack([torch.ones_like(y_H), y_H, y_H.square()])
    columns = torch.stack([torch.ones_like(x_W), x_W], dim=1)
    sums_N32 = two_sided(rows, weights_NHW, columns)
    mass_N11 = sums_N32[:, :1, :1].clamp_min(torch.finfo(x_NCHW.dtype).tiny)
    means_N32 = sums_N32 / mass_N11
    return means_N32[:, 0, 1], means_N32[:, 1, 0], means_N32[:, 1, 1], means_N32[:, 2, 0]


def _shifted(x_NCHW: Tensor, columns_NH1: Tensor) -> Tensor:
    """Shifts each row to the left by a number of columns, which may be fractional."""
    width = x_NCHW.shape[3]
    position = torch.arange(width, device=x_NCHW.device) + columns_NH1
    column = position.floor()
    fraction = (position - column)[:, None]
    padded = F.pad(x_NCHW, (1, 1))  # what lies outside counts as a column of zeros

    def at(index_NHW: Tensor) -> Tensor:
        inside = index_NHW.long().add(1).clamp(0, width + 1)
        return padded.gather(3, inside[:, None].expand(x_NCHW.shape))

    return (1 - fraction) * at(column) + fraction * at(column + 1)
