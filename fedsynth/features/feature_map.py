"""Defines `FeatureMap`, a fixed function from the pixels of one image to a vector.

A private release clips these vectors. A map therefore has public constants that state how long its
vectors are. The constants are fixed before any private data are read. They follow from a proof or
from random images of a fixed seed (`random_images.py`), and never from the clients' data.

This module also has matrix products in which the bits of each row of the result depend only on the
corresponding row of the input. Usually this does not hold. A kernel library may sum a row in an
order that depends on the row's memory alignment. If the width is not a multiple of the register
width, each row of a batch has a different alignment. The results then differ only by rounding, but
a server can send weights for which nothing but rounding remains. One additional record would then
change all rows after it. Widths are therefore padded with zeros to a multiple of `LANES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.errors import SettingError

LANES = 16  # the number of float32 values in the widest registers of a CPU (512 bits)


def row_product(rows_Nd: Tensor, weight_Cd: Tensor) -> Tensor:
    """Returns the matrix product rows · weightᵀ. The bits of each row of the result depend only on
    the same row of `rows`.

    The result has the shape [N, C].

    >>> import torch
    >>> row_product(torch.ones(2, 3), torch.ones(1, 3)).tolist()
    [[3.0], [3.0]]
    """
    return filled_up(rows_Nd) @ filled_up(weight_Cd).T


def two_sided(left_ka: Tensor, rows_Nas: Tensor, right_st: Tensor) -> Tensor:
    """Multiplies each matrix in a batch by one matrix from the left and by another from the right.

    The bits of each product depend only on its own matrix in the batch. The result has the shape
    [N, k, t].

    >>> import torch
    >>> two_sided(torch.eye(2), torch.ones(1, 2, 3), torch.eye(3)).shape
    torch.Size([1, 2, 3])
    """
    products = _both_filled_up(left_ka) @ _both_filled_up(rows_Nas) @ _both_filled_up(right_st)
    return products[..., : len(left_ka), : right_st.shape[1]]


def filled_up(rows: Tensor) -> Tensor:
    """Pads the last dimension of a tensor with zeros, so that its size is a multiple of `LANES`."""
    missing = rows.new_zeros(*rows.shape[:-1], -rows.shape[-1] % LANES)
    return torch.cat([rows, missing], dim=-1)  # faster than F.pad, which writes twice


def _both_filled_up(matrices: Tensor) -> Tensor:
    return F.pad(matrices, (0, -matrices.shape[-1] % LANES, 0, -matrices.shape[-2] % LANES))


Shape = tuple[int, int, int]  # the shape of an image: (channels, height, width)


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A feature map φ, which is a fixed function from the pixels of an image to a vector.

    The vector of an image depends only on this image and not on others in the batch.

    Args:
        name: the map's name in settings and reports.
        image_shape: the shape (C, H, W) of the input images.
        dimension: the dimension d of the vectors.
        norm_bound: a public bound in the units of the features. φ is clipped to this L2 norm before
            sums are released. fedstats computes the centre of the features from such a sum.
        radius: R, a public constant in the same units: the approximate distance of an image's
            vector from the mean m of all vectors. fedstats clips (φ − m)/R to norm 1.
        source: a text for the report that states the origin of the two constants.
        function: float32 pixels in [0, 1] [N, C, H, W] -> vectors [N, d]. It must be differentiable
            if images are synthesised from statistics.
        blocks: the sizes (channels, cells) of the matrices that make up a vector when they are
            concatenated. Covariances between channels and between cells can be computed from these
            matrices. The tuple is empty if the vectors do not consist of matrices.

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

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise self._wrong("dimension", f"must be at least 1, got {self.dimension}")
        for name in ("norm_bound", "radius"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise self._wrong(name, f"must be positive and finite, got {value}")
        if self.blocks and sum(a * b for a, b in self.blocks) != self.dimension:
            reason = f"must have {self.dimension} coordinates in total, got {self.blocks}"
            raise self._wrong("blocks", reason)

    def _wrong(self, key: str, reason: str) -> SettingError:
        return SettingError(None, key, f"of the feature map {self.name!r} {reason}")

    def __call__(self, pixels_NCHW: Tensor) -> Tensor:
        """Returns the vectors [N, d] of the images, float32.

        Args:
            pixels_NCHW: images, either uint8 or floating point in [0, 1].

        Raises:
            SettingError: the images do not have the map's image shape, or the map's function does
                not return vectors of the declared dimension.
        """
        shape = tuple(pixels_NCHW.shape[1:])
        if shape != self.image_shape:
            raise self._wrong("image_shape", f"is {self.image_shape}, but the images have {shape}")
        x = pixels_NCHW.float()
        if pixels_NCHW.dtype == torch.uint8:
            x = x / 255
        features: object = self.function(x)
        expected = (x.shape[0], self.dimension)  # `len` would fix the number of images in ONNX
        returned = type(features).__name__
        if isinstance(features, Tensor):
            if features.shape == expected:
                return features.float()
            returned = f"shape {tuple(features.shape)}"
        reason = f"must return a tensor of shape {expected}, but returned {returned}"
        raise self._wrong("function", reason)

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureMap:
        """Returns the map itself.

        A map is immutable, and vectors are cached by map object.
        """
        return self
