"""Fixed feature maps: scattering transforms and downscaled images.

The scattering transform of order 2 (Bruna & Mallat 2013) is a cascade of Morlet wavelets and
moduli, averaged over 2^J pixels. It has scales j < J and L orientations. The channels are x⋆φ,
|x⋆ψ₁|⋆φ and ||x⋆ψ₁|⋆ψ₂|⋆φ with j₁ < j₂. Each input channel gives 1 + JL + L²J(J−1)/2 channels,
which is 81 for J = 2 and L = 8. Filters are applied in Fourier space, where subsampling is a sum
over aliases. The transform is differentiable and runs in batches on any device. Its values agree
with `Scattering2D` of kymatio 0.3 (tests/features/test_feature_map.py).

The scattering features follow Tramèr & Boneh 2021 (arXiv 2011.11660). Colour is converted to YUV,
the channels of each image are normalised in 27 groups, and overlapping windows pool each channel to
a 3×3 grid.

The second map (`low_pass`) gives vectors of norm 1 (at most 1 with a shear), whose class sums and
Gram matrix are released.
An image's pixels are averaged in cells to a vector v. The vector is divided by its norm and
extended by a constant: u = (√(1 − c²)·v/‖v‖, c). The norm does not depend on an example's
brightness, so the bound of 1 needs no data and no further proof. The class sums over u also contain
the class counts.
"""

from __future__ import annotations

import math
from functools import lru_cache, reduce
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.errors import SettingError
from fedsynth.features.deskewing import LARGEST_SHEAR, shear_of, sheared
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.public_statistics import Whitening, map_of_vectors, public_vectors

# The last coordinate c of each vector u, which counts examples. c² is a tenth of ‖u‖².
CONSTANT = math.sqrt(0.1)
# The maximum number of cells in each direction, for grey and colour images. It is small because a
# sum's noise grows with the square root of the dimension.
GREY_SIDE, COLOUR_SIDE = 14, 8

# The weight of the shear among the coordinates of a deskewed image.
SHEAR = math.sqrt(0.05)

DARKEST = 1e-6


def cells_of(shape: Shape) -> tuple[int, int, int]:
    """Returns the downscaled size (channels, rows, columns) for an image shape.

    >>> cells_of((1, 28, 28)), cells_of((3, 32, 32))
    ((1, 14, 14), (3, 8, 8))
    """
    channels, height, width = shape
    side = GREY_SIDE if channels == 1 else COLOUR_SIDE
    return channels, min(side, height), min(side, width)


@lru_cache(maxsize=8)
def low_pass(shape: Shape, *, deskews: bool = False) -> FeatureMap:
    """Returns the feature map that downscales an image, and scales the result to norm 1.

    The vector is u in the module docstring.

    Args:
        shape: the image shape.
        deskews: whether images are deskewed first. The norm is then at most 1, and u contains the
            image's shear s: u = (√(1 − c²)·(√(1 − k²)·v/‖v‖, k·s), c), where k is `SHEAR`.

    >>> u = low_pass((1, 28, 28))(torch.rand(2, 1, 28, 28))
    >>> u.shape, torch.allclose(u.norm(dim=1), torch.ones(2))
    (torch.Size([2, 197]), True)
    """
    cells = cells_of(shape)

    def function(x_NCHW: Tensor) -> Tensor:
        v = F.adaptive_avg_pool2d(x_NCHW, cells[1:]).flatten(1)
        size = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        constant = torch.full_like(size, CONSTANT)
        return torch.cat([math.sqrt(1 - CONSTANT**2) * v / size.clamp_min(DARKEST), constant], 1)

    def with_shear(x_NCHW: Tensor) -> Tensor:
        shear_N = shear_of(x_NCHW)
        u = function(sheared(x_NCHW, shear_N))
        share_N1 = math.sqrt(1 - CONSTANT**2) * shear_N[:, None] / LARGEST_SHEAR
        return torch.cat([math.sqrt(1 - SHEAR**2) * u[:, :-1], SHEAR * share_N1, u[:, -1:]], dim=1)

    source = "an image is divided by its norm"
    return FeatureMap(
        name="low-pass",
        image_shape=shape,
        dimension=math.prod(cells) + 1 + deskews,
        norm_bound=1.0,
        radius=1.0,
        source=f"{source}, and its shear is limited: analytic"
        if deskews
        else f"{source}: analytic",
        function=with_shear if deskews else function,
    )


Real = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]

J, L = 2, 8  # octaves J and orientations L of the scattering transform
GROUPS = 27
GRID = 3  # cells per direction after pooling a channel
# The smallest image side in pixels. The transform of a smaller image has fewer than two cells.
MIN_SIDE = 8
# A number added to channel-group variances, so that a constant image's features are 0.
EPSILON = 1e-5
# The BT.601 conversion from (R, G, B) to YUV. The rows are Y, U and V.
YUV = ((0.299, 0.587, 0.114), (-0.14713, -0.28886, 0.436), (0.615, -0.51499, -0.10001))
# The number added to the eigenvalues in whitening, relative to the largest one. It was chosen on
# EMNIST letters.
FLOOR = 0.003
# The number of image channels in a CPU batch. It is small so that spectra stay in the CPU's cache.
PLANES = 16
# The shifts, in image sizes, between the copies that are summed to make a filter periodic.
PERIODS = (-2, -1, 0, 1, 2)


