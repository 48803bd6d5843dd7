"""FedStats' synthetic images, which the server generates after the last round from released sums
only.

If moments of small pictures are released, the initial images are drawn from each class's Gaussian
and sharpened. Otherwise they are drawn from random processes. They are then optimised towards the
released class means of features (`fedsynth.synthesizer.condensation.from_statistics`). For each
optimised image, three interpolations between it and its initial image are kept too. Further initial
images are added without optimisation. The released classifier gives all images soft labels.

A small picture v is a downsampled image. u = (√(1−c²)·v/‖v‖, c) has norm 1 and D coordinates
(`fedsynth.features.scattering`), and e_y is the image's one-hot label. Clients release noisy sums
of √½·[svec(u uᵀ); e_y ⊗ u], which are `Moments` with targets of norm 1. The sums give the class
counts, the class means and a common covariance around the means. Only the covariance's directions
above a noise threshold are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.capabilities import ImagesAtEnd
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.method import State
from fedsynth.core.sums import Pool
from fedsynth.data.images import normalise, to_stored
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.features.feature_map import Shape
from fedsynth.features.scattering import CONSTANT, cells_of
from fedsynth.methods.statistics.moments import second_and_crossed, target_norm
from fedsynth.models.on_features import FeatureLinear
from fedsynth.privacy.products import Moments
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation import from_statistics
from fedsynth.synthesizer.condensation.sets import MAX_IPC
from fedsynth.synthesizer.condensation.student import soft_labels
from fedsynth.validation import in_range, one_of

# The first and the last image of a class differ from the class mean by these fractions of the
# released standard deviation.
VARIETY = (0.4, 1.0)
# Positions of the kept images between an initial image (0) and its optimised image (1).
# Interpolated images need no pass through the features, and increase the variety by half.
ALONG = (1.0, 0.75, 0.5, 0.25)
# Number of random-process candidates for each image that is not optimised. More candidates do not
# improve a student.
FEW_CANDIDATES = 2

# The ranges of the sharpening curve's parameters, drawn for each image. The steepness is
# log-uniform.
STEEPNESS = (12.0, 50.0)
MIDDLE = (0.35, 0.55)
# The quantile of pixels that is scaled to white, because small pictures have lost their brightness.
WHITE = 0.98
# The smallest share of all examples that a class is assumed to have. A smaller released share is
# noise.
FEWEST = 1e-3


@dataclass(frozen=True)
class ImagesState(ServerState):
    """The server's state for FedStats' synthetic images: their statistics, and the images.

    Args:
        class_means: the class means of z around their common mean, [C, d], from the released
            moments. None before round 1, or if no images are requested.
        picture_means, picture_roots: the fields of `PixelMoments`, from the released small
            pictures. None before round 1, or if small pictures are not released.
        images: the normalised images generated after the last round, [C · m, channels, H, W], where
            m is `images_each`.
        soft_labels: the labels that the released classifier gives the images, [C · m, C].
    """

    class_means: Tensor | None = None
    picture_means: Tensor | None = None
    picture_roots: Tensor | None = None
    images: Tensor | None = None
    soft_labels: Tensor | None = None


@dataclass(frozen=True)
class MakesImages(from_statistics.ImageSteps, ImagesAtEnd):
    """A method whose server generates images from released statistics after the last round.

    `ImageSteps` documents the optimisation's settings.

    Args:
        ipc: number of images per class with soft labels after the last round. A quarter of them are
            optimised towards the released statistics. The others lie between an optimised image and
            its start image. With 0, none are optimised.
        drawn_ipc: number of further images per class, not optimised. Each is worse, but they are
            more diverse, and a student learns more from both kinds. They cost no privacy and little
            time.
        pictures: whether the images start from released moments of small pictures. Otherwise the
            images start from random processes, which cost no privacy. "auto" releases them for grey
            images with more than one row and column of pixels. For colour images, a student learns
            more from random processes.
        pixel_share: share of the budget for the moments of small pictures. It is used only if
            images are requested.
    """

    ipc: int = in_range(0, 0, MAX_IPC)
    drawn_ipc: int = in_range(0, 0, MAX_IPC)
    pictures: str = one_of("auto", "yes", "no")
    pixel_share: float = in_range(0.15, 0, 0.9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pictures == "yes" and not self.images_each:
            reason = (
                "must be 'auto' or 'no', got 'yes', because no images are requested. Set "
                "method.ipc=400 to request them"
            )
            raise SettingError("method", "pictures", reason)

    @property
    def images_each(self) -> int:
        """Returns the number of generated images per class."""
        return self.ipc + self.drawn_ipc

    def releases_pictures(self, spec: DatasetSpec) -> bool:
        """Returns whether moments of small pictures are released.

        They are released if images are requested that do not start from random processes. The
        decision uses only public facts.
        """
        if not self.images_each or not self.pixel_share:
            return False
        if self.pictures == "auto":
            return spec.channels == 1 and min(spec.height, spec.width) > 1
        return self.pictures == "yes"

    def at_end(self, state: State, context: RoundContext) -> ServerState:
        """Returns the state with images made from all releases so far, and their soft labels."""
        if state.class_means is None:
            return state
        teacher: Any = context.load(state.parameters).requires_grad_(False)
        images = normalise(self._pixels(teacher, state, context), context.spec)
        return replace(state, images=images, soft_labels=soft_labels(teacher, images))

    def _pixels(self, teacher: FeatureLinear, state: State, context: RoundContext) -> Tensor:
        """Generates all classes' images as stored pixels, [C · m, channels, H, W].

        The images are sorted by class. In each class the optimised images come first.

        The images start from random processes if no moments of small pictures were released.
        """
        weight, shape = teacher.classifier.weight, context.spec.image_shape
        means = state.class_means
        statistics = from_statistics.ReleasedStatistics(teacher.embed_pixels, weight, means)
        draws = torch_generator(context.seed, "fedstats' start images")

        def start(count: int, candidates: int) -> Tensor:
            if state.picture_means is None or state.picture_roots is None:
                return from_statistics.public_start(statistics, count, shape, draws, candidates)
            pictures = PixelMoments(state.picture_means, state.picture_roots)
            return gaussian_start(pictures, count, shape, draws).to(weight.device)

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

    def synthetic(
        self, state: ImagesState, context: RoundContext
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if state.images is None:
            return None
        labels = torch.arange(context.spec.classes, device=state.images.device)
        return state.images, labels.repeat_interleave(self.images_each), state.soft_labels


def class_means_of(pool: Pool, shape: tuple[int, int], *, has_second: bool) -> Tensor:
    """Computes the class means of z minus the common mean of all classes, [C, d].

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


