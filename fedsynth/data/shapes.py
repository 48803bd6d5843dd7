"""Generates `shapes`: ellipses with masks, from four sites with different scanner styles.

The data set is public and fixed. It demonstrates and tests segmentation in seconds without files.
"""

from __future__ import annotations

import numpy as np

from fedsynth.data.files import Split
from fedsynth.data.images import Floats
from fedsynth.data.registry import DatasetSpec
from fedsynth.seeding import numpy_generator

SEED = 0
# Each site's brightness, contrast, noise and brightness slope.
STYLES = (
    (0.3, 0.4, 0.05, 0.0),
    (0.6, 0.25, 0.05, 0.2),
    (0.15, 0.2, 0.1, 0.1),
    (0.45, 0.3, 0.15, 0.3),
)


def make_shapes(spec: DatasetSpec) -> tuple[Split, Split]:
    """Generates the training and test splits, with one equally large domain per site."""
    splits = []
    for purpose, size in (("shapes", spec.train_size), ("test shapes", spec.test_size)):
        images, masks = [], []
        for site, style in enumerate(STYLES):
            rng = numpy_generator(SEED, purpose, site)
            is_inside = _ellipses(rng, size // len(STYLES), spec.height, spec.width)
            images.append(_scanned(is_inside, style, rng))
            masks.append(is_inside)
        pixels = np.rint(255 * np.concatenate(images)[:, None].clip(0, 1)).astype(np.uint8)
        sites = np.repeat(np.arange(len(STYLES)), size // len(STYLES))
        splits.append(Split(pixels, np.concatenate(masks).astype(np.uint8), sites))
    return splits[0], splits[1]


def _ellipses(rng: np.random.Generator, count: int, height: int, width: int) -> Floats:
    """Draws masks of ellipses, 1 inside and 0 outside, [count, height, width]."""
    rows, columns = np.mgrid[:height, :width]
    y, x = rng.uniform(0.3, 0.7, (2, count, 1, 1)) * [[[[height]]], [[[width]]]]
    a, b = rng.uniform(0.12, 0.28, (2, count, 1, 1)) * min(height, width)
    return (((rows - y) / a) ** 2 + ((columns - x) / b) ** 2 <= 1).astype(np.float64)


def _scanned(
    is_inside: Floats, style: tuple[float, float, float, float], rng: np.random.Generator
) -> Floats:
    """Simulates the scanner of a site, and adds structures that the masks do not mark."""
    brightness, contrast, noise, slope = style
    count, height, width = is_inside.shape
    waves = rng.uniform(0, 2 * np.pi, (count, 1, 1)) + np.arange(width) / rng.uniform(
        2, 5, (count, 1, 1)
    )
    tissue = brightness + slope * np.linspace(-0.5, 0.5, height)[:, None] + 0.05 * np.sin(waves)
    return tissue + contrast * is_inside + noise * rng.standard_normal(is_inside.shape)
