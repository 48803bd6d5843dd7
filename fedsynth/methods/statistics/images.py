"""FedStats' images: made by its server after the last round, of released sums and nothing else.

Start images are drawn from the class Gaussians of the released small pictures, and made sharper; or
from random processes, where there are no such pictures. They are moved towards the released class
means of features (`fedsynth.synthesizer.condensation.from_statistics`), and images between start
and end are taken too. Further start images are left as they are drawn. The released classifier
labels all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method, State
from fedsynth.core.state import ServerState
from fedsynth.data.images import normalise
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.features.feature_map import Shape
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.methods.statistics.class_moments import target_norm
from fedsynth.methods.statistics.pixel_moments import PixelMoments, sharpened
from fedsynth.methods.statistics.whitening import AUTO, NO, YES
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
from fedsynth.synthesizer.condensation.sets import MOST_IPC
from fedsynth.synthesizer.condensation.student import soft_labels
from fedsynth.validation import check_choices, check_ranges

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


@dataclass(frozen=True)
class ImagesState(ServerState):
    """What the server keeps for images, and they.

    Args:
        class_means: of z about their common mean, by the released moments, where images are to be
            made, [C, d]; None before.
        picture_means, picture_roots: of the released small pictures (`PixelMoments`), likewise.
        images: that were made after the last round, [C · m, channels, H, W], normalised, with m
            `images_each`.
        soft_labels: of them, by the released classifier, [C · m, C].
    """

    class_means: Tensor | None = None
    picture_means: Tensor | None = None
    picture_roots: Tensor | None = None
    images: Tensor | None = None
    soft_labels: Tensor | None = None


@dataclass(frozen=True)
class MakesImages(Method):
    """A method whose server makes images of released statistics after the last round.

    Args:
        ipc: images of each class that the server makes of the released statistics after the last
            round and moves towards them, with soft labels; 0: none.
        drawn_ipc: images of each class beside those, as they are drawn: worse each, but not alike.
            A student learns more from both; they cost no privacy, and a server little time.
        pictures: whether moments of small pictures are released for images to start from; else they
            start from random processes, which cost nothing. "auto": of grey images (a single row
            of pixels is a vector); in colour a student learns more from random processes.
        pixel_share: of the budget for these moments, taken where images are asked for.
        image_steps: of Adam on them.
        image_lr: in pixel units, where 1 is white.
        teacher_weight: of the released classifier's cross-entropy beside the class means' distance.
        smoothness: of total variation beside it.
    """

    images_from: ClassVar[str] = "ipc or drawn_ipc above 0, and a first round"
    learns_from_images: ClassVar[bool] = False

    ipc: int = 0
    drawn_ipc: int = 0
    pictures: str = AUTO
    pixel_share: float = 0.15
    image_steps: int = 12
    image_lr: float = 0.05
    teacher_weight: float = 0.03
    smoothness: float = 0.3

    def check_images(self) -> None:
        """Refuses what is out of range."""
        check_ranges(self, ipc=(0, MOST_IPC), drawn_ipc=(0, MOST_IPC), pixel_share=(0, 0.9))
        check_ranges(self, image_steps=(0, inf), image_lr=(0, inf))
        check_ranges(self, teacher_weight=(0, inf), smoothness=(0, inf))
        check_choices(self, pictures=(YES, NO, AUTO))
        if self.pictures == YES and not self.images_each:
            raise SettingError(
                "method",
                "pictures",
                "is yes, and no images are asked for that would start from them (method.ipc=400)",
            )

    @property
    def images_each(self) -> int:
        """Images of each class that are made."""
        return self.ipc + self.drawn_ipc

    def picture_share(self, spec: DatasetSpec) -> float:
        """What small pictures take of the budget: nothing where no images are asked for, or where
        they start from random processes; by public facts alone."""
        grey = spec.channels == 1 and min(spec.height, spec.width) > 1
        wanted = self.pictures == YES or (self.pictures == AUTO and grey)
        return self.pixel_share if wanted and self.images_each else 0.0

    def at_end(self, state: State, context: RoundContext) -> ServerState:
        """The state with images of what was released until now, and their soft labels."""
        if state.class_means is None:
            return state  # type: ignore[no-any-return]
        teacher = context.load(state.parameters)
        if not isinstance(teacher, FeatureLinear):
            raise TypeError(f"{self.name} has a linear model on features")
        teacher.requires_grad_(False)
        moments = None
        if state.picture_means is not None and state.picture_roots is not None:
            moments = PixelMoments(state.picture_means, state.picture_roots)
        steps = ImageSteps(self.image_steps, self.image_lr, self.teacher_weight, self.smoothness)
        making = ImageMaking(self.ipc, self.drawn_ipc, steps)
        pixels = make_images(teacher, state.class_means, moments, making, context)
        images = normalise(pixels, context.spec)
        made = {"images": images, "soft_labels": soft_labels(teacher, images)}
        return replace(state, **made)  # type: ignore[no-any-return]

    def synthetic(self, state: ImagesState, context: RoundContext) -> tuple[Tensor, Tensor] | None:
        if state.images is None:
            return None
        labels = torch.arange(context.spec.classes, device=state.images.device)
        return state.images, labels.repeat_interleave(self.images_each)

    def synthetic_soft_labels(self, state: ImagesState, context: RoundContext) -> Tensor | None:
        return state.soft_labels

    @property
    def plans_images(self) -> bool:
        return self.images_each > 0

    def makes_images(self, counted: Sequence[int]) -> bool:
        """Moments are released in round 1 only, and never from a sum without noise."""
        return self.plans_images and not self.sums_alone and 1 in counted


def class_means_of(pool: Pool, shape: tuple[int, int], *, second: bool) -> Tensor:
    """Class means of z about their common mean, drawn towards 0 as their noise asks, [C, d]: C/n
    times the sums of (e_y − 1/C) ⊗ z, exact where classes are as frequent as each other.

    Args:
        pool: the release of moments.
        shape: (C, d).
        second: whether second moments stand before them.
    """
    classes = shape[0]
    scale = classes * target_norm(classes) / pool.records * (math.sqrt(2) if second else 1.0)
    found = scale * pool.sums[-math.prod(shape) :].view(shape)
    return shrunk(found, scale * pool.deviation).float()


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


def check_differentiable(model: FeatureLinear) -> None:
    """Refuses a map that no image can be moved through; before anything is charged."""
    shape = model.feature_map.image_shape
    image = torch.full((1, *shape), 0.5, device=model.classifier.weight.device)
    image.requires_grad_(True)
    with torch.enable_grad():
        made = model.embed_pixels(image)
    if not made.requires_grad:
        raise SettingError(
            "method",
            "ipc",
            "must be 0: the feature map has no derivative by the pixels (is it computed under "
            "torch.no_grad?), so images cannot be moved; method.drawn_ipc=400 makes images "
            "without it",
        )
