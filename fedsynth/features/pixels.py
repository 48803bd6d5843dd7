"""Pixels as features: the simplest map, and the baseline for the others."""

from __future__ import annotations

import math

from torch import Tensor

from fedsynth.features.feature_map import FeatureMap, Shape


def pixels(shape: Shape) -> FeatureMap:
    """Returns the map to pixels relative to mid-grey.

    The norm is at most √d/2, because each coordinate is in [−½, ½]. Distances from the mean are
    about 0.3·√d for images with strong contrast (a coordinate's deviation is at most ½).

    >>> pixels((1, 8, 8)).norm_bound
    4.0
    """
    size = math.prod(shape)
    return FeatureMap(
        name="pixels",
        image_shape=shape,
        dimension=size,
        norm_bound=math.sqrt(size) / 2,
        radius=0.3 * math.sqrt(size),
        source="pixels are in [0, 1]: analytic",
        function=about_grey,
    )


def about_grey(x_NCHW: Tensor) -> Tensor:
    """Returns pixels relative to mid-grey, [N, C·H·W] in [−½, ½]."""
    return x_NCHW.flatten(1) - 0.5
