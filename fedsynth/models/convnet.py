"""The ConvNet of dataset condensation papers, with a fast vector-Jacobian product.

It has `depth` blocks of a 3×3 convolution, a norm, ReLU and 2×2 average pooling, and then one
linear layer. `embed` computes the papers' h_w, the output before the linear layer, and `classifier`
maps h_w to the logits z_w. With instance norm and width 128, parameter counts match FedDM's Table
3: 317,706 for MNIST, 320,010 for CIFAR-10 and 504,420 for CIFAR-100. The first convolution pads
28×28 images to 32×32, as in the condensation literature.

`block_chain_vjp` computes a frozen instance-norm ConvNet's vector-Jacobian products (VJPs) without
autograd. Condensation needs many scalars' gradients with respect to the same images, such as one
for each private example. In each block, autograd needs six passes over full-size activations. The
formula below, which combines all layers in a block, needs two.

Let x̂ be the normalised activation, γ and β the norm's weight and bias, and s the inverse standard
deviation. The mask m = [γx̂ + β > 0]·γs/4 combines ReLU, pooling and scaling. A vector g of the
pooled size is mapped to

    dy = m ⊙ up(g),        dx = dy − mean(dy) − x̂ ⊙ mean(dy ⊙ x̂),

where the means are over an image's pixels, for each channel. Both means are sums at the pooled
size: mean(dy) = Σ g ⊙ a and mean(dy ⊙ x̂) = Σ g ⊙ b. Here a and b are the 2×2 sums of m and m ⊙ x̂,
divided by the number of pixels.

Activations are channels-last, the fastest layout for convolutions. The forward pass is never in
bfloat16, because rounding would change the sign of some ReLU inputs. The resulting gradient error
would be 9 %, compared with 0.6 % if only g is rounded. On a GPU, convolutions may use TF32.

`_between` (in the forward pass) and `_back` compute what lies between two convolutions. Their speed
is limited by memory. Compiled by torch.compile, they pass over memory a few times, and otherwise a
dozen times or more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.errors import SettingError, unknown_value
from fedsynth.models.layers import EmbeddingNetwork, group_norm
from fedsynth.privacy.row_products import PaddedLinear, row_product

# A function that maps V output vectors g [V, N, …] to V image gradients, float32 [V, N, C, H, W].
VectorJacobian = Callable[[Tensor], Tensor]

# The largest number of input channels with a transposed convolution by matrix product and fold.
FEW_CHANNELS = 4


class _Saved(NamedTuple):
    """Tensors from a ConvNet block's forward pass that the backward pass (VJP) needs.

    `normalised` and `mask` have the shape [N, h, 2, w, 2, C], and `a` and `b` [N, h, w, C]. The
    size after pooling is h×w.
    """

    normalised: Tensor
    mask: Tensor
    a: Tensor
    b: Tensor


def _pixel_sums(x_NPC: Tensor, factor: float) -> Tensor:
    """Sums each channel over the pixels, and multiplies by `factor`: [N, 1, C].

    The sum is a matrix product, which on a CPU is several times faster than `sum`.
    """
    factors = x_NPC.new_full((1, 1, x_NPC.shape[1]), factor)
    return torch.bmm(factors.expand(len(x_NPC), -1, -1), x_NPC)


def _sums_2x2(x_NPC: Tensor, h: int, w: int, factor: float) -> Tensor:
    """Sums over 2×2 windows, and multiplies by `factor`: [N, h, w, C]."""
    x = x_NPC.view(len(x_NPC), h, 2, w, 2, -1)
    sums: Tensor = x[:, :, 0, :, 0] + x[:, :, 0, :, 1] + x[:, :, 1, :, 0] + x[:, :, 1, :, 1]
    return factor * sums


def _conv_transpose(dx_NHWC: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Computes the gradient of a convolution with respect to the input, in channels-last layout."""
    n, h, w, c = dx_NHWC.shape
    incoming = weight.shape[1]
    if incoming > FEW_CHANNELS:
        out = F.conv_transpose2d(dx_NHWC.permute(0, 3, 1, 2), weight, padding=padding)
        return out.permute(0, 2, 3, 1).contiguous()
    columns = row_product(dx_NHWC.view(n, h * w, c), weight.reshape(c, -1).T).float()
    size = (h + 2 - 2 * padding, w + 2 - 2 * padding)
    folded: Tensor = F.fold(columns.transpose(1, 2), size, kernel_size=3, padding=padding)
    return folded.permute(0, 2, 3, 1).to(dx_NHWC.dtype)


