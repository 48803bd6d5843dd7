"""Matrix products in which the bits of a result row do not depend on the other rows.

Usually this does not hold. A kernel library may sum a row in an order that depends on the row's
memory alignment. If the width is not a multiple of the register width, each row of a batch has a
different alignment. The results then differ only by rounding, but a server can send weights for
which nothing but rounding remains. One additional record would then change all rows after it.
Rows are therefore padded with zeros to a multiple of `LANES`, so that they and their gradients
begin at aligned addresses.

Processors and libraries differ, so padding is not trusted. A private run tries the products of its
own shapes on its machine (`fedsynth.federation.position_leak_check`). If bits move, it computes
each record separately (`fedsynth.privacy.passes`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LANES = 16  # the number of float32 values in the widest registers of a CPU (512 bits)


def row_product(rows_Nd: Tensor, weight_Cd: Tensor, bias_C: Tensor | None = None) -> Tensor:
    """Computes rows · weightᵀ + bias, [N, C]. A result's bits do not depend on other rows.

    >>> import torch
    >>> row_product(torch.ones(2, 3), torch.ones(1, 3)).tolist()
    [[3.0], [3.0]]
    """
    return F.linear(filled_up(rows_Nd), filled_up(weight_Cd), bias_C)


def two_sided(left_ka: Tensor, rows_Nas: Tensor, right_st: Tensor) -> Tensor:
    """Multiplies each matrix in a batch by one matrix from the left and another from the right.

    The bits of each product depend only on its own matrix in the batch. The result has the shape
    [N, k, t].

    >>> import torch
    >>> two_sided(torch.eye(2), torch.ones(1, 2, 3), torch.eye(3)).shape
    torch.Size([1, 2, 3])
    """
    products = _both_filled_up(left_ka) @ _both_filled_up(rows_Nas) @ _both_filled_up(right_st)
    return products[..., : len(left_ka), : right_st.shape[1]]


def filled_up(rows: Tensor) -> Tensor:
    """Pads the last dimension of a tensor with zeros, so that its size is a multiple of `LANES`."""
    if rows.shape[-1] % LANES == 0:
        return rows
    missing = rows.new_zeros(*rows.shape[:-1], -rows.shape[-1] % LANES)
    return torch.cat([rows, missing], dim=-1)  # faster than F.pad, which writes twice


def _both_filled_up(matrices: Tensor) -> Tensor:
    return F.pad(matrices, (0, -matrices.shape[-1] % LANES, 0, -matrices.shape[-2] % LANES))


class PaddedLinear(nn.Linear):
    """A linear layer that computes a `row_product`. Its parameters are those of `nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return row_product(input, self.weight, self.bias)
