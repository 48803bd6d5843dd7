"""Post-processing of summed class statistics: a closed-form classifier, gradient steps with noise,
and whitening of features.

Let z = clip₁(T(φ(x) − m)/R), e = e_y − 1/C and b = ‖e‖ = √(1 − 1/C). Clients release noisy sums of
√½·[svec(z zᵀ); z ⊗ e/b] (`fedsynth.privacy.products.Moments`), and in later rounds noisy sums of
clip(p − y) ⊗ z.

Suppose that each gradient has noise ν per coordinate. After T steps with effective lengths η_t, W ←
W − Σ_t η_t g_t has the noise ν·√(Σ η_t²) in each coordinate. A unit-norm z has the same noise in
its logits. If a budget is divided over T releases, ν grows with √T. If the lengths are equal, the
noise therefore depends only on τ = Σ η_t, and not on the number of steps. With momentum it is
slightly larger. As τ grows, the classifier moves from its class means to the maximum likelihood,
and the noise grows too. `step_rate` chooses τ by the noise, which is public before any data are
read.

A whitening computed from public images works only if they resemble the data. Otherwise the data may
vary far more in some directions than in others. The former use up most of a clipped vector's norm,
and steps along all others are slow. A covariance of all d coordinates has d²/2 entries, too many to
be seen above the noise. Covariances over channels and over spatial cells have few entries. They are
released together with the centre, for u = clip₁(φ/B) with B the norm bound of the map
(`fedsynth.privacy.products.Grams`).

The whitening matrix T scales each eigenvector by λ^(−POWER/2). Eigenvalues below the noise are set
to the noise (or to `FLOOR` of the mean), so that all unknown directions are scaled equally. A
common factor then roughly keeps the trace. u is clipped and φ is not, so T is only approximately
right for z.

Of z's second moments in a subspace of k directions, only k²/2 entries are released. The subspace is
that of images rendered from released moments of thumbnails, so it contains most of the
directions along which z varies most. These are then shortened (`principal_shortening`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.sums import Pool
from fedsynth.features.feature_map import FeatureMap
from fedsynth.models.on_features import Shortening, root_names
from fedsynth.privacy.products import Grams, Moments, Outer, matrices_of, smat
from fedsynth.privacy.row_products import row_product

# The smallest ridge, with or without noise, relative to the mean eigenvalue when z has norm 1.
EXACT = 1e-6


def target_norm(classes: int) -> float:
    """Returns the norm of a centred one-hot target, b = ‖e_y − 1/C‖ = √(1 − 1/C).

    With one class, all targets are 0. Then b is 1, so that they can be divided by it.
    """
    return math.sqrt(1 - 1 / classes) or 1.0


def gradient_at_zero(pool: Pool, classes: int) -> Tensor:
    """Computes the mean cross-entropy's gradient [C, d] at zero weights, from summed moments."""
    gradient: Tensor = pool.sums.view(classes, -1) * (-target_norm(classes) / pool.records)
    return gradient.float()


def moment_rows(
    z_Nd: Tensor, labels_N: Tensor, classes: int, *, has_second: bool
) -> Moments | Outer:
    """Returns each example's vector for the release of moments.

    Clients release the sum of the vectors. Without second moments, a vector is e/b ⊗ z, of norm at
    most 1.
    """
    targets = F.one_hot(labels_N, classes).to(z_Nd.dtype) - 1 / classes
    if has_second:
        return Moments(z_Nd, targets, target_norm(classes))
    return Outer(targets / target_norm(classes), z_Nd, 1.0)


def step_rows(z_Nd: Tensor, labels_N: Tensor, weight_Cd: Tensor, clip: float) -> Outer:
    """Returns the clipped gradient of each example's cross-entropy, clip(p − y) ⊗ z."""
    wrong = torch.softmax(row_product(z_Nd, weight_Cd), dim=1) - F.one_hot(labels_N, len(weight_Cd))
    return Outer(wrong, z_Nd, clip)


