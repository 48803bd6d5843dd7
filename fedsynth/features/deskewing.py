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
    """Shears each image horizontally about its centre of mass, [N, C, H, W].

    Pixels are weights on a dark background. Row y moves by a·(y − m_y) columns, where a =
    cov(x, y)/var(y). Values between columns are interpolated linearly, and are 0 outside the image.

    >>> diagonal = torch.eye(8)[None, None]
    >>> deskewed(diagonal)[0, 0].sum(dim=0).tolist()
    [0.0, 0.0, 0.0, 4.0, 4.0, 0.0, 0.0, 0.0]
    """
    height, width = x_NCHW.shape[2:]
    weights_NHW = x_NCHW.mean(dim=1).clamp_min(0)
    y_H = torch.arange(height, dtype=x_NCHW.dtype, device=x_NCHW.device) - (height - 1) / 2
    x_W = torch.arange(width, dtype=x_NCHW.dtype, device=x_NCHW.device) - (width - 1) / 2
    rows = torch.stack([torch.ones_like(y_H), y_H, y_H.square()])
    columns = torch.stack([torch.ones_like(x_W), x_W], dim=1)
    sums_N32 = two_sided(rows, weights_NHW, columns)
    mass = sums_N32[:, 0, 0].clamp_min(torch.finfo(x_NCHW.dtype).tiny)
    mean_y, mean_x = sums_N32[:, 1, 0] / mass, sums_N32[:, 0, 1] / mass
    variance = (sums_N32[:, 2, 0] / mass - mean_y.square()).clamp_min(LEAST_VARIANCE)
    shear = (sums_N32[:, 1, 1] / mass - mean_x * mean_y) / variance
    shear = shear.clamp(-LARGEST_SHEAR, LARGEST_SHEAR)
    moved_NHW = (shear[:, None] * (y_H - mean_y[:, None]))[:, :, None]
    return _shifted(x_NCHW, moved_NHW)


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
