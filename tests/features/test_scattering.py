"""The scattering transform against kymatio's numbers, two kinds of features in one vector, and the
mean over an image and its mirror image."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.features import feature_map
from fedsynth.features.feature_map import Shape
from fedsynth.features.public_statistics import Whitening, public_vectors
from fedsynth.features.random_images import random_images
from fedsynth.features.random_process import CHANNEL_SHARE, DICTIONARY, Mirrored, SideBySide
from fedsynth.features.scattering import Scattering, _aliased, sizes
from fedsynth.privacy.products import matrices_of
from fedsynth.seeding import torch_generator

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


@pytest.mark.parametrize("kept", [None, 2])
def test_the_main_directions_are_white_and_in_order(kept: int | None) -> None:
    """By NumPy's covariances: all of the channels', or so many, the largest first."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 8.0, 2.0, 4.0])[:, None]
    turn = torch.linalg.qr(torch.randn(4, 4, generator=generator)).Q
    drawn = scale * torch.randn(4000, 4, 3, generator=generator)
    vectors = (turn @ drawn).flatten(1) + 5.0
    white = Whitening.of(lambda x: x, vectors, cells=3, floor=0.0, num_channels=kept)
    made = white.applied(vectors).unflatten(1, (kept or 4, 3)).numpy()
    between = np.einsum("nas,nbs->ab", made, made) / made.shape[0] / 3
    np.testing.assert_allclose(between / between[0, 0], np.eye(kept or 4), atol=0.05)
    if kept:
        first = white.channels[0].numpy()
        assert abs(first @ turn[:, 1].numpy()) > 0.99 * np.linalg.norm(first)
        assert np.linalg.norm(white.channels[1]) > 1.5 * np.linalg.norm(first)
        again = Whitening.of(lambda x: x, -vectors, cells=3, floor=0.0, num_channels=kept)
        torch.testing.assert_close(again.channels, white.channels)


GREY, COLOUR = (1, 14, 14), (3, 12, 12)
PAIR, MIRRORED = "whitened-scattering+random-process", "mirrored-scattering+random-process"


def images(count: int, shape: Shape) -> Tensor:
    return random_images(count, shape, torch_generator(1, "test"))


def test_vectors_are_concatenated_with_their_factors() -> None:
    functions = (lambda x: x.flatten(1), lambda x: x.flatten(1)[:, :2])
    made = SideBySide(functions, (2.0, -1.0), ((1, 3), (1, 2)))
    x = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    assert made(x).tolist() == [[2.0, 4.0, 6.0, -1.0, -2.0]]
    assert Mirrored(made)(x).tolist() == [[4.0, 4.0, 4.0, -2.0, -2.0]]


def test_an_image_and_its_mirror_image_have_one_vector() -> None:
    """The mean of both vectors of the other map, of which each is another."""
    x, shape = images(6, COLOUR), COLOUR
    mirrored = feature_map(MIRRORED, shape)
    torch.testing.assert_close(mirrored(x), mirrored(x.flip(-1)), rtol=1e-4, atol=1e-4)
    pair = feature_map(PAIR, shape)
    both = (pair(x), pair(x.flip(-1)))
    torch.testing.assert_close(mirrored(x), (both[0] + both[1]) / 2, rtol=1e-4, atol=1e-4)
    assert float((both[0] - both[1]).norm(dim=1).min()) > 0.1 * pair.radius


def test_neither_kind_drowns_the_other() -> None:
    """Distances of public images from their mean: the dictionary's are its factor of
    scattering's."""
    vectors = public_vectors(feature_map(PAIR, GREY).function, GREY)
    channels, cells = sizes(GREY)
    size = math.ceil(CHANNEL_SHARE * channels) * cells
    about = vectors - vectors.mean(dim=0)
    one = about[:, :size].norm(dim=1).median()
    other = about[:, size:].norm(dim=1).median()
    assert float(other / one) == pytest.approx(DICTIONARY, rel=0.02)


def test_blocks_are_where_the_channels_are() -> None:
    """A map's blocks are its matrices of channels by cells. Catches: cells before channels, or
    blocks in another order: a covariance of cells is then no longer that of neighbours."""
    made = feature_map(PAIR, GREY)
    assert sum(a * s for a, s in made.blocks) == made.dimension
    assert [cells for _, cells in made.blocks] == [9, 9]
    x = images(1, GREY)
    corner = x.clone()
    corner[..., -4:, -4:] = 1 - corner[..., -4:, -4:]  # the last cell's, and few others'
    moved = (made(corner) - made(x)).abs()[0]
    for block in matrices_of(moved[None], made.blocks):
        by_cell = block[0].mean(dim=0)
        assert int(by_cell.argmax()) == 8
        assert float(by_cell[8]) > 3 * float(by_cell[0])
