"""Sums of long per-example vectors that are products of two short vectors.

The sums are computed from the short vectors, so the long products of the examples are never stored.

Theorem (sensitivity). Each class below clips the short vectors of every example. Therefore, for
every possible example, the L2 norm of its long vector u is at most the attribute `bound`:

- `Rows`: u itself, clipped to norm a.
- `Outer`: u = l ⊗ r with ‖l‖ ≤ a and ‖r‖ ≤ 1, so ‖u‖ = ‖l‖·‖r‖ ≤ a.
- `LayerGradients`: the blocks of u are vectors and sums of products Σ_t l_t ⊗ r_t, whose squared
  norm is Σ_{t,s} ⟨l_t, l_s⟩⟨r_t, r_s⟩. So the norm of u is known without u, and u is multiplied by
  min(1, a/‖u‖). Products may cancel each other. In float64, their squared norm then has an error of
  at most e·M² with M = Σ_t ‖l_t‖‖r_t‖ and e = (P + Q + 2T²)·2⁻⁵³, by the usual bounds on dot
  products. Twice this error, or 2⁻³⁶·M² if that is more, is added to the squared norm, so the
  factor is never too large. It is also at most 2¹⁸·a/M, so products that cancel stay below 2¹⁸·a,
  and each addition of them in a sum leaves less than 2⁻³⁵·a.
- `Moments`: u = √½·[svec(z zᵀ); z ⊗ e/b] with ‖z‖ ≤ 1 and ‖e‖ ≤ b. svec writes the upper triangle
  of a symmetric matrix with its off-diagonal entries times √2, so that ‖svec(z zᵀ)‖ = ‖z zᵀ‖_F =
  ‖z‖². Hence ‖u‖² = ½‖z‖⁴ + ½‖z‖²‖e‖²/b² ≤ 1.
- `Grams`: z is a row of matrices Z_b, and u = [p·svec(Z_b Z_bᵀ); q·svec(Z_bᵀ Z_b)] over b with
  ‖z‖ ≤ 1 and p² + q² = 1. ‖Z Zᵀ‖_F ≤ ‖Z‖_F², and Zᵀ Z has the same norm; hence ‖u‖² ≤
  (p² + q²)·Σ_b ‖Z_b‖⁴ ≤ (Σ_b ‖Z_b‖²)² = ‖z‖⁴ ≤ 1.

For example, the sum of the `Moments` vectors, each with d(d+1)/2 + dC coordinates, takes only two
matrix products over the examples. The sums equal those of the clipped long vectors
(tests/privacy/test_products.py). All computations are in float64, as in `clip_rows`.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from fedsynth.errors import PrivacyError
from fedsynth.privacy.mechanisms import (
    add_weighted,
    clip_factors,
    clip_rows,
    squared_norms,
    used_rows,
)


class Products(ABC):
    """Base class for long per-example vectors, stored as short factors.

    A subclass is a dataclass. Its tensor fields are the factors, each with N rows. Its first field
    must be a tensor.

    Attributes:
        bound: the bound on the L2 norm of one example's vector.
    """

    bound: float

    @property
    @abstractmethod
    def width(self) -> int:
        """The dimension of one example's vector."""

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        device: torch.device = next(iter(vars(self).values())).device
        return device

    def __len__(self) -> int:
        """Returns N, the number of examples."""
        return len(next(iter(vars(self).values())))

    def part(self, indices: slice | Tensor) -> Self:
        """Returns the vectors of the examples at the given indices."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                object.__setattr__(part, name, value[indices])
        return part

    def compared(self) -> Tensor:
        """Returns numbers [N, D] whose changes, relative to their norm, are those of the vectors.

        The trial of a step compares them, because the vectors themselves may be too long.
        """
        factors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return torch.cat(factors, dim=1)

    @abstractmethod
    def rows(self) -> Tensor:
        """Computes each example's vector [N, width] in float64, for tests and audits."""

    @abstractmethod
    def sums(self, shares_N: Tensor | None = None) -> Tensor:
        """Computes the sum of the examples' vectors, [width], float64.

        Args:
            shares_N: the weight of each example, in [0, 1]. None gives every example weight 1.
        """

    def add_to(self, total_D: Tensor, shares_N: Tensor | None = None) -> None:
        """Adds `sums(shares_N)` to `total_D` (float64) in place."""
        total_D += self.sums(shares_N)


