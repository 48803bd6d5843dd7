"""Whitening of a feature map by released covariances of its channels and of its spatial cells.

A whitening that is computed from public images works only if these images resemble the data.
The data may then vary far more in some directions than in others. Such directions use up most of
the norm of a clipped vector, and steps along all other directions are slow. A covariance of all d
coordinates has d²/2 entries, which are too many to be seen above the noise. The covariances of
channels and of spatial cells have few entries. They are released together with the centre, for u =
clip₁(φ/B) with B the norm bound of the map (`fedsynth.privacy.products.Grams`).

The rest of this module is post-processing. The matrix T scales each eigenvector by λ^(−POWER/2).
Eigenvalues below the noise are set to the noise, so that all unknown directions are scaled equally.
T flattens the covariance of u around its mean, whereas z is computed from φ itself, which may be
longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedsynth.features.feature_map import FeatureMap
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.models.on_features import root_names
from fedsynth.privacy.products import Grams, matrices_of, smat

YES, NO, AUTO = "yes", "no", "auto"
# The name of the release plan of the covariances.
COVARIANCES = "covariances"
# The share of the products of spatial cells in the squared norm of a contribution. There are few
# cells, so the noise of their covariance is small.
CELLS_PART = 0.16
# The exponent of the whitening. 1 would make the features white. A smaller value is used because
# the eigenvalues are uncertain. It was tuned on held-out training images.
POWER = 0.75
# The smallest eigenvalue that is used without noise, relative to the mean eigenvalue.
FLOOR = 0.02


def covariance_rows(features_Nd: Tensor, features: FeatureMap) -> Grams:
    """Returns the contributions of single examples to the sum of covariances.

    The contribution of an example is [p·svec(U Uᵀ); q·svec(Uᵀ U)], where U are the matrices of u.
    Its norm is at most 1.
    """
    return Grams(features_Nd / features.norm_bound, features.blocks, CELLS_PART)


def white_signal(blocks: Sequence[tuple[int, int]]) -> float:
    """Returns the norm of the mean contribution if channels and spatial cells are white.

    The norm shows whether a flat spectrum is above the noise. All blocks of the feature map are
    assumed to have equal norms.

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
    """Computes the matrices that make up the whitening T, from the released covariances.

    The keys are the names of the matrices in a model (`fedsynth.models.on_features.root_names`).

    Args:
        pool: the release, summed over the clients. If its public number of records differs from the
            true number, the covariances are slightly wrong.
        centre_d: the released centre, in the units of the feature map.
        centre_deviation: standard deviation of the noise in each coordinate of the centre.
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
            # the noise of the mean adds its variance to each diagonal entry of side·sideᵀ
            covariance = second - side @ side.T + centre_variance * summands * identity
            roots.append(_root(covariance, noise / math.sqrt(part)).float())
            start += width
    return dict(zip(root_names(features.blocks), roots, strict=True))


def _root(covariance: Tensor, noise: float) -> Tensor:
    """Computes the symmetric matrix that flattens the spectrum of a covariance and keeps its trace.

    Args:
        covariance: the released covariance [size, size].
        noise: standard deviation of the noise of a diagonal entry. The standard deviation of other
            entries is √½ of it, so the eigenvalues of pure noise reach about noise·√(2·size). By
            chance, single ones exceed this value by up to a quarter.
    """
    values, vectors = torch.linalg.eigh(covariance)
    mean = float(values.clamp_min(0).mean())
    floor = max(FLOOR * mean, noise * math.sqrt(2 * len(values)))
    if floor <= 0:  # all features are identical
        return torch.eye(len(values), dtype=values.dtype, device=values.device)
    factors = (values.clamp_min(floor) / floor) ** (-POWER / 2)
    trace = float(values.sum())
    new_trace = float((values * factors**2).sum())
    if trace > 0 and new_trace > 0:  # noise makes eigenvalues of either sign, the ratio uncertain
        highest = max(1.0, float(values.max()) / floor) ** POWER
        factors = factors * math.sqrt(min(max(1.0, trace / new_trace), highest))
    root: Tensor = (vectors * factors) @ vectors.T
    return root
