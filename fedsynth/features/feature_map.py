"""What a feature map is: a fixed function of one image's pixels, and its public constants.

A private release clips what a map makes, so the map needs constants that say how far its values go.
They are fixed before any private data are read: from a proof, or from images that a procedure draws
with a fixed seed (`random_images.py`), and never from the clients' data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsynth.errors import SettingError

Shape = tuple[int, int, int]
"""(channels, height, width) of an image."""


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A map φ from pixels to vectors. Each image's vector depends on that image alone.

    Args:
        name: for settings and reports.
        image_shape: (C, H, W) of the images that it takes.
        dimension: d of its vectors.
        norm_bound: public constant in the features' units: φ is clipped to this L2 norm where sums
            of it are released (fedstats' centre).
        radius: R, a public constant in the same units: about the distance of an image's vector from
            the mean of all. fedstats clips (φ − m)/R to norm 1.
        source: where the two constants come from, for the report.
        function: float32 pixels in [0, 1] [N, C, H, W] -> [N, d], differentiable where images are
            to be made from statistics.
        blocks: where a vector is a row of matrices [channels, cells], one after another, their
            sizes: what covariances of channels and of cells can be made of. Empty: it is not.

    Raises:
        SettingError: a dimension below 1, a constant that is not positive and finite, or blocks
            that are not the whole vector.

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

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise SettingError(
                None,
                "dimension",
                f"of features {self.name!r} must be at least 1, got {self.dimension}",
            )
        for name in ("norm_bound", "radius"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingError(
                    None, name, f"of features {self.name!r} must be positive, got {value}"
                )
        if self.blocks and sum(a * b for a, b in self.blocks) != self.dimension:
            raise SettingError(
                None,
                "blocks",
                f"of features {self.name!r} must have {self.dimension} coordinates in all, got "
                f"{self.blocks}",
            )

    def __call__(self, pixels_NCHW: Tensor) -> Tensor:
        """Vectors [N, d], float32, of images as the package's data hold them.

        Args:
            pixels_NCHW: uint8, or floating point in [0, 1].

        Raises:
            SettingError: images of another shape, or a function that makes other vectors than it
                declares.
        """
        if tuple(pixels_NCHW.shape[1:]) != self.image_shape:
            raise SettingError(
                None,
                "image_shape",
                f"of features {self.name!r} is {self.image_shape}, got images "
                f"{tuple(pixels_NCHW.shape[1:])}",
            )
        x = pixels_NCHW
        x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
        made: object = self.function(x)
        if not isinstance(made, Tensor):
            raise SettingError(
                None,
                "function",
                f"of features {self.name!r} must make a tensor [N, {self.dimension}], got "
                f"{type(made).__name__}",
            )
        if tuple(made.shape) != (len(x), self.dimension):
            raise SettingError(
                None,
                "dimension",
                f"of features {self.name!r} is {self.dimension}, but its function made "
                f"{tuple(made.shape)} of {len(x)} images",
            )
        return made.float()

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureMap:
        """Itself: it cannot change, and vectors are kept by which map made them."""
        return self

    def facts(self) -> dict[str, Any]:
        """What a report says of it: all of it is public."""
        return {
            "features": self.name,
            "dimension": self.dimension,
            "norm_bound": self.norm_bound,
            "radius": self.radius,
            "constants": self.source,
        }
