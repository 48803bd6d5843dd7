"""AlexNet with batch norm, as FedBN (Li et al. 2021, arXiv 2102.07623) and FedFA+ train it on
Office-Caltech-10 and DomainNet.

The network has the five convolutions of AlexNet with torchvision's widths, and then two hidden
layers of 1024 units. Batch norm follows each of these layers. There is no dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsynth.models.convnet import make_norm
from fedsynth.models.embedding_network import EmbeddingNetwork, require_size
from fedsynth.models.resnet import group_norm

MIN_SIDE = 63  # a smaller side leaves a pooling layer without output


class AlexNet(EmbeddingNetwork):
    """AlexNet, which maps normalised images [N, C, H, W] to logits [N, classes].

    Args:
        norm: "batch", or "group" for DP-SGD.

    Raises:
        SettingError: the images are smaller than 63×63.
    """

    stage_names = ("pool1", "pool2", "layer3", "layer4", "pool5")

    def __init__(
        self, image_shape: tuple[int, int, int], classes: int, *, norm: str = "batch"
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        require_size("alexnet", image_shape, MIN_SIDE)

        def convolution(
            inputs: int, outputs: int, kernel: int, stride: int, padding: int
        ) -> nn.Module:
            convolve = nn.Conv2d(inputs, outputs, kernel, stride, padding)
            return nn.Sequential(convolve, make_norm(norm, outputs), nn.ReLU())

        def hidden(inputs: int) -> nn.Module:
            layer = group_norm(1024) if norm == "group" else nn.BatchNorm1d(1024)
            return nn.Sequential(nn.Linear(inputs, 1024), layer, nn.ReLU())

        self.layer1 = convolution(channels, 64, 11, 4, 2)
        self.pool1 = nn.MaxPool2d(3, 2)
        self.layer2 = convolution(64, 192, 5, 1, 2)
        self.pool2 = nn.MaxPool2d(3, 2)
        self.layer3 = convolution(192, 384, 3, 1, 1)
        self.layer4 = convolution(384, 256, 3, 1, 1)
        self.layer5 = convolution(256, 256, 3, 1, 1)
        self.pool5 = nn.MaxPool2d(3, 2)
        self.spread = nn.AdaptiveAvgPool2d((6, 6))
        self.hidden1 = hidden(256 * 6 * 6)
        self.hidden2 = hidden(1024)
        self.classifier = nn.Linear(1024, classes)
        self.embedding_size = 1024
        self.largest_activation = 64 * (1 + (height - 7) // 4) * (1 + (width - 7) // 4)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 1024]."""
        x = self.pool2(self.layer2(self.pool1(self.layer1(x_NCHW))))
        x = self.spread(self.pool5(self.layer5(self.layer4(self.layer3(x)))))
        return self.hidden2(self.hidden1(torch.flatten(x, 1)))
