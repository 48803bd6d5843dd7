"""The scattering transform of order 2 (Bruna & Mallat 2013), as a fixed feature map.

It is a cascade of Morlet wavelets and moduli, averaged over 2^J pixels. With scales j < J and L
orientations, the channels are x⋆φ, |x⋆ψ₁|⋆φ and ||x⋆ψ₁|⋆ψ₂|⋆φ with j₁ < j₂, that is
1 + JL + L²J(J−1)/2 for each input channel (81 for J = 2, L = 8). Filters are applied in Fourier
space, where subsampling is a sum over aliases. The transform is differentiable and runs in batches
on any device. Its values agree with kymatio 0.3's `Scattering2D`
(tests/features/test_scattering.py).

The features follow Tramèr & Boneh 2021 (arXiv 2011.11660): colour is converted to YUV, the channels
of each image are normalised in 27 groups, and overlapping windows pool each channel to a 3×3 grid.

Downscaled images as feature vectors of norm 1, whose class sums and Gram matrix are released.

An image is averaged in cells to v, which is divided by its norm and extended by a constant:
u = (√(1 − c²)·v/‖v‖, c). Every example therefore has norm 1, whatever its brightness, so the bound
of 1 needs no data and no further proof. The class sums of u also contain the classes' counts.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.public_statistics import Whitening, map_of_vectors, public_vectors

CONSTANT = math.sqrt(0.1)
"""c: a tenth of a vector's squared norm is used to count examples."""
GREY_SIDE, COLOUR_SIDE = 14, 8
"""The maximum number of cells in each direction. The noise of a sum grows with the square root of
the number of its coordinates."""
DARKEST = 1e-6


def cells_of(shape: Shape) -> tuple[int, int, int]:
    """Returns (channels, rows, columns) of the downscaled images for images of this shape.

    >>> cells_of((1, 28, 28)), cells_of((3, 32, 32))
    ((1, 14, 14), (3, 8, 8))
    """
    channels, height, width = shape
    side = GREY_SIDE if channels == 1 else COLOUR_SIDE
    return channels, min(side, height), min(side, width)


@lru_cache(maxsize=8)
def low_pass(shape: Shape) -> FeatureMap:
    """Returns the map u for images of this shape.

    >>> u = low_pass((1, 28, 28))(torch.rand(2, 1, 28, 28))
    >>> u.shape, u.norm(dim=1)
    (torch.Size([2, 197]), tensor([1.0000, 1.0000]))
    """
    cells = cells_of(shape)

    def function(x_NCHW: Tensor) -> Tensor:
        v = F.adaptive_avg_pool2d(x_NCHW, cells[1:]).flatten(1)
        size = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        constant = torch.full_like(size, CONSTANT)
        return torch.cat(
            [math.sqrt(1 - CONSTANT**2) * v / size.clamp_min(DARKEST), constant], dim=1
        )

    return FeatureMap(
        name="low-pass",
        image_shape=shape,
        dimension=math.prod(cells) + 1,
        norm_bound=1.0,
        radius=1.0,
        source="each vector is divided by its norm: analytic",
        function=function,
    )


Real = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]

J, L = 2, 8
"""Octaves and orientations."""
GROUPS = 27
GRID = 3
"""Cells of the pooled map in each direction."""
MIN_SIDE = 8
"""The smallest image side in pixels: smaller images have fewer than two positions of 2^J pixels."""
EPSILON = 1e-5
"""Added to a group's variance, so that a constant image has features 0."""
YUV = ((0.299, 0.587, 0.114), (-0.14713, -0.28886, 0.436), (0.615, -0.51499, -0.10001))
"""BT.601, rows Y, U, V of (R, G, B)."""
FLOOR = 0.003
"""The floor of the whitening's eigenvalues, relative to the largest; chosen on EMNIST letters."""
PLANES = 16
"""Image channels that a CPU processes at a time: their spectra then stay in its cache."""
PERIODS = (-2, -1, 0, 1, 2)
"""Copies of a filter that are summed to make it periodic."""


def gabor(size: tuple[int, int], sigma: float, theta: float, xi: float, slant: float) -> Complex:
    """Returns a periodic Gabor filter exp(−uᵀCu/2σ² + iξ·u)·slant/(2πσ²), complex [H, W].

    Args:
        size: (H, W).
        sigma: width of the Gaussian along the wave, in pixels.
        theta: direction of the wave.
        xi: the wave's frequency, in radians per pixel.
        slant: the Gaussian's width along the wave divided by its width across it.
    """
    turn = np.array([[math.cos(theta), -math.sin(theta)], [math.sin(theta), math.cos(theta)]])
    curve = turn @ np.diag([1.0, slant**2]) @ turn.T / (2 * sigma**2)
    rows, columns = np.mgrid[: size[0], : size[1]]
    total = np.zeros(size, dtype=np.complex128)
    for down, right in product(PERIODS, repeat=2):
        y = rows + down * size[0]
        x = columns + right * size[1]
        falls = curve[0, 0] * y**2 + 2 * curve[0, 1] * y * x + curve[1, 1] * x**2
        wave = xi * (y * math.cos(theta) + x * math.sin(theta))
        total += np.exp(-falls + 1j * wave)
    return total * slant / (2 * math.pi * sigma**2)