def balanced(first: Tensor, second: Tensor | None = None) -> Tensor:
    """Concatenates the factors [N, …] of products, each scaled by the other's norm.

    Otherwise a long factor would hide changes of a short one. Vectors without a second factor are
    only flattened.
    """
    first = first.flatten(1)
    if second is None:
        return first
    second = second.flatten(1)
    norms = [factor.double().norm(dim=1, keepdim=True).float() for factor in (first, second)]
    return torch.cat([first * norms[1], second * norms[0]], dim=1)


@dataclass(frozen=True, eq=False)
class Rows(Products):
    """One vector per example, stored directly instead of as factors.

    Args:
        vectors: [N, D], clipped to norm `bound`.
        bound: a.
    """

    vectors: Tensor
    bound: float

    @property
    def width(self) -> int:
        return self.vectors.shape[1]

    def rows(self) -> Tensor:
        return clip_rows(self.vectors, self.bound)

    def sums(self, shares_N: Tensor | None = None) -> Tensor:
        return _weighted(self.rows(), shares_N).sum(dim=0)


@dataclass(frozen=True, eq=False)
class Outer(Products):
    """For each example, the outer product l ⊗ r of two vectors.

    The products are flattened in row-major order.

    Args:
        column: l [N, P], clipped to norm `bound`.
        row: r [N, Q], clipped to norm 1.
        bound: a.
    """

    column: Tensor
    row: Tensor
    bound: float

    @property
    def width(self) -> int:
        return self.column.shape[1] * self.row.shape[1]

    def compared(self) -> Tensor:
        return balanced(self.column, self.row)

    def rows(self) -> Tensor:
        column, row = clip_rows(self.column, self.bound), clip_rows(self.row, 1.0)
        return torch.einsum("np,nq->npq", column, row).flatten(1)

    def sums(self, shares_N: Tensor | None = None) -> Tensor:
        # r is much longer than l, so l is multiplied by the factor that clips r
        row = self.row.to(torch.float64)
        weights = _weighted(clip_factors(squared_norms(row), 1.0)[:, None], shares_N)
        column = clip_rows(self.column, self.bound) * weights
        return (column.T @ used_rows(row, weights[:, 0] != 0)).flatten()


