"""Siamese augmentation, warped copies, and views of images."""

from __future__ import annotations

import numpy as np
import torch

from fedsynth.data.registry import dataset_spec
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.augmentation import (
    SiameseAugmentation,
    Views,
    blended,
    warped,
)


def transform(seed: int, segments: int = 40, flip: bool = True) -> SiameseAugmentation:
    return SiameseAugmentation(segments, torch.Generator().manual_seed(seed), flip=flip)


def test_images_of_a_segment_are_transformed_alike() -> None:
    x = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    t = transform(1)
    segment = torch.arange(40).repeat(2)
    out = t(x.expand(80, -1, -1, -1), segment)
    assert torch.equal(out[:40], out[40:])
    assert len({tuple(o.flatten().tolist()) for o in out[:40]}) > 30  # segments differ


def test_an_image_does_not_see_the_rest_of_the_batch() -> None:
    x = torch.rand(40, 3, 16, 16)
    t = transform(2)
    whole = t(x, torch.arange(40))
    for i in (0, 7, 39):
        torch.testing.assert_close(whole[i : i + 1], t(x[i : i + 1], torch.tensor([i])))


def test_without_flip_no_image_is_mirrored() -> None:
    ramp = torch.linspace(0, 1, 16).expand(1, 1, 16, 16)
    out = transform(3, segments=400, flip=False)(ramp.expand(400, -1, -1, -1), torch.arange(400))
    slopes = out[:, 0, 6:10, 12].mean(1) - out[:, 0, 6:10, 3].mean(1)
    assert (slopes > -0.5).all()
    flipped = transform(3, segments=400, flip=True)(ramp.expand(400, -1, -1, -1), torch.arange(400))
    assert ((flipped[:, 0, 6:10, 12].mean(1) - flipped[:, 0, 6:10, 3].mean(1)) < -0.5).any()


def test_gradients_flow_and_the_seed_decides() -> None:
    x = torch.rand(10, 1, 8, 8, requires_grad=True)
    t = transform(4, segments=10)
    (g,) = torch.autograd.grad(t(x, torch.arange(10)).square().sum(), x)
    assert torch.isfinite(g).all()
    assert (g.flatten(1).norm(dim=1) > 0).all()
    again = transform(4, segments=10)(x, torch.arange(10))
    assert torch.equal(t(x, torch.arange(10)), again)


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


def test_mixtures_are_between_two_of_the_images() -> None:
    x = torch.eye(4).view(4, 1, 2, 2)
    made = blended(x, draws()).flatten(1)
    torch.testing.assert_close(made.sum(dim=1), torch.ones(4))
    assert int((made > 1e-6).sum(dim=1).max()) <= 2
    assert bool((made.diagonal() > 0).all())  # its own share is there


DIGITS, COLOUR = dataset_spec("digits"), dataset_spec("cifar10")


def _images(device: torch.device, channels: int = 3, side: int = 32) -> torch.Tensor:
    draws = torch_generator(0, "test images", device=device)
    return torch.randn(40, channels, side, side, generator=draws, device=device)


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
    assert not Views()
    assert Views(crop=0.125)
    seen = Views(True, 0.125)(x, DIGITS, torch_generator(1, "views", device=device))
    (gradient,) = torch.autograd.grad((seen * 2).sum(), x)
    assert set(gradient.unique().tolist()) == {0.0, 2.0}  # cut off, or seen once
