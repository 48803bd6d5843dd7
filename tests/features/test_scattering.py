"""The scattering transform against kymatio: its numbers, kept here, and itself where it is
there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.features.public_statistics import Whitening
from fedsynth.features.scattering import Scattering, _aliased

# kymatio 0.3.0's Scattering2D(J=2, (16, 20)) of `waves()`: channel -> values at (0, 0), (2, 3), (3, 4)
KYMATIO = {
    0: (0.683185, 0.508932, 0.511984),
    1: (0.043483, 0.065723, 0.096386),
    4: (0.059764, 0.018296, 0.010356),
    9: (0.012205, 0.04982, 0.069065),
    13: (0.032006, 0.00258, 0.013215),
    17: (0.001428, 0.002761, 0.005142),
    30: (0.002007, 0.003435, 0.005508),
    55: (0.001168, 0.000917, 0.00251),
    80: (0.001753, 0.001104, 0.005368),
}


def waves() -> Tensor:
    """An image [1, 16, 20] with several frequencies and directions."""
    row, column = np.arange(16)[:, None], np.arange(20)[None]
    pixels = 0.5 + 0.3 * np.sin(0.9 * row + 0.04 * column**2) + 0.2 * np.cos(1.7 * column)
    return torch.from_numpy(pixels.astype(np.float32))[None]


def test_one_image_has_kymatio_s_numbers() -> None:
    made = Scattering((16, 20))(waves())[0]
    assert made.shape == (81, 4, 5)
    for channel, values in KYMATIO.items():
        found = [float(made[channel, i, j]) for i, j in ((0, 0), (2, 3), (3, 4))]
        assert found == pytest.approx(values, abs=3e-5)


def test_whitening_makes_channels_and_cells_white() -> None:
    """By NumPy's covariances, on vectors with a product covariance."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(4, 4, generator=generator)
    vectors = (mix @ torch.randn(4000, 4, 3, generator=generator)).flatten(1) + 5.0
    white = Whitening.of(lambda x: x, vectors, cells=3, floor=0.0)
    made = white.applied(vectors).unflatten(1, (4, 3)).numpy()
    between = np.einsum("nas,nbs->ab", made, made) / made.shape[0] / 3
    np.testing.assert_allclose(between / between[0, 0], np.eye(4), atol=0.05)


def test_every_second_sample_has_the_mean_of_the_spectrum_s_aliases_and_its_derivative() -> None:
    """Also where a function is mapped over examples, as per-example gradients are."""
    draws = torch.Generator().manual_seed(0)
    signal = torch.randn(2, 8, 8, generator=draws, dtype=torch.float64)
    spectrum = torch.fft.fft2(signal)
    expected = torch.fft.fft2(signal[:, ::2, ::2])
    torch.testing.assert_close(_aliased(spectrum, 2), expected)
    leaf = spectrum.clone().requires_grad_(True)
    torch.testing.assert_close(_aliased(leaf, 2).detach(), expected)
    assert torch.autograd.gradcheck(lambda x: _aliased(x, 2), leaf)

    def size(one: Tensor) -> Tensor:
        return _aliased(torch.fft.fft2(one), 4).abs().sum()

    each = torch.func.vmap(torch.func.grad(size))(signal)
    alone = torch.stack([torch.func.grad(size)(one) for one in signal])
    torch.testing.assert_close(each, alone)


def test_only_the_main_directions_are_white_and_in_order() -> None:
    """By NumPy's eigenvectors: so many of the channels', the largest first."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 8.0, 2.0, 4.0])[:, None]
    turn = torch.linalg.qr(torch.randn(4, 4, generator=generator)).Q
    vectors = (turn @ (scale * torch.randn(4000, 4, 3, generator=generator))).flatten(1)
    white = Whitening.of(lambda x: x, vectors, cells=3, floor=0.0, num_channels=2)
    made = white.applied(vectors).unflatten(1, (2, 3)).numpy()
    between = np.einsum("nas,nbs->ab", made, made) / made.shape[0] / 3
    np.testing.assert_allclose(between / between[0, 0], np.eye(2), atol=0.05)
    first = white.channels[0].numpy()
    assert abs(first @ turn[:, 1].numpy()) > 0.99 * np.linalg.norm(first)
    assert np.linalg.norm(white.channels[1]) > 1.5 * np.linalg.norm(first)
    again = Whitening.of(lambda x: x, -vectors, cells=3, floor=0.0, num_channels=2)
    torch.testing.assert_close(again.channels, white.channels)
