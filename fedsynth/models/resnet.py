"""ResNet-18 and ResNet-50 (He et al. 2016), based on torchvision and with its parameter names.

With three channels and ten classes, they have 11,181,642 parameters (as in FedAF's Table 7) and
23,528,522 parameters. The networks halve the image five times, so a small image ends as one pixel.
Instance norm is not available, because it would map a single pixel to zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet


def group_norm(channels: int) -> nn.GroupNorm:
    """Creates a group norm with at most 32 groups, as Wu and He (2018) and Opacus use it."""
    return nn.GroupNorm(next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0), channels)


class _Block(BasicBlock):  # type: ignore[misc]  # torchvision has no types
    """torchvision's block, without the in-place addition."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return _add_shortcut(self, x, y)


class _Bottleneck(Bottleneck):  # type: ignore[misc]  # torchvision has no types
    """torchvision's bottleneck block, without the in-place addition."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        return _add_shortcut(self, x, self.bn3(self.conv3(y)))


def _add_shortcut(block: Any, x: Tensor, y: Tensor) -> Tensor:
    if block.downsample is not None:
        x = block.downsample(x)
    return block.relu(y + x)


class EmbeddingResNet(ResNet):  # type: ignore[misc]  # torchvision has no types
    """A ResNet, which maps normalised images [N, C, H, W] to logits [N, classes]."""

    stage_names = ("layer1", "layer2", "layer3", "layer4")

    def __init__(
        self,
        block: type[nn.Module],
        numbers: list[int],
        image_shape: tuple[int, int, int],
        classes: int,
        norm: str,
    ) -> None:
        layer = {"batch": nn.BatchNorm2d, "group": group_norm}[norm]
        super().__init__(block, numbers, num_classes=classes, norm_layer=layer)
        channels, height, width = image_shape
        if channels != 3:  # initialised as in torchvision
            self.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        for layer in self.modules():
            if isinstance(layer, nn.ReLU):
                layer.inplace = False  # DP-SGD's hooks hold the input that it would overwrite
        self.embedding_size: int = self.fc.in_features
        # scalars of an image after the first convolution
        self.largest_activation = 64 * -(-height // 2) * -(-width // 2)

    @property
    def classifier(self) -> nn.Linear:
        """The last layer, `fc`."""
        return self.fc

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 512], or [N, 2048] for ResNet-50."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x_NCHW))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return torch.flatten(self.avgpool(x), 1)


def resnet18(
    image_shape: tuple[int, int, int], classes: int, norm: str = "batch"
) -> EmbeddingResNet:
    """Creates a ResNet-18. `norm` is "batch" as in torchvision, or "group" for DP-SGD."""
    return EmbeddingResNet(_Block, [2, 2, 2, 2], image_shape, classes, norm)


def resnet50(
    image_shape: tuple[int, int, int], classes: int, norm: str = "batch"
) -> EmbeddingResNet:
    """Creates a ResNet-50. The arguments are those of `resnet18`."""
    return EmbeddingResNet(_Bottleneck, [3, 4, 6, 3], image_shape, classes, norm)
