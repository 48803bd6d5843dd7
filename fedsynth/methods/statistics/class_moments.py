"""Post-processing of summed class statistics: a classifier in closed form, and steps on noisy
gradients.

With z = clip₁(T(φ(x) − m)/R) and e = e_y − 1/C, clients release noisy sums of √½·[svec(z zᵀ); z ⊗
e/b] with b = ‖e‖ = √(1 − 1/C) (`fedsynth.privacy.products.Moments`). In later rounds, they release
noisy sums of clip(p − y) ⊗ z.

Suppose that each gradient has noise ν per coordinate. After T steps W ← W − Σ_t η_t g_t with
effective lengths η_t, the noise is ν·√(Σ η_t²) in each coordinate of W, and also in the logit of a
z of norm 1. If a budget is divided over T releases, ν grows with √T. The noise therefore depends
only on τ = Σ η_t, and not on the number of steps. As τ grows, the classifier moves from its class
means to the maximum likelihood, and the noise grows too. `pace` chooses τ by the noise, which is
known publicly before any data are read.
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
"""The ridge of moments without noise, relative to the trace of the moments for z of norm 1."""


def target_norm(classes: int) -> float:
    """Returns b = ‖e_y − 1/C‖, which is the same for every class."""
    return math.sqrt(1 - 1 / classes)


def first_gradient(pool: Pool, classes: int) -> Tensor:
    """Computes the gradient of the mean cross-entropy at W = 0, [C, d], from the sums of e/b ⊗
    z."""
    gradient: Tensor = pool.sums.view(classes, -1) * (-target_norm(classes) / pool.records)
    return gradient.float()


def moment_rows(z_Nd: Tensor, labels_N: Tensor, classes: int) -> Moments:
    """Returns the contribution of each example to the release of moments, with second moments."""
    targets = F.one_hot(labels_N, classes).to(z_Nd.dtype) - 1 / classes
    return Moments(z_Nd, targets, target_norm(classes))


def crossed_rows(z_Nd: Tensor, labels_N: Tensor, classes: int) -> Outer:
    """Returns the contribution of each example to the release of moments, without second moments.

    The contribution is e/b ⊗ z, whose norm is at most 1.
    """
    targets = F.one_hot(labels_N, classes).to(z_Nd.dtype) - 1 / classes
    return Outer(targets / target_norm(classes), z_Nd, 1.0)


def step_rows(z_Nd: Tensor, labels_N: Tensor, weight_Cd: Tensor, clip: float) -> Outer:
    """Returns the contribution of each example to a gradient step.

    The contribution is clip(p − y) ⊗ z, the clipped gradient of the cross-entropy.
    """
    wrong = torch.softmax(row_product(z_Nd, weight_Cd), dim=1) - F.one_hot(labels_N, len(weight_Cd))
    return Outer(wrong, z_Nd, clip)


@dataclass(frozen=True)
class ClassMoments:
    """The released moments, divided by the public number of records.

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
        """Unpacks the moments from a sum over clients.

        Args:
            pool: Σ √½·[svec(z zᵀ); z ⊗ e/b] over all clients, with its noise.
            dimension, classes: d and C.
        """
        scaled = pool.sums.double() * (math.sqrt(2) / pool.records)
        packed = dimension * (dimension + 1) // 2
        crossed = scaled[packed:].view(classes, dimension) * target_norm(classes)
        noise = pool.noise_std * math.sqrt(2) / pool.records
        return cls(smat(scaled[:packed], dimension), crossed, noise)


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues and eigenvectors of the released second moments.

    Attributes:
        values: the eigenvalues [d], clamped to at least 0, plus the ridge.
        vectors: the eigenvectors as columns, [d, d].
    """

    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, moments: ClassMoments, ridge: float) -> Spectrum:
        """Computes the spectrum of second moments.

        Negative eigenvalues are caused by noise and are set to 0.

        Args:
            moments: the released moments.
            ridge: the value that is added to each eigenvalue, divided by noise·√d. The largest
                eigenvalue of the noise is about 1.4·noise·√d.
        """
        values, vectors = torch.linalg.eigh(moments.second)
        size = len(values)
        shift = max(ridge * moments.noise * math.sqrt(size), EXACT / size)
        return cls(values.clamp_min(0) + shift, vectors)

    def solve(self, crossed_Cd: Tensor) -> Tensor:
        """Returns crossed·(A + λ)⁻¹, [C, d]."""
        return ((crossed_Cd @ self.vectors) / self.values) @ self.vectors.T

    def step(self, gradient_Cd: Tensor, floor: float) -> Tensor:
        """Returns the Newton-like direction gradient·V diag(1/max(w, floor)) Vᵀ.

        The floor is needed because, along an eigenvector whose eigenvalue is below the noise, a
        full step would add only noise.
        """
        scaled = gradient_Cd @ self.vectors / self.values.clamp_min(floor)
        return scaled @ self.vectors.T


@dataclass(frozen=True)
class Pace:
    """The size of the steps v ← m·v + g, W ← W − rate·v.

    Attributes:
        rate: the rate of each step.
        momentum: m.
    """

    rate: float
    momentum: float

    def step(
        self, weight_Cd: Tensor, gradient_Cd: Tensor, velocity_Cd: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns W and v after one step.

        Args:
            weight_Cd: W.
            gradient_Cd: g.
            velocity_Cd: v, or None before the first step.
        """
        velocity = gradient_Cd
        if velocity_Cd is not None:
            velocity = self.momentum * velocity_Cd + gradient_Cd
        return weight_Cd - self.rate * velocity, velocity


def total_weight(steps: int, momentum: float) -> float:
    """Computes Σ_t (1 − mᵗ)/(1 − m), the sum of the weights that momentum gives the gradients,
    which is τ divided by the rate.

    >>> total_weight(2, 0.5)
    2.5
    """
    return sum((1 - momentum**t) / (1 - momentum) for t in range(1, steps + 1))


def pace(noise: float, steps: int, logit_noise: float, max_rate: float, momentum: float) -> Pace:
    """Chooses a rate with which all steps together add noise of about `logit_noise` to a logit.

    The rate is at most `max_rate`.

    Args:
        noise: ν/√T, the standard deviation of a coordinate of the gradient if the whole budget were
            spent on one gradient. With 0, the rate is `max_rate`.
        steps: T.
        logit_noise: standard deviation of the noise of all T steps together in a logit.
        max_rate: the largest rate that is stable along the steepest direction.
        momentum: m, below 1.

    >>> pace(0.001, steps=1, logit_noise=0.1, max_rate=200.0, momentum=0.5)
    Pace(rate=100.0, momentum=0.5)
    """
    rate = max_rate
    if noise > 0:
        rate = min(max_rate, logit_noise / noise / total_weight(steps, momentum))
    return Pace(rate, momentum)
