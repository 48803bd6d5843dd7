"""The U-Net, which assigns a class to each pixel (Ronneberger, Fischer and Brox 2015, arXiv
1505.04597).

The form follows HarmoFL's and FedFA's public code for ProstateMRI. The image is halved four times.
Each block has two padded 3×3 convolutions without biases, each followed by a norm. Transposed 2×2
convolutions double the size again. The widths are w, 2w, 4w, 8w and 16w. With w = 32, three
channels and two classes, the network has 7,763,074 parameters, as in FedFA's code. HarmoFL's batch
norms have neither weights nor running statistics. Here and in FedFA's code, they have both.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import Shape
from fedsynth.models.convnet import make_norm

LEVELS = 4


class UNet(nn.Module):
    """A U-Net, which maps normalised images [N, C, H, W] to logits [N, classes, H, W].

    Raises:
        SettingError: an image side is not a multiple of 16.
    """

    stage_names = (*(f"pool{level}" for level in range(1, LEVELS + 1)), "bottleneck")

    def __init__(self, image_shape: Shape, classes: int, width: int, norm: str = "batch") -> None:
        super().__init__()
        channels, height, side = image_shape
        if height % 2**LEVELS or side % 2**LEVELS:
            rule = (
                f"requires sides that are multiples of {2**LEVELS}, got {height}×{side}. Set "
                "data.image_size"
            )
            raise SettingError("model", "name", rule, value="unet")
        widths = [width * 2**level for level in range(LEVELS + 1)]
        for level, (inputs, outputs) in enumerate(pairwise([channels, *widths[:-1]]), 1):
            self.add_module(f"encoder{level}", _block(inputs, outputs, norm))
            self.add_module(f"pool{level}", nn.MaxPool2d(2))
        self.bottleneck = _block(widths[-2], widths[-1], norm)
        for level in range(LEVELS, 0, -1):
            w = widths[level - 1]
            self.add_module(f"up{level}", nn.ConvTranspose2d(2 * w, w, 2, stride=2))
            self.add_module(f"decoder{level}", _block(2 * w, w, norm))
        self.classifier = nn.Conv2d(width, classes, 1)
        self.largest_activation = 2 * width * height * side

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes pixel features, [N, width, H, W]."""
        x, skipped = x_NCHW, []
        for level in range(1, LEVELS + 1):
            skipped.append(self.get_submodule(f"encoder{level}")(x))
            x = self.get_submodule(f"pool{level}")(skipped[-1])
        x = self.bottleneck(x)
        for level in range(LEVELS, 0, -1):
            x = torch.cat([self.get_submodule(f"up{level}")(x), skipped.pop()], dim=1)
            x = self.get_submodule(f"decoder{level}")(x)
        return x

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.classifier(self.embed(x_NCHW))


def _block(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False)]
        layers += [make_norm(norm, outputs), nn.ReLU()]
    return nn.Sequential(*layers)
