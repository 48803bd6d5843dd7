"""Matrix products in which each row's bits depend only on that row.

A kernel library may sum a row in an order that depends on the row's memory alignment. At a width
that is not a multiple of the register width, each row of a batch is aligned differently. The
resulting difference is only rounding, but a server can send weights under which nothing but
rounding remains; one additional record would then change all rows after it. Widths are therefore
zero-padded to a multiple of `LANES`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

LANES = 16
"""The number of float32 values in the widest registers (512 bits)."""


def row_product(rows_Nd: Tensor, weight_Cd: Tensor) -> Tensor:
    """Returns rows · weightᵀ, [N, C].

    >>> import torch
    >>> row_product(torch.ones(2, 3), torch.ones(1, 3)).tolist()
    [[3.0], [3.0]]
    """
    return filled_up(rows_Nd) @ filled_up(weight_Cd).T


def two_sided(left_ka: Tensor, rows_Nas: Tensor, right_st: Tensor) -> Tensor:
    """Returns left · row · right for each row, [N, k, t].

    >>> import torch
    >>> two_sided(torch.eye(2), torch.ones(1, 2, 3), torch.eye(3)).shape
    torch.Size([1, 2, 3])
    """
    products = _both_filled_up(left_ka) @ _both_filled_up(rows_Nas) @ _both_filled_up(right_st)
    return products[..., : len(left_ka), : right_st.shape[1]]


def filled_up(rows: Tensor) -> Tensor:
    """Zero-pads the last dimension to a multiple of `LANES`."""
    return F.pad(rows, (0, -rows.shape[-1] % LANES))


def _both_filled_up(matrices: Tensor) -> Tensor:
    return F.pad(matrices, (0, -matrices.shape[-1] % LANES, 0, -matrices.shape[-2] % LANES))
