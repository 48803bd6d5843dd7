"""Matrix products in which a row's bits depend on that row alone.

A library of kernels may add up a row in another order where the row begins at another place in
memory: at a width that is no multiple of what its registers hold, each row of a batch begins
elsewhere. The difference is rounding, and yet a server can send weights under which rounding is all
that is left; one record more would then move the rows of all that come after it. So widths are
filled up with zeros to a multiple of `LANES` first.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

LANES = 16
"""float32 numbers of the widest registers (512 bits)."""


def row_product(rows_Nd: Tensor, weight_Cd: Tensor) -> Tensor:
    """rows · weightᵀ, [N, C].

    >>> import torch
    >>> row_product(torch.ones(2, 3), torch.ones(1, 3)).tolist()
    [[3.0], [3.0]]
    """
    return filled_up(rows_Nd) @ filled_up(weight_Cd).T


def two_sided(left_ka: Tensor, rows_Nas: Tensor, right_st: Tensor) -> Tensor:
    """left · row · right of each row, [N, k, t].

    >>> import torch
    >>> two_sided(torch.eye(2), torch.ones(1, 2, 3), torch.eye(3)).shape
    torch.Size([1, 2, 3])
    """
    left = _both_filled_up(left_ka)
    right = _both_filled_up(right_st)
    made = left @ _both_filled_up(rows_Nas) @ right
    return made[..., : len(left_ka), : right_st.shape[1]]


def filled_up(rows: Tensor) -> Tensor:
    """With zeros after the last dimension, to a multiple of `LANES`."""
    return F.pad(rows, (0, -rows.shape[-1] % LANES))


def _both_filled_up(matrices: Tensor) -> Tensor:
    return F.pad(matrices, (0, -matrices.shape[-1] % LANES, 0, -matrices.shape[-2] % LANES))