def gaussian_start(
    moments: PixelMoments, ipc: int, shape: Shape, generator: torch.Generator
) -> Tensor:
    """Draws each class's start images from the moments of small pictures.

    They have the shape [C, ipc, channels, H, W], with pixels in [0, 1], on the CPU.
    """
    blurred_NCHW = moments.drawn(ipc, shape, VARIETY, generator).flatten(0, 1)
    share = torch.rand(2, len(blurred_NCHW), generator=generator)  # of each image's curve
    steepness = STEEPNESS[0] * (STEEPNESS[1] / STEEPNESS[0]) ** share[0]
    middle = MIDDLE[0] + (MIDDLE[1] - MIDDLE[0]) * share[1]
    return sharpened(blurred_NCHW, steepness, middle).view(len(moments.means), ipc, *shape)


def check_differentiable(model: FeatureLinear) -> None:
    """Checks that the feature map has a gradient with respect to the pixels.

    The check runs before any budget is charged.

    Raises:
        SettingError: the feature map has no gradient.
    """
    shape = model.feature_map.image_shape
    image = torch.full((1, *shape), 0.5, device=model.classifier.weight.device)
    image.requires_grad_(True)
    with torch.enable_grad():
        embedded = model.embed_pixels(image)
    if not embedded.requires_grad:
        reason = (
            "must be 0, because the feature map has no gradient with respect to the pixels. "
            "Remove torch.no_grad from the feature map, or set method.ipc=0 and "
            "method.drawn_ipc=400"
        )
        raise SettingError("method", "ipc", reason)


def pixel_rows(u_ND: Tensor, labels_N: Tensor, classes: int) -> Moments:
    """Returns each example's contribution √½·[svec(u uᵀ); e_y ⊗ u] to the small-picture release, of
    norm at most 1.
    """
    return Moments(u_ND, F.one_hot(labels_N, classes).to(u_ND.dtype), 1.0)


