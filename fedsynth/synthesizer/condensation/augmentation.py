"""Random image transformations for condensation and for training students.

Siamese augmentation (Zhao & Bilen 2021, "Differentiable Siamese Augmentation") applies the same
transformation to the real and the synthetic images of a (client, class) pair. Each step draws a new
transformation. Shift, scale, rotation and flip are one affine resampling. Brightness, saturation
and contrast are pointwise, and cutout is a mask. The strengths are the DSA paper's defaults.

A teacher labels warped and mixed copies, so they need not keep the original image's class. A smooth
random field deforms the warped copies (after Simard, Steinkraus & Platt 2003).

Views are flips and crops of single images, as in DENSE's public code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, repeat

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.context import RoundContext
from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec
from fedsynth.seeding import torch_generator

# A function that transforms images, given each image's group index. Images with the same group
# index get the same transformation.
Augmentation = Callable[[Tensor, Tensor], Tensor]

SHIFT, SCALE, ROTATE_DEGREES, CUTOUT = 0.125, 1.2, 15.0, 0.5


class SiameseAugmentation:
    """The random transformations of all images in one condensation step.

    Images with the same group index get the same transformation.

    Args:
        groups: the number of groups.
        generator: the random generator, on the images' device.
        flip: whether images may be mirrored. False for digits and letters, whose mirror image is a
            different character.
    """

    def __init__(self, groups: int, generator: torch.Generator, *, flip: bool) -> None:
        device = generator.device
        draw = torch.rand(10, groups, generator=generator, device=device)
        # 0 colour, 1 shift, 2 cutout, 3 scale, 4 rotate, 5 flip
        kind = (draw[0] * (6 if flip else 5)).long()
        signed = 2 * draw[1:7] - 1
        on = [kind == k for k in range(6)]
        self._brightness = torch.where(on[0], signed[0] / 2, 0)
        self._saturation = torch.where(on[0], 2 * draw[2], 1)
        self._contrast = torch.where(on[0], draw[3] + 0.5, 1)
        angle = torch.where(on[4], signed[3] * math.radians(ROTATE_DEGREES), 0)
        ratio = torch.where(on[3], SCALE ** signed[4], 1)
        mirror = torch.where(on[5] & (draw[6] < 0.5), -1.0, 1.0)
        shift = torch.where(on[1], 2 * SHIFT * signed[:2], 0)
        rows = [
            torch.stack([mirror * ratio * angle.cos(), -ratio * angle.sin(), shift[0]], dim=1),
            torch.stack([mirror * ratio * angle.sin(), ratio * angle.cos(), shift[1]], dim=1),
        ]
        self._theta = torch.stack(rows, dim=1)
        # centre of the cutout in [-1, 1]; 9 is outside
        self._hole = torch.where(on[2], 2 * draw[8:10] - 1, 9.0)

    def __call__(self, x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
        """Returns the transformed images, differentiable with respect to the originals.

        Args:
            x_NCHW: the images.
            pair_N: the group index of each image.
        """
        x = x_NCHW + self._brightness[pair_N].view(-1, 1, 1, 1)
        grey = x.mean(dim=1, keepdim=True)
        x = (x - grey) * self._saturation[pair_N].view(-1, 1, 1, 1) + grey
        level = x.mean(dim=(1, 2, 3), keepdim=True)
        x = (x - level) * self._contrast[pair_N].view(-1, 1, 1, 1) + level
        grid = F.affine_grid(self._theta[pair_N], list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)
        return x * self._mask(x, pair_N)

    def _mask(self, x: Tensor, pair_N: Tensor) -> Tensor:
        height, width = x.shape[2:]
        rows = torch.linspace(-1, 1, height, device=x.device).view(1, -1, 1)
        columns = torch.linspace(-1, 1, width, device=x.device).view(1, 1, -1)
        hole = self._hole[:, pair_N].view(2, -1, 1, 1)
        inside = ((rows - hole[0]).abs() < CUTOUT) & ((columns - hole[1]).abs() < CUTOUT)
        return (~inside).unsqueeze(1).to(x.dtype)


AUGMENTATIONS = ("none", "siamese")


def augmentations(
    kind: str, label_S: Tensor, context: RoundContext, *, flip: bool, period: int | None = None
) -> Iterator[Augmentation | None]:
    """Yields a random image augmentation for each condensation step.

    The transformation is drawn separately for each class, and applies to real and synthetic images
    alike. All clients share it, because it is drawn from the round's public seed.

    Args:
        kind: one of `AUGMENTATIONS`. "none" yields None in every step.
        label_S: the class of each (client, class) pair.
        context: the round's context.
        flip: see `SiameseAugmentation`.
        period: the number of steps before the transformations repeat. With None, they never repeat.
    """
    if kind == "none":
        yield from repeat(None)
    label_S = label_S.to(context.device)
    generator = torch_generator(
        context.seed, "siamese augmentation", context.round, device=context.device
    )
    initial = generator.get_state()
    for step in count():
        if period is not None and step % period == 0:
            generator.set_state(initial)
        yield _by_class(SiameseAugmentation(context.spec.classes, generator, flip=flip), label_S)


def _by_class(transform: SiameseAugmentation, label_S: Tensor) -> Augmentation:
    return lambda x_NCHW, pair_N: transform(x_NCHW, label_S[pair_N])


TURN = 0.15  # radians; this and the next four are maxima
WARP_SCALE = 0.15  # relative change of the size
SHEAR = 0.1  # relative to a side
WARP_SHIFT = 0.16  # relative to half a side
BEND = 0.12  # relative to half a side, at the knots of a grid
KNOTS = 5  # of this grid, per side


def warped(x_NCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Returns randomly rotated, scaled, sheared, shifted and deformed copies of images.

    Each image has its own random transformation. Pixels from outside the image take the value of
    the nearest border pixel.

    Args:
        x_NCHW: images with pixel values of any scale.
        generator: the random generator, on the images' device.
    """

    def drawn(bound: float, *shape: int) -> Tensor:
        uniform = torch.rand(len(x_NCHW), *shape, generator=generator, device=x_NCHW.device)
        return bound * (2 * uniform - 1)

    angle = drawn(TURN)
    theta = torch.zeros(len(x_NCHW), 2, 3, device=x_NCHW.device)
    theta[:, 0, 0] = (1 + drawn(WARP_SCALE)) * angle.cos()
    theta[:, 0, 1] = drawn(SHEAR) - angle.sin()
    theta[:, 1, 0] = angle.sin()
    theta[:, 1, 1] = (1 + drawn(WARP_SCALE)) * angle.cos()
    theta[:, :, 2] = drawn(WARP_SHIFT, 2)
    grid = F.affine_grid(theta, list(x_NCHW.shape), align_corners=False)
    field = drawn(BEND, 2, KNOTS, KNOTS)
    bent = F.interpolate(field, size=x_NCHW.shape[2:], mode="bicubic", align_corners=False)
    grid = grid + bent.permute(0, 2, 3, 1)
    return F.grid_sample(x_NCHW, grid, padding_mode="border", align_corners=False)


