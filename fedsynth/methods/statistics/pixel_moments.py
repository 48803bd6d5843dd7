"""Released moments of small pictures, and images that are drawn from them.

A small picture is a downsampled image. u is the vector of norm 1 that
`fedsynth.features.scattering` makes of an image, and e_y is the image's one-hot label. Clients
release noisy sums of √½·[svec(u uᵀ); e_y ⊗ u], which are `Moments` with targets of norm 1. The sums
give the class counts, the class means and a common covariance around the means, of which only the
directions above the noise are kept. Everything in this module is post-processing of such sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.features.feature_map import Shape
from fedsynth.features.scattering import CONSTANT, cells_of, low_pass
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.privacy.plans import FIRST, ReleasePlan
from fedsynth.privacy.products import Moments, smat

PIXELS = "pixels"
"""The name of the release plan."""
WHITE = 0.98
"""The quantile of an image's pixels that is scaled to white, because small pictures have lost their
brightness."""
FEWEST = 1e-3
"""The smallest share of all examples that a class is assumed to have. A smaller released share is
noise."""


def pixel_rows(u_ND: Tensor, labels_N: Tensor, classes: int) -> Moments:
    """Returns the contribution of each example, √½·[svec(u uᵀ); e_y ⊗ u], whose norm is at most
    1."""
    return Moments(u_ND, F.one_hot(labels_N, classes).to(u_ND.dtype), 1.0)


def pixel_plan(
    make: Callable[..., ReleasePlan], share: float, shape: Shape, classes: int
) -> ReleasePlan:
    """Returns the plan of this release, which takes place in the first exchange of a round.

    Args:
        make: creates a plan with the fields that all plans of the method share.
        share: share of the budget μ².
        shape: shape of the images.
        classes: C.
    """
    return make(
        name=PIXELS,
        quantity="products of small pictures with labels, and their second moments",
        clipped="u of each example, an image averaged in cells over its own norm, beside a "
        "constant; the joint vector of its products has norm at most 1",
        clip=1.0,
        dimension=pixel_width(low_pass(shape).dimension, classes),
        relative_noise_multiplier=share**-0.5,
        phase=FIRST,
        signal=classes**-0.5,
    )


def pixel_width(dimension: int, classes: int) -> int:
    """Returns the number of coordinates of the release."""
    return dimension * (dimension + 1) // 2 + dimension * classes


@dataclass(frozen=True, eq=False)
class PixelMoments:
    """Moments of normalised small pictures v/‖v‖.

    Attributes:
        means: the mean of each class, [C, D].
        roots: columns that span the variation within classes, [D, k]. roots·rootsᵀ is the
            covariance that all classes share, restricted to its eigenvectors above the noise.
    """

    means: Tensor
    roots: Tensor

    @classmethod
    def unpacked(cls, pool: Pool, dimension: int, classes: int) -> PixelMoments:
        """Unpacks the moments from a sum over clients.

        Args:
            pool: Σ √½·[svec(u uᵀ); e_y ⊗ u] over all clients, with its noise.
            dimension, classes: the dimension of u, and C.
        """
        scaled = pool.sums.double() * (math.sqrt(2) / pool.records)
        packed = dimension * (dimension + 1) // 2
        gram = smat(scaled[:packed], dimension)[:-1, :-1] / (1 - CONSTANT**2)
        crossed = scaled[packed:].view(classes, dimension)
        noise = pool.noise_std * math.sqrt(2) / pool.records / (1 - CONSTANT**2)
        shares = (crossed[:, -1:] / CONSTANT).clamp_min(max(FEWEST, noise))
        means = crossed[:, :-1] / shares / math.sqrt(1 - CONSTANT**2)
        within = gram - (shares * means).T @ means
        values, vectors = torch.linalg.eigh(within)
        significant = values > max(noise * math.sqrt(dimension), 1e-9)
        return cls(means, vectors[:, significant] * values[significant].sqrt())

    def drawn(
        self, count: int, shape: Shape, variety: tuple[float, float], generator: torch.Generator
    ) -> Tensor:
        """Draws images of each class from the Gaussian of the class, [C, count, channels, H, W] in
        [0, 1].

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
