"""Two kinds of features in one vector, and the mean over an image and its mirror image."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsynth.features import feature_map
from fedsynth.features.feature_map import Shape
from fedsynth.features.public_statistics import public_vectors
from fedsynth.features.random_images import random_images
from fedsynth.features.random_process import CHANNEL_SHARE, DICTIONARY, Mirrored, SideBySide
from fedsynth.features.scattering import sizes
from fedsynth.privacy.products import matrices_of
from fedsynth.seeding import torch_generator

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