def _between(
    y_NHWC: Tensor, weight: Tensor, bias: Tensor, eps: float, precision: torch.dtype
) -> tuple[Tensor, _Saved]:
    """Applies a block's layers after the convolution: instance norm, ReLU and pooling.

    Returns the pooled activations [N, h, w, C], and the VJP's tensors in `precision`.
    """
    n, height, width, c = y_NHWC.shape
    h = height // 2
    w = width // 2
    pixels = height * width
    y_NPC = y_NHWC.reshape(n, pixels, c)
    y_NPC = y_NPC - _pixel_sums(y_NPC, 1 / pixels)
    scale = torch.rsqrt(_pixel_sums(y_NPC.square(), 1 / pixels) + eps)
    normalised = y_NPC.mul_(scale)
    z = torch.addcmul(bias, normalised, weight)
    mask = (z > 0) * (scale * (weight / 4))
    pooled = _sums_2x2(z.clamp_min_(0), h, w, 1 / 4)
    saved = _Saved(
        normalised=normalised.view(n, h, 2, w, 2, c).to(precision),
        mask=mask.view(n, h, 2, w, 2, c).to(precision),
        a=_sums_2x2(mask, h, w, 1 / pixels).to(precision),
        b=_sums_2x2(mask * normalised, h, w, 1 / pixels).to(precision),
    )
    return pooled, saved


def _back(g_VNhwC: Tensor, saved: _Saved) -> Tensor:
    """Propagates gradients back through one block's pooling, ReLU and instance norm.

    g [V, N, h, w, C] are gradients for the pooling's output, and the result dx [V, N, h, 2, w, 2,
    C] for the norm's input.
    """
    v, n, h, w, c = g_VNhwC.shape
    mean = _pixel_sums((g_VNhwC * saved.a).view(v * n, h * w, c), -1).view(v, n, 1, 1, 1, 1, c)
    along = _pixel_sums((g_VNhwC * saved.b).view(v * n, h * w, c), -1).view(v, n, 1, 1, 1, 1, c)
    dx = torch.addcmul(mean, saved.normalised, along)
    return dx.addcmul_(saved.mask, g_VNhwC.view(v, n, h, 1, w, 1, c))


Between = Callable[[Tensor, Tensor, Tensor, float, torch.dtype], tuple[Tensor, _Saved]]
Back = Callable[[Tensor, _Saved], Tensor]


@functools.cache
def _parts(compiled: bool) -> tuple[Between, Back]:
    """Returns a stage's forward and backward functions, compiled if `compiled` is true."""
    if not compiled:
        return _between, _back
    return torch.compile(_between, dynamic=False), torch.compile(_back, dynamic=False)


def block_chain_vjp(
    x_NCHW: Tensor,
    layers: list[tuple[nn.Conv2d, nn.GroupNorm]],
    precision: torch.dtype = torch.float32,
    *,
    compiled: bool = False,
) -> tuple[Tensor, VectorJacobian]:
    """Computes image embeddings [N, D], and a function for their vector-Jacobian products.

    The network is a chain of blocks with frozen weights.

    Heights and widths must be even in each block. No autograd graph is built.

    Args:
        x_NCHW: the normalised images.
        layers: each block's convolution and instance norm (an affine GroupNorm with one channel per
            group).
        precision: the VJP's precision. Embeddings are always float32.
        compiled: whether torch.compile compiles the operations between convolutions, again for each
            image size and batch size. After eight compilations in a process, torch prints a warning
            and runs further cases uncompiled.
    """
    between, back = _parts(compiled)
    blocks = []
    with torch.no_grad():
        h = x_NCHW.to(memory_format=torch.channels_last)
        for conv, norm in layers:
            y = F.conv2d(h, conv.weight, conv.bias, padding=conv.padding)
            y_NHWC = y.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
            pooled, saved = between(y_NHWC, norm.weight, norm.bias, norm.eps, precision)
            weight = conv.weight.to(precision, memory_format=torch.channels_last)
            blocks.append((saved, weight, int(conv.padding[0])))
            h = pooled.permute(0, 3, 1, 2)

    def pull(g_VND: Tensor) -> Tensor:
        v, n = g_VND.shape[:2]
        with torch.no_grad():
            g = g_VND.to(precision).view(v, n, *h.shape[1:]).permute(0, 1, 3, 4, 2).contiguous()
            for saved, weight, padding in reversed(blocks):
                rows, columns, channels = g.shape[2:]
                dx = back(g, saved).view(v * n, 2 * rows, 2 * columns, channels)
                g = _conv_transpose(dx, weight, padding).unflatten(0, (v, n))
            return g.permute(0, 1, 4, 2, 3).float()

    return h.flatten(1), pull


