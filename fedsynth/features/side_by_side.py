"""Scattering coefficients and features of the random-process dictionary side by side, both whitened
by public images; and the same of an image and its mirror image together.

The mean over an image and its mirror image is again a map of one image. What tells a scene from its
mirror image seldom tells its class, but takes a part of a vector's norm, which is what is clipped
and what noise is scaled by: a mean without that part is a clearer signal at the same ε. For written
characters and for clothing that faces one way it is not so. docs/fedstats.md has what either is
worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.public_statistics import (
    Whitening,
    constants,
    map_of_vectors,
    public_vectors,
)
from fedsynth.features.random_process import CELLS, random_process
from fedsynth.features.scattering import FLOOR, scattering_features, sizes

DICTIONARY = 0.7
"""Size of the dictionary's features beside scattering's; found on held-out CIFAR-10 training
images."""
KEPT = 0.5
"""Share of channels' directions, those in which public images differ most, found likewise: accuracy
is the same with half of the coordinates."""
SMALLER = 0.7
"""Norm bound and radius over their medians on public images: photographs have less in each
direction than random processes; found likewise."""


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Several functions' vectors in one, each times its own factor.

    Args:
        functions: pixels -> [N, d_i].
        factors: one for each.
        blocks: (channels, cells) of each one's vectors.
    """

    functions: tuple[Callable[[Tensor], Tensor], ...]
    factors: tuple[float, ...]
    blocks: tuple[tuple[int, int], ...]

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Vectors [N, Σ d_i]."""
        each = zip(self.functions, self.factors, strict=True)
        return torch.cat([function(x_NCHW) * factor for function, factor in each], dim=1)


@dataclass(frozen=True, eq=False)
class Mirrored:
    """The mean of a function over an image and its mirror image (left is right)."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Vectors [N, d], the same for both images."""
        return (self.function(x_NCHW) + self.function(x_NCHW.flip(-1))) / 2


@lru_cache(maxsize=8)
def whitened_pair(shape: Shape) -> FeatureMap:
    """Both kinds of features, each whitened and over its own public radius: 1233 coordinates of
    28×28 in grey.

    Raises:
        SettingError: images that are neither grey nor colour, or smaller than 12×12.
    """
    pair = _pair(shape)
    return _named("whitened-scattering+random-process", shape, pair, pair.blocks)


@lru_cache(maxsize=8)
def mirrored_pair(shape: Shape) -> FeatureMap:
    """The mean of the same over an image and its mirror image: 1962 coordinates of 32×32 in colour.

    Raises:
        SettingError: as above.
    """
    pair = _pair(shape)
    return _named("mirrored-scattering+random-process", shape, Mirrored(pair), pair.blocks)


@lru_cache(maxsize=8)
def _pair(shape: Shape) -> SideBySide:
    dictionary = random_process(shape).function
    one, scattered = _whitened(scattering_features, shape, sizes(shape)[1])
    other, compared = _whitened(dictionary, shape, CELLS**2)
    blocks = tuple((len(each.channels), len(each.cells)) for each in (one, other))
    return SideBySide((one, other), (1 / scattered, DICTIONARY / compared), blocks)


def _whitened(
    function: Callable[[Tensor], Tensor], shape: Shape, cells: int
) -> tuple[Whitening, float]:
    """A function's main directions, whitened, and their public radius."""
    with torch.inference_mode(False):
        raw = public_vectors(function, shape)
        kept = math.ceil(KEPT * raw.shape[1] / cells)
        white = Whitening.of(function, raw, cells, FLOOR, kept)
        return white, constants(white.applied(raw))[1]


def _named(
    name: str,
    shape: Shape,
    function: Callable[[Tensor], Tensor],
    blocks: tuple[tuple[int, int], ...],
) -> FeatureMap:
    """The map, with its dimension and constants from public images."""
    with torch.inference_mode(False):
        vectors = public_vectors(function, shape)
    return map_of_vectors(name, shape, function, vectors, blocks, SMALLER)
