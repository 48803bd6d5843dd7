"""The ConvNet that papers on dataset condensation use.

It has `depth` blocks of a 3×3 convolution, a norm, ReLU and 2×2 average pooling, and then one
linear layer. `embed` computes the papers' h_w, the output before the linear layer, and `classifier`
maps this output to the logits z_w. With instance norm and width 128, the numbers of parameters are
those of FedDM's Table 3: 317,706 for MNIST, 320,010 for CIFAR-10 and 504,420 for CIFAR-100. The
first convolution pads images of 28×28 to 32×32, as in the condensation literature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsynth.errors import SettingError, unknown_value
from fedsynth.models.embedding_network import EmbeddingNetwork
from fedsynth.models.frozen import VectorJacobian, block_chain_vjp
from fedsynth.models.resnet import group_norm


def channels_last(x_NCHW: Tensor) -> Tensor:
    """Converts a tensor on a CPU to channels-last layout. Returns a tensor on a GPU unchanged.

    In this layout, max pooling on a CPU is vectorised over channels, and convolutions and batch
    norms need not reorder their input (docs/speed.md has the times). Layers keep the layout of
    their input. Group and instance norms are slower in this layout, so networks with these norms do
    not use it.

    `Tensor.contiguous(memory_format=...)` cannot be used here, for two reasons. It fails inside
    `vmap`, and it does not change the strides of images with one channel, on which the choice of
    the convolution kernel depends.
    """
    if x_NCHW.device.type != "cpu":
        return x_NCHW
    n, channels, height, width = x_NCHW.shape
    rows = x_NCHW.permute(0, 2, 3, 1).reshape(-1)  # a view if the layout is already channels-last
    return rows.view(n, height, width, channels).permute(0, 3, 1, 2)


WIDE = 32
"""The number of channels that fill a bfloat16 vector of a CPU. With fewer channels, float32 is
faster."""


class InstanceNorm(nn.GroupNorm):
    """Instance norm with affine weights, as a GroupNorm with one channel per group.

    A faster implementation is used for channels-last inputs on a CPU without gradients, such as the
    real images in condensation. It computes the statistics by matrix products over the pixels,
    because GroupNorm's kernel would take longer than the convolutions. Variances are computed from
    centred values, so that bfloat16 inputs lose no precision by cancellation. Under torch.compile,
    GroupNorm's kernel is used, because it is faster when it is fused with other operations.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        plain = torch.is_grad_enabled() or x_NCHW.is_cuda or torch.compiler.is_compiling()
        if plain or not x_NCHW.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x_NCHW)
        n, c, h, w = x_NCHW.shape
        if c < WIDE and x_NCHW.dtype == torch.bfloat16:
            return self.forward(x_NCHW.float()).to(torch.bfloat16)
        x = x_NCHW.permute(0, 2, 3, 1).reshape(n, h * w, c)
        average = x.new_full((1, 1, h * w), 1 / (h * w)).expand(n, -1, -1)
        x = x - torch.bmm(average, x)
        # the error of rounding the first mean to x's precision
        mean = torch.bmm(average, x).float()
        variance = (torch.bmm(average, x * x).float() - mean.square()).clamp_min(0)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return (
            torch.addcmul(shift.to(x.dtype), x, scale.to(x.dtype))
            .view(n, h, w, c)
            .permute(0, 3, 1, 2)
        )


_NORM_LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "instance": InstanceNorm,
    "group": group_norm,
    "batch": nn.BatchNorm2d,
    "none": lambda channels: nn.Identity(),
}
NORMS = tuple(_NORM_LAYERS)


def make_norm(kind: str, channels: int) -> nn.Module:
    """Creates a norm layer. Its kind is one of `NORMS`.

    Raises:
        UnknownNameError: no norm has this name.
    """
    if kind not in NORMS:
        raise unknown_value("model", "norm", kind, NORMS)
    return _NORM_LAYERS[kind](channels)


class ConvNet(EmbeddingNetwork):
    """The ConvNet, which maps normalised images [N, C, H, W] to logits [N, classes].

    Raises:
        SettingError: the network has more blocks than the image can be halved.
        UnknownNameError: no norm has this name.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        classes: int,
        *,
        width: int = 128,
        depth: int = 3,
        norm: str = "instance",
    ) -> None:
        super().__init__()
        channels, height, side = image_shape
        first_padding = 3 if (height, side) == (28, 28) else 1
        height = height + 2 * (first_padding - 1)
        side = side + 2 * (first_padding - 1)
        if min(height, side) >> depth < 1:
            raise SettingError(
                "model",
                "depth",
                f"is too large for {height}×{side} images, because each block halves the image: "
                "use fewer blocks",
                value=depth,
            )
        blocks: list[nn.Module] = []
        padding = first_padding
        for _ in range(depth):
            blocks += [
                nn.Conv2d(channels, width, 3, padding=padding),
                make_norm(norm, width),
                nn.ReLU(),
                nn.AvgPool2d(2),
            ]
            channels, padding = width, 1
        self.features = nn.Sequential(*blocks)
        self.stage_names = tuple(f"features.{4 * block + 3}" for block in range(depth))
        # scalars of an image after the first convolution
        self.largest_activation = width * height * side
        self.halves_evenly = height % (1 << depth) == 0 and side % (1 << depth) == 0
        self.embedding_size = width * (height >> depth) * (side >> depth)
        self.classifier = nn.Linear(self.embedding_size, classes)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings h_w(x) of normalised images, [N, embedding_size]."""
        return self.features(x_NCHW).flatten(1)

    def embed_vjp(
        self, x_NCHW: Tensor, precision: torch.dtype = torch.float32, *, compiled: bool = False
    ) -> tuple[Tensor, VectorJacobian] | None:
        """Computes the embeddings h_w(x) and a function for their vector-Jacobian product.

        This is several times faster than autograd. Weights get no gradients. The method requires
        instance norm, float32 weights, and an image whose sides can be halved evenly in each block.
        It returns None if the norm or the image size does not fit. The arguments are those of
        `fedsynth.models.frozen.block_chain_vjp`.
        """
        if not self.halves_evenly or not isinstance(self.features[1], InstanceNorm):
            return None
        layers = list(zip(self.features[::4], self.features[1::4], strict=True))
        return block_chain_vjp(x_NCHW, layers, precision, compiled=compiled)  # type: ignore[arg-type]
