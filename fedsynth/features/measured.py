"""A feature map of one's own with its constants measured, on images that a procedure draws."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.public_statistics import SOURCE, constants, public_vectors


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
    norm_bound, radius = constants(vectors)
    if not radius > 0:
        raise SettingError(
            None, "function", f"of features {name!r} makes the same of half of all images"
        )
    return FeatureMap(name, image_shape, vectors.shape[1], norm_bound, radius, SOURCE, function)
