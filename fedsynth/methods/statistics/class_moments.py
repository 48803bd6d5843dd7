"""Post-processing of summed class statistics: a closed-form classifier, and steps on noisy
gradients.

With z = clip₁(T(φ(x) − m)/R) and e = e_y − 1/C, clients release noisy sums of
√½·[svec(z zᵀ); z ⊗ e/b] with b = ‖e‖ = √(1 − 1/C) (`fedsynth.privacy.products.Moments`), and in
later rounds of clip(p − y) ⊗ z.

If each gradient has noise ν per coordinate, T steps W ← W − Σ_t η_t g_t of effective lengths η_t
leave noise ν·√(Σ η_t²) in a coordinate of W, and in the logit of a z of norm 1. When a budget is
divided over T releases, ν grows with √T, so the noise depends only on τ = Σ η_t, and not on the
number of steps. As τ grows, the classifier moves from its class means to the maximum likelihood,
and the noise grows too; `pace` chooses τ by the noise, which is public before any data are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.features.feature_map import row_product
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.privacy.products import Moments, Outer, smat

EXACT = 1e-6
"""The ridge of moments without noise, relative to the trace for z of norm 1."""


def target_norm(classes: int) -> float:
    """Returns b = ‖e_y − 1/C‖, the same for every class."""
    return math.sqrt(1 - 1 / classes)


def first_gradient(pool: Pool, classes: int) -> Tensor:
    """Returns the mean cross-entropy's gradient at W = 0, [C, d], from the sums of e/b ⊗ z."""
    gradient: Tensor = pool.sums.view(classes, -1) * (-target_norm(classes) / pool.records)
    return gradient.float()


def moment_rows(z_Nd: Tensor, labels_N: Tensor, classes: int) -> Moments:
    """Returns each example's contribution to the second release."""
    targets = F.one_hot(labels_N, classes).to(z_Nd.dtype) - 1 / classes
    return Moments(z_Nd, targets, target_norm(classes))


def crossed_rows(z_Nd: Tensor, labels_N: Tensor, classes: int) -> Outer:
    """Returns each example's contribution without second moments: e/b ⊗ z, of norm at most 1."""
    targets = F.one_hot(labels_N, classes).to(z_Nd.dtype) - 1 / classes
    return Outer(targets / target_norm(classes), z_Nd, 1.0)


def step_rows(z_Nd: Tensor, labels_N: Tensor, weight_Cd: Tensor, clip: float) -> Outer:
    """Returns each example's contribution to a step: clip(p − y) ⊗ z, the clipped gradient of the
    cross-entropy."""
    wrong = torch.softmax(row_product(z_Nd, weight_Cd), dim=1) - F.one_hot(labels_N, len(weight_Cd))
    return Outer(wrong, z_Nd, clip)


@dataclass(frozen=True)
class ClassMoments:
    """The second release, unpacked and divided by the public number of records.

    Attributes:
        second: (1/n) Σ z zᵀ, symmetric [d, d], float64.
        crossed: (1/n) Σ e ⊗ z, [C, d], float64.
        noise: the standard deviation of the noise in a diagonal entry of `second`.
    """

    second: Tensor
    crossed: Tensor
    noise: float

    @classmethod
    def unpacked(cls, pool: Pool, dimension: int, classes: int) -> ClassMoments:
        """Unpacks the pooled sums.

        Args:
            pool: Σ √½·[svec(z zᵀ); z ⊗ e/b] over all clients, with their noise.
            dimension, classes: d, C.
        """
        scaled = pool.sums.double() * (math.sqrt(2) / pool.records)
        packed = dimension * (dimension + 1) // 2
        crossed = scaled[packed:].view(classes, dimension) * target_norm(classes)
        noise = pool.noise_std * math.sqrt(2) / pool.records
        return cls(smat(scaled[:packed], dimension), crossed, noise)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues and eigenvectors of the released second moments.

    Attributes:
        values: [d], at least 0, plus the ridge.
        vectors: [d, d], in columns.
    """

    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, moments: ClassMoments, ridge: float) -> Spectrum:
        """Computes the spectrum; negative eigenvalues are caused by noise and become 0.

        Args:
            moments: released.
            ridge: the value added to each eigenvalue, over noise·√d; the noise's largest eigenvalue
                is about 1.4·noise·√d.
        """
        values, vectors = torch.linalg.eigh(moments.second)
        size = len(values)
        shift = max(ridge * moments.noise * math.sqrt(size), EXACT / size)
        return cls(values.clamp_min(0) + shift, vectors)

    def solve(self, crossed_Cd: Tensor) -> Tensor:
        """Returns crossed·(A + λ)⁻¹, [C, d]."""
        return ((crossed_Cd @ self.vectors) / self.values) @ self.vectors.T

    def step(self, gradient_Cd: Tensor, floor: float) -> Tensor:
        """Returns the Newton-like direction gradient·V diag(1/max(w, floor)) Vᵀ. Along an
        eigenvector whose eigenvalue is below the noise, a full step would add only noise."""
        scaled = gradient_Cd @ self.vectors / self.values.clamp_min(floor)
        return scaled @ self.vectors.T


@dataclass(frozen=True)
class Pace:
    """Steps v ← m·v + g, W ← W − rate·v.

    Attributes:
        rate: of each step.
        momentum: m.
    """

    rate: float
    momentum: float

    def step(
        self, weight_Cd: Tensor, gradient_Cd: Tensor, velocity_Cd: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns W and v after a step; v is None before the first."""
        velocity = gradient_Cd
        if velocity_Cd is not None:
            velocity = self.momentum * velocity_Cd + gradient_Cd
        return weight_Cd - self.rate * velocity, velocity


def total_weight(steps: int, momentum: float) -> float:
    """Returns τ over the rate, the total weight of the gradients: Σ_t (1 − mᵗ)/(1 − m).

    >>> total_weight(2, 0.5)
    2.5
    """
    return sum((1 - momentum**t) / (1 - momentum) for t in range(1, steps + 1))


def pace(noise: float, steps: int, logit_noise: float, max_rate: float, momentum: float) -> Pace:
    """Returns the steps whose noise in a logit is about `logit_noise`, at most at `max_rate`.

    Args:
        noise: ν/√T, the standard deviation of a gradient's coordinate if the whole budget were
            spent on one gradient; 0: steps of `max_rate`.
        steps: T.
        logit_noise: noise in a logit, of all T steps together.
        max_rate: the largest rate that is stable along the steepest direction.
        momentum: m, below 1.

    >>> pace(0.001, steps=1, logit_noise=0.1, max_rate=200.0, momentum=0.5)
    Pace(rate=100.0, momentum=0.5)
    """
    rate = max_rate
    if noise > 0:
        rate = min(max_rate, logit_noise / noise / total_weight(steps, momentum))
    return Pace(rate, momentum)
