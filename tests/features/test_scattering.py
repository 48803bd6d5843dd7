"""The scattering transform against kymatio, concatenated features, and means over mirrored images."""

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
from fedsynth.features.scattering import Scattering, sizes
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
    """Returns an image [1, 16, 20] with several frequencies and directions."""
    row, column = np.arange(16)[:, None], np.arange(20)[None]
    pixels = 0.5 + 0.3 * np.sin(0.9 * row + 0.04 * column**2) + 0.2 * np.cos(1.7 * column)
    return torch.from_numpy(pixels.astype(np.float32))[None]


def test_scattering_equals_kymatio() -> None:
    coefficients = Scattering((16, 20))(waves())[0]
    assert coefficients.shape == (81, 4, 5)
    for channel, values in KYMATIO.items():
        actual = [float(coefficients[channel, i, j]) for i, j in ((0, 0), (2, 3), (3, 4))]
        assert actual == pytest.approx(values, abs=3e-5)


def test_derivatives_agree_with_finite_differences_and_between_vmap_and_single_images() -> None:
    transform = Scattering((8, 8)).double()
    draws = torch.Generator().manual_seed(0)
    images = torch.rand(2, 8, 8, generator=draws, dtype=torch.float64)
    assert torch.autograd.gradcheck(transform, images.clone().requires_grad_(True))

    def size(image: Tensor) -> Tensor:
        return transform(image[None]).square().sum()

    mapped = torch.func.vmap(torch.func.grad(size))(images)
    separate = torch.stack([torch.func.grad(size)(image) for image in images])
    torch.testing.assert_close(mapped, separate)
    black = torch.zeros(8, 8, dtype=torch.float64)
    assert bool(torch.isfinite(torch.func.grad(size)(black)).all())


@pytest.mark.parametrize("num_channels", [None, 2])
def test_whitening_directions_are_white_and_sorted(num_channels: int | None) -> None:
    """Compares NumPy's covariances of all channels or the main ones, the largest first."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 8.0, 2.0, 4.0])[:, None]
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator)).Q
    samples = scale * torch.randn(4000, 4, 3, generator=generator)
    vectors = (rotation @ samples).flatten(1) + 5.0
    white = Whitening.of(lambda x: x, vectors, cells=3, floor=0.0, num_channels=num_channels)
    whitened = white.applied(vectors).unflatten(1, (num_channels or 4, 3)).numpy()
    between = np.einsum("nas,nbs->ab", whitened, whitened) / whitened.shape[0] / 3
    np.testing.assert_allclose(between / between[0, 0], np.eye(num_channels or 4), atol=0.05)
    if num_channels:
        first = white.channels[0].numpy()
        assert abs(first @ rotation[:, 1].numpy()) > 0.99 * np.linalg.norm(first)
        assert np.linalg.norm(white.channels[1]) > 1.5 * np.linalg.norm(first)
        negated = Whitening.of(lambda x: x, -vectors, cells=3, floor=0.0, num_channels=num_channels)
        torch.testing.assert_close(negated.channels, white.channels)


GREY, COLOUR = (1, 14, 14), (3, 12, 12)
PAIR, MIRRORED = "whitened-scattering+random-process", "mirrored-scattering+random-process"


def images(count: int, shape: Shape) -> Tensor:
    return random_images(count, shape, torch_generator(1, "test"))


def test_vectors_are_concatenated_with_their_factors() -> None:
    functions = (lambda x: x.flatten(1), lambda x: x.flatten(1)[:, :2])
    combined = SideBySide(functions, (2.0, -1.0), ((1, 3), (1, 2)))
    x = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    assert combined(x).tolist() == [[2.0, 4.0, 6.0, -1.0, -2.0]]
    assert Mirrored(combined)(x).tolist() == [[4.0, 4.0, 4.0, -2.0, -2.0]]


def test_mirrored_images_have_equal_vectors() -> None:
    """The vector is the mean of the pair map's vectors, which differ."""
    x, shape = images(6, COLOUR), COLOUR
    mirrored = feature_map(MIRRORED, shape)
    torch.testing.assert_close(mirrored(x), mirrored(x.flip(-1)), rtol=1e-4, atol=1e-4)
    pair = feature_map(PAIR, shape)
    vectors = (pair(x), pair(x.flip(-1)))
    torch.testing.assert_close(mirrored(x), (vectors[0] + vectors[1]) / 2, rtol=1e-4, atol=1e-4)
    assert float((vectors[0] - vectors[1]).norm(dim=1).min()) > 0.1 * pair.radius


def test_feature_kinds_have_balanced_scales() -> None:
    """The median distances of public images from their mean have the ratio DICTIONARY."""
    vectors = public_vectors(feature_map(PAIR, GREY).function, GREY)
    channels, cells = sizes(GREY)
    size = math.ceil(CHANNEL_SHARE * channels) * cells
    about = vectors - vectors.mean(dim=0)
    scattering = about[:, :size].norm(dim=1).median()
    dictionary = about[:, size:].norm(dim=1).median()
    assert float(dictionary / scattering) == pytest.approx(DICTIONARY, rel=0.02)


def test_blocks_are_matrices_of_channels_by_cells() -> None:
    """A broken version would have cells before channels, or blocks in another order, and covariances
    of cells that are no neighbours."""
    features = feature_map(PAIR, GREY)
    assert sum(a * s for a, s in features.blocks) == features.dimension
    assert [cells for _, cells in features.blocks] == [9, 9]
    x = images(1, GREY)
    corner = x.clone()
    corner[..., -4:, -4:] = 1 - corner[..., -4:, -4:]  # the last cell's and few other cells' pixels
    change = (features(corner) - features(x)).abs()[0]
    for block in matrices_of(change[None], features.blocks):
        by_cell = block[0].mean(dim=0)
        assert int(by_cell.argmax()) == 8
        assert float(by_cell[8]) > 3 * float(by_cell[0])
