"""GoogLeNet (Szegedy et al. 2015) without auxiliary classifiers, based on torchvision.

Parameters have torchvision's names. There are two differences from torchvision, for differential
privacy. The network has no dropout, because its masks would depend on the rest of the batch. ReLUs
are not in-place, because DP-SGD's hooks keep their inputs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models.googlenet import BasicConv2d, Inception, InceptionAux
from torchvision.models.googlenet import GoogLeNet as TorchvisionGoogLeNet

from fedsynth.models.embedding_network import require_size
from fedsynth.privacy.dpsgd import group_norm_twin

MIN_SIDE = 15  # a smaller side leaves a pooling layer without output


def googlenet(image_shape: tuple[int, int, int], classes: int, norm: str) -> nn.Module:
    """Creates a GoogLeNet. `norm` is "batch", or "group" to replace batch norms by group norms."""
    model = GoogLeNet(image_shape, classes)
    if norm == "group":
        return group_norm_twin(model)
    return model


class _Conv(BasicConv2d):  # type: ignore[misc]  # torchvision has no types
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class GoogLeNet(TorchvisionGoogLeNet):  # type: ignore[misc]  # torchvision has no types
    """GoogLeNet, which maps normalised images [N, C, H, W] to logits [N, classes].

    Raises:
        SettingError: the images are smaller than 15×15.
    """

    stage_names = ("maxpool1", "maxpool2", "maxpool3", "maxpool4", "inception5b")

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        blocks = [_Conv, partial(Inception, conv_block=_Conv), InceptionAux]
        super().__init__(num_classes=classes, aux_logits=False, init_weights=False, blocks=blocks)
        channels, height, width = image_shape
        require_size("googlenet", image_shape, MIN_SIDE)
        if channels != 3:
            self.conv1.conv = nn.Conv2d(
                channels, 64, kernel_size=7, stride=2, padding=3, bias=False
            )
        self.dropout = nn.Identity()
        self.embedding_size = 1024
        # scalars of an image after the first convolution
        self.largest_activation = 64 * -(-height // 2) * -(-width // 2)

    @property
    def classifier(self) -> nn.Linear:
        """The last layer, `fc`."""
        return self.fc

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 1024]."""
        x = self.conv3(self.conv2(self.maxpool1(self.conv1(x_NCHW))))
        x = self.inception3b(self.inception3a(self.maxpool2(x)))
        x = self.inception4e(
            self.inception4d(self.inception4c(self.inception4b(self.inception4a(self.maxpool3(x)))))
        )
        x = self.inception5b(self.inception5a(self.maxpool4(x)))
        return torch.flatten(self.avgpool(x), 1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.fc(self.embed(x_NCHW))
