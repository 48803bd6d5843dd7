"""Feature maps that combine scattering coefficients with features of the random-process dictionary.

Both kinds of features are whitened with public images. A second map averages these features over an
image and the horizontal mirror image.

The average is again a map of one image. The part of a vector that distinguishes a scene from its
mirror image seldom indicates the class, but it adds to the vector's norm, which is clipped and
scales the noise. Without this part, a mean is a clearer signal at the same ε. This does not hold
for handwritten characters, or for clothing that faces one way. docs/fedstats.md has the measured
gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.public_statistics import Whitening, constants, map_of_vectors, public_vectors
from fedsynth.features.random_process import CELLS, random_process
from fedsynth.features.scattering import FLOOR, scattering_features, sizes

DICTIONARY = 0.7
"""The scale of the dictionary's features relative to the scattering features. It was chosen on
held-out CIFAR-10 training images."""
CHANNEL_SHARE = 0.5
"""The fraction of channel directions that are kept. These are the directions in which public images
differ most. The fraction was chosen on the same images. With half of the coordinates, accuracy is
the same."""
SMALLER = 0.7
"""A factor for the norm bound and the radius, which are otherwise medians over public random
images. It was chosen on the same images. Photographs vary less in each direction than random
processes do."""


@dataclass(frozen=True, eq=False)
class SideBySide:
    """A function that concatenates the vectors of several functions, each multiplied by a factor.

    Args:
        functions: the functions, each pixels -> [N, d_i].
        factors: one factor for each function.
        blocks: the sizes (channels, cells) of each function's vectors.
    """

    functions: tuple[Callable[[Tensor], Tensor], ...]
    factors: tuple[float, ...]
    blocks: tuple[tuple[int, int], ...]

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Returns the concatenated vectors [N, Σ d_i]."""
        vectors = []
        for function, factor in zip(self.functions, self.factors, strict=True):
            vectors.append(function(x_NCHW) * factor)
        return torch.cat(vectors, dim=1)


@dataclass(frozen=True, eq=False)
class Mirrored:
    """A function that averages another function over an image and the horizontal mirror image."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Returns vectors [N, d], which are the same for an image and the mirror image."""
        return (self.function(x_NCHW) + self.function(x_NCHW.flip(-1))) / 2


def whitened_pair(shape: Shape) -> FeatureMap:
    """Returns the map that concatenates whitened scattering and whitened random-process features.

    Both parts are divided by their public radius. The vectors have 1233 coordinates for 28×28 grey
    images.

    Raises:
        SettingError: the images are neither grey nor colour, or smaller than 12×12 pixels.
    """
    pair = _pair(shape)
    return _map_of(pair, "whitened-scattering+random-process", shape, pair.blocks)


def mirrored_pair(shape: Shape) -> FeatureMap:
    """Returns the map that averages the features of `whitened_pair` over an image and its mirror
    image.

    The vectors have 1962 coordinates for 32×32 colour images.

    Raises:
        SettingError: as for `whitened_pair`.
    """
    pair = _pair(shape)
    return _map_of(Mirrored(pair), "mirrored-scattering+random-process", shape, pair.blocks)


def _pair(shape: Shape) -> SideBySide:
    dictionary = random_process(shape).function
    coefficients, coefficients_radius = _whitened(scattering_features, shape, sizes(shape)[1])
    comparisons, comparisons_radius = _whitened(dictionary, shape, CELLS**2)
    return SideBySide(
        (coefficients, comparisons),
        (1 / coefficients_radius, DICTIONARY / comparisons_radius),
        (coefficients.block, comparisons.block),
    )


def _whitened(
    function: Callable[[Tensor], Tensor], shape: Shape, cells: int
) -> tuple[Whitening, float]:
    """Returns a function that whitens the main directions of another function, and the public
    radius."""
    vectors = public_vectors(function, shape)
    num_channels = math.ceil(CHANNEL_SHARE * vectors.shape[1] / cells)
    whitening = Whitening.of(function, vectors, cells, FLOOR, num_channels)
    return whitening, constants(whitening.applied(vectors))[1]


def _map_of(
    function: Callable[[Tensor], Tensor],
    name: str,
    shape: Shape,
    blocks: tuple[tuple[int, int], ...],
) -> FeatureMap:
    """Returns the feature map of a function, with constants that are measured on public images."""
    vectors = public_vectors(function, shape)
    return map_of_vectors(name, shape, function, vectors, blocks, SMALLER)
