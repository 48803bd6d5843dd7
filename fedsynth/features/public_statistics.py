"""A feature map's constants and whitening, computed from random images instead of data.

The images are `random_images` of a fixed seed. Everything computed from them is public, whatever
the private data are. Constants are rounded, so that all machines agree on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap, Shape, two_sided
from fedsynth.features.random_images import random_images
from fedsynth.seeding import torch_generator

IMAGES = 600
SEED = 0
DIGITS = 3
"""Significant digits of a constant."""
SOURCE = f"medians over {IMAGES} images of random processes, seed {SEED} (no data)"


@lru_cache(maxsize=2)
def _images(shape: Shape) -> Tensor:
    with torch.inference_mode(False):  # cached, and also used with autograd
        return random_images(IMAGES, shape, torch_generator(SEED, "public statistics of features"))


def public_vectors(function: Callable[[Tensor], Tensor], shape: Shape) -> Tensor:
    """Returns the random images' feature vectors, [IMAGES, d]."""
    with torch.no_grad():
        return torch.cat([function(images) for images in _images(shape).split(50)])


def constants(vectors_Nd: Tensor) -> tuple[float, float]:
    """Returns the median norm and the median distance from the mean.

    A clip at the median affects half of the images, so it changes a mean only little, and the noise
    is scaled to no more than a typical image."""
    norm = float(torch.linalg.vector_norm(vectors_Nd, dim=1).median())
    about = vectors_Nd - vectors_Nd.mean(dim=0)
    return rounded(norm), rounded(float(torch.linalg.vector_norm(about, dim=1).median()))


def map_of_vectors(
    name: str,
    shape: Shape,
    function: Callable[[Tensor], Tensor],
    vectors_Nd: Tensor,
    blocks: tuple[tuple[int, int], ...] = (),
    scale: float = 1.0,
) -> FeatureMap:
    """Returns the map of a function, with the dimension and constants of its vectors of the random
    images; the constants are multiplied by `scale`."""
    norm, radius = constants(vectors_Nd)
    source = SOURCE if scale == 1 else f"{scale} of {SOURCE}"
    return FeatureMap(
        name,
        shape,
        vectors_Nd.shape[1],
        rounded(scale * norm),
        rounded(scale * radius),
        source,
        function,
        blocks,
    )


def measured_map(name: str, image_shape: Shape, function: Callable[[Tensor], Tensor]) -> FeatureMap:
    """Returns the map of a function; its dimension and constants are measured on images of random
    processes (`random_images`, with a fixed seed), so no data are read.

    Args:
        name: the name for settings and reports.
        image_shape: (C, H, W) of the input images.
        function: float32 pixels in [0, 1] [N, C, H, W] -> [N, d], where each vector depends only on
            its image: an encoder in evaluation mode that was not trained on the private data.

    Raises:
        SettingError: the function does not return finite vectors, or returns the same one for half
            of the images.

    >>> halves = measured_map("halves", (1, 16, 16), lambda x: x.reshape(len(x), 2, -1).mean(2))
    >>> halves.dimension, halves.norm_bound > 0, halves.radius > 0
    (2, True, True)
    """

    def refused(reason: str) -> SettingError:
        return SettingError(None, "function", f"of features {name!r} {reason}")

    try:
        vectors = public_vectors(function, image_shape).float()
    except (AttributeError, TypeError) as error:
        raise refused(f"must return a tensor [N, d]: {error}") from None
    if vectors.dim() != 2:
        shape = list(vectors.shape)
        raise refused(f"must return one vector per image, [N, d], but returns {shape}")
    if not bool(torch.isfinite(vectors).all()):
        raise refused("returns numbers that are not finite")
    if not constants(vectors)[1] > 0:
        raise refused("returns the same vector for half of all images")
    return map_of_vectors(name, image_shape, function, vectors)


def rounded(value: float) -> float:
    """Rounds to `DIGITS` significant digits.

    >>> rounded(0.123456)
    0.123
    """
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True, eq=False)
class Whitening:
    """Whitening: φ ↦ (φ − m) times the inverse roots of a covariance between channels and of one
    between cells.

    Without whitening, directions that all images share strongly would take most of a vector's norm,
    which a private sum's clip bounds and which scales its noise.

    Args:
        function: pixels -> [N, channels · cells], channels first.
        mean: m, [d].
        channels: the first root, symmetric; or only its largest directions, [kept, channels].
        cells: the second, symmetric.
    """

    function: Callable[[Tensor], Tensor]
    mean: Tensor
    channels: Tensor
    cells: Tensor

    @classmethod
    def of(
        cls,
        function: Callable[[Tensor], Tensor],
        vectors_Nd: Tensor,
        cells: int,
        floor: float,
        num_channels: int | None = None,
    ) -> Whitening:
        """Computes the whitening from vectors of public images.

        Args:
            function: see the class.
            vectors_Nd: its vectors of public images.
            cells: the number of cells of each channel.
            floor: added to the eigenvalues, relative to the largest, so that nearly constant
                directions stay small.
            num_channels: the number of channel directions to keep, those in which the images differ
                most; None keeps all, in the original basis.
        """
        mean = vectors_Nd.mean(dim=0)
        about = (vectors_Nd - mean).double().unflatten(1, (-1, cells))
        between = torch.einsum("nas,nbs->ab", about, about) / (len(about) * cells)
        across = torch.einsum("nas,nat->st", about, about) / (len(about) * about.shape[1])
        scaled, directions = _inverse_root(between, floor)
        channels = scaled @ directions.T
        if num_channels is not None:
            channels = scaled.T[-num_channels:].flip(0)
        scaled, directions = _inverse_root(across, floor)
        return cls(function, mean, channels.float(), (scaled @ directions.T).float())

    @property
    def block(self) -> tuple[int, int]:
        """The numbers of channel directions and of cells."""
        return len(self.channels), len(self.cells)

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Returns the whitened vectors [N, d] of images."""
        return self.applied(self.function(x_NCHW))

    def applied(self, vectors_Nd: Tensor) -> Tensor:
        """Whitens vectors [N, d] of the function."""
        device = vectors_Nd.device
        about = vectors_Nd - self.mean.to(device)
        cells = self.cells.to(device)
        grid = about.unflatten(1, (-1, len(cells)))
        return two_sided(self.channels.to(device), grid, cells).flatten(1)


def _inverse_root(covariance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Returns V diag(λ/λ₁ + floor)^−½ and V, the eigenvectors of a symmetric matrix C with largest
    eigenvalue λ₁, as columns in ascending order of eigenvalue. The first times Vᵀ is
    (C/λ₁ + floor)^−½.

    Signs are chosen such that Σ i·vᵢ > 0, so that machines agree on them. The sign of the largest
    entry would not do: it can have a twin of the opposite sign in the mirror image's channel.
    """
    values, vectors = torch.linalg.eigh(covariance)
    index = torch.arange(1, len(values) + 1, dtype=vectors.dtype, device=vectors.device)
    vectors = vectors * torch.where(index @ vectors < 0, -1.0, 1.0)
    return vectors * ((values / values[-1]).clamp_min(0) + floor).rsqrt(), vectors
