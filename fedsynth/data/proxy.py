"""Provides public images of another data set as model inputs, for FedDF's distillation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.data.images import ImageData, normalise
from fedsynth.data.registry import DatasetSpec
from fedsynth.seeding import torch_generator

NOISE = "noise"
NOISE_IMAGES = 10_000


def noise_images(spec: DatasetSpec, seed: int) -> ImageData:
    """Draws images of uniformly random pixels from the run's seed. They are public, because they
    depend on no data."""
    generator = torch_generator(seed, "noise proxy")
    pixels = torch.randint(
        256, (NOISE_IMAGES, *spec.image_shape), generator=generator, dtype=torch.uint8
    )
    return ImageData(pixels, torch.zeros(NOISE_IMAGES, dtype=torch.int64), spec)


class ProxyImages:
    """Converts images of one data set to the inputs of a network for another data set.

    Grey images are repeated in all channels, and colour images are averaged to grey (ITU-R 601), as
    the other data set requires. Images are then resized, and normalised with its constants.

    Args:
        data: the images to convert.
        spec: the specification of the data set for which the network was built.
    """

    def __init__(self, data: ImageData, spec: DatasetSpec) -> None:
        self._pixels = data.images
        self._spec = spec

    def __len__(self) -> int:
        return len(self._pixels)

    def __call__(self, indices: Tensor) -> Tensor:
        """Returns the images at the given positions as normalised inputs [N, C, H, W]."""
        x = self._pixels[indices].float()
        if x.shape[1] == 3 and self._spec.channels == 1:
            x = (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
        if x.shape[1] != self._spec.channels:
            x = x.mean(dim=1, keepdim=True).expand(-1, self._spec.channels, -1, -1)
        size = (self._spec.height, self._spec.width)
        if tuple(x.shape[2:]) != size:
            x = F.interpolate(x, size=size, mode="bilinear", antialias=True)
        return normalise(x.round().clamp(0, 255).to(torch.uint8), self._spec)
