"""FedStats' images: made by its server after the last round, of released sums and nothing else.

Start images are drawn from the class Gaussians of the released small pictures, and made sharper; or
from random processes, where there are no such pictures. They are moved towards the released class
means of features (`fedsynth.synthesizer.condensation.from_statistics`), and images between start
and end are taken too. Further start images are left as they are drawn. The released classifier
labels all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.features.feature_map import Shape
from fedsynth.methods.shared.class_statistics import target_norm
from fedsynth.methods.shared.pixel_moments import PixelMoments, sharpened
from fedsynth.models.feature_linear import FeatureLinear
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.from_statistics import (
    CANDIDATES,
    ImageSteps,
    ReleasedStatistics,
    images_from_statistics,
    public_start,
    shrunk,
)

VARIETY = (0.4, 1.0)
"""Parts of the released deviation by which a class's first and last image vary."""
ALONG = (1.0, 0.75, 0.5, 0.25)
"""Where images are taken on their straight way from start to end: those between cost no features,
and are another half of the variety."""
FEW_CANDIDATES = 2
"""Random-process images for each that is left as it is: a surer choice helps no student."""
STEEPNESS = (12.0, 50.0)
MIDDLE = (0.35, 0.55)
"""Of the curve that makes an image sharper: drawn for each image, the first evenly in its log."""


def class_means_of(
    sums_D: Tensor, deviation: float, records: float, shape: tuple[int, int], *, second: bool
) -> Tensor:
    """Class means of z about their common mean, drawn towards 0 as their noise asks, [C, d]: C/n
    times the sums of (e_y − 1/C) ⊗ z, exact where classes are as frequent as each other.

    Args:
        sums_D: the pooled release of moments.
        deviation: of its noise in a coordinate.
        records: n.
        shape: (C, d).
        second: whether second moments stand before them.
    """
    classes = shape[0]
    scale = classes * target_norm(classes) / records * (math.sqrt(2) if second else 1.0)
    found = scale * sums_D[-math.prod(shape) :].view(shape)
    return shrunk(found, scale * deviation).float()


@dataclass(frozen=True)
class ImageMaking:
    """What is asked for: images a class that are moved, those that are only drawn, and how the
    first are moved."""

    ipc: int
    drawn: int
    steps: ImageSteps

    @property
    def along(self) -> tuple[float, ...]:
        """Where on its way each moved image is taken."""
        return ALONG if self.steps.steps else (1.0,)


def make_images(
    teacher: FeatureLinear,
    class_means_Cd: Tensor,
    moments: PixelMoments | None,
    making: ImageMaking,
    context: RoundContext,
) -> Tensor:
    """Pixels uint8 [C · (ipc + drawn), channels, H, W], class by class, moved images first.

    Args:
        teacher: the released classifier.
        class_means_Cd: released, of z.
        moments: released, of small pictures; None: images start from random processes.
        making: how many, and how.
        context: of the last round.
    """
    weight = teacher.classifier.weight
    statistics = ReleasedStatistics(teacher.embed_pixels, weight, class_means_Cd)
    draws = torch_generator(context.seed, "fedstats' start images")

    def start(count: int, candidates: int) -> Tensor:
        shape = context.spec.image_shape
        if moments is None:
            return public_start(statistics, count, shape, draws, candidates)
        return drawn_start(moments, count, shape, draws).to(weight.device)

    parts = []
    if making.ipc:
        begin = start(math.ceil(making.ipc / len(making.along)), CANDIDATES)
        parts.append(_moved(statistics, begin, making, context))
    if making.drawn:
        parts.append(start(making.drawn, FEW_CANDIDATES))
    return torch.cat(parts, dim=1).flatten(0, 1).mul(255).round().to(torch.uint8)


def _moved(
    statistics: ReleasedStatistics, begin: Tensor, making: ImageMaking, context: RoundContext
) -> Tensor:
    """[C, ipc, channels, H, W]: images at the end of their way, then those along it."""
    made = images_from_statistics(
        statistics,
        begin,
        making.steps,
        lambda done, total: context.report("images", done, total),
    )
    between = [begin + share * (made - begin) for share in making.along]
    return torch.cat(between, dim=1)[:, : making.ipc]


def drawn_start(
    moments: PixelMoments, ipc: int, shape: Shape, generator: torch.Generator
) -> Tensor:
    """Start images of each class, [C, ipc, channels, H, W] in [0, 1], on the CPU."""
    made = moments.drawn(ipc, shape, VARIETY, generator).flatten(0, 1)
    return clear(made, generator).view(len(moments.means), ipc, *shape)


def clear(blurred_NCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Each image made sharper by a curve of its own."""
    share = torch.rand(2, len(blurred_NCHW), generator=generator)
    steepness = STEEPNESS[0] * (STEEPNESS[1] / STEEPNESS[0]) ** share[0]
    middle = MIDDLE[0] + (MIDDLE[1] - MIDDLE[0]) * share[1]
    return sharpened(blurred_NCHW, steepness, middle)
