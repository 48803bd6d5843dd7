"""Images drawn from random processes: public images that need no data set.

Their only input is a seed, so everything computed from these images (a feature map's centre, a norm
bound, an encoder's weights) is a public constant. There are three processes, after Baradad et al.
2021, "Learning to See by Looking at Noise" (arXiv 2106.05963), from which DP-RandP (Tang et al.
2023, arXiv 2306.06076) learns a private classifier's prior:

- "dead-leaves": shapes of power-law sizes that occlude each other, on a spectral background;
- "generator": convolutional generators of random weights, one for each image, with noise at every
  resolution and oriented first filters;
- "spectral": Gaussian fields whose power falls as 1/f^α.

All are batched torch code on any device, and take an explicit generator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

AT_ONCE = 256
"""Images that are generated together: bounds memory, and affects the result of a seed."""
LEAVES = 48
"""Shapes in front of the background, enough to cover most of it."""
CHROMA = 0.35
"""Relative spread of a leaf's colour around its grey value: natural images are mostly grey."""
WIDTH = 16
"""Channels of the random generators."""


def random_images(
    count: int, image_shape: tuple[int, int, int], generator: torch.Generator
) -> Tensor:
    """Draws images of the three processes, in equal shares, float32 [count, C, H, W] in [0, 1], on
    the generator's device.

    Args:
        count: number of images.
        image_shape: C, H, W; one channel is the grey value of a colour image.
        generator: source of all draws; the same state gives the same images on one device type.

    >>> import torch
    >>> images = random_images(4, (3, 32, 32), torch.Generator().manual_seed(0))
    >>> list(images.shape), bool(images.min() >= 0), bool(images.max() <= 1)
    ([4, 3, 32, 32], True, True)
    """
    channels, height, width = image_shape
    parts = [torch.empty(0, 3, height, width, device=generator.device)]
    for start in range(0, count, AT_ONCE):
        size = min(AT_ONCE, count - start)
        per_process = -(-size // 3)
        processes = [
            dead_leaves(per_process, height, width, generator),
            random_generators(per_process, height, width, generator),
            spectral_noise(per_process, height, width, generator),
        ]
        # interleaved, so that every prefix mixes the processes
        parts.append(torch.stack(processes, dim=1).flatten(0, 1)[:size])
    images = torch.cat(parts)
    if channels == 1:
        return images.mean(dim=1, keepdim=True)
    # more bands than colours repeat the colours in turn
    return images[:, torch.arange(channels, device=images.device) % 3]


# ------------------------------------------------------------------------------- spectral noise


def spectral_noise(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draws Gaussian fields of power 1/f^α in random colours, [N, 3, H, W] in [0, 1]. Each image
    has its own α, uniform in [1.5, 3.5], and its own axis weights, which stretch it."""
    fields = _fields(count, 3, height, width, generator)
    return _levels(_mixed_colours(fields, generator), generator)


def _fields(
    count: int, channels: int, height: int, width: int, generator: torch.Generator
) -> Tensor:
    """Draws standardised fields [N, channels, H, W]; an image's channels share a spectrum."""
    device = generator.device
    white = torch.randn(count, channels, height, width, generator=generator, device=device)
    draws = torch.rand(count, 2, generator=generator, device=device)
    alpha = (1.5 + 2.0 * draws[:, 0]).view(-1, 1, 1, 1)
    stretch = torch.exp(2 * draws[:, 1] - 1).view(-1, 1, 1, 1)  # of the two axes' frequencies
    down = torch.fft.fftfreq(height, device=device).view(1, 1, -1, 1) * stretch
    across = torch.fft.rfftfreq(width, device=device).view(1, 1, 1, -1) / stretch
    frequency = (down.square() + across.square()).sqrt().clamp_min(1 / max(height, width))
    shaped = torch.fft.irfft2(torch.fft.rfft2(white) * frequency ** (-alpha / 2), (height, width))
    mean = shaped.mean(dim=(2, 3), keepdim=True)
    deviation = (shaped - mean).square().mean(dim=(2, 3), keepdim=True).sqrt()
    return (shaped - mean) / deviation.clamp_min(1e-6)


def _mixed_colours(fields: Tensor, generator: torch.Generator) -> Tensor:
    """Colours fields [N, 3, H, W]: luminance and two weaker chroma axes, in random directions."""
    weights = torch.randn(len(fields), 3, 3, generator=generator, device=fields.device)
    weights = CHROMA * weights
    weights[:, :, 0] = 1.0  # the first field changes all colours equally
    return torch.einsum("noi,nihw->nohw", weights, fields)


def _levels(values: Tensor, generator: torch.Generator) -> Tensor:
    """Brings each image into [0, 1] with a random brightness and contrast."""
    draws = torch.rand(len(values), 2, generator=generator, device=values.device)
    contrast = (0.10 + 0.20 * draws[:, 0]).view(-1, 1, 1, 1)
    brightness = (0.3 + 0.4 * draws[:, 1]).view(-1, 1, 1, 1)
    mean = values.mean(dim=(1, 2, 3), keepdim=True)
    spread = (values - mean).square().mean(dim=(1, 2, 3), keepdim=True).sqrt().clamp_min(1e-6)
    return (brightness + contrast * (values - mean) / spread).clamp(0, 1)


# ---------------------------------------------------------------------------------- dead leaves


def dead_leaves(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draws ellipses, rectangles and triangles, front to back over a spectral background,
    [N, 3, H, W] in [0, 1]. Sizes have density r⁻³; each shape has its own colour, shading and
    stripes."""
    device = generator.device
    side = float(max(height, width))
    rows = torch.arange(height, device=device, dtype=torch.float32).view(1, -1, 1)
    columns = torch.arange(width, device=device, dtype=torch.float32).view(1, 1, -1)
    image = torch.zeros(count, 3, height, width, device=device)
    free = torch.ones(count, 1, height, width, dtype=torch.bool, device=device)
    for _ in range(LEAVES):
        draw = torch.rand(count, 12, 1, 1, generator=generator, device=device)
        radius = _power_law(draw[:, 0], 0.09 * side, 0.6 * side)
        along, off = _turned(rows - height * draw[:, 1], columns - width * draw[:, 2], draw[:, 3])
        along = along / radius
        off = off / (radius * (0.4 + 0.6 * draw[:, 4]))
        inside = _shape(along, off, draw[:, 5])
        stripes = torch.sin(draw[:, 6] * 12 * along + 6.28 * draw[:, 7])
        shade = 0.25 * (draw[:, 8] - 0.5) * along + 0.2 * draw[:, 9].square() * stripes
        paint = _colours(count, generator) + shade[:, None]
        new = free & inside[:, None]
        image = torch.where(new, paint, image)
        free = free & ~inside[:, None]
    background = spectral_noise(count, height, width, generator)
    return torch.where(free, background, image).clamp(0, 1)


def _power_law(uniform: Tensor, smallest: float, largest: float) -> Tensor:
    """Returns radii in [smallest, largest] with density proportional to r⁻³, by inversion."""
    low, high = smallest**-2, largest**-2
    return (low - uniform * (low - high)).rsqrt()


def _turned(down: Tensor, across: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Returns coordinates along and perpendicular to an axis at angle π·turn."""
    angle = math.pi * turn
    return down * angle.cos() + across * angle.sin(), across * angle.cos() - down * angle.sin()


def _shape(along: Tensor, off: Tensor, kind: Tensor) -> Tensor:
    """Returns whether points are inside a unit ellipse, rectangle or triangle (`kind` in thirds of
    [0, 1]), bool."""
    ellipse = along.square() + off.square() <= 1
    rectangle = torch.maximum(along.abs(), off.abs()) <= 0.8
    triangle = (along >= -0.7) & (along + 1.7 * off.abs() <= 1)
    return torch.where(kind < 1 / 3, ellipse, torch.where(kind < 2 / 3, rectangle, triangle))


def _colours(count: int, generator: torch.Generator) -> Tensor:
    """Draws mostly grey colours [N, 3, 1, 1], roughly in [0, 1]."""
    device = generator.device
    grey = torch.rand(count, 1, 1, 1, generator=generator, device=device)
    chroma = torch.randn(count, 3, 1, 1, generator=generator, device=device)
    return grey + CHROMA / 2 * chroma


# ----------------------------------------------------------------------------- random generators


def random_generators(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draws images of random convolutional generators, [N, 3, H, W] in [0, 1].

    Each generator starts from a 4×4 map of noise. Each step doubles the resolution, convolves with
    weights drawn for the image (oriented waves in the first step), adds noise of random strength
    and applies a leaky ReLU. A random 1×1 layer maps to colours.
    """
    device = generator.device
    x = torch.randn(count, WIDTH, 4, 4, generator=generator, device=device)
    levels = max(1, math.ceil(math.log2(max(height, width, 8) / 4)))
    for level in range(levels):
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        if level == 0:
            weights = _oriented(count, generator)
        else:
            weights = torch.randn(count, WIDTH, WIDTH, 3, 3, generator=generator, device=device)
            weights = weights / (3 * math.sqrt(WIDTH))
        x = _convolved_each(x, weights)
        strength = 0.5 * torch.rand(count, WIDTH, 1, 1, generator=generator, device=device).square()
        noise = torch.randn(count, 1, *x.shape[2:], generator=generator, device=device)
        x = F.leaky_relu(_standardised(x) + strength * noise, 0.2)
    x = _standardised(x[:, :, :height, :width])
    mixing = torch.randn(count, 3, WIDTH, generator=generator, device=device)
    mixing = mixing / math.sqrt(WIDTH)
    luminance = mixing.mean(dim=1, keepdim=True)
    mixing = luminance + CHROMA * (mixing - luminance)
    return _levels(torch.einsum("noi,nihw->nohw", mixing, x), generator)


def _standardised(x: Tensor) -> Tensor:
    """Standardises each channel of each image to mean 0 and standard deviation 1."""
    mean = x.mean(dim=(2, 3), keepdim=True)
    deviation = (x - mean).square().mean(dim=(2, 3), keepdim=True).sqrt()
    return (x - mean) / deviation.clamp_min(1e-5)


def _convolved_each(x_NCHW: Tensor, weights: Tensor) -> Tensor:
    """Convolves each image with its own weights [N, O, C, k, k], with reflected borders."""
    count, channels = x_NCHW.shape[:2]
    half = weights.shape[-1] // 2
    padded = F.pad(x_NCHW, (half, half, half, half), mode="reflect")
    joined = padded.reshape(1, count * channels, *padded.shape[2:])
    output = F.conv2d(joined, weights.flatten(0, 1), groups=count)
    return output.view(count, weights.shape[1], *output.shape[2:])


def _oriented(count: int, generator: torch.Generator) -> Tensor:
    """Draws filters [N, WIDTH, WIDTH, 5, 5]: waves of random frequency and phase, in two directions
    per image."""
    device = generator.device
    draw = torch.rand(3, count, WIDTH, WIDTH, 1, 1, generator=generator, device=device)
    axes = torch.rand(count, 1, 2, 1, 1, generator=generator, device=device)
    angle = math.pi * axes[:, :, torch.arange(WIDTH, device=device) % 2]
    place = torch.arange(5, device=device, dtype=torch.float32) - 2
    down = place.view(-1, 1)
    across = place.view(1, -1)
    along = down * angle.cos() + across * angle.sin()
    wave = torch.cos((0.3 + 1.5 * draw[0]) * along + 2 * math.pi * draw[1])
    window = torch.exp(-(down.square() + across.square()) / 4)
    return (draw[2] - 0.5) * wave * window
