"""Computes a feature map's constants and whitening matrices from random images.

No data set is read. The images come from `random_images` with a fixed seed, so everything computed
from them is public. Constants are rounded so that all machines agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.random_images import random_images
from fedsynth.privacy.row_products import two_sided
from fedsynth.seeding import torch_generator

IMAGES = 600
# The number of uniform noise images for testing maps without measured constants.
TEST_IMAGES = 8

SEED = 0
DIGITS = 3  # significant digits of a constant
SOURCE = f"medians over {IMAGES} images of random processes, seed {SEED} (no data)"


@lru_cache(maxsize=2)
def _images(shape: Shape) -> Tensor:
    with torch.inference_mode(False):  # cached, and also used with autograd
        return random_images(IMAGES, shape, torch_generator(SEED, "public statistics of features"))


def public_vectors(
    function: Callable[[Tensor], Tensor], shape: Shape, images: Tensor | None = None
) -> Tensor:
    """Applies a function to public images, and returns their vectors [N, d].

    Args:
        function: pixels -> vectors [N, d].
        shape: the shape (C, H, W) of the images.
        images: public images [N, C, H, W], uint8 or floating point in [0, 1]. None uses the random
            images.
    """
    if images is None:
        images = _images(shape)
    scale = 255 if images.dtype == torch.uint8 else 1
    with torch.no_grad():
        return torch.cat([function(part.float() / scale) for part in images.split(50)])


def constants(vectors_Nd: Tensor) -> tuple[float, float]:
    """Returns the vectors' median norm, and their median distance from the mean vector.

    Clipping at the median changes half of the vectors, but their mean only little. Noise is then
    scaled to a typical image's norm.
    """
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
    origin: str = SOURCE,
) -> FeatureMap:
    """Creates a feature map for a function, given the function's vectors of public images.

    The map's dimension and constants are computed from the vectors.

    Args:
        name: the map's name in settings and reports.
        shape: the shape (C, H, W) of the input images.
        function: the function from pixels to vectors.
        vectors_Nd: the function's vectors for the random images (`public_vectors`).
        blocks: see `FeatureMap`.
        scale: a factor for both constants.
        origin: the images from which the constants were measured, as text.
    """
    norm, radius = constants(vectors_Nd)
    source = origin if scale == 1 else f"{scale} of {origin}"
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


def measured_map(
    name: str,
    image_shape: Shape,
    function: Callable[[Tensor], Tensor],
    images: Tensor | None = None,
) -> FeatureMap:
    """Makes a feature map from a function, such as an encoder trained on public images.

    The map's dimension and constants are measured on public images, so no private data are read.
    Vectors longer than the public images' median norm are clipped. If the public images look unlike
    the data, most vectors may be clipped: `normalised_map` needs no such constant.

    Args:
        name: the map's name in settings and reports.
        image_shape: the shape (C, H, W) of the input images.
        function: float32 pixels in [0, 1] [N, C, H, W] -> vectors [N, d]. Each vector must depend
            on one image only. An example is an encoder in evaluation mode, trained without the
            private data.
        images: public images [N, C, H, W], uint8 or floating point in [0, 1]. None uses
            `random_images` with a fixed seed.

    Raises:
        SettingError: the function's vectors are not finite, or the same for half of the images.

    >>> halves = measured_map("halves", (1, 16, 16), lambda x: x.reshape(len(x), 2, -1).mean(2))
    >>> halves.dimension, halves.norm_bound > 0, halves.radius > 0
    (2, True, True)
    """
    vectors = checked_vectors(name, image_shape, function, images)
    origin = SOURCE
    if images is not None:
        origin = f"medians over {len(images)} public images that the operator supplies"
    return map_of_vectors(name, image_shape, function, vectors, origin=origin)


def normalised_map(
    name: str,
    image_shape: Shape,
    function: Callable[[Tensor], Tensor],
    images: Tensor | None = None,
) -> FeatureMap:
    """Creates a feature map that scales a function's vectors to norm 1.

    Given public images, their mean vector is subtracted first. Each vector is then divided by its
    norm, so the bound is exact for any public images. The arguments and errors are those of
    `measured_map`, but `images` has no default.

    >>> halves = normalised_map("halves", (1, 16, 16), lambda x: x.reshape(len(x), 2, -1).mean(2))
    >>> torch.allclose(halves(torch.rand(3, 1, 16, 16)).norm(dim=1), torch.ones(3))
    True
    """
    test_images = images
    if images is None:
        generator = torch_generator(SEED, "tested images")
        test_images = torch.rand(TEST_IMAGES, *image_shape, generator=generator)
    vectors = checked_vectors(name, image_shape, function, test_images)
    centre = torch.zeros(vectors.shape[1])
    source = "vectors of norm 1: analytic"
    if images is not None:
        centre = vectors.mean(dim=0)
        source = f"{source}. The mean vector of public images is subtracted before"

    def normalised(x_NCHW: Tensor) -> Tensor:
        return F.normalize(function(x_NCHW).float() - centre.to(x_NCHW.device), dim=1)

    return FeatureMap(name, image_shape, vectors.shape[1], 1.0, 1.0, source, normalised)


def checked_vectors(
    name: str, shape: Shape, function: Callable[[Tensor], Tensor], images: Tensor | None
) -> Tensor:
    """Computes the public images' vectors [N, d], and checks that they are valid for a feature map.

    The arguments and errors are those of `measured_map`.
    """
    vectors = public_vectors(function, shape, images).float()
    reason = ""
    if vectors.dim() != 2 or not bool(torch.isfinite(vectors).all()):
        fault = f"shape {list(vectors.shape)}" if vectors.dim() != 2 else "NaN or infinite values"
        reason = f"must return finite vectors [N, d], but returned {fault}. Correct the function"
    elif not constants(vectors)[1] > 0:
        reason = (
            "returns the same vector for half of the public images. Compute vectors that depend on "
            "the image"
        )
    if reason:
        raise SettingError(None, "function", f"of the feature map {name!r} {reason}")
    return vectors


def rounded(value: float) -> float:
    """Rounds a number to `DIGITS` significant digits.

    >>> rounded(0.123456)
    0.123
    """
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True, eq=False)
class Whitening:
    """Whitens the vectors that a function computes from images.

    A vector φ is centred to φ − m, and multiplied by the inverse roots of a channel covariance and
    a cell covariance.

    A private sum clips each vector's norm and scales its noise to the clip. Without whitening,
    strong directions shared by all images would dominate the norm.

    Args:
        function: pixels -> vectors [N, channels · cells]. All cells of a channel are adjacent.
        mean: the mean m of the vectors, [d].
        channels: the inverse root for the channels, which is symmetric. If only the largest
            directions are kept, a matrix [kept, channels].
        cells: the inverse root for the cells, which is symmetric.
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
        """Computes the whitening from public images' vectors.

        Args:
            function: the function from pixels to vectors, see the class.
            vectors_Nd: the function's vectors for public images.
            cells: the number of cells per channel.
            floor: a number added to the eigenvalues, relative to the largest one, so that nearly
                constant directions stay small.
            num_channels: the number of channel directions to keep, by decreasing variance. None
                keeps all directions in the original basis.
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
        """The number of channels and the number of cells of a whitened vector."""
        return len(self.channels), len(self.cells)

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Computes the images' whitened vectors [N, d]."""
        return self.applied(self.function(x_NCHW))

    def applied(self, vectors_Nd: Tensor) -> Tensor:
        """Whitens vectors [N, d] returned by `function`."""
        device = vectors_Nd.device
        about = vectors_Nd - self.mean.to(device)
        cells = self.cells.to(device)
        grid = about.unflatten(1, (-1, len(cells)))
        return two_sided(self.channels.to(device), grid, cells).flatten(1)


def _inverse_root(covariance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Computes a regularised inverse square root of a symmetric matrix C.

    It returns V diag(λ/λ₁ + floor)^−½ and V. The columns of V are the eigenvectors of C in
    ascending order of the eigenvalues λ, and λ₁ is the largest eigenvalue. The product of the first
    result and Vᵀ is (C/λ₁ + floor)^−½.

    The sign of each eigenvector is chosen such that Σ i·vᵢ > 0, so that all machines choose the
    same sign. The sign of the largest entry would not be enough, because a channel and its mirror
    image can have entries of equal magnitude and opposite sign.
    """
    values, vectors = torch.linalg.eigh(covariance)
    index = torch.arange(1, len(values) + 1, dtype=vectors.dtype, device=vectors.device)
    vectors = vectors * torch.where(index @ vectors < 0, -1.0, 1.0)
    return vectors * ((values / values[-1]).clamp_min(0) + floor).rsqrt(), vectors