def pixel_width(dimension: int, classes: int) -> int:
    """Returns the small-picture release's dimension."""
    return dimension * (dimension + 1) // 2 + dimension * classes


@dataclass(frozen=True, eq=False)
class PixelMoments:
    """The moments of small pictures, each scaled to v/‖v‖.

    Attributes:
        means: the mean of each class, [C, D − 1], without u's constant.
        roots: columns that span the variation within classes, [D − 1, k]. roots·rootsᵀ is the
            covariance that all classes share, restricted to eigenvalues above a noise threshold.
    """

    means: Tensor
    roots: Tensor

    @classmethod
    def unpacked(cls, pool: Pool, dimension: int, classes: int) -> PixelMoments:
        """Extracts the moments from a release that was summed over the clients.

        Args:
            pool: Σ √½·[svec(u uᵀ); e_y ⊗ u] over all clients, with its noise.
            dimension, classes: D, and C.
        """
        second, crossed, noise = second_and_crossed(pool, dimension, classes)
        gram = second[:-1, :-1] / (1 - CONSTANT**2)
        noise /= 1 - CONSTANT**2
        shares = (crossed[:, -1:] / CONSTANT).clamp_min(max(FEWEST, noise))
        means = crossed[:, :-1] / shares / math.sqrt(1 - CONSTANT**2)
        within = gram - (shares * means).T @ means
        values, vectors = torch.linalg.eigh(within)
        # pure noise reaches noise·√(2D), so about a tenth of its directions pass this threshold
        significant = values > max(noise * math.sqrt(dimension), 1e-9)
        return cls(means, vectors[:, significant] * values[significant].sqrt())

    def drawn(
        self, count: int, shape: Shape, variety: tuple[float, float], generator: torch.Generator
    ) -> Tensor:
        """Draws random images of each class from a Gaussian with the class's moments.

        The images have the shape [C, count, channels, H, W], with pixels in [0, 1].

        Args:
            count: number of images per class.
            shape: (channels, H, W).
            variety: fractions of the standard deviation for a class's first and last image. The
                images between them have evenly spaced fractions.
            generator: a CPU generator.
        """
        classes = len(self.means)
        width = self.roots.shape[1]
        draws = torch.randn(classes, count, width, generator=generator, dtype=torch.float64)
        spread = torch.linspace(*variety, count, dtype=torch.float64).view(1, -1, 1)
        pictures = self.means.cpu()[:, None] + (spread * draws) @ self.roots.cpu().T
        return enlarged(pictures.flatten(0, 1), shape).view(classes, count, *shape)


def enlarged(pictures: Tensor, shape: Shape) -> Tensor:
    """Enlarges small pictures [N, D − 1] of any brightness to images [N, C, H, W] in [0, 1]."""
    small = pictures.float().reshape(-1, *cells_of(shape))
    large = F.interpolate(small, size=shape[1:], mode="bicubic", align_corners=False)
    white = large.flatten(1).quantile(WHITE, dim=1).clamp_min(1e-6).view(-1, 1, 1, 1)
    return (large / white).clamp(0, 1)


def sharpened(x_NCHW: Tensor, steepness_N: Tensor, middle_N: Tensor) -> Tensor:
    """Sharpens blurred images by a steeper curve from black to white.

    Averages of many images are blurred, whereas images are not. The curve is (s(x) − s(0))/(s(1) −
    s(0)), where s(x) is the logistic function of steepness·(x − middle).

    >>> x = torch.tensor([0.0, 0.4, 1.0]).view(1, 1, 1, 3)
    >>> sharpened(x, torch.tensor([10.0]), torch.tensor([0.4])).flatten()
    tensor([0.0000, 0.4921, 1.0000])
    """
    k = steepness_N.view(-1, 1, 1, 1)
    middle = middle_N.view(-1, 1, 1, 1)
    low = torch.sigmoid(-k * middle)
    high = torch.sigmoid(k * (1 - middle))
    curved: Tensor = (torch.sigmoid(k * (x_NCHW - middle)) - low) / (high - low)
    return curved
