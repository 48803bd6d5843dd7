"""Siamese augmentation (Zhao & Bilen 2021, "Differentiable Siamese Augmentation"): real and
synthetic images of a class get the same.

At every step each segment (client and class) draws one transformation and its strength; all its
images, real and synthetic, are transformed alike, on the device and differentiably. Shift, scale,
rotation and flip are one affine resampling; brightness, saturation and contrast are pointwise;
cutout is a mask. Strengths follow the DSA paper's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.seeding import torch_generator

SHIFT, SCALE, ROTATE_DEGREES, CUTOUT = 0.125, 1.2, 15.0, 0.5


class SiameseAugmentation:
    """One step's transformations for all segments.

    Args:
        segments: how many; `generator`: on the images' device; `flip`: False for digits and
            letters, whose mirror image is another sign.
    """

    def __init__(self, segments: int, generator: torch.Generator, *, flip: bool) -> None:
        device = generator.device
        draw = torch.rand(10, segments, generator=generator, device=device)
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

    def __call__(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """The transformed images; differentiable."""
        x = x_NCHW + self._brightness[segment_N].view(-1, 1, 1, 1)
        grey = x.mean(dim=1, keepdim=True)
        x = (x - grey) * self._saturation[segment_N].view(-1, 1, 1, 1) + grey
        level = x.mean(dim=(1, 2, 3), keepdim=True)
        x = (x - level) * self._contrast[segment_N].view(-1, 1, 1, 1) + level
        grid = F.affine_grid(self._theta[segment_N], list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)
        return x * self._mask(x, segment_N)

    def _mask(self, x: Tensor, segment_N: Tensor) -> Tensor:
        height, width = x.shape[2:]
        rows = torch.linspace(-1, 1, height, device=x.device).view(1, -1, 1)
        columns = torch.linspace(-1, 1, width, device=x.device).view(1, 1, -1)
        hole = self._hole[:, segment_N].view(2, -1, 1, 1)
        inside = ((rows - hole[0]).abs() < CUTOUT) & ((columns - hole[1]).abs() < CUTOUT)
        return (~inside).unsqueeze(1).to(x.dtype)


class SiameseDraws:
    """Draws each step's transformations by class, from the round's public seed.

    All clients share them, as they share the networks.

    Args:
        label_S: class of each segment, on the images' device.
        classes: how many there are.
        flip: see `SiameseAugmentation`.
        period: after so many steps the same ones come again; None: never.
    """

    def __init__(
        self,
        label_S: Tensor,
        classes: int,
        *,
        flip: bool,
        seed: int,
        round: int,
        period: int | None = None,
    ) -> None:
        self._label = label_S
        self._classes = classes
        self._flip = flip
        self._key = (seed, round)
        self._period = period
        self._drawn = 0
        self._generator = self._stream()

    def _stream(self) -> torch.Generator:
        seed, round = self._key
        return torch_generator(seed, "siamese augmentation", round, device=self._label.device)

    def draw(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The next step's: (images, segment of each) -> transformed images."""
        if self._period is not None and self._drawn % self._period == 0:
            self._generator = self._stream()
        self._drawn += 1
        transform = SiameseAugmentation(self._classes, self._generator, flip=self._flip)
        return lambda x_NCHW, segment_N: transform(x_NCHW, self._label[segment_N])
