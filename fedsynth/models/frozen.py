"""Vector-Jacobian products of a frozen ConvNet block: conv 3×3, instance norm, ReLU, average-pool
2, as one hand-derived step.

Condensation pulls vectors back to the images, often many through the same images (one for each
private example). Autograd needs six passes over full-size activations per block; this needs two.
With x̂ the normalised activation, γ, s the norm's weight and 1/deviation, and m =
[γx̂ + β > 0]·γs/4 (ReLU, pooling and scaling in one mask), an incoming g (pooled size) becomes

    dy = m ⊙ up(g),        dx = dy − mean(dy) − x̂ ⊙ mean(dy ⊙ x̂),

with means over an image's pixels, by channel. Both are sums at the pooled size: mean(dy) = Σ g ⊙ a,
mean(dy ⊙ x̂) = Σ g ⊙ b, with a, b the 2×2 sums of m and m ⊙ x̂ divided by the number of pixels.
Activations are channels-last, the layout in which convolutions reach peak matrix throughput. The
forward pass is never in bfloat16: that would flip ReLUs, an error of 9 % of a gradient, compared
with 0.6 % when only g is rounded. (On a GPU convolutions may use TF32.)

The operations between two convolutions are memory-bound: `_between` in the forward pass, and
`_back`. torch.compile may compile both: they then pass over memory a few times, instead of a dozen
times or more in eager torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VectorJacobian = Callable[[Tensor], Tensor]
"""g [V, N, …] of the output -> [V, N, C, H, W] of the images, float32."""

FEW_CHANNELS = 4
"""For inputs with at most this many channels, the transposed convolution is a matrix product and a
fold."""


class _Saved(NamedTuple):
    """The tensors that a block saves for its VJP; h, w are the pooled size. `normalised`, `mask`:
    [N, h, 2, w, 2, C]; `a`, `b`: [N, h, w, C]."""

    normalised: Tensor
    mask: Tensor
    a: Tensor
    b: Tensor


def _pixel_sums(x_NPC: Tensor, factor: float) -> Tensor:
    """Returns factor · Σ over pixels, [N, 1, C], by a matrix product: on a CPU this is several
    times faster than `sum` over a middle dimension."""
    return torch.bmm(
        x_NPC.new_full((1, 1, x_NPC.shape[1]), factor).expand(len(x_NPC), -1, -1), x_NPC
    )


def _sums_2x2(x_NPC: Tensor, h: int, w: int, factor: float) -> Tensor:
    """Returns factor · Σ over each 2×2 window, [N, h, w, C]."""
    x = x_NPC.view(len(x_NPC), h, 2, w, 2, -1)
    sums: Tensor = x[:, :, 0, :, 0] + x[:, :, 0, :, 1] + x[:, :, 1, :, 0] + x[:, :, 1, :, 1]
    return factor * sums


def _conv_transpose(dx_NHWC: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Returns the convolution's VJP, channels last."""
    n, h, w, c = dx_NHWC.shape
    incoming = weight.shape[1]
    if incoming > FEW_CHANNELS:
        out = F.conv_transpose2d(dx_NHWC.permute(0, 3, 1, 2), weight, padding=padding)
        return out.permute(0, 2, 3, 1).contiguous()
    columns = (dx_NHWC.view(n, h * w, c) @ weight.reshape(c, -1)).float().transpose(1, 2)
    size = (h + 2 - 2 * padding, w + 2 - 2 * padding)
    folded: Tensor = F.fold(columns, size, kernel_size=3, padding=padding)
    return folded.permute(0, 2, 3, 1).to(dx_NHWC.dtype)


def _between(
    y_NHWC: Tensor, weight: Tensor, bias: Tensor, eps: float, precision: torch.dtype
) -> tuple[Tensor, _Saved]:
    """Applies instance norm, ReLU and pooling to a convolution's output; returns the pooled
    [N, h, w, C], and the tensors that the VJP needs, in `precision`."""
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
    """Returns dx [V, N, h, 2, w, 2, C] of the convolution's output, from g [V, N, h, w, C]."""
    v, n, h, w, c = g_VNhwC.shape
    mean = _pixel_sums((g_VNhwC * saved.a).view(v * n, h * w, c), -1).view(v, n, 1, 1, 1, 1, c)
    along = _pixel_sums((g_VNhwC * saved.b).view(v * n, h * w, c), -1).view(v, n, 1, 1, 1, 1, c)
    dx = torch.addcmul(mean, saved.normalised, along)
    return dx.addcmul_(saved.mask, g_VNhwC.view(v, n, h, 1, w, 1, c))


Between = Callable[[Tensor, Tensor, Tensor, float, torch.dtype], tuple[Tensor, _Saved]]
Back = Callable[[Tensor, _Saved], Tensor]


@functools.cache
def _parts(compiled: bool) -> tuple[Between, Back]:
    """Returns `_between` and `_back`, as they are or compiled."""
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
    """Returns (embeddings [N, D], their VJP) of a chain of blocks whose sides are all even; builds
    no graph and no weight gradients.

    Args:
        layers: convolution and instance norm (one channel per group, affine) of each block.
        precision: precision of the pulled-back vectors; embeddings are float32.
        compiled: whether torch.compile compiles the operations between convolutions. It does so
            once for each block's size and each number of images; beyond eight of these in a process
            torch warns and runs the others uncompiled.
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
