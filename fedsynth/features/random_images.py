"""Draws public images from random processes, without any data set.

A seed is the only input. Everything computed from the images, such as a feature map's centre, a
norm bound or an encoder's weights, is therefore a public constant. The three processes follow
Baradad et al. 2021, "Learning to See by Looking at Noise" (arXiv 2106.05963). DP-RandP (Tang et al.
2023, arXiv 2306.06076) learns a private classifier's prior from the same processes.

- "dead-leaves" draws shapes of power-law sizes that cover each other, in front of a spectral
  background.
- "generator" uses a convolutional generator with random weights for each image, with noise at
  every resolution and oriented filters in the first layer.
- "spectral" draws Gaussian fields whose power falls as 1/f^α.

All processes are batched torch code for any device and take an explicit random generator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.features.feature_map import Shape

# The generation batch size, which bounds memory and affects the images for a seed.
AT_ONCE = 256

LEAVES = 48  # the number of shapes, enough to cover most of the background
# The relative spread of a shape's colour around grey. Natural images are mostly grey.
CHROMA = 0.35

WIDTH = 16  # the number of channels of the random generators


def random_images(count: int, image_shape: Shape, generator: torch.Generator) -> Tensor:
    """Draws images from the three random processes, in equal shares.

    The result is float32 [count, C, H, W] in [0, 1], on the random generator's device.

    Args:
        count: the number of images.
        image_shape: the shape (C, H, W). One channel gives the grey values of colour images.
        generator: the random generator for all draws. The same state gives the same images on
            devices of the same type.

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
    # further bands repeat the colours in turn
    return images[:, torch.arange(channels, device=images.device) % 3]


# ------------------------------------------------------------------------------- spectral noise


def spectral_noise(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draws images of coloured noise whose power falls with the frequency f as 1/f^α.

    The images have the shape [N, 3, H, W] and values in [0, 1].

    Each image has its own α, uniform in [1.5, 3.5], and a random factor between its axes' scales.
    """
    fields = _fields(count, 3, height, width, generator)
    return _levels(_mixed_colours(fields, generator), generator)


def _fields(
    count: int, channels: int, height: int, width: int, generator: torch.Generator
) -> Tensor:
    """Draws Gaussian noise [N, channels, H, W] with mean 0 and standard deviation 1.

    All channels of an image have the same power spectrum.
    """
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
    """Mixes three independent noise channels into each image's colour channels.

    The first noise channel changes all colours equally. The second and third change colours in
    random directions, and more weakly.
    """
    weights = torch.randn(len(fields), 3, 3, generator=generator, device=fields.device)
    weights = CHROMA * weights
    weights[:, :, 0] = 1.0  # the first field changes all colours equally
    return torch.einsum("noi,nihw->nohw", weights, fields)


def _levels(values: Tensor, generator: torch.Generator) -> Tensor:
    """Applies random brightness and contrast to each image, and clips the pixels to [0, 1]."""
    draws = torch.rand(len(values), 2, generator=generator, device=values.device)
    contrast = (0.10 + 0.20 * draws[:, 0]).view(-1, 1, 1, 1)
    brightness = (0.3 + 0.4 * draws[:, 1]).view(-1, 1, 1, 1)
    mean = values.mean(dim=(1, 2, 3), keepdim=True)
    spread = (values - mean).square().mean(dim=(1, 2, 3), keepdim=True).sqrt().clamp_min(1e-6)
    return (brightness + contrast * (values - mean) / spread).clamp(0, 1)


# ---------------------------------------------------------------------------------- dead leaves


def dead_leaves(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draws images of ellipses, rectangles and triangles that cover each other.

    The images have the shape [N, 3, H, W] and values in [0, 1].

    The shapes are drawn from front to back over a spectral background. Their radii r have a density
    proportional to r⁻³. Each shape has its own colour, shading and stripes.
    """
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
    """Transforms uniform random numbers to radii r with density proportional to r⁻³.

    The radii are between `smallest` and `largest`.
    """
    low, high = smallest**-2, largest**-2
    return (low - uniform * (low - high)).rsqrt()


def _turned(down: Tensor, across: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates coordinates by the angle π·turn.

    Returns the coordinates along the rotated axis and perpendicular to this axis.
    """
    angle = math.pi * turn
    return down * angle.cos() + across * angle.sin(), across * angle.cos() - down * angle.sin()


def _shape(along: Tensor, off: Tensor, kind: Tensor) -> Tensor:
    """Returns a boolean tensor that is true for points inside an ellipse, rectangle or triangle.

    `kind` in [0, 1] selects the shape: below 1/3 an ellipse, below 2/3 a rectangle, otherwise a
    triangle.
    """
    ellipse = along.square() + off.square() <= 1
    rectangle = torch.maximum(along.abs(), off.abs()) <= 0.8
    triangle = (along >= -0.7) & (along + 1.7 * off.abs() <= 1)
    return torch.where(kind < 1 / 3, ellipse, torch.where(kind < 2 / 3, rectangle, triangle))


def _colours(count: int, generator: torch.Generator) -> Tensor:
    """Draws colours [N, 3, 1, 1] that are mostly grey and roughly in [0, 1]."""
    device = generator.device
    grey = torch.rand(count, 1, 1, 1, generator=generator, device=device)
    chroma = torch.randn(count, 3, 1, 1, generator=generator, device=device)
    return grey + CHROMA / 2 * chroma


# ----------------------------------------------------------------------------- random generators


def random_generators(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draws images from convolutional generators with random weights.

    The images have the shape [N, 3, H, W] and values in [0, 1].

    Each generator starts from a 4×4 map of noise. Each layer doubles the resolution and convolves
    with the image's own random weights. Then it adds noise of random strength and applies a leaky
    ReLU. The first layer's weights are oriented waves. A random 1×1 layer computes the colours.
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
    """Standardises each (image, channel) pair to mean 0 and standard deviation 1."""
    mean = x.mean(dim=(2, 3), keepdim=True)
    deviation = (x - mean).square().mean(dim=(2, 3), keepdim=True).sqrt()
    return (x - mean) / deviation.clamp_min(1e-5)


def _convolved_each(x_NCHW: Tensor, weights: Tensor) -> Tensor:
    """Convolves each image with its own weights [O, C, k, k]. Borders are reflected."""
    count, channels = x_NCHW.shape[:2]
    half = weights.shape[-1] // 2
    padded = F.pad(x_NCHW, (half, half, half, half), mode="reflect")
    joined = padded.reshape(1, count * channels, *padded.shape[2:])
    output = F.conv2d(joined, weights.flatten(0, 1), groups=count)
    return output.view(count, weights.shape[1], *output.shape[2:])


def _oriented(count: int, generator: torch.Generator) -> Tensor:
    """Draws wave-shaped convolution filters with random frequency and phase.

    The shape is [N, WIDTH, WIDTH, 5, 5] for N images. Each image's waves have two random
    directions.
    """
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
