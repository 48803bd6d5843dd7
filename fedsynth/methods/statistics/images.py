"""FedStats' synthetic images. The server generates them after the last round, from released sums
only.

If moments of thumbnails are released, the initial images are rendered from them
(`fedsynth.methods.statistics.pictures`). Otherwise they are drawn from random processes. They are
then optimised towards the released class means of features
(`fedsynth.synthesizer.condensation.from_statistics`). For each optimised image, three
interpolations between it and its initial image are kept too. Further initial images are added
without optimisation. The released classifier gives all images soft labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.capabilities import ImagesAtEnd, ServerParts
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Tensors
from fedsynth.core.method import State
from fedsynth.core.sums import Pool
from fedsynth.data.images import normalise, to_stored
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.methods.statistics.moments import target_norm
from fedsynth.methods.statistics.pictures import PixelMoments, rendered
from fedsynth.models.on_features import FeatureLinear
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation import from_statistics
from fedsynth.synthesizer.condensation.sets import MAX_IPC
from fedsynth.synthesizer.condensation.student import soft_labels
from fedsynth.validation import in_range, one_of

# Positions of the kept images between an initial image (0) and its optimised image (1).
# Interpolated images need no pass through the features, and increase the variety by half.
ALONG = (1.0, 0.75, 0.5, 0.25)
# Number of random-process candidates for each image that is not optimised. More candidates do not
# improve a student.
FEW_CANDIDATES = 2


@dataclass(frozen=True)
class ImagesState(ServerState):
    """The part of FedStats' server state that concerns synthetic images.

    Args:
        class_means: the class means of z around their common mean, [C, d], from the released
            moments. None before round 1, or if no images are requested.
        picture_means, picture_roots, picture_overall: the fields of `PixelMoments`, from the
            released thumbnails. None before round 1, or if thumbnails are not released.
        images: the normalised images generated after the last round, [C · m, channels, H, W], where
            m is `images_each`.
        soft_labels: the labels that the released classifier gives the images, [C · m, C].
    """

    class_means: Tensor | None = None
    picture_means: Tensor | None = None
    picture_roots: Tensor | None = None
    picture_overall: Tensor | None = None
    images: Tensor | None = None
    soft_labels: Tensor | None = None


@dataclass(frozen=True)
class MakesImages(from_statistics.ImageSteps, ImagesAtEnd, ServerParts):
    """A method whose server generates images from released statistics after the last round.

    `ImageSteps` documents the optimisation's settings.

    Args:
        ipc: number of images per class with soft labels after the last round. A quarter of them are
            optimised towards the released statistics. The others lie between an optimised image and
            its start image. With 0, none are optimised.
        drawn_ipc: number of further images per class, not optimised. Each is worse, but they are
            more diverse, and a student learns more from both kinds. They cost no privacy and little
            time.
        pictures: whether the images start from released moments of thumbnails. Otherwise the
            images start from random processes, which cost no privacy. "auto" releases them for grey
            images with more than one row and column of pixels. For colour images, a student learns
            more from random processes.
        pixel_share: share of the budget for the moments of thumbnails. It is used only if
            images are requested.
    """

    ipc: int = in_range(0, 0, MAX_IPC)
    drawn_ipc: int = in_range(0, 0, MAX_IPC)
    pictures: str = one_of("auto", "yes", "no")
    pixel_share: float = in_range(0.15, 0, 0.9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pictures == "yes" and not self.images_each:
            reason = "is 'yes', but no images are requested. Set method.ipc=400"
            raise SettingError("method", "pictures", reason)
        if self.pictures == "yes" and not self.pixel_share:
            reason = "is 'yes', but method.pixel_share is 0. Set method.pixel_share=0.15"
            raise SettingError("method", "pictures", reason)

    @property
    def images_each(self) -> int:
        """Returns the number of generated images per class."""
        return self.ipc + self.drawn_ipc

    def releases_pictures(self, spec: DatasetSpec) -> bool:
        """Returns True if moments of thumbnails are released.

        They are released if images are requested that do not start from random processes. The
        decision uses only public facts.
        """
        if not self.images_each or not self.pixel_share:
            return False
        if self.pictures == "auto":
            return spec.channels == 1 and min(spec.height, spec.width) > 1
        return self.pictures == "yes"

    def at_end(self, state: State, context: RoundContext) -> ServerState:
        """Returns the state with images and soft labels that are made from all releases so far."""
        if state.class_means is None:
            return state
        teacher: Any = context.load(state.parameters).requires_grad_(False)
        images = normalise(self._pixels(teacher, state, context), context.spec)
        return replace(state, images=images, soft_labels=soft_labels(teacher, images))

    def _pixels(self, teacher: FeatureLinear, state: State, context: RoundContext) -> Tensor:
        """Generates the images of all classes as stored pixels, [C · m, channels, H, W].

        The images are sorted by class. In each class the optimised images come first.

        The images start from random processes if no moments of thumbnails were released.
        """
        weight, shape = teacher.classifier.weight, context.spec.image_shape
        class_means = state.class_means
        compute = self.in_parts(state.parameters, context)
        statistics = from_statistics.ReleasedStatistics(compute, weight, class_means)
        draws = torch_generator(context.seed, "fedstats' start images")

        def start(count: int, candidates: int) -> Tensor:
            means, roots, overall = state.picture_means, state.picture_roots, state.picture_overall
            if means is None or roots is None or overall is None:
                return from_statistics.public_start(statistics, count, shape, draws, candidates)
            pictures = PixelMoments(means, roots, overall)
            return rendered(pictures, statistics, count, shape, draws).to(weight.device)

        parts = []
        if self.ipc:
            # fully optimised images first, then the interpolated ones
            positions = ALONG if self.image_steps else (1.0,)
            initial = start(math.ceil(self.ipc / len(positions)), from_statistics.CANDIDATES)
            report = partial(context.report, "images")
            optimised = from_statistics.images_from_statistics(statistics, initial, self, report)
            line = [initial + position * (optimised - initial) for position in positions]
            parts.append(torch.cat(line, dim=1)[:, : self.ipc])
        if self.drawn_ipc:
            parts.append(start(self.drawn_ipc, FEW_CANDIDATES))
        return to_stored(torch.cat(parts, dim=1).flatten(0, 1), context.spec)

    def server_part(self, shared: Tensors, context: RoundContext) -> Callable[[Tensors], Tensors]:
        teacher: Any = context.load(shared).requires_grad_(False)
        return partial(from_statistics.compute_part, teacher.embed_pixels)

    def synthetic(
        self, state: ImagesState, context: RoundContext
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if state.images is None:
            return None
        labels = torch.arange(context.spec.classes, device=state.images.device)
        return state.images, labels.repeat_interleave(self.images_each), state.soft_labels


def class_means_of(pool: Pool, shape: tuple[int, int], *, has_second: bool) -> Tensor:
    """Computes the class means of z, [C, d], and subtracts the common mean of all classes.

    The class means are b·C/n times the sums of e/b ⊗ z (e = e_y − 1/C, b = ‖e‖), which is exact if
    the classes are equally frequent. They are then shrunk towards 0 by their noise.

    Args:
        pool: the release of moments, summed over the clients.
        shape: (C, d).
        has_second: whether second moments precede these sums in the release.
    """
    classes = shape[0]
    scale = classes * target_norm(classes) / pool.records
    if has_second:
        scale *= math.sqrt(2)
    means = scale * pool.sums[-math.prod(shape) :].view(shape)
    return from_statistics.shrunk(means, scale * pool.noise_std).float()


def check_feature_map(model: FeatureLinear, *, optimised: bool) -> None:
    """Checks on black, grey and white images that the server can compute with the feature map.

    The check runs before any budget is charged.

    Args:
        model: the method's model.
        optimised: whether images are optimised, so that gradients must flow back to the pixels.

    Raises:
        SettingError: a vector is not finite, or the feature map has no gradient.
    """
    levels = torch.tensor([0.0, 0.5, 1.0], device=model.classifier.weight.device)
    images = levels.view(-1, 1, 1, 1).repeat(1, *model.feature_map.image_shape)
    with torch.enable_grad():
        embedded = model.embed_pixels(images.requires_grad_(optimised))
    for level, is_finite in zip(levels, torch.isfinite(embedded).all(dim=1), strict=True):
        if not is_finite:
            reason = (
                f"gives a vector that is not finite for an image with all pixels {level:g}. Choose "
                "other features, or set method.ipc=0 and method.drawn_ipc=0"
            )
            raise SettingError("method", "features", reason)
    if optimised and not embedded.requires_grad:
        reason = (
            "is above 0, but the feature map has no gradient with respect to the pixels. Set "
            "method.ipc=0 and method.drawn_ipc=400"
        )
        raise SettingError("method", "ipc", reason)