@dataclass(frozen=True, eq=False)
class LayerGradients(Products):
    """Per-example gradients in factored form, clipped to the L2 norm `bound`.

    A gradient consists of blocks. A block is a vector, or the sum of T outer products l_t ⊗ r_t of
    two vectors, flattened in row-major order.

    Args:
        values: [N, S], the vectors of all blocks one after the other, those of products as all l_t,
            then all r_t.
        blocks: for each block the lengths of its vectors: (D,), or (P, Q) for a product, or
            (P, Q, T) for a sum of products.
        bound: a, the bound on the L2 norm of a gradient.
    """

    values: Tensor
    blocks: tuple[tuple[int, ...], ...]
    bound: float

    @property
    def width(self) -> int:
        return sum(self._widths())

    def _widths(self) -> list[int]:
        return [math.prod(block[:2]) for block in self.blocks]

    def _vectors(self) -> list[tuple[Tensor, ...]]:
        """Returns each block's vectors [N, D], or its factors [N, T, P] and [N, T, Q]."""
        terms = [math.prod(block[2:]) for block in self.blocks]
        lengths = [n * T for block, T in zip(self.blocks, terms, strict=True) for n in block[:2]]
        vectors = iter(self.values.split(lengths, dim=1))
        blocks = [tuple(islice(vectors, min(len(block), 2))) for block in self.blocks]
        return [
            tuple(v.unflatten(1, (T, -1)) for v in block) if len(block) > 1 else block
            for block, T in zip(blocks, terms, strict=True)
        ]

    def _factors(self, blocks: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Computes each example's clipping factor [N]."""
        squares = self.values.new_zeros(len(self), dtype=torch.float64)
        for first, *second in blocks:
            squares += product_squares(first, second[0]) if second else squared_norms(first)
        return clip_factors(squares, self.bound)

    def gradients(self) -> Tensor:
        """Computes each example's gradient without clipping, [N, width]."""
        blocks = [outer_products(*vectors) for vectors in self._vectors()]
        return torch.cat(blocks, dim=1)

    def compared(self) -> Tensor:
        return torch.cat([balanced(*vectors) for vectors in self._vectors()], dim=1)

    def rows(self) -> Tensor:
        exact = replace(self, values=self.values.to(torch.float64))
        return clip_rows(exact.gradients(), self.bound)

    def sums(self, shares_N: Tensor | None = None) -> Tensor:
        total = self.values.new_zeros(self.width, dtype=torch.float64)
        self.add_to(total, shares_N)
        return total

    def add_to(self, total_D: Tensor, shares_N: Tensor | None = None) -> None:
        blocks = self._vectors()
        for position, vectors in enumerate(blocks):
            if len(vectors) == 2:  # converted once for the norm and the sum
                blocks[position] = (vectors[0].double(), vectors[1].double())
        weights = _weighted(self._factors(blocks)[:, None], shares_N)
        used = weights[:, 0] != 0
        for (first, *second), total in zip(blocks, total_D.split(self._widths()), strict=True):
            if second:
                column, row = used_rows(first, used), used_rows(second[0], used)
                columns = (column * weights[:, None]).flatten(0, 1)
                total.view(columns.shape[1], -1).addmm_(columns.T, row.flatten(0, 1))
            else:
                add_weighted(total[None], weights, first)


def product_squares(columns_NTP: Tensor, rows_NTQ: Tensor) -> Tensor:
    """Computes the squared L2 norm [N] of each sum of outer products Σ_t l_t ⊗ r_t.

    The inputs must be float64. The result is not below the exact value, except for relative
    rounding (see the module's text).
    """
    (terms, P), Q = columns_NTP.shape[1:], rows_NTQ.shape[2]
    if terms == 1:
        return squared_norms(columns_NTP[:, 0]) * squared_norms(rows_NTQ[:, 0])
    grams = columns_NTP @ columns_NTP.mT, rows_NTQ @ rows_NTQ.mT
    squares = grams[0] * grams[1]
    lengths = squares.diagonal(dim1=1, dim2=2).sqrt().sum(dim=1)
    error = max((P + Q + 2 * terms**2) * 2.0**-52, 2.0**-36)
    return squares.sum(dim=(1, 2)).clamp_min(0.0) + error * lengths**2


def outer_products(columns: Tensor, rows: Tensor | None = None) -> Tensor:
    """Computes each example's outer product l ⊗ r, flattened in row-major order to [N, PQ].

    Returns l if there is no r. Sums of T products have factors [N, T, P] and [N, T, Q], single
    products [N, P] and [N, Q].
    """
    if rows is None:
        return columns
    if columns.dim() == 2:
        columns, rows = columns[:, None], rows[:, None]
    return torch.einsum("ntp,ntq->npq", columns, rows).flatten(1)


@dataclass(frozen=True, eq=False)
class Moments(Products):
    """The products of each example's features with one another and with the targets.

    The vector of an example is √½·[svec(z zᵀ); e/b ⊗ z]. The sum over examples contains the second
    moments of the features z and their products with the targets e.

    Args:
        z: [N, d], clipped to norm 1.
        targets: e [N, C], clipped to norm b, such as centred one-hot labels.
        target_norm: b, the bound on the norm of each target.
    """

    z: Tensor
    targets: Tensor
    target_norm: float
    bound = 1.0

    @property
    def width(self) -> int:
        d = self.z.shape[1]
        return d * (d + 1) // 2 + d * self.targets.shape[1]

    def _clipped(self) -> tuple[Tensor, Tensor]:
        e = clip_rows(self.targets, self.target_norm) / self.target_norm
        return clip_rows(self.z, 1.0), e

    def rows(self) -> Tensor:
        z, e = self._clipped()
        squares = svec(torch.einsum("nd,ne->nde", z, z))
        crossed = torch.einsum("nc,nd->ncd", e, z).flatten(1)
        return math.sqrt(0.5) * torch.cat([squares, crossed], dim=1)

    def sums(self, shares_N: Tensor | None = None) -> Tensor:
        z, e = self._clipped()
        weighted = _weighted(z, shares_N)
        squares = svec(weighted.T @ z)
        crossed = (e.T @ weighted).flatten()
        return math.sqrt(0.5) * torch.cat([squares, crossed])


@dataclass(frozen=True, eq=False)
class Grams(Products):
    """For each example, the Gram matrices of its feature maps, as one vector.

    Each example has several matrices Z [channels, cells], where the cells are the spatial positions
    of a feature map. The vectors [p·svec(Z Zᵀ); q·svec(Zᵀ Z)] of all its matrices are concatenated.

    Args:
        z: [N, Σ channels·cells], clipped to norm 1.
        blocks: (channels, cells) of each matrix.
        cells_part: q² in [0, 1]. p² is 1 − q².
    """

    z: Tensor
    blocks: tuple[tuple[int, int], ...]
    cells_part: float
    bound = 1.0

    @property
    def width(self) -> int:
        return grams_width(self.blocks)

    def rows(self) -> Tensor:
        pieces = []
        for Z in matrices_of(clip_rows(self.z, 1.0), self.blocks):
            channels = torch.einsum("nas,nbs->nab", Z, Z)
            cells = torch.einsum("nas,nat->nst", Z, Z)
            pieces += self._scaled(channels, cells)
        return torch.cat(pieces, dim=1)

    def sums(self, shares_N: Tensor | None = None) -> Tensor:
        z = clip_rows(self.z, 1.0)
        weighted = matrices_of(_weighted(z, shares_N), self.blocks)
        pieces = []
        for W, Z in zip(weighted, matrices_of(z, self.blocks), strict=True):
            channels = W.transpose(0, 1).flatten(1) @ Z.transpose(0, 1).flatten(1).T
            cells = W.flatten(0, 1).T @ Z.flatten(0, 1)
            pieces += self._scaled(channels, cells)
        return torch.cat(pieces)

    def _scaled(self, channels: Tensor, cells: Tensor) -> list[Tensor]:
        p, q = math.sqrt(1 - self.cells_part), math.sqrt(self.cells_part)
        return [p * svec(channels), q * svec(cells)]


def grams_width(blocks: tuple[tuple[int, int], ...]) -> int:
    """Computes the dimension of a vector in `Grams` from the blocks' shapes.

    >>> grams_width(((3, 2),))
    9
    """
    return sum((a * (a + 1) + s * (s + 1)) // 2 for a, s in blocks)


def matrices_of(rows_Nd: Tensor, blocks: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """Splits each row into its blocks, and reshapes each block to a matrix.

    Returns one tensor [N, channels, cells] for each block.
    """
    parts = rows_Nd.split(list(map(math.prod, blocks)), dim=1)
    return [part.unflatten(1, size) for part, size in zip(parts, blocks, strict=True)]


def _weighted(rows: Tensor, shares_N: Tensor | None) -> Tensor:
    if shares_N is None:
        return rows
    if len(shares_N) and not bool(((shares_N >= 0) & (shares_N <= 1)).all()):  # on the CPU
        raise PrivacyError("the weights of a user's records are outside of [0, 1]. Rescale them")
    return rows * shares_N.to(rows)[:, None]


def svec(matrix: Tensor) -> Tensor:
    """Converts symmetric matrices [..., d, d] to vectors [..., d(d+1)/2] with equal L2 norms.

    A vector holds the upper triangle of its matrix, with the off-diagonal entries multiplied by √2.

    >>> svec(torch.tensor([[1.0, 2.0], [2.0, 3.0]])).square().sum().item()
    18.0
    """
    d = matrix.shape[-1]
    row, column = torch.triu_indices(d, d, device=matrix.device)
    weights = torch.where(row == column, 1.0, math.sqrt(2.0)).to(matrix.dtype)
    return matrix[..., row, column] * weights


def smat(vector_D: Tensor, d: int) -> Tensor:
    """Converts a vector to a symmetric matrix [d, d], as the inverse of `svec`.

    >>> smat(svec(torch.tensor([[1.0, 2.0], [2.0, 3.0]])), 2).round().tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    row, column = torch.triu_indices(d, d, device=vector_D.device)
    weights = torch.where(row == column, 1.0, math.sqrt(0.5)).to(vector_D.dtype)
    matrix = vector_D.new_zeros(d, d)
    matrix[row, column] = vector_D * weights
    matrix[column, row] = vector_D * weights
    return matrix
