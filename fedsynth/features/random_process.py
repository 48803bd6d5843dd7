"""A feature map that compares image patches with a dictionary learned from random images.

This is the single-layer learning of Coates, Ng & Lee 2011, "An Analysis of Single-Layer Networks in
Unsupervised Feature Learning". Patches of 6×6 pixels are normalised, whitened, and multiplied by K
unit vectors. The excess of each product over a threshold is averaged in 3×3 overlapping cells,
separately for positive and negative products.

The dictionary was learned by spherical k-means (`benchmarks/random_process.py`) from
`random_images.py`. It follows from a seed and a procedure, so it is as public as a network's
architecture. docs/features.md compares the features with scattering, and with a network trained on
the same images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from fedsynth.errors import SettingError
from fedsynth.features.deskewing import deskewed
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.public_statistics import Whitening, constants, map_of_vectors, public_vectors
from fedsynth.features.scattering import FLOOR, scattering, scattering_features, sizes
from fedsynth.privacy.row_products import two_sided

# The file written by `python benchmarks/random_process.py`.
WEIGHTS = Path(__file__).with_name("random_process.safetensors")

PATCH = 6  # the side of a patch in pixels
# A number added to patch variances, so that nearly flat patches stay small. As in the paper, it is
# 10 squared grey values.
CONTRAST = 10 / 255**2

THRESHOLD = 0.25
CELLS = 3
# The CPU batch size. A power of two, so that all pieces of a private client's pass have the same
# length.
AT_ONCE = 16
# The smallest image side in pixels. Smaller images have too few patches for 3×3 cells.
MIN_SIDE = 12


@dataclass(frozen=True, eq=False)
class Dictionary:
    """A dictionary of patch vectors that maps images to feature vectors.

    Args:
        mean: the mean of the normalised patches, [P]. P is 3·PATCH², with the channels first.
        atoms: the whitening matrix times the K unit vectors, [P, K]. A patch p's features are
            computed from (p − mean) @ atoms.
    """

    mean: Tensor
    atoms: Tensor

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Computes feature vectors of grey or colour images with pixels in [0, 1].

        The shape is [N, 2K·CELLS²], where K is the number of vectors in the dictionary.

        One convolution compares all patches with the dictionary. Each patch's mean and contrast are
        applied afterwards, because (p − μ_p)/s_p is linear in p for fixed μ_p and s_p. Few images
        at a time stay in a CPU's cache.
        """
        at_once = len(x_NCHW) if x_NCHW.device.type != "cpu" else AT_ONCE
        return torch.cat(list(map(self._compared, x_NCHW.split(max(1, at_once)))))

    def _compared(self, x_NCHW: Tensor) -> Tensor:
        atoms = self.atoms.to(x_NCHW)
        kernels = (atoms - atoms.mean(dim=0)).T.reshape(-1, 3, PATCH, PATCH)
        if x_NCHW.shape[1] == 1:  # grey images stand for three equal channels
            kernels = kernels.sum(dim=1, keepdim=True)
        powers = torch.stack([x_NCHW, x_NCHW.square()], dim=1).mean(dim=2)
        rows, columns = map(window_sums, x_NCHW.shape[2:])
        sums = two_sided(rows.to(powers), powers, columns.T.to(powers)).flatten(2)
        level, square = (sums[:, :, :, None] / PATCH**2).unbind(dim=1)
        spread_NP1 = ((square - level.square()).clamp_min(0) + CONTRAST).sqrt()
        last = torch.channels_last
        z = F.conv2d(x_NCHW.contiguous(memory_format=last), kernels.contiguous(memory_format=last))
        z_NPK = z.flatten(2).transpose(1, 2) / spread_NP1
        shift = self.mean.to(x_NCHW) @ atoms
        # the mean of relu(z − shift − THRESHOLD), and of relu(shift − z − THRESHOLD)
        cells = cell_means(*z.shape[2:]).to(x_NCHW)
        above = cells @ torch.maximum(z_NPK, shift + THRESHOLD) - (shift + THRESHOLD)
        below = shift - THRESHOLD - cells @ torch.minimum(z_NPK, shift - THRESHOLD)
        return torch.cat([above, below], dim=2).transpose(1, 2).flatten(1)


@lru_cache(maxsize=8)
def window_sums(side: int) -> Tensor:
    """Returns the matrix [side − PATCH + 1, side] that sums PATCH adjacent values."""
    return torch.eye(side).unfold(0, PATCH, 1).sum(dim=2)


