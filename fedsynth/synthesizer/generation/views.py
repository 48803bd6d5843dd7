"""Random views of images, as training on generated images uses them: mirrored, shifted by a crop.

Unlike `augmentation`, whose classes of real and synthetic images share a transformation, each image
gets one of its own (DENSE's public code).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec


@dataclass(frozen=True)
class Views:
    """Flips and crops of normalised images, differentiable.

    Args:
        flips: mirror every image left to right with probability one half.
        crop: share of the longer side that is added at every edge as black pixels, before a window
            of the old size is cut out at random; 0: no crop.
    """

    flips: bool = False
    crop: float = 0.0

    def __bool__(self) -> bool:
        return self.flips or self.crop > 0

    def __call__(self, x_NCHW: Tensor, spec: DatasetSpec, draws: torch.Generator) -> Tensor:
        """The views [N, C, H, W] of images that are normalised as `spec` says.

        Args:
            draws: on the images' device.
        """
        if self.flips:
            mirrored = torch.rand(len(x_NCHW), generator=draws, device=x_NCHW.device) < 0.5
            x_NCHW = torch.where(mirrored.view(-1, 1, 1, 1), x_NCHW.flip(3), x_NCHW)
        edge = self.edge(spec)
        if edge:
            x_NCHW = _cropped(x_NCHW, edge, _black(x_NCHW, spec), draws)
        return x_NCHW

    def edge(self, spec: DatasetSpec) -> int:
        """Pixels that a crop adds at each edge: 4 of 28 and of 32 at an eighth."""
        return int(self.crop * max(spec.height, spec.width) + 0.5)


def _black(x_NCHW: Tensor, spec: DatasetSpec) -> Tensor:
    """What a pixel of value 0 is after normalisation, [1, C, 1, 1]."""
    mean, std = pixel_constants(spec, x_NCHW.device)
    return -mean / std


def _cropped(x_NCHW: Tensor, edge: int, black: Tensor, draws: torch.Generator) -> Tensor:
    count, _, height, width = x_NCHW.shape
    device = x_NCHW.device
    corner = torch.randint(2 * edge + 1, (2, count, 1), generator=draws, device=device)
    rows = corner[0] + torch.arange(height, device=device)
    columns = corner[1] + torch.arange(width, device=device)
    wide = F.pad(x_NCHW - black, (edge, edge, edge, edge)) + black
    image = torch.arange(count, device=device).view(-1, 1, 1)
    return wide[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
