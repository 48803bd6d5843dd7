"""Random-process images: of the seed alone, of any size, and not all alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.features.random_images import AT_ONCE, PROCESSES, random_images
from fedsynth.seeding import torch_generator

SHAPES = [(3, 20, 48), (2, 9, 8), (1, 4, 4)]


def drawn(seed: int, count: int, shape: tuple[int, int, int], process: str = "mixed") -> Tensor:
    return random_images(count, shape, torch_generator(seed, "test"), process)


@pytest.mark.parametrize("process", PROCESSES)
def test_a_seed_gives_the_same_images_and_touches_no_global_generator(process: str) -> None:
    before = torch.random.get_rng_state()
    one = drawn(0, 7, (3, 16, 16), process)
    assert torch.equal(one, drawn(0, 7, (3, 16, 16), process))
    assert not torch.equal(one, drawn(1, 7, (3, 16, 16), process))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("process", PROCESSES)
def test_any_shape_has_pixels_from_0_to_1(process: str, shape: tuple[int, int, int]) -> None:
    images = drawn(0, 6, shape, process)
    assert images.shape == (6, *shape)
    assert images.dtype == torch.float32
    assert torch.isfinite(images).all()
    assert 0 <= images.min() < images.max() <= 1


def test_grey_is_the_mean_of_the_colours() -> None:
    colour = drawn(0, 5, (3, 16, 16))
    torch.testing.assert_close(drawn(0, 5, (1, 16, 16))[:, 0], colour.mean(dim=1))


def test_neighbouring_pixels_are_alike_as_in_photographs() -> None:
    """White noise has no correlation; photographs have 0.9 or more."""
    for process in PROCESSES:
        x = drawn(0, 60, (1, 32, 32), process)
        x = x - x.mean(dim=(2, 3), keepdim=True)
        beside = (x[..., 1:] * x[..., :-1]).mean() / x.square().mean()
        far = (x[..., 12:] * x[..., :-12]).mean() / x.square().mean()
        assert beside > 0.6, process
        assert far < beside - 0.2, process


def test_blocks_and_none_at_all() -> None:
    assert drawn(0, 0, (3, 8, 8)).shape == (0, 3, 8, 8)
    images = drawn(0, AT_ONCE + 3, (1, 8, 8), "spectral")
    assert torch.equal(images[:AT_ONCE], drawn(0, AT_ONCE, (1, 8, 8), "spectral"))
    assert not torch.equal(images[-3:], images[:3])


def test_invalid_image_shapes_and_processes_are_refused() -> None:
    with pytest.raises(SettingError, match="image_shape"):
        drawn(0, 1, (3, 0, 8))
    with pytest.raises(UnknownNameError, match="spectral"):
        drawn(0, 1, (3, 8, 8), "spectrum")
