"""Whitening by released covariances: of a feature map's channels, and of its cells.

Public images whiten a feature map as far as they are like the data. What is left are directions in
which the data vary far more than in others: they take most of a clipped vector's norm, and steps
along all others are slow. A covariance of all d coordinates has d²/2 entries and drowns; those of
channels and of cells have few, and are released beside the centre, of u = clip₁(φ/B) with B the
map's norm bound (`fedsynth.privacy.products.Grams`). All else here is post-processing: T has an
eigenvector's direction times λ^(−POWER/2), with every eigenvalue below its noise taken to be the
noise, so that directions of which nothing is known stay alike. It is the covariance of u about its
mean that is flattened; z is of φ itself, which may be longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.random_process import LEAST
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.models.feature_linear import root_names
from fedsynth.privacy.plans import FIRST, PrivatePlan
from fedsynth.privacy.products import Grams, grams_width, matrices_of, smat

YES, NO, AUTO = "yes", "no", "auto"
COVARIANCES = "covariances"
"""The name of the plan."""
CELLS_PART = 0.16
"""Of a vector's squared norm for cells, of which there are few, so that their noise is small."""
POWER = 0.75
"""1: white. Less, as eigenvalues are uncertain; found on held-out training images."""
FLOOR = 0.02
"""The least eigenvalue over their mean, where there is no noise."""


def whitens(choice: str, features: FeatureMap, shape: Shape) -> bool:
    """Whether z is whitened in a private run; by public facts alone.

    Args:
        choice: "yes", "no" or "auto": of grey images of 12 pixels a side and more.
        features: the map.
        shape: of the images.

    Raises:
        SettingError: "yes" of features that have no channels and cells.
    """
    if choice == AUTO:
        return bool(features.blocks) and shape[0] == 1 and min(shape[1:]) >= LEAST
    if choice == YES and not features.blocks:
        raise SettingError(
            "method",
            "whitening",
            f"needs features of channels and cells (FeatureMap.blocks), which {features.name!r} "
            "are not",
            value=choice,
        )
    return choice == YES


def covariance_rows(features_Nd: Tensor, features: FeatureMap) -> Grams:
    """What each example adds: [p·svec(U Uᵀ); q·svec(Uᵀ U)] of u's matrices, of norm at most 1."""
    return Grams(features_Nd / features.norm_bound, features.blocks, CELLS_PART)


def covariance_plan(
    make: Callable[..., PrivatePlan], share: float, features: FeatureMap
) -> PrivatePlan:
    """The release, in the first exchange of its round.

    Args:
        make: a plan, of what all of a method's plans have in common.
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
        noise_ratio=share**-0.5,
        phase=FIRST,
        signal=white_signal(features.blocks),
    )


def white_signal(blocks: Sequence[tuple[int, int]]) -> float:
    """Norm over n of the sum of n examples whose channels and cells are white, blocks alike:
    whether a flat spectrum can be seen.

    >>> round(white_signal([(1, 1)]), 3)
    1.0
    """
    each = ((1 - CELLS_PART) / channels + CELLS_PART / cells for channels, cells in blocks)
    return math.sqrt(sum(each)) / len(blocks)


def released_roots(
    pool: Pool, centre_d: Tensor, centre_deviation: float, features: FeatureMap
) -> dict[str, Tensor]:
    """T's matrices by their names in a model (`fedsynth.models.feature_linear.root_names`).

    Args:
        pool: the summed release; its records are the public number, and where there are more or
            fewer, T is of somewhat other covariances.
        centre_d: the released centre, in the map's units.
        centre_deviation: of the noise in each of its coordinates.
        features: the map.
    """
    bound = features.norm_bound
    noise = pool.deviation / pool.records
    sums = pool.sums.double() / pool.records
    mean = (centre_d.double() / bound)[None]
    spread = (centre_deviation / bound) ** 2
    found: list[Tensor] = []
    start = 0
    for m in matrices_of(mean, features.blocks):
        sides = ((m[0], 1 - CELLS_PART), (m[0].T, CELLS_PART))
        for side, part in sides:
            size, other = side.shape
            width = size * (size + 1) // 2
            second = smat(sums[start : start + width], size) / math.sqrt(part)
            own = spread * other * torch.eye(size, dtype=second.dtype, device=second.device)
            found.append(_root(second - side @ side.T + own, noise / math.sqrt(part)).float())
            start += width
    return dict(zip(root_names(features.blocks), found, strict=True))


def _root(covariance: Tensor, noise: float) -> Tensor:
    """The symmetric matrix that makes it flatter and keeps its trace.

    Args:
        covariance: released [size, size].
        noise: the deviation of a diagonal entry; those beside it have √½ of that, so that the noise
            alone has eigenvalues up to about noise·√(2·size): single ones are above it by chance,
            by up to a quarter.
    """
    values, vectors = torch.linalg.eigh(covariance)
    mean = float(values.clamp_min(0).mean())
    least = max(FLOOR * mean, noise * math.sqrt(2 * len(values)))
    if least <= 0:  # a client's features that are all alike
        return torch.eye(len(values), dtype=values.dtype, device=values.device)
    factors = (values.clamp_min(least) / least) ** (-POWER / 2)
    before = float(values.sum())
    after = float((values * factors**2).sum())
    if before > 0 and after > 0:  # noise's eigenvalues of either sign make the ratio uncertain
        most = max(1.0, float(values.max()) / least) ** POWER
        factors = factors * math.sqrt(min(max(1.0, before / after), most))
    root: Tensor = (vectors * factors) @ vectors.T
    return root
