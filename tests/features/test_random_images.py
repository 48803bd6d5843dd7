"""Random-process images: of the seed only, of any size, and different."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsynth.features.random_images import (
    AT_ONCE,
    dead_leaves,
    random_generators,
    random_images,
    spectral_noise,
)
from fedsynth.seeding import torch_generator


def drawn(seed: int, count: int, shape: tuple[int, int, int]) -> Tensor:
    return random_images(count, shape, torch_generator(seed, "test"))


def test_a_seed_gives_the_same_images_and_touches_no_global_generator() -> None:
    before = torch.random.get_rng_state()
    images = drawn(0, 7, (3, 16, 16))
    assert torch.equal(images, drawn(0, 7, (3, 16, 16)))
    assert not torch.equal(images, drawn(1, 7, (3, 16, 16)))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("shape", [(3, 20, 48), (5, 9, 8), (1, 4, 4)], ids=str)
def test_any_shape_has_pixels_from_0_to_1(shape: tuple[int, int, int]) -> None:
    images = drawn(0, 6, shape)
    assert images.shape == (6, *shape)
    assert images.dtype == torch.float32
    assert torch.isfinite(images).all()
    assert 0 <= images.min() < images.max() <= 1
    assert drawn(0, 0, shape).shape == (0, *shape)


def test_grey_is_the_mean_of_the_colours() -> None:
    colour = drawn(0, 5, (3, 16, 16))
    torch.testing.assert_close(drawn(0, 5, (1, 16, 16))[:, 0], colour.mean(dim=1))


@pytest.mark.parametrize("process", [dead_leaves, random_generators, spectral_noise])
def test_neighbouring_pixels_are_alike_as_in_photographs(process: Any) -> None:
    """White noise has no correlation; photographs have 0.9 or more."""
    x = process(60, 32, 32, torch_generator(0, "test"))
    x = x - x.mean(dim=(2, 3), keepdim=True)
    near = (x[..., 1:] * x[..., :-1]).mean() / x.square().mean()
    far = (x[..., 12:] * x[..., :-12]).mean() / x.square().mean()
    assert near > 0.6
    assert far < near - 0.2


def test_every_block_has_other_images() -> None:
    images = drawn(0, AT_ONCE + 3, (1, 8, 8))
    assert torch.equal(images[:AT_ONCE], drawn(0, AT_ONCE, (1, 8, 8)))
    assert not torch.equal(images[-3:], images[:3])