@lru_cache(maxsize=8)
def cell_means(height: int, width: int) -> Tensor:
    """Returns the matrix [9, height·width] that averages a map in 3×3 overlapping cells.

    Each cell is half as wide as the map, and overlaps the next cell by half.
    """
    tall, wide = (height + 1) // 2, (width + 1) // 2
    cells = torch.zeros(CELLS, CELLS, height, width, dtype=torch.float64)
    for i, row in enumerate((0, (height - tall) // 2, height - tall)):
        for j, column in enumerate((0, (width - wide) // 2, width - wide)):
            cells[i, j, row : row + tall, column : column + wide] = 1 / (tall * wide)
    return cells.view(CELLS**2, -1)


@lru_cache(maxsize=1)
def shipped() -> Dictionary:
    """Loads the package's patch dictionary."""
    tensors = load_file(WEIGHTS)
    return Dictionary(tensors["mean"], tensors["atoms"])


def random_process(shape: Shape) -> FeatureMap:
    """Returns the feature map of image patches, with a dictionary learned from random images.

    Raises:
        SettingError: the images are neither grey nor colour, or smaller than 12×12 pixels.

    >>> random_process((3, 32, 32)).dimension
    1728
    """
    if shape[0] not in (1, 3) or min(shape[1:]) < MIN_SIDE:
        reason = (
            f"does not support images of shape {shape}, only grey or colour images of at least "
            "12×12 pixels. Choose other features"
        )
        raise SettingError("method", "features", reason)
    dictionary = shipped()
    blocks = ((2 * dictionary.atoms.shape[1], CELLS**2),)
    vectors = public_vectors(dictionary, shape)
    return map_of_vectors("random-process", shape, dictionary, vectors, blocks)


def scattering_and_random_process(shape: Shape) -> FeatureMap:
    """Returns the feature map that concatenates `scattering` and `random_process`.

    Both parts are divided by their public radius, so that neither part dominates.

    Raises:
        SettingError: the images are neither grey nor colour, or smaller than 12×12 pixels.
    """
    comparisons = random_process(shape)
    coefficients = scattering(shape)

    def function(x_NCHW: Tensor) -> Tensor:
        scattered = coefficients.function(x_NCHW) / coefficients.radius
        return torch.cat([scattered, comparisons.function(x_NCHW) / comparisons.radius], dim=1)

    vectors = public_vectors(function, shape)
    blocks = coefficients.blocks + comparisons.blocks
    return map_of_vectors("scattering+random-process", shape, function, vectors, blocks)


# The scale of dictionary features relative to scattering features, chosen on held-out CIFAR-10
# training images.
DICTIONARY = 0.7
# The fraction of channel directions to keep, by decreasing variance of public images. It was chosen
# on the same images. With half of the coordinates, accuracy is the same.
CHANNEL_SHARE = 0.5
# A factor for norm bound and radius, which are otherwise medians over public random images. It was
# chosen on the same images. Photographs vary less in each direction than random processes.
SMALLER = 0.7


def whitened_pair(shape: Shape) -> FeatureMap:
    """Returns the feature map that concatenates whitened `scattering` and `random_process`.

    Both parts are divided by their public radius, and the second is multiplied by `DICTIONARY`. The
    vectors have 1233 coordinates for 28×28 grey images.

    Raises:
        SettingError: the images are neither grey nor colour, or smaller than 12×12 pixels.
    """
    return _pair("whitened-scattering+random-process", shape)


def mirrored_pair(shape: Shape) -> FeatureMap:
    """Returns the feature map that gives an image and its mirror image the same vector.

    The vector is the mean of the `whitened_pair` vectors for the image and its left-right mirror
    image. The vectors have 1962 coordinates for 32×32 colour images.

    Raises:
        SettingError: as for `whitened_pair`.
    """
    return _pair("mirrored-scattering+random-process", shape, _mean_of_mirrored)


def deskewed_pair(shape: Shape) -> FeatureMap:
    """Returns the feature map that deskews images before `whitened_pair`.

    It suits handwriting on a dark background (`fedsynth.features.deskewing.deskewed`). The vectors
    have 1233 coordinates for 28×28 grey images.

    Raises:
        SettingError: as for `whitened_pair`.
    """
    pair = _pair("deskewed-scattering+random-process", shape, _of_deskewed)
    return replace(pair, deskews=True)


# Applies a function from images to vectors to transformed images.
_Transform = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def _pair(name: str, shape: Shape, transform: _Transform | None = None) -> FeatureMap:
    dictionary = random_process(shape).function
    coefficients, coefficients_radius = _whitened(scattering_features, shape, sizes(shape)[1])
    comparisons, comparisons_radius = _whitened(dictionary, shape, CELLS**2)
    factors = (1 / coefficients_radius, DICTIONARY / comparisons_radius)
    function = partial(_side_by_side, (coefficients, comparisons), factors)
    if transform is not None:
        function = partial(transform, function)
    blocks = (coefficients.block, comparisons.block)
    vectors = public_vectors(function, shape)
    return map_of_vectors(name, shape, function, vectors, blocks, SMALLER)


def _side_by_side(
    functions: tuple[Callable[[Tensor], Tensor], ...], factors: tuple[float, ...], x_NCHW: Tensor
) -> Tensor:
    """Scales each function's vectors by a factor, and concatenates the vectors of all functions."""
    vectors = []
    for function, factor in zip(functions, factors, strict=True):
        vectors.append(function(x_NCHW) * factor)
    return torch.cat(vectors, dim=1)


def _mean_of_mirrored(function: Callable[[Tensor], Tensor], x_NCHW: Tensor) -> Tensor:
    return (function(x_NCHW) + function(x_NCHW.flip(-1))) / 2


def _of_deskewed(function: Callable[[Tensor], Tensor], x_NCHW: Tensor) -> Tensor:
    return function(deskewed(x_NCHW))


def _whitened(
    function: Callable[[Tensor], Tensor], shape: Shape, cells: int
) -> tuple[Whitening, float]:
    """Whitens the vectors that a function computes from pixels.

    Returns the whitened function and its vectors' radius. Only the directions with the largest
    variance over public images are kept.
    """
    vectors = public_vectors(function, shape)
    num_channels = math.ceil(CHANNEL_SHARE * vectors.shape[1] / cells)
    whitening = Whitening.of(function, vectors, cells, FLOOR, num_channels)
    return whitening, constants(whitening.applied(vectors))[1]
