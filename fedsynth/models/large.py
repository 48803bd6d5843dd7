"""ResNet-18, ResNet-50, AlexNet, GoogLeNet, DenseNet-100 and Swin-T.

The last layer of each network is `classifier`, whatever its name is in torchvision.

ResNet-18 and ResNet-50 (He et al. 2016) are based on torchvision and have its parameter names. With
three channels and ten classes, they have 11,181,642 parameters (as in FedAF's Table 7) and
23,528,522 parameters. The networks halve the image five times, so a small image ends as one pixel.
Instance norm is not available, because it would map a single pixel to zero.

AlexNet has batch norm, as FedBN (Li et al. 2021, arXiv 2102.07623) and FedFA+ train it on
Office-Caltech-10 and DomainNet. It has five convolutions with torchvision's widths, and then two
hidden layers of 1024 units. Batch norm follows each convolution and hidden layer. There is no
dropout.

GoogLeNet (Szegedy et al. 2015) has no auxiliary classifiers. It is based on torchvision and has its
parameter names. There are two differences from torchvision, for differential privacy. The network
has no dropout, because its masks would depend on the rest of the batch. ReLUs are not in-place,
because DP-SGD's hooks keep their inputs.

DenseNet-100 is DenseNet-BC for small images, with 100 layers and growth rate 12 (Huang et al. 2017,
arXiv 1608.06993, Sec. 3). It has 0.8 million parameters, as in the paper's Table 2. FedFA+'s
overview only names "Dense100". It augments five stages, which here are the three dense blocks and
the two transitions. For ResNet-50, the overview's five stages are the stem and the four groups of
blocks. The network is torchvision's, but begins with the paper's 3×3 convolution.

Swin-T (Liu et al. 2021, arXiv 2103.14030) is based on torchvision and has its parameter names. With
1,000 classes it has 28.3 million parameters, as in the paper's Table 1. There is no stochastic
depth, because torchvision draws it from torch's global generator. Images keep their size, and
feature maps smaller than a window are padded. DP-SGD refuses the network for its position buffers,
and because attention uses linear layers' weights without calling the layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.densenet import DenseNet
from torchvision.models.googlenet import BasicConv2d, Inception, InceptionAux
from torchvision.models.googlenet import GoogLeNet as TorchvisionGoogLeNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.swin_transformer import PatchMerging, SwinTransformer

from fedsynth.features.feature_map import Shape
from fedsynth.models.convnet import make_norm
from fedsynth.models.layers import EmbeddingNetwork, group_norm, require_size
from fedsynth.privacy.dpsgd import group_norm_twin
from fedsynth.privacy.row_products import PaddedLinear


class _Block(BasicBlock):  # type: ignore[misc]  # torchvision has no types
    """torchvision's basic ResNet block, without in-place addition."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return _add_shortcut(self, x, y)


class _Bottleneck(Bottleneck):  # type: ignore[misc]  # torchvision has no types
    """torchvision's bottleneck ResNet block, without in-place addition."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        return _add_shortcut(self, x, self.bn3(self.conv3(y)))


def _add_shortcut(block: Any, x: Tensor, y: Tensor) -> Tensor:
    if block.downsample is not None:
        x = block.downsample(x)
    return block.relu(y + x)


def _renamed_last_layer(network: Any, name: str) -> nn.Linear:
    """Removes torchvision's last layer from a network, and returns it.

    As `classifier`, it has the same name in the state of all networks.
    """
    layer: nn.Linear = getattr(network, name)
    delattr(network, name)
    return layer


def _keep_inputs(network: nn.Module) -> None:
    """Makes all ReLUs out-of-place, because DP-SGD's hooks need their inputs."""
    for layer in network.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False