def channels_last(x_NCHW: Tensor) -> Tensor:
    """Converts a tensor on a CPU to channels-last layout. Returns a tensor on a GPU unchanged.

    On a CPU, max pooling is then vectorised over channels, and convolutions and batch norms need
    not reorder their input (docs/speed.md has the times). Layers keep their input's layout.
    Networks with group or instance norms do not use channels-last, which slows the norms down.

    `Tensor.contiguous(memory_format=...)` cannot be used here: it fails inside `vmap`, and does not
    change one-channel strides, which determine the convolution kernel.
    """
    if x_NCHW.device.type != "cpu":
        return x_NCHW
    n, channels, height, width = x_NCHW.shape
    rows = x_NCHW.permute(0, 2, 3, 1).reshape(-1)  # a view if the layout is already channels-last
    return rows.view(n, height, width, channels).permute(0, 3, 1, 2)


# The number of channels that fill a CPU's bfloat16 vector. With fewer channels, float32 is faster.
WIDE = 32


class InstanceNorm(nn.GroupNorm):
    """Instance norm with affine weights, as a GroupNorm with one channel per group.

    A faster implementation is used for channels-last inputs on a CPU without gradients, such as the
    real images in condensation. Matrix products over the pixels compute the statistics, because
    GroupNorm's kernel would take longer than the convolutions. Variances are computed from centred
    values, so that bfloat16 inputs lose no precision by cancellation. Under torch.compile,
    GroupNorm's kernel is used, because fused with other operations it is faster.
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
        y = torch.addcmul(shift.to(x.dtype), x, scale.to(x.dtype))
        return y.view(n, h, w, c).permute(0, 3, 1, 2)


_NORM_LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "instance": InstanceNorm,
    "group": group_norm,
    "batch": nn.BatchNorm2d,
    "none": lambda channels: nn.Identity(),
}
NORMS = tuple(_NORM_LAYERS)


def make_norm(kind: str, channels: int) -> nn.Module:
    """Creates a norm layer by name. `kind` is one of `NORMS`.

    Raises:
        UnknownNameError: no norm has this name.
    """
    if kind not in NORMS:
        raise unknown_value("model", "norm", kind, NORMS)
    return _NORM_LAYERS[kind](channels)


class ConvNet(EmbeddingNetwork):
    """The ConvNet, which maps normalised images [N, C, H, W] to logits [N, classes].

    Raises:
        SettingError: the image is too small for `depth` blocks, each of which halves the image.
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
            deepest = min(height, side).bit_length() - 1
            size = f"{image_shape[1]}×{image_shape[2]}"
            if not deepest:
                reason = (
                    f"cannot be a convolutional network for {size} images. Set it to mlp, lstm "
                )
                raise SettingError("model", "name", f"{reason}or linear")
            reason = f"must be at most {deepest} for {size} images. Lower it"
            raise SettingError("model", "depth", reason, value=depth)
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
        # values per image after the first convolution
        self.largest_activation = width * height * side
        self.halves_evenly = height % (1 << depth) == 0 and side % (1 << depth) == 0
        self.embedding_size = width * (height >> depth) * (side >> depth)
        self.classifier = PaddedLinear(self.embedding_size, classes)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings h_w(x) of normalised images, [N, embedding_size]."""
        return self.features(x_NCHW).flatten(1)

    def embed_vjp(
        self, x_NCHW: Tensor, precision: torch.dtype = torch.float32, *, compiled: bool = False
    ) -> tuple[Tensor, VectorJacobian] | None:
        """Computes the embeddings h_w(x), and a function for their vector-Jacobian products.

        The method is several times faster than autograd, but computes no weight gradients. It
        requires instance norm, float32 weights, and image sides that are even in each block. It
        returns None if the norm or the image size does not fit. The arguments are those of
        `fedsynth.models.convnet.block_chain_vjp`.
        """
        if not self.halves_evenly or not isinstance(self.features[1], InstanceNorm):
            return None
        layers = list(zip(self.features[::4], self.features[1::4], strict=True))
        return block_chain_vjp(x_NCHW, layers, precision, compiled=compiled)  # type: ignore[arg-type]
