"""Copies for a teacher to label: bent and mixed, each image by draws of its own."""

from __future__ import annotations

import torch

from fedsynth.synthesizer.condensation.augmentation import blended, warped


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_warped_images_stay_within_their_range_and_differ() -> None:
    x = torch.zeros(5, 1, 16, 16)
    x[:, :, 5:11, 6:10] = 1.0
    made = warped(x, draws())
    assert made.shape == x.shape
    assert float(made.min()) >= 0
    assert float(made.max()) <= 1
    assert torch.equal(made, warped(x, draws()))
    apart = (made[:, None] - made[None]).abs().amax(dim=(2, 3, 4))
    assert float(apart[~torch.eye(5, dtype=torch.bool)].min()) > 0.2  # equal images, other draws
    kept = made.sum(dim=(1, 2, 3)) / x.sum(dim=(1, 2, 3))
    assert 0.4 < float(kept.min()) < float(kept.max()) < 2.0  # the figure is still there


def test_a_constant_image_is_left_and_an_edge_goes_on_outside() -> None:
    x = torch.full((2, 3, 8, 8), 0.3)
    torch.testing.assert_close(warped(x, draws()), x)


def test_mixtures_are_between_two_of_the_images() -> None:
    x = torch.eye(4).view(4, 1, 2, 2)
    made = blended(x, draws()).flatten(1)
    torch.testing.assert_close(made.sum(dim=1), torch.ones(4))
    assert int((made > 1e-6).sum(dim=1).max()) <= 2
    assert bool((made.diagonal() > 0).all())  # its own share is there