def second_and_crossed(pool: Pool, dimension: int, classes: int) -> tuple[Tensor, Tensor, float]:
    """Splits the summed `Moments` into second moments of z and products of z with the targets.

    Args:
        pool: Σ √½·[svec(z zᵀ); t ⊗ z] over all clients, with its noise.
        dimension, classes: the dimension of z, and of the targets t.

    Returns:
        (1/n) Σ z zᵀ, symmetric [d, d], (1/n) Σ t ⊗ z [C, d], both float64, and the noise's standard
        deviation in the first matrix's diagonal.
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
        """Computes the eigenvalues and eigenvectors of the second moments.

        Negative eigenvalues, caused by noise, are set to 0.

        Args:
            second, noise: the released second moments and their noise, see `second_and_crossed`.
            ridge: the value that is added to each eigenvalue, divided by noise·√d. The largest
                eigenvalue of the noise is about 1.4·noise·√d.
        """
        values, vectors = torch.linalg.eigh(second)
        size = len(values)
        shift = max(ridge * noise * math.sqrt(size), EXACT / size)
        return cls(values.clamp_min(0) + shift, vectors)

    def solve(self, crossed_Cd: Tensor) -> Tensor:
        """Returns the weights [C, d] of the ridge classifier, crossed·(A + λ)⁻¹."""
        return ((crossed_Cd @ self.vectors) / self.values) @ self.vectors.T

    def step(self, gradient_Cd: Tensor, floor: float) -> Tensor:
        """Returns the direction of a Newton-like step, gradient·V diag(1/max(values, floor)) Vᵀ.

        Without the floor, a full step along an eigenvector below the noise would add only noise.
        """
        scaled = gradient_Cd @ self.vectors / self.values.clamp_min(floor)
        return scaled @ self.vectors.T


def total_weight(steps: int, momentum: float) -> float:
    """Returns the sum of the weights of all gradients in SGD with momentum m.

    A gradient that enters t steps has the weight 1 + m + … + mᵗ⁻¹ = (1 − mᵗ)/(1 − m).

    >>> total_weight(2, 0.5)
    2.5
    """
    return sum((1 - momentum**t) / (1 - momentum) for t in range(1, steps + 1))


def step_rate(
    noise: float, steps: int, logit_noise: float, max_rate: float, momentum: float
) -> float:
    """Returns a step size η that limits the noise of all steps together.

    The noise in a logit is at most about `logit_noise`, and η is at most `max_rate`. The steps are
    v ← m·v + g and W ← W − η·v.

    Args:
        noise: ν/√T, the gradient's standard deviation per coordinate if the whole budget were spent
            on one gradient. With 0, the rate is `max_rate`.
        steps: T.
        logit_noise: standard deviation of all T steps' total noise in a logit.
        max_rate: the largest rate that is stable along the steepest direction.
        momentum: m, below 1.

    >>> step_rate(0.001, steps=1, logit_noise=0.1, max_rate=200.0, momentum=0.5)
    100.0
    """
    if noise <= 0:
        return max_rate
    return min(max_rate, logit_noise / noise / total_weight(steps, momentum))


# The spatial cells' share of a contribution's squared norm. There are few cells, so their
# covariance's noise is small.
CELLS_PART = 0.16
# The whitening's exponent. 1 would make the features white. It is smaller because the eigenvalues
# are uncertain. It was tuned on held-out training images.
POWER = 0.75
# The smallest eigenvalue that is used, relative to the mean eigenvalue. Noise may raise it.
FLOOR = 0.02


def covariance_rows(features_Nd: Tensor, features: FeatureMap) -> Grams:
    """Returns each example's vector for the release of covariances.

    The vector is [p·svec(U Uᵀ); q·svec(Uᵀ U)], where U are the matrices of u. Its norm is at most
    1.
    """
    return Grams(features_Nd / features.norm_bound, features.blocks, CELLS_PART)


def white_signal(blocks: Sequence[tuple[int, int]]) -> float:
    """Returns the norm of the mean vector of `covariance_rows` for uncorrelated features.

    The norm shows whether a flat spectrum is above the noise. All feature-map blocks are assumed to
    have equal norms.

    >>> round(white_signal([(1, 1)]), 3)
    1.0
    """
    square = 0.0
    for channels, cells in blocks:
        square += (1 - CELLS_PART) / channels + CELLS_PART / cells
    return math.sqrt(square) / len(blocks)


def released_roots(
    pool: Pool, centre_d: Tensor, centre_deviation: float, features: FeatureMap
) -> dict[str, Tensor]:
    """Computes the whitening matrices from the released covariances.

    The keys are names in the model state (`fedsynth.models.on_features.root_names`).

    Args:
        pool: the release, summed over the clients. If its public number of records differs from the
            true number, the covariances are slightly wrong.
        centre_d: the released centre, in the units of the feature map.
        centre_deviation: standard deviation of the centre's noise per coordinate.
        features: the feature map.
    """
    bound = features.norm_bound
    noise = pool.noise_std / pool.records
    sums = pool.sums.double() / pool.records
    mean = (centre_d.double() / bound)[None]
    centre_variance = (centre_deviation / bound) ** 2
    roots: list[Tensor] = []
    start = 0
    for m in matrices_of(mean, features.blocks):
        for side, part in ((m[0], 1 - CELLS_PART), (m[0].T, CELLS_PART)):
            size, summands = side.shape
            width = size * (size + 1) // 2
            second = smat(sums[start : start + width], size) / math.sqrt(part)
            identity = torch.eye(size, dtype=second.dtype, device=second.device)
            # the mean's noise adds its variance to each diagonal entry of side·sideᵀ
            covariance = second - side @ side.T + centre_variance * summands * identity
            roots.append(_root(covariance, noise / math.sqrt(part)).float())
            start += width
    return dict(zip(root_names(features.blocks), roots, strict=True))


# The smallest second moment along a direction that is shortened, in units of the noise's edge. It
# was tuned on held-out training images.
SHORTENED = 0.7


def principal_rows(z_Nd: Tensor, directions_dk: Tensor) -> Grams:
    """Returns each example's vector for the release of second moments in a subspace.

    The vector is svec(y yᵀ), with y = Dᵀz clipped to norm 1. The release has one coordinate more,
    which is 0.
    """
    y_Nk = row_product(z_Nd, directions_dk.T)
    return Grams(y_Nk, ((y_Nk.shape[1], 1),), 0.0)


def principal_shortening(pool: Pool, directions_dk: Tensor) -> tuple[Shortening, float]:
    """Computes a linear map that scales down the directions with the most variance.

    A direction with the second moment λ > λ₀ is scaled by √(λ₀/λ), so that all of them have λ₀, a
    multiple `SHORTENED` of the noise.

    Args:
        pool: the release of second moments in the subspace, summed over the clients.
        directions_dk: orthonormal columns that span the subspace.

    Returns:
        The map, and the factor by which a vector of norm 1 then regains the norm 1, on average.
    """
    k = directions_dk.shape[1]
    sums = pool.sums[: k * (k + 1) // 2].double() / pool.records
    values, vectors = torch.linalg.eigh(smat(sums, k))
    edge = noise_edge(pool.noise_std / pool.records, k)
    floor = max(SHORTENED * edge, EXACT)
    factors = (values.clamp_min(floor) / floor) ** -0.5
    # noise of this edge moves an eigenvalue θ above it to θ + (edge/2)²/θ, and hides all others
    exact = torch.where(values > edge, (values + (values**2 - edge**2).clamp_min(0).sqrt()) / 2, 0)
    square = 1 - float(((1 - factors**2) * exact).sum())
    turned = directions_dk @ vectors.to(directions_dk)
    return Shortening(turned, (1 - factors).float()), max(square, min(floor, 1.0)) ** -0.5


def noise_edge(noise: float, size: int) -> float:
    """Returns noise·√(2d), the expected largest eigenvalue of a symmetric [d, d] noise matrix.

    By chance, single eigenvalues exceed the edge by up to a quarter.

    Args:
        noise: standard deviation of the noise in the diagonal. Other entries have √½ of it.
        size: d, the number of rows.

    >>> noise_edge(0.5, 8)
    2.0
    """
    return noise * math.sqrt(2 * size)


def denoised(values_d: Tensor, floor: float) -> Tensor:
    """Replaces all variances below the noise floor by their mean, or by 0 if the mean is negative.

    The sum of all variances is kept, because a sum's noise is much smaller than its signal.

    >>> denoised(torch.tensor([-1.0, 2.0, 9.0]), floor=3.0)
    tensor([0.5000, 0.5000, 9.0000])
    """
    low = values_d < floor
    mean = torch.where(low, values_d, 0.0).sum() / low.sum().clamp_min(1)
    return torch.where(low, mean.clamp_min(0.0), values_d)


def _root(covariance: Tensor, noise: float) -> Tensor:
    """Computes a symmetric matrix that partly whitens data with the given covariance.

    A limited factor roughly keeps the trace.

    Args:
        covariance: the released covariance [size, size].
        noise: standard deviation of the noise of a diagonal entry (`noise_edge`).
    """
    values, vectors = torch.linalg.eigh(covariance)
    mean = float(values.clamp_min(0).mean())
    floor = max(FLOOR * mean, noise_edge(noise, len(values)))
    if floor <= 0:  # all features are identical
        return torch.eye(len(values), dtype=values.dtype, device=values.device)
    factors = (values.clamp_min(floor) / floor) ** (-POWER / 2)
    trace = float(values.sum())
    new_trace = float((values * factors**2).sum())
    if trace > 0 and new_trace > 0:  # with noise, they may be near 0 and their ratio meaningless
        highest = max(1.0, float(values.max()) / floor) ** POWER
        factors = factors * math.sqrt(min(max(1.0, trace / new_trace), highest))
    root: Tensor = (vectors * factors) @ vectors.T
    return root