def blended(x_NCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Mixes each image with another image of the batch, with weights uniform on [0, 1]."""
    count = len(x_NCHW)
    share = torch.rand(count, 1, 1, 1, generator=generator, device=x_NCHW.device)
    other = torch.randperm(count, generator=generator, device=x_NCHW.device)
    return share * x_NCHW + (1 - share) * x_NCHW[other]


@dataclass(frozen=True)
class Views:
    """Random flips and crops of normalised images, differentiable with respect to the images.

    Args:
        flips: whether every image is mirrored left to right with probability one half.
        crop: the width of the black border added at every edge, as a share of the longer side. A
            window of the original size is then cut out at random. 0 means no crop.
    """

    flips: bool = False
    crop: float = 0.0

    def __bool__(self) -> bool:
        return self.flips or self.crop > 0

    def __call__(self, x_NCHW: Tensor, spec: DatasetSpec, draws: torch.Generator) -> Tensor:
        """Flips and crops each image [N, C, H, W] at random.

        The images must be normalised with the constants of `spec`, and so is the result.

        Args:
            x_NCHW: the images.
            spec: the data set's specification.
            draws: the random generator, on the images' device.
        """
        if self.flips:
            mirrored = torch.rand(len(x_NCHW), generator=draws, device=x_NCHW.device) < 0.5
            x_NCHW = torch.where(mirrored.view(-1, 1, 1, 1), x_NCHW.flip(3), x_NCHW)
        if edge := self.edge(spec):
            mean, std = pixel_constants(spec, x_NCHW.device)
            x_NCHW = _cropped(x_NCHW, edge, -mean / std, draws)
        return x_NCHW

    def edge(self, spec: DatasetSpec) -> int:
        """Returns the padding in pixels at each edge before a random crop.

        It is 4 for sides of 28 or 32 pixels and a crop of 1/8.
        """
        return int(self.crop * max(spec.height, spec.width) + 0.5)


def _cropped(x_NCHW: Tensor, edge: int, black: Tensor, draws: torch.Generator) -> Tensor:
    """Pads each image with a black border of `edge` pixels, and cuts out a random window.

    `black` is the normalised value of a black pixel, [1, C, 1, 1].
    """
    count, _, height, width = x_NCHW.shape
    device = x_NCHW.device
    corner = torch.randint(2 * edge + 1, (2, count, 1), generator=draws, device=device)
    rows = corner[0] + torch.arange(height, device=device)
    columns = corner[1] + torch.arange(width, device=device)
    wide = F.pad(x_NCHW - black, (edge, edge, edge, edge)) + black
    image = torch.arange(count, device=device).view(-1, 1, 1)
    return wide[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
