"""What a feature map makes of images that a procedure draws: constants and whitening from no data.

The images are `random_images` of a fixed seed. All that is computed from them is public, whatever
the private data are; constants are rounded, so that machines agree on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.random_images import random_images
from fedsynth.features.row_products import two_sided
from fedsynth.seeding import torch_generator

IMAGES = 600
SEED = 0
DIGITS = 3
"""Of a constant that is kept."""
SOURCE = f"medians over {IMAGES} images of random processes, seed {SEED} (no data)"


@lru_cache(maxsize=2)
def _images(shape: Shape) -> Tensor:
    with torch.inference_mode(False):  # kept, and used where autograd is on
        return random_images(IMAGES, shape, torch_generator(SEED, "public statistics of features"))


def public_vectors(function: Callable[[Tensor], Tensor], shape: Shape) -> Tensor:
    """Vectors [IMAGES, d] of the procedure's images."""
    with torch.no_grad():
        return torch.cat([function(some) for some in _images(shape).split(50)])


def constants(vectors_Nd: Tensor) -> tuple[float, float]:
    """The median norm, and the median distance from the mean: where a clip takes half of the
    images, and so loses little of a mean, while noise is no larger than they are."""
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
    """Returns the map of a function with the dimension and the constants of its vectors of the
    procedure's images, these times `scale`."""
    norm, radius = (rounded(scale * value) for value in constants(vectors_Nd))
    source = SOURCE if scale == 1 else f"{scale} of {SOURCE}"
    return FeatureMap(name, shape, vectors_Nd.shape[1], norm, radius, source, function, blocks)


def measured_map(name: str, image_shape: Shape, function: Callable[[Tensor], Tensor]) -> FeatureMap:
    """The map of a function, whose dimension and constants are what it makes of images of random
    processes (`random_images`, of a fixed seed): no data are read.

    Args:
        name: for settings and reports.
        image_shape: (C, H, W) of the images that it is to take.
        function: float32 pixels in [0, 1] [N, C, H, W] -> [N, d], of each image alone: an encoder
            that was not trained on the private data, in evaluation mode.

    Raises:
        SettingError: a function that makes no vectors, or the same of every image.

    >>> halves = measured_map("halves", (1, 16, 16), lambda x: x.reshape(len(x), 2, -1).mean(2))
    >>> halves.dimension, halves.norm_bound > 0, halves.radius > 0
    (2, True, True)
    """
    try:
        vectors = public_vectors(function, image_shape).float()
    except (AttributeError, TypeError) as error:
        raise SettingError(
            None, "function", f"of features {name!r} must make a tensor [N, d]: {error}"
        ) from None
    if vectors.dim() != 2:
        raise SettingError(
            None,
            "function",
            f"of features {name!r} must make one vector of each image, [N, d], and makes "
            f"{list(vectors.shape)} of {len(vectors)}",
        )
    if not bool(torch.isfinite(vectors).all()):
        raise SettingError(
            None, "function", f"of features {name!r} makes numbers that are not finite"
        )
    if not constants(vectors)[1] > 0:
        raise SettingError(
            None, "function", f"of features {name!r} makes the same of half of all images"
        )
    return map_of_vectors(name, image_shape, function, vectors)


def rounded(value: float) -> float:
    """To a few significant digits.

    >>> rounded(0.123456)
    0.123
    """
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True, eq=False)
class Whitening:
    """φ ↦ (φ − m) times the inverse roots of a covariance between channels and of one between
    cells.

    Directions that all images share strongly would else take most of a vector's norm, which is what
    a private sum's clip bounds and its noise is scaled by.

    Args:
        function: pixels -> [N, channels · cells], channels first.
        mean: m, [d].
        channels: the first root, symmetric; or its largest directions alone, [kept, channels].
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
        kept: int | None = None,
    ) -> Whitening:
        """Args:
        function: see the class.
        vectors_Nd: what it makes of public images.
        cells: how many each channel has.
        floor: added to eigenvalues, over the largest: what is nearly constant stays small.
        kept: of so many channels' directions there are coordinates, those in which the images
            differ most; None: there are as many as channels, and no basis is chosen.
        """
        mean = vectors_Nd.mean(dim=0)
        about = (vectors_Nd - mean).double().unflatten(1, (-1, cells))
        between = torch.einsum("nas,nbs->ab", about, about) / (len(about) * cells)
        across = torch.einsum("nas,nat->st", about, about) / (len(about) * about.shape[1])
        scaled, turns = _inverse_root(between, floor)
        channels = scaled @ turns.T if kept is None else scaled.T[-kept:].flip(0)
        scaled, turns = _inverse_root(across, floor)
        return cls(function, mean, channels.float(), (scaled @ turns.T).float())

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Vectors [N, d] about the procedure's mean."""
        return self.applied(self.function(x_NCHW))

    def applied(self, vectors_Nd: Tensor) -> Tensor:
        """To what the function makes."""
        device = vectors_Nd.device
        about = vectors_Nd - self.mean.to(device)
        cells = self.cells.to(device)
        grid = about.unflatten(1, (-1, len(cells)))
        return two_sided(self.channels.to(device), grid, cells).flatten(1)


def _inverse_root(covariance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Eigenvectors V of a symmetric matrix C with largest eigenvalue λ₁, a column each, that of λ₁
    last, and V diag(λ/λ₁ + floor)^−½: V times that transposed is (C/λ₁ + floor)^−½.

    Signs are such that Σ i·vᵢ > 0, so that machines agree on them: of a largest entry they would
    not, where it has a twin of the other sign in the mirror image's channel.
    """
    values, vectors = torch.linalg.eigh(covariance)
    counted = torch.arange(1, len(values) + 1, dtype=vectors.dtype, device=vectors.device)
    signs = torch.where(counted @ vectors < 0, -1.0, 1.0)
    turns = vectors * signs
    return turns * ((values / values[-1]).clamp_min(0) + floor).rsqrt(), turns
