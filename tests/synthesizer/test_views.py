"""Flips and crops of generated images against NumPy, pixel by pixel."""

from __future__ import annotations

import numpy as np
import torch

from fedsynth.data.registry import dataset_spec
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.augmentation import Views

DIGITS, COLOUR = dataset_spec("digits"), dataset_spec("cifar10")


def _images(device: torch.device, channels: int = 3, side: int = 32) -> torch.Tensor:
    draws = torch_generator(0, "test images", device=device)
    return torch.randn(40, channels, side, side, generator=draws, device=device)


def test_no_view_is_the_image_itself_and_draws_nothing(device: torch.device) -> None:
    draws = torch_generator(0, "views", device=device)
    before = draws.get_state()
    x = _images(device)
    assert Views()(x, COLOUR, draws) is x
    assert not Views()
    assert torch.equal(draws.get_state(), before)


def test_each_image_is_mirrored_or_not(device: torch.device) -> None:
    x = _images(device)
    seen = Views(flips=True)(x, COLOUR, torch_generator(0, "views", device=device))
    mirrored = [bool(torch.equal(a, b.flip(2))) for a, b in zip(seen, x, strict=True)]
    same = [bool(torch.equal(a, b)) for a, b in zip(seen, x, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 8 < sum(mirrored) < 32  # of 40, a half each: outside with probability 1e-4


def test_crops_are_windows_of_the_image_in_black(device: torch.device) -> None:
    """Each of 9 × 9 windows of a picture with 4 black pixels at each edge, and several of them."""
    x = _images(device)
    views = Views(crop=0.125)
    assert views.edge(COLOUR) == 4
    assert views.edge(DIGITS) == 1
    assert views.edge(dataset_spec("mnist")) == 4
    seen = views(x, COLOUR, torch_generator(0, "views", device=device)).cpu().numpy()
    black = -np.array(COLOUR.mean, np.float32) / np.array(COLOUR.std, np.float32)
    wide = np.tile(black[None, :, None, None], (40, 1, 40, 40))
    wide[:, :, 4:36, 4:36] = x.cpu().numpy()
    corners = set()
    for image, picture in zip(seen, wide, strict=True):
        fits = [
            (row, column)
            for row in range(9)
            for column in range(9)
            if np.allclose(image, picture[:, row : row + 32, column : column + 32], atol=1e-6)
        ]
        assert len(fits) == 1
        corners.add(fits[0])
    assert len(corners) > 20


def test_gradients_reach_what_is_seen(device: torch.device) -> None:
    x = _images(device, 1, 8).requires_grad_()
    seen = Views(True, 0.125)(x, DIGITS, torch_generator(1, "views", device=device))
    (gradient,) = torch.autograd.grad((seen * 2).sum(), x)
    assert set(gradient.unique().tolist()) == {0.0, 2.0}  # cut off, or seen once
