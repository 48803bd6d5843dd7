"""Small networks: softmax regression, a network with one hidden layer, and small CNNs.

The CNNs are LeNet-5 (LeCun et al. 1998), the CNNs of FedHydra, and ResNet-8 (He et al. 2016).

LeNet-5 has its common form, with 5×5 convolutions (6 and 16 channels), ReLU, max pooling, and
hidden layers with 120 and 84 units. It pads 28×28 images to 32×32. It has 61,706 parameters for
MNIST and 63,066 for EMNIST letters. ResNet-8 has a convolution, three stages of one basic block
each with 16, 32 and 64 channels, and average pooling. Its shortcuts are 1×1 convolutions where the
shape changes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedsynth.features.feature_map import Shape
from fedsynth.models.convnet import channels_last, make_norm
from fedsynth.models.layers import EmbeddingNetwork, require_size
from fedsynth.privacy.row_products import PaddedLinear


class Linear(EmbeddingNetwork):
    """Softmax regression, which maps normalised images [N, C, H, W] to logits [N, classes].

    The embedding consists of the image's pixels.
    """

    dense = True

    def __init__(self, image_shape: Shape, classes: int) -> None:
        super().__init__()
        self.embedding_size = self.largest_activation = math.prod(image_shape)
        self.classifier = PaddedLinear(self.embedding_size, classes)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Flattens normalised images to [N, embedding_size]."""
        return x_NCHW.flatten(1)


class Mlp(EmbeddingNetwork):
    """A network with one hidden layer.

    The network maps normalised images [N, C, H, W] to logits [N, classes].
    """

    dense = True

    def __init__(self, image_shape: Shape, classes: int, width: int) -> None:
        super().__init__()
        inputs = math.prod(image_shape)
        self.hidden = PaddedLinear(inputs, width)
        self.classifier = PaddedLinear(width, classes)
        self.embedding_size = width
        self.largest_activation = max(inputs, width)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, width]."""
        return torch.relu(self.hidden(x_NCHW.flatten(1)))


class LeNet5(EmbeddingNetwork):
    """LeNet-5, which maps normalised images [N, C, H, W] to logits [N, classes].

    Raises:
        SettingError: the images are smaller than 16×16, so the last pooling would have no output.
    """

    stage_names = ("relu1", "relu2")

    def __init__(self, image_shape: Shape, classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        require_size("lenet5", image_shape, 16)
        padding = 2 if (height, width) == (28, 28) else 0
        rows = ((height + 2 * padding - 4) // 2 - 4) // 2
        columns = ((width + 2 * padding - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool1 = nn.MaxPool2d(2)
        self.pool2 = nn.MaxPool2d(2)
        self.relu1 = nn.ReLU()
        self.relu2 = nn.ReLU()
        self.fc1 = PaddedLinear(16 * rows * columns, 120)
        self.fc2 = PaddedLinear(120, 84)
        self.classifier = PaddedLinear(84, classes)
        self.embedding_size = 84
        self.largest_activation = 6 * (height + 2 * padding - 4) * (width + 2 * padding - 4)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 84]."""
        # ReLU commutes with max pooling, also in gradients; pooling leaves a quarter of the values
        x = self.relu1(self.pool1(self.conv1(channels_last(x_NCHW))))
        x = self.relu2(self.pool2(self.conv2(x)))
        return torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1)))))


class Cnn(EmbeddingNetwork):
    """A plain convolutional network, such as FedHydra's CNN1 and CNN2.

    Each block has a convolution, a norm, 2×2 max pooling and ReLU. A hidden layer follows the
    blocks. FedHydra's paper does not give the sizes of its networks. Here CNN1 has 32 and 64
    channels and 128 hidden units, and CNN2 has 16, 32 and 64 channels and 64 hidden units. CNN3 has
    16 and 32 channels, 5×5 convolutions and no hidden layer, as the network for grey images in a
    public repository of FedHydra's first author.

    Raises:
        SettingError: the images are too small, because each block halves them.
    """

    def __init__(
        self,
        image_shape: Shape,
        classes: int,
        channels: tuple[int, ...],
        hidden: int = 0,
        kernel: int = 3,
        *,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        inside, height, width = image_shape
        require_size(f"cnn with {len(channels)} blocks", image_shape, 2 ** len(channels))
        layers: list[nn.Module] = []
        for outside in channels:
            layers += [
                nn.Conv2d(inside, outside, kernel, padding=kernel // 2),
                make_norm(norm, outside),
                nn.MaxPool2d(2),
                nn.ReLU(),  # commutes with max pooling, which leaves a quarter of the values
            ]
            inside = outside
        self.features = nn.Sequential(*layers)
        self._pixelwise = norm in ("batch", "none")
        self.stage_names = tuple(f"features.{4 * block + 3}" for block in range(len(channels)))
        pixels = (height >> len(channels)) * (width >> len(channels))
        self.embedding_size = inside * pixels
        self.hidden: nn.Module = nn.Identity()
        if hidden:
            self.hidden = PaddedLinear(self.embedding_size, hidden)
            self.embedding_size = hidden
        self.classifier = PaddedLinear(self.embedding_size, classes)
        self.largest_activation = channels[0] * height * width

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, embedding_size]."""
        x = channels_last(x_NCHW) if self._pixelwise else x_NCHW
        return torch.relu(self.hidden(self.features(x).flatten(1)))


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1 = make_norm(norm, outside)
        self.norm2 = make_norm(norm, outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), make_norm(norm, outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet8(EmbeddingNetwork):
    """ResNet-8, which maps normalised images [N, C, H, W] to logits [N, classes].

    Args:
        norm: "instance" (as in FedKF), "group" or "batch".

    Raises:
        SettingError: the images are smaller than 8×8.
    """

    stage_names = ("stages.0", "stages.1", "stages.2")

    def __init__(self, image_shape: Shape, classes: int, *, norm: str = "instance") -> None:
        super().__init__()
        channels, height, width = image_shape
        require_size("resnet8", image_shape, 8)
        self.conv = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.norm = make_norm(norm, 16)
        self.stages = nn.Sequential(
            _Block(16, 16, 1, norm), _Block(16, 32, 2, norm), _Block(32, 64, 2, norm)
        )
        self.classifier = PaddedLinear(64, classes)
        self.embedding_size = 64
        self.largest_activation = 16 * height * width

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, 64]."""
        return self.stages(torch.relu(self.norm(self.conv(x_NCHW)))).mean(dim=(2, 3))
