"""Scattering coefficients concatenated with features of the random-process dictionary, both
whitened by public images; and the mean of that map over an image and its mirror image.

The mean over an image and its mirror image is again a map of one image. What distinguishes a scene
from its mirror image seldom indicates its class, but takes up part of the vector's norm, which is
clipped and scales the noise. Without that part, a mean is a clearer signal at the same ε. This does
not hold for handwritten characters, or for clothing that faces one way. docs/fedstats.md has the
measured gains.
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
"""Scale of the dictionary's features relative to scattering's; chosen on held-out CIFAR-10 training
images."""
CHANNEL_SHARE = 0.5
"""Fraction of channel directions that are kept, those in which public images differ most; chosen in
the same way. Accuracy is the same with half of the coordinates."""
SMALLER = 0.7
"""Norm bound and radius relative to their medians on public images; chosen in the same way.
Photographs vary less in each direction than random processes do."""


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Concatenates the vectors of several functions, each multiplied by a factor.

    Args:
        functions: pixels -> [N, d_i].
        factors: one for each function.
        blocks: (channels, cells) of each function's vectors.
    """

    functions: tuple[Callable[[Tensor], Tensor], ...]
    factors: tuple[float, ...]
    blocks: tuple[tuple[int, int], ...]

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Returns vectors [N, Σ d_i]."""
        vectors = []
        for function, factor in zip(self.functions, self.factors, strict=True):
            vectors.append(function(x_NCHW) * factor)
        return torch.cat(vectors, dim=1)


@dataclass(frozen=True, eq=False)
class Mirrored:
    """The mean of a function over an image and its horizontal mirror image."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Returns vectors [N, d], the same for an image and its mirror image."""
        return (self.function(x_NCHW) + self.function(x_NCHW.flip(-1))) / 2


def whitened_pair(shape: Shape) -> FeatureMap:
    """Returns the map of both kinds of features, each whitened and divided by its public radius:
    1233 coordinates for 28×28 grey images.

    Raises:
        SettingError: the images are neither grey nor colour, or smaller than 12×12.
    """
    pair = _pair(shape)
    return _map_of(pair, "whitened-scattering+random-process", shape, pair.blocks)


def mirrored_pair(shape: Shape) -> FeatureMap:
    """Returns the mean of `whitened_pair`'s features over an image and its mirror image: 1962
    coordinates for 32×32 colour images.

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
    """Returns a function's main directions, whitened, and their public radius."""
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
    """Returns the map, with its dimension and constants measured on public images."""
    vectors = public_vectors(function, shape)
    return map_of_vectors(name, shape, function, vectors, blocks, SMALLER)
