"""Siamese augmentation: alike within a segment, different between them, differentiable."""

from __future__ import annotations

import torch

from fedsynth.synthesizer.condensation.augmentation import SiameseAugmentation


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
