"""Defines `FeatureMap`, a fixed function from one image's pixels to a vector.

Private releases clip vectors, so a map has public constants for typical vector norms. The constants
are fixed before any private data are read. They follow from a proof or from random images with a
fixed seed (`random_images.py`), never from the clients' data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsynth.errors import SettingError

Shape = tuple[int, int, int]  # the shape of an image: (channels, height, width)


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A feature map φ: a fixed function from an image's pixels to a vector.

    An image's vector depends only on the image itself, not on others in the batch.

    Args:
        name: the map's name in settings and reports.
        image_shape: the shape (C, H, W) of the input images.
        dimension: the dimension d of the vectors.
        norm_bound: a public bound in feature units. φ is clipped to this L2 norm before sums are
            released. fedstats computes the features' centre from a released sum.
        radius: R, a public constant in feature units: a vector's approximate distance from the mean
            m of all vectors. fedstats clips (φ − m)/R to norm 1.
        source: the origin of both constants, for the report.
        function: float32 pixels in [0, 1] [N, C, H, W] -> vectors [N, d]. It must be differentiable
            if images are synthesised from statistics.
        blocks: the sizes (channels, cells) of the matrices that are concatenated to a vector.
            Covariances between channels and between cells are computed from the matrices. Empty for
            vectors without matrix structure.
        deskews: whether φ deskews images (`fedsynth.features.deskewing`). FedStats' thumbnails are
            then deskewed, too.

    Raises:
        SettingError: the dimension is below 1, a constant is not positive and finite, or the blocks
            do not cover the vector exactly.

    >>> import torch
    >>> brightness = FeatureMap(
    ...     "brightness", (1, 8, 8), dimension=1, norm_bound=1.0, radius=0.5,
    ...     source="pixels are in [0, 1]", function=lambda x: x.mean(dim=(2, 3)))
    >>> brightness(torch.full((2, 1, 8, 8), 255, dtype=torch.uint8)).tolist()
    [[1.0], [1.0]]
    """

    name: str
    image_shape: Shape
    dimension: int
    norm_bound: float
    radius: float
    source: str
    function: Callable[[Tensor], Tensor]
    blocks: tuple[tuple[int, int], ...] = ()
    deskews: bool = False

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise self._wrong("dimension", f"must be at least 1, got {self.dimension}")
        for name in ("norm_bound", "radius"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise self._wrong(name, f"must be positive and finite, got {value}")
        if self.blocks and sum(a * b for a, b in self.blocks) != self.dimension:
            reason = f"must have a total of {self.dimension} coordinates, got {self.blocks}"
            raise self._wrong("blocks", reason)

    def _wrong(self, key: str, reason: str) -> SettingError:
        return SettingError(None, key, f"of the feature map {self.name!r} {reason}")

    def __call__(self, pixels_NCHW: Tensor) -> Tensor:
        """Computes the images' vectors, float32 [N, d].

        Args:
            pixels_NCHW: images, either uint8 or floating point in [0, 1].

        Raises:
            SettingError: the image shape does not match the map's, or the map's function does not
                return vectors of the declared dimension.
        """
        shape = tuple(pixels_NCHW.shape[1:])
        if shape != self.image_shape:
            raise self._wrong("image_shape", f"is {self.image_shape}, but images have {shape}")
        x = pixels_NCHW.float()
        if pixels_NCHW.dtype == torch.uint8:
            x = x / 255
        features: object = self.function(x)
        expected = (x.shape[0], self.dimension)  # `len` would fix the batch size in ONNX
        returned = type(features).__name__
        if isinstance(features, Tensor):
            if features.shape == expected:
                return features.float()
            returned = f"shape {tuple(features.shape)}"
        reason = f"must return a tensor of shape {expected}, got {returned}"
        raise self._wrong("function", reason)

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureMap:
        """Returns the map itself.

        Maps are immutable, and vectors are cached by map object.
        """
        return self