def gabor(size: tuple[int, int], sigma: float, theta: float, xi: float, slant: float) -> Complex:
    """Returns a periodic Gabor filter: a wave in a Gaussian window.

    The result is the complex tensor exp(−uᵀCu/2σ² + iξ·u)·slant/(2πσ²) of shape [H, W].

    Args:
        size: the size (H, W) of the filter.
        sigma: the width of the Gaussian along the wave, in pixels.
        theta: the direction of the wave.
        xi: the frequency of the wave, in radians per pixel.
        slant: the ratio of the Gaussian's widths along and across the wave.
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
    """Returns a Morlet wavelet: a Gabor filter minus a Gaussian, with mean zero.

    The parameters are σ = 0.8·2^j and ξ = 3π/4·2^−j for the scale j. The result is complex and has
    the shape [H, W].
    """
    sigma = 0.8 * 2**scale
    theta = (L - L // 2 - 1 - orientation) * math.pi / L
    wave = gabor(size, sigma, theta, 0.75 * math.pi / 2**scale, 4 / L)
    bump = gabor(size, sigma, theta, 0.0, 4 / L)
    return wave - wave.sum() / bump.sum() * bump


class Scattering(nn.Module):
    """The scattering transform for images of one size (H, W).

    Images are padded to the height H' = ((H + 4) // 4 + 1)·4 and, in the same way, the width W'.
    The reflected border is thus at least 4 pixels in total in each dimension.

    The filters are float32 buffers. `rows` and `columns` are matrices that apply φ, and
    `half_rows` and `half_columns` apply φ at half the resolution (see `_smoothing`). `fine` is ψ at
    the first scale in Fourier space, [L, H', W', 2], with each value twice, for the real and the
    imaginary part. `coarse` contains the four quarters of ψ at the second scale, divided by 4, [4,
    L, H'/2, W'/2, 2].

    Raises:
        SettingError: a side of the images is below 8 pixels.
    """

    rows: Tensor
    columns: Tensor
    half_rows: Tensor
    half_columns: Tensor
    fine: Tensor
    coarse: Tensor

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        if min(size) < MIN_SIDE:
            reason = f"needs at least {MIN_SIDE}×{MIN_SIDE} pixels, got {size[0]}×{size[1]}"
            raise SettingError("method", "features", reason, value="scattering")
        self.size = size
        padded = (_padded(size[0]), _padded(size[1]))
        low = np.fft.fft2(gabor(padded, 0.8 * 2 ** (J - 1), 0.0, 0.0, 1.0)).real
        for name, low_1d in (("rows", low[:, 0]), ("columns", low[0])):
            side, factor = len(low_1d), low_1d / low[0, 0] ** 0.5
            self.register_buffer(name, _smoothing(factor, side, 4))
            self.register_buffer(f"half_{name}", _smoothing(factor, side // 2, 2))
        fine, coarse = (_waves(padded, scale) for scale in range(J))
        self.register_buffer("fine", fine)
        self.register_buffer("coarse", torch.stack(_quarters(coarse, 1)) / 4)

    def forward(self, x_NHW: Tensor) -> Tensor:
        """Computes the scattering transform of images [N, H, W].

        The result has the shape [N, 81, h, w], with h = H'/4 − 2.

        The channel of order 0 comes first. The channels of order 1 follow, sorted by (j, θ). The
        channels of order 2 are last, sorted by (θ₁, θ₂).
        """
        x = self._pad(x_NHW)[:, None]
        spectrum = torch.fft.fft2(x)
        filtered = _filtered(spectrum, self.fine)
        fine = _modulus(torch.fft.ifft2(torch.view_as_complex(filtered)))
        coarse = self._at_half(spectrum)
        crossed = self._at_half(torch.fft.fft2(fine)[:, :, None]).flatten(1, 2)
        averages = self.rows @ torch.cat([x, fine], dim=1) @ self.columns.T
        return torch.cat([averages, coarse, crossed], dim=1)[..., 1:-1, 1:-1]

    def _pad(self, x_NHW: Tensor) -> Tensor:
        (height, width), (tall, wide) = self.size, self.fine.shape[1:3]
        top_pad, left_pad = (tall - height) // 2, (wide - width) // 2
        sides = (left_pad, wide - width - left_pad, top_pad, tall - height - top_pad)
        return F.pad(x_NHW[:, None], sides, mode="reflect")[:, 0]

    def _at_half(self, spectrum: Tensor) -> Tensor:
        """Computes the second scale's wavelet moduli at half resolution, and pools the moduli.

        In Fourier space, subsampling by 2 in each direction averages a spectrum's four quarters. φ
        is a product of one-dimensional Gaussians, so each side is averaged by a matrix product.
        """
        # in place: a third of the time in new memory, the same bits
        total = reduce(Tensor.add_, map(_filtered, _quarters(spectrum, -2), self.coarse))
        signal = torch.fft.ifft2(torch.view_as_complex(total))
        return self.half_rows @ _modulus(signal) @ self.half_columns.T


def _modulus(signal: Tensor) -> Tensor:
    """Computes |z| faster than `abs`.

    With gradients, `abs` is used, because the derivative would be NaN at 0.
    """
    if signal.requires_grad:
        return signal.abs()
    squares = torch.view_as_real(signal).square()
    return squares[..., 0].add(squares[..., 1]).sqrt_()


def _filtered(spectrum: Tensor, wave: Tensor) -> Tensor:
    """Multiplies a spectrum by ψ, and returns real and imaginary parts in the last dimension."""
    return torch.view_as_real(spectrum.contiguous()) * wave


def _quarters(spectrum: Tensor, dim: int) -> list[Tensor]:
    """Splits each matrix into its four quadrants. Rows are dimension `dim`, columns `dim` + 1."""
    upper, lower = spectrum.chunk(2, dim=dim)
    return [*upper.chunk(2, dim=dim + 1), *lower.chunk(2, dim=dim + 1)]


def _waves(size: tuple[int, int], scale: int) -> Tensor:
    """Returns the oriented wavelets in Fourier space, [L, H', W', 2].

    The last dimension repeats each value, for the real and the imaginary part.
    """
    waves = [np.fft.fft2(morlet(size, scale, turn)).real for turn in range(L)]
    return torch.from_numpy(np.stack(waves)).float()[..., None].repeat(1, 1, 1, 2)


def _padded(side: int) -> int:
    return ((side + 2**J) // 2**J + 1) * 2**J


def _smoothing(low_H: Real, side: int, step: int) -> Tensor:
    """Returns the matrix [side/step, side] that averages and subsamples a one-dimensional signal.

    Args:
        low_H: the spectrum of a Gaussian at full resolution, [H'].
        side: the signal length, H' or H'/2. At half the resolution, only the lower half of the
            frequencies is kept. The spectrum is below 5 % at the others.
        step: the subsampling step.
    """
    low_side = np.concatenate([low_H[: side // 2], low_H[len(low_H) - side // 2 :]])
    circulant = np.fft.ifft(np.fft.fft(np.eye(side), axis=0) * low_side[:, None], axis=0).real
    return torch.from_numpy(circulant[::step].copy()).float()


@lru_cache(maxsize=8)
def _filters(size: tuple[int, int], device: torch.device) -> Scattering:
    with torch.inference_mode(False):  # cached, and also used with autograd
        return Scattering(size).to(device)


def scattering_features(x_NCHW: Tensor) -> Tensor:
    """Computes images' scattering features: normalised and pooled scattering coefficients.

    The pixels are in [0, 1]. The result has the shape [N, 81·C·cells].
    """
    if x_NCHW.device.type != "cpu":
        return _pooled(x_NCHW)
    # a power of two, so that all pieces of a private client's pass have the same length
    at_once = PLANES if x_NCHW.shape[1] == 1 else PLANES // 4
    return torch.cat(list(map(_pooled, x_NCHW.split(at_once))))


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
    """Returns the pooling windows' size and stride in one direction.

    A side with at most three cells is not pooled.
    """
    stride = max(1, side // GRID)
    return side - (min(GRID, side) - 1) * stride, stride


def scattering(shape: Shape) -> FeatureMap:
    """Returns the feature map that computes scattering features (`scattering_features`).

    The vectors have 729 coordinates for 28×28 grey images and 2187 for 32×32 colour images.

    Raises:
        SettingError: a side of the images is below 8 pixels.
    """
    vectors = public_vectors(scattering_features, shape)
    return map_of_vectors("scattering", shape, scattering_features, vectors, (sizes(shape),))


def whitened_scattering(shape: Shape) -> FeatureMap:
    """Returns the feature map that computes scattering features and whitens them.

    The whitening uses the covariances of public random images.

    Raises:
        SettingError: a side of the images is below 8 pixels.
    """
    vectors = public_vectors(scattering_features, shape)
    whitening = Whitening.of(scattering_features, vectors, sizes(shape)[1], FLOOR)
    whitened = whitening.applied(vectors)
    return map_of_vectors("whitened-scattering", shape, whitening, whitened, (sizes(shape),))


def sizes(shape: Shape) -> tuple[int, int]:
    """Returns the scattering features' shape: (number of channels, cells per channel)."""
    rows, columns = _padded(shape[1]) // 2**J - 2, _padded(shape[2]) // 2**J - 2
    return shape[0] * (1 + J * L + L**2 * J * (J - 1) // 2), min(GRID, rows) * min(GRID, columns)