def morlet(size: tuple[int, int], scale: int, orientation: int) -> Complex:
    """Returns a Gabor wavelet of mean zero, complex [H, W]: σ = 0.8·2^j, ξ = 3π/4·2^−j."""
    sigma = 0.8 * 2**scale
    theta = (L - L // 2 - 1 - orientation) * math.pi / L
    wave = gabor(size, sigma, theta, 0.75 * math.pi / 2**scale, 4 / L)
    bump = gabor(size, sigma, theta, 0.0, 4 / L)
    return wave - wave.sum() / bump.sum() * bump


class Scattering(nn.Module):
    """The transform for images of one size (H, W). Filters are float32 buffers: `low`, φ in Fourier
    space at full resolution, [H', W']; `rows` and `columns`, φ's matrices at half the resolution,
    see `_smoothing`; `fine` and `coarse`, ψ of both scales in Fourier space, [L, H', W'].

    Padded images have H' = ((H + 4) // 4 + 1)·4, that is at least 4 pixels of reflection in total
    in each dimension.

    Raises:
        SettingError: a side below 8 pixels.
    """

    low: Tensor
    rows: Tensor
    columns: Tensor
    fine: Tensor
    coarse: Tensor

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        if min(size) < MIN_SIDE:
            raise SettingError(
                "method",
                "features",
                f"needs images of at least {MIN_SIDE}×{MIN_SIDE} pixels, got {size[0]}×{size[1]}",
                value="scattering",
            )
        self.size = size
        padded = (_padded(size[0]), _padded(size[1]))
        low = np.fft.fft2(gabor(padded, 0.8 * 2 ** (J - 1), 0.0, 0.0, 1.0)).real
        self.register_buffer("low", torch.from_numpy(low).float())
        self.register_buffer("rows", _smoothing(low[:, 0] / low[0, 0] ** 0.5))
        self.register_buffer("columns", _smoothing(low[0] / low[0, 0] ** 0.5))
        for scale, name in enumerate(("fine", "coarse")):
            waves = [np.fft.fft2(morlet(padded, scale, turn)).real for turn in range(L)]
            self.register_buffer(name, torch.from_numpy(np.stack(waves)).float())

    def forward(self, x_NHW: Tensor) -> Tensor:
        """Transforms [N, H, W] to [N, 81, h, w], with h = H'/4 − 2: order 0, then 1 and 2.

        The channels of order 1 are sorted by (j, θ), those of order 2 by (θ₁, θ₂).
        """
        spectrum = torch.fft.fft2(self._pad(x_NHW))
        zero = self._average(spectrum[:, None], self.low, 2**J)
        fine = torch.fft.ifft2(spectrum[:, None] * self.fine).abs()
        fine_spectrum = torch.fft.fft2(fine)
        coarse = self._modulus(spectrum[:, None] * self.coarse)
        first = torch.cat([self._average(fine_spectrum, self.low, 4), self._smooth(coarse)], dim=1)
        crossed = self._modulus(fine_spectrum[:, :, None] * self.coarse)
        second = self._smooth(crossed.flatten(1, 2))
        return torch.cat([zero, first, second], dim=1)[..., 1:-1, 1:-1]

    def _pad(self, x_NHW: Tensor) -> Tensor:
        (height, width), (tall, wide) = self.size, self.low.shape
        top_pad, left_pad = (tall - height) // 2, (wide - width) // 2
        sides = (left_pad, wide - width - left_pad, top_pad, tall - height - top_pad)
        return F.pad(x_NHW[:, None], sides, mode="reflect")[:, 0]

    def _modulus(self, spectrum: Tensor) -> Tensor:
        """Returns |·| of a signal at half the resolution, given its spectrum."""
        return torch.fft.ifft2(_aliased(spectrum, 2)).abs()

    def _smooth(self, half: Tensor) -> Tensor:
        """Averages signals that are at half the resolution, and keeps every second value.

        φ is a product of one-dimensional Gaussians, so this is a matrix product on each side.
        """
        return self.rows @ half @ self.columns.T

    def _average(self, spectrum: Tensor, low: Tensor, step: int) -> Tensor:
        return torch.fft.ifft2(_aliased(spectrum * low, step)).real


def _padded(side: int) -> int:
    return ((side + 2**J) // 2**J + 1) * 2**J


class _Aliased(torch.autograd.Function):
    """`_mean_of_aliases` with a custom derivative that repeats the gradient: autograd would
    allocate a spectrum of zeros for each slice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(spectrum: Tensor, step: int) -> Tensor:
        return _mean_of_aliases(spectrum, step)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.step = inputs[1]

    @staticmethod
    def backward(ctx: Any, pulled: Tensor) -> tuple[Tensor, None]:
        ones = [1] * (pulled.dim() - 2)
        return (pulled / ctx.step**2).repeat(*ones, ctx.step, ctx.step), None


def _aliased(spectrum: Tensor, step: int) -> Tensor:
    """Returns the spectrum of every `step`-th sample in both directions: the mean over aliases."""
    if not spectrum.requires_grad:
        return _mean_of_aliases(spectrum, step)
    return _Aliased.apply(spectrum, step)


def _mean_of_aliases(spectrum: Tensor, step: int) -> Tensor:
    height, width = spectrum.shape[-2] // step, spectrum.shape[-1] // step
    # slices are added one by one: a reduction over two inner dimensions is several times slower
    total = spectrum[..., :height, :width]
    for down, right in list(product(range(step), repeat=2))[1:]:
        rows = slice(down * height, (down + 1) * height)
        total = total + spectrum[..., rows, right * width : (right + 1) * width]
    return total / step**2


def _smoothing(low_H: Real) -> Tensor:
    """Returns the matrix [H'/4, H'/2] that averages a signal at half the resolution and keeps every
    second value.

    Args:
        low_H: a Gaussian's spectrum at full resolution, [H']. Only the frequencies below half of
            the highest are kept; the others are below 5 %.
    """
    side = len(low_H)
    low_half = np.concatenate([low_H[: side // 4], low_H[side - side // 4 :]])
    circulant = np.fft.ifft(np.fft.fft(np.eye(side // 2), axis=0) * low_half[:, None], axis=0).real
    return torch.from_numpy(circulant[::2].copy()).float()


@lru_cache(maxsize=8)
def _filters(size: tuple[int, int], device: torch.device) -> Scattering:
    with torch.inference_mode(False):  # cached, and also used with autograd
        return Scattering(size).to(device)


def scattering_features(x_NCHW: Tensor) -> Tensor:
    """Returns normalised and pooled scattering coefficients [N, 81·C·cells] of pixels in [0, 1]."""
    if x_NCHW.device.type != "cpu":
        return _pooled(x_NCHW)
    # a power of two, so that all pieces of a private client's pass have the same length
    at_once = PLANES if x_NCHW.shape[1] == 1 else PLANES // 4
    return torch.cat([_pooled(images) for images in x_NCHW.split(at_once)])


def _pooled(x_NCHW: Tensor) -> Tensor:
    colour = x_NCHW
    if x_NCHW.shape[1] == 3:
        colour = torch.einsum("kc,nchw->nkhw", x_NCHW.new_tensor(YUV), x_NCHW)
    planes = _filters(tuple(x_NCHW.shape[2:]), x_NCHW.device)(colour.flatten(0, 1))
    channels = planes.unflatten(0, colour.shape[:2]).flatten(1, 2)
    normal = F.group_norm(channels, GROUPS, eps=EPSILON)
    (height, down), (width, right) = _window(normal.shape[2]), _window(normal.shape[3])
    return F.avg_pool2d(normal, (height, width), (down, right)).flatten(1)


def _window(side: int) -> tuple[int, int]:
    """Returns the pooling's window and stride in one direction; fewer than three positions are not
    pooled."""
    stride = max(1, side // GRID)
    return side - (min(GRID, side) - 1) * stride, stride


def scattering(shape: Shape) -> FeatureMap:
    """Returns the map for images of this shape: 729 coordinates for 28×28 grey images, 2187 for
    32×32 colour images.

    Raises:
        SettingError: a side below 8 pixels.
    """
    vectors = public_vectors(scattering_features, shape)
    return map_of_vectors("scattering", shape, scattering_features, vectors, (sizes(shape),))


def whitened_scattering(shape: Shape) -> FeatureMap:
    """Returns the map of coefficients whitened by covariances of public random images.

    Raises:
        SettingError: a side below 8 pixels.
    """
    vectors = public_vectors(scattering_features, shape)
    whitening = Whitening.of(scattering_features, vectors, sizes(shape)[1], FLOOR)
    whitened = whitening.applied(vectors)
    return map_of_vectors("whitened-scattering", shape, whitening, whitened, (sizes(shape),))


def sizes(shape: Shape) -> tuple[int, int]:
    """Returns the number of channels, and of cells in each."""
    rows, columns = _padded(shape[1]) // 2**J - 2, _padded(shape[2]) // 2**J - 2
    return shape[0] * (1 + J * L + L**2 * J * (J - 1) // 2), min(GRID, rows) * min(GRID, columns)
