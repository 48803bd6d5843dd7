"""Whitening by released covariances: of a feature map's channels, and of its cells.

Public images whiten a feature map only to the extent that they resemble the data. Directions
remain in which the data vary far more than in others: they take most of a clipped vector's norm,
and steps along all others are slow. A covariance of all d coordinates has d²/2 entries and is lost
in noise. Those of channels and of cells have few entries; they are released with the centre, for
u = clip₁(φ/B) with B the map's norm bound (`fedsynth.privacy.products.Grams`). All else here is
post-processing: T scales each eigenvector by λ^(−POWER/2). Eigenvalues below the noise are set to
the noise, so that unknown directions are scaled equally. T flattens the covariance of u about its
mean; z is computed from φ itself, which may be longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.random_process import MIN_SIDE
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.models.feature_linear import root_names
from fedsynth.privacy.plans import FIRST, ReleasePlan
from fedsynth.privacy.products import Grams, grams_width, matrices_of, smat

YES, NO, AUTO = "yes", "no", "auto"
COVARIANCES = "covariances"
"""The name of the plan."""
CELLS_PART = 0.16
"""The cells' part of a vector's squared norm: cells are few, so their noise is small."""
POWER = 0.75
"""1 would be white; less, as eigenvalues are uncertain. Tuned on held-out training images."""
FLOOR = 0.02
"""The least eigenvalue over the mean eigenvalue, without noise."""


def whitens(choice: str, features: FeatureMap, shape: Shape) -> bool:
    """Returns whether z is whitened in a private run, from public facts only.

    Args:
        choice: "yes", "no" or "auto": for grey images of at least 12 pixels a side.
        features: the map.
        shape: of the images.

    Raises:
        SettingError: "yes" for features without channels and cells.
    """
    if choice == AUTO:
        return bool(features.blocks) and shape[0] == 1 and min(shape[1:]) >= MIN_SIDE
    if choice == YES and not features.blocks:
        raise SettingError(
            "method",
            "whitening",
            "needs features with channels and cells (FeatureMap.blocks), which "
            f"{features.name!r} does not have",
            value=choice,
        )
    return choice == YES


def covariance_rows(features_Nd: Tensor, features: FeatureMap) -> Grams:
    """Returns [p·svec(U Uᵀ); q·svec(Uᵀ U)] of u's matrices for each example, of norm at most 1."""
    return Grams(features_Nd / features.norm_bound, features.blocks, CELLS_PART)


def covariance_plan(
    make: Callable[..., ReleasePlan], share: float, features: FeatureMap
) -> ReleasePlan:
    """Returns the plan of the release, in the first exchange of its round.

    Args:
        make: builds a plan, with the fields that all plans of the method share.
        share: of the budget μ².
        features: the map.
    """
    return make(
        name=COVARIANCES,
        quantity="second moments of features' channels, and of their cells",
        clipped="φ(x)/B of each example, B the map's norm bound; the joint vector of the products "
        "of its channels and of its cells has norm at most 1",
        clip=1.0,
        dimension=grams_width(features.blocks),
        relative_noise_multiplier=share**-0.5,
        phase=FIRST,
        signal=white_signal(features.blocks),
    )


def white_signal(blocks: Sequence[tuple[int, int]]) -> float:
    """Returns the norm over n of the sum of n examples with white channels and cells and equal
    blocks: it shows whether a flat spectrum is above the noise.

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
    """Returns T's matrices by their names in a model (`fedsynth.models.feature_linear.root_names`).

    Args:
        pool: the summed release; its records are the public number, so if the true number differs,
            the covariances are somewhat off.
        centre_d: the released centre, in the map's units.
        centre_deviation: standard deviation of the noise in each of its coordinates.
        features: the map.
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
    """Returns the symmetric matrix that flattens the covariance's spectrum and keeps its trace.

    Args:
        covariance: released [size, size].
        noise: the standard deviation of a diagonal entry; off-diagonal entries have √½ of that, so
            eigenvalues of pure noise reach about noise·√(2·size); single ones exceed it by chance,
            by up to a quarter.
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
