"""Post-processing of summed class statistics: a classifier in closed form, and steps on noisy
gradients.

With z = clip₁(T(φ(x) − m)/R) and e = e_y − 1/C, clients release noisy sums of √½·[svec(z zᵀ); z ⊗
e/b] with b = ‖e‖ = √(1 − 1/C) (`fedsynth.privacy.products.Moments`). In later rounds, they release
noisy sums of clip(p − y) ⊗ z.

Suppose that each gradient has noise ν per coordinate. After T steps W ← W − Σ_t η_t g_t with
effective lengths η_t, the noise is ν·√(Σ η_t²) in each coordinate of W, and also in the logit of a
z of norm 1. If a budget is divided over T releases, ν grows with √T. The noise therefore depends
only on τ = Σ η_t, and not on the number of steps. As τ grows, the classifier moves from its class
means to the maximum likelihood, and the noise grows too. `step_rate` chooses τ by the noise, which
is known publicly before any data are read.

The module also has the moments of small pictures, and draws images from them. A small picture is a
downsampled image. u is the vector of norm 1 that `fedsynth.features.scattering` makes of an image,
and e_y is the image's one-hot label. Clients release noisy sums of √½·[svec(u uᵀ); e_y ⊗ u], which
are `Moments` with targets of norm 1. The sums give the class counts, the class means and a common
covariance around the means, of which only the directions above the noise are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.features.feature_map import Shape
from fedsynth.features.scattering import CONSTANT, cells_of
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.privacy.products import Moments, Outer, smat
from fedsynth.privacy.row_products import row_product

# The ridge of moments without noise, relative to the trace of the moments for z of norm 1.
EXACT = 1e-6


def target_norm(classes: int) -> float:
    """Returns b = ‖e_y − 1/C‖, which is the same for every class."""
    return math.sqrt(1 - 1 / classes)


def first_gradient(pool: Pool, classes: int) -> Tensor:
    """Computes the gradient of the mean cross-entropy at a classifier with zero weights, [C, d].

    It follows from the sums of e/b ⊗ z.
    """
    gradient: Tensor = pool.sums.view(classes, -1) * (-target_norm(classes) / pool.records)
    return gradient.float()


def moment_rows(z_Nd: Tensor, labels_N: Tensor, classes: int, *, second: bool) -> Moments | Outer:
    """Returns each example's contribution to the release of moments.

    If the release has no second moments, the contribution is e/b ⊗ z, whose norm is at most 1.
    """
    targets = F.one_hot(labels_N, classes).to(z_Nd.dtype) - 1 / classes
    if second:
        return Moments(z_Nd, targets, target_norm(classes))
    return Outer(targets / target_norm(classes), z_Nd, 1.0)


def step_rows(z_Nd: Tensor, labels_N: Tensor, weight_Cd: Tensor, clip: float) -> Outer:
    """Returns the contribution of each example to a gradient step.

    The contribution is clip(p − y) ⊗ z, the clipped gradient of the cross-entropy.
    """
    wrong = torch.softmax(row_product(z_Nd, weight_Cd), dim=1) - F.one_hot(labels_N, len(weight_Cd))
    return Outer(wrong, z_Nd, clip)


def unpacked(pool: Pool, dimension: int, classes: int) -> tuple[Tensor, Tensor, float]:
    """Extracts second moments and products with targets from a sum of `Moments` over the clients.

    Args:
        pool: Σ √½·[svec(z zᵀ); t ⊗ z] over all clients, with its noise.
        dimension, classes: the dimension of z, and of the targets t.

    Returns:
        (1/n) Σ z zᵀ, symmetric [d, d], (1/n) Σ t ⊗ z [C, d], both float64, and the standard
        deviation of the noise in a diagonal entry of the first.
    """
    scaled = pool.sums.double() * (math.sqrt(2) / pool.records)
    packed = dimension * (dimension + 1) // 2
    noise = pool.noise_std * math.sqrt(2) / pool.records
    return smat(scaled[:packed], dimension), scaled[packed:].view(classes, dimension), noise


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
    def of(cls, second: Tensor, noise: float, ridge: float) -> Spectrum:
        """Computes the spectrum of second moments.

        Negative eigenvalues are caused by noise and are set to 0.

        Args:
            second, noise: the released second moments and their noise, see `unpacked`.
            ridge: the value that is added to each eigenvalue, divided by noise·√d. The largest
                eigenvalue of the noise is about 1.4·noise·√d.
        """
        values, vectors = torch.linalg.eigh(second)
        size = len(values)
        shift = max(ridge * noise * math.sqrt(size), EXACT / size)
        return cls(values.clamp_min(0) + shift, vectors)

    def solve(self, crossed_Cd: Tensor) -> Tensor:
        """Returns the weights of the ridge classifier, crossed·(A + λ)⁻¹ [C, d]."""
        return ((crossed_Cd @ self.vectors) / self.values) @ self.vectors.T

    def step(self, gradient_Cd: Tensor, floor: float) -> Tensor:
        """Returns the direction of a Newton-like step, gradient·V diag(1/max(w, floor)) Vᵀ.

        The floor is needed because, along an eigenvector whose eigenvalue is below the noise, a
        full step would add only noise.
        """
        scaled = gradient_Cd @ self.vectors / self.values.clamp_min(floor)
        return scaled @ self.vectors.T


def total_weight(steps: int, momentum: float) -> float:
    """Computes the total weight that steps with momentum give to all gradients.

    It is Σ_t (1 − mᵗ)/(1 − m), which is τ divided by the rate.

    >>> total_weight(2, 0.5)
    2.5
    """
    return sum((1 - momentum**t) / (1 - momentum) for t in range(1, steps + 1))


def step_rate(
    noise: float, steps: int, logit_noise: float, max_rate: float, momentum: float
) -> float:
    """Returns the step size η with which all steps together add noise of about `logit_noise` to a
    logit.

    The steps are v ← m·v + g and W ← W − η·v.

    The rate is at most `max_rate`.

    Args:
        noise: ν/√T, the standard deviation of a coordinate of the gradient if the whole budget were
            spent on one gradient. With 0, the rate is `max_rate`.
        steps: T.
        logit_noise: standard deviation of the noise of all T steps together in a logit.
        max_rate: the largest rate that is stable along the steepest direction.
        momentum: m, below 1.

    >>> step_rate(0.001, steps=1, logit_noise=0.1, max_rate=200.0, momentum=0.5)
    100.0
    """
    if noise <= 0:
        return max_rate
    return min(max_rate, logit_noise / noise / total_weight(steps, momentum))


# The name of the release plan of small pictures.
PIXELS = "pixels"
# The quantile of an image's pixels that is scaled to white, because small pictures have lost their
# brightness.
WHITE = 0.98
# The smallest share of all examples that a class is assumed to have. A smaller released share is
# noise.
FEWEST = 1e-3


def pixel_rows(u_ND: Tensor, labels_N: Tensor, classes: int) -> Moments:
    """Returns each example's contribution to the release of small pictures.

    It is √½·[svec(u uᵀ); e_y ⊗ u], whose norm is at most 1.
    """
    return Moments(u_ND, F.one_hot(labels_N, classes).to(u_ND.dtype), 1.0)


def pixel_width(dimension: int, classes: int) -> int:
    """Returns the number of coordinates of the release of small pictures."""
    return dimension * (dimension + 1) // 2 + dimension * classes


@dataclass(frozen=True, eq=False)
class PixelMoments:
    """The moments of small pictures, after each picture v was scaled to v/‖v‖.

    Attributes:
        means: the mean of each class, [C, D].
        roots: columns that span the variation within classes, [D, k]. roots·rootsᵀ is the
            covariance that all classes share, restricted to its eigenvectors above the noise.
    """

    means: Tensor
    roots: Tensor

    @classmethod
    def unpacked(cls, pool: Pool, dimension: int, classes: int) -> PixelMoments:
        """Extracts the moments from a release that was summed over the clients.

        Args:
            pool: Σ √½·[svec(u uᵀ); e_y ⊗ u] over all clients, with its noise.
            dimension, classes: the dimension of u, and C.
        """
        second, crossed, noise = unpacked(pool, dimension, classes)
        gram = second[:-1, :-1] / (1 - CONSTANT**2)
        noise /= 1 - CONSTANT**2
        shares = (crossed[:, -1:] / CONSTANT).clamp_min(max(FEWEST, noise))
        means = crossed[:, :-1] / shares / math.sqrt(1 - CONSTANT**2)
        within = gram - (shares * means).T @ means
        values, vectors = torch.linalg.eigh(within)
        significant = values > max(noise * math.sqrt(dimension), 1e-9)
        return cls(means, vectors[:, significant] * values[significant].sqrt())

    def drawn(
        self, count: int, shape: Shape, variety: tuple[float, float], generator: torch.Generator
    ) -> Tensor:
        """Draws random images of each class from a Gaussian with the moments of the class.

        The images have the shape [C, count, channels, H, W], with pixels in [0, 1].

        Args:
            count: number of images of each class.
            shape: (channels, H, W).
            variety: fractions of the standard deviation for the first and the last image of a
                class. The images between them have evenly spaced fractions.
            generator: a CPU generator.
        """
        classes = len(self.means)
        width = self.roots.shape[1]
        draws = torch.randn(classes, count, width, generator=generator, dtype=torch.float64)
        spread = torch.linspace(*variety, count, dtype=torch.float64).view(1, -1, 1)
        pictures = self.means.cpu()[:, None] + (spread * draws) @ self.roots.cpu().T
        return enlarged(pictures.flatten(0, 1), shape).view(classes, count, *shape)


def enlarged(pictures_ND: Tensor, shape: Shape) -> Tensor:
    """Enlarges small pictures [N, D] of any brightness to images [N, channels, H, W] in [0, 1]."""
    small = pictures_ND.float().reshape(-1, *cells_of(shape))
    large = F.interpolate(small, size=shape[1:], mode="bicubic", align_corners=False)
    white = large.flatten(1).quantile(WHITE, dim=1).clamp_min(1e-6).view(-1, 1, 1, 1)
    return (large / white).clamp(0, 1)


def sharpened(x_NCHW: Tensor, steepness_N: Tensor, middle_N: Tensor) -> Tensor:
    """Sharpens blurred images by a steeper curve from black to white.

    Averages of many images are blurred, whereas images are not. The curve is (s(x) − s(0))/(s(1) −
    s(0)), where s(x) is the logistic function of steepness·(x − middle).

    >>> x = torch.tensor([0.0, 0.4, 1.0]).view(1, 1, 1, 3)
    >>> sharpened(x, torch.tensor([10.0]), torch.tensor([0.4])).flatten()
    tensor([0.0000, 0.4921, 1.0000])
    """
    k = steepness_N.view(-1, 1, 1, 1)
    middle = middle_N.view(-1, 1, 1, 1)
    low = torch.sigmoid(-k * middle)
    high = torch.sigmoid(k * (1 - middle))
    curved: Tensor = (torch.sigmoid(k * (x_NCHW - middle)) - low) / (high - low)
    return curved