class EmbeddingResNet(ResNet):  # type: ignore[misc]  # torchvision has no types
    """A ResNet, which maps normalised images [N, C, H, W] to logits [N, classes]."""

    stage_names = ("maxpool", "layer1", "layer2", "layer3", "layer4")

    forward = EmbeddingNetwork.forward

    def __init__(
        self, block: type[nn.Module], counts: list[int], image_shape: Shape, classes: int, norm: str
    ) -> None:
        layer = {"batch": nn.BatchNorm2d, "group": group_norm}[norm]
        super().__init__(block, counts, num_classes=classes, norm_layer=layer)
        channels, height, width = image_shape
        if channels != 3:  # initialised as in torchvision
            self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        _keep_inputs(self)
        self.classifier = _renamed_last_layer(self, "fc")
        self.embedding_size: int = self.classifier.in_features
        # values per image after the first convolution
        self.largest_activation = 64 * -(-height // 2) * -(-width // 2)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 512], or [N, 2048] for ResNet-50."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x_NCHW))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return torch.flatten(self.avgpool(x), 1)


def resnet18(image_shape: Shape, classes: int, norm: str = "batch") -> EmbeddingResNet:
    """Creates a ResNet-18. `norm` is "batch" as in torchvision, or "group" for DP-SGD."""
    return EmbeddingResNet(_Block, [2, 2, 2, 2], image_shape, classes, norm)


def resnet50(image_shape: Shape, classes: int, norm: str = "batch") -> EmbeddingResNet:
    """Creates a ResNet-50. The arguments are those of `resnet18`."""
    return EmbeddingResNet(_Bottleneck, [3, 4, 6, 3], image_shape, classes, norm)


class AlexNet(EmbeddingNetwork):
    """AlexNet, which maps normalised images [N, C, H, W] to logits [N, classes].

    Args:
        norm: "batch", or "group" for DP-SGD.

    Raises:
        SettingError: the images are smaller than 63×63.
    """

    stage_names = ("pool1", "pool2", "layer3", "layer4", "pool5")

    def __init__(self, image_shape: Shape, classes: int, *, norm: str = "batch") -> None:
        super().__init__()
        channels, height, width = image_shape
        require_size("alexnet", image_shape, 63)  # else a pooling layer has no output

        def convolution(
            inputs: int, outputs: int, kernel: int, stride: int, padding: int
        ) -> nn.Module:
            convolve = nn.Conv2d(inputs, outputs, kernel, stride, padding)
            return nn.Sequential(convolve, make_norm(norm, outputs), nn.ReLU())

        def hidden(inputs: int) -> nn.Module:
            layer = group_norm(1024) if norm == "group" else nn.BatchNorm1d(1024)
            return nn.Sequential(PaddedLinear(inputs, 1024), layer, nn.ReLU())

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
        self.classifier = PaddedLinear(1024, classes)
        self.embedding_size = 1024
        self.largest_activation = 64 * (1 + (height - 7) // 4) * (1 + (width - 7) // 4)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 1024]."""
        x = self.pool2(self.layer2(self.pool1(self.layer1(x_NCHW))))
        x = self.spread(self.pool5(self.layer5(self.layer4(self.layer3(x)))))
        return self.hidden2(self.hidden1(torch.flatten(x, 1)))


def googlenet(image_shape: Shape, classes: int, norm: str) -> nn.Module:
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

    forward = EmbeddingNetwork.forward

    def __init__(self, image_shape: Shape, classes: int) -> None:
        blocks = [_Conv, partial(Inception, conv_block=_Conv), InceptionAux]
        super().__init__(num_classes=classes, aux_logits=False, init_weights=False, blocks=blocks)
        channels, height, width = image_shape
        require_size("googlenet", image_shape, 15)  # else a pooling layer has no output
        if channels != 3:
            self.conv1.conv = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.dropout = nn.Identity()
        self.classifier = _renamed_last_layer(self, "fc")
        self.embedding_size = 1024
        # values per image after the first convolution
        self.largest_activation = 64 * -(-height // 2) * -(-width // 2)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 1024]."""
        x = self.conv3(self.conv2(self.maxpool1(self.conv1(x_NCHW))))
        x = self.inception3b(self.inception3a(self.maxpool2(x)))
        x = self.inception4e(
            self.inception4d(self.inception4c(self.inception4b(self.inception4a(self.maxpool3(x)))))
        )
        x = self.inception5b(self.inception5a(self.maxpool4(x)))
        return torch.flatten(self.avgpool(x), 1)


def densenet100(image_shape: Shape, classes: int, norm: str) -> nn.Module:
    """Creates a DenseNet-100. `norm` is "batch", or "group" for DP-SGD."""
    model = DenseNet100(image_shape, classes)
    if norm == "group":
        return group_norm_twin(model)
    return model


class DenseNet100(DenseNet):  # type: ignore[misc]  # torchvision has no types
    """DenseNet-BC-100-12, which maps normalised images [N, C, H, W] to logits [N, classes].

    Raises:
        SettingError: the images are smaller than 4×4.
    """

    stage_names = tuple(
        f"features.{name}"
        for name in ("denseblock1", "transition1", "denseblock2", "transition2", "denseblock3")
    )

    forward = EmbeddingNetwork.forward

    def __init__(self, image_shape: Shape, classes: int) -> None:
        growth, layers = 12, 16
        super().__init__(growth, (layers,) * 3, 2 * growth, num_classes=classes)
        channels, height, width = image_shape
        require_size("densenet100", image_shape, 4)  # else a pooling layer has no output
        self.features.conv0 = nn.Conv2d(channels, 2 * growth, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.features.conv0.weight)
        for name in ("norm0", "relu0", "pool0"):
            delattr(self.features, name)
        _keep_inputs(self)
        self.embedding_size: int = self.classifier.in_features
        # values per image after the first dense block
        self.largest_activation = (2 + layers) * growth * height * width

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 342]."""
        return torch.relu(self.features(x_NCHW)).mean(dim=(2, 3))


class _Stage(nn.Sequential):
    """The blocks of a Swin-T stage, with outputs in the layout [N, C, H, W]."""

    def forward(self, x_NHWC: Tensor) -> Tensor:
        blocks: Tensor = super().forward(x_NHWC)  # type: ignore[no-untyped-call]
        return blocks.permute(0, 3, 1, 2)


class _Merging(PatchMerging):  # type: ignore[misc]  # torchvision has no types
    def forward(self, x_NCHW: Tensor) -> Tensor:
        return super().forward(x_NCHW.permute(0, 2, 3, 1))


class SwinT(SwinTransformer):  # type: ignore[misc]  # torchvision has no types
    """Swin-T, which maps normalised images [N, C, H, W] to logits [N, classes].

    Args:
        norm: "layer".

    Raises:
        SettingError: the images are smaller than a patch of 4×4.
    """

    stage_names = ("features.1", "features.3", "features.5", "features.7")

    forward = EmbeddingNetwork.forward

    def __init__(self, image_shape: Shape, classes: int, norm: str = "layer") -> None:
        features, depths, heads = 96, [2, 2, 6, 2], [3, 6, 12, 24]
        settings = {"num_classes": classes, "stochastic_depth_prob": 0.0}
        layers = {"downsample_layer": _Merging}
        super().__init__([4, 4], features, depths, heads, [7, 7], **layers, **settings)
        channels, height, width = image_shape
        require_size("swin-t", image_shape, 4)
        if channels != 3:
            self.features[0][0] = nn.Conv2d(channels, features, 4, stride=4)
        for name in self.stage_names:
            index = int(name.removeprefix("features."))
            self.features[index] = _Stage(*self.features[index])
        self.classifier = _renamed_last_layer(self, "head")
        self.embedding_size: int = self.classifier.in_features
        # values per image in the first stage's hidden layer
        self.largest_activation = 4 * features * (height // 4) * (width // 4)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 768]."""
        return self.norm(self.features(x_NCHW).permute(0, 2, 3, 1)).mean(dim=(1, 2))
