"""Images from class statistics: gradients reach pixels, images come nearer to the released means,
by the seed alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.features.registry import feature_map
from fedsynth.models.on_features import embedded
from fedsynth.synthesizer.condensation import from_statistics
from fedsynth.synthesizer.condensation.from_statistics import (
    ImageSteps,
    ReleasedStatistics,
    images_from_statistics,
    public_start,
    shrunk,
    total_variation,
)

SHAPE = (1, 8, 8)


def statistics(classes: int = 3) -> ReleasedStatistics:
    features = feature_map("whitened-scattering", SHAPE)
    centre = torch.zeros(features.dimension)
    draws = torch.Generator().manual_seed(0)
    means = torch.randn(classes, features.dimension, generator=draws)
    means = 0.3 * F.normalize(means - means.mean(dim=0), dim=1)

    def embed(pixels: Tensor) -> Tensor:
        return embedded(features(pixels), centre, features.radius)

    return ReleasedStatistics(embed, 20 * means, means)


def start(released: ReleasedStatistics, seed: int = 0) -> Tensor:
    return public_start(released, 2, SHAPE, torch.Generator().manual_seed(seed))


def test_images_come_nearer_to_the_released_class_means() -> None:
    released = statistics()
    begun = start(released)
    kept = begun.clone()
    made = images_from_statistics(released, begun, ImageSteps(steps=30))
    before, after = (
        float(released.distance(released.embed(one.flatten(0, 1)).unflatten(0, (3, 2))))
        for one in (begun, made)
    )
    assert after < 0.7 * before
    assert torch.equal(begun, kept)
    assert 0 <= float(made.min()) <= float(made.max()) <= 1


def test_the_gradient_is_that_of_the_whole_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd over all images at once, and pulled back in parts of two."""
    monkeypatch.setattr(from_statistics, "AT_ONCE", 2)
    released = statistics()
    pixels = start(released).flatten(0, 1).requires_grad_(True)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    z = released.embed(pixels)
    loss = released.distance(z.unflatten(0, (3, 2))) + 0.3 * F.cross_entropy(
        z @ released.weight.T, labels
    )
    (expected,) = torch.autograd.grad(loss + 0.7 * total_variation(pixels), pixels)
    settings = ImageSteps(teacher_weight=0.3, smoothness=0.7)
    pulled = from_statistics._pull(released, z.detach(), labels, settings)
    found, seen = from_statistics._gradient(released, pixels.detach(), pulled, settings)
    torch.testing.assert_close(seen, z.detach())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert float(found.abs().amax(dim=(1, 2, 3)).min()) > 0  # it reaches every image


def test_start_images_are_the_seed_s_and_of_their_classes() -> None:
    released = statistics()
    one = start(released)
    assert torch.equal(one, start(released))
    assert not torch.equal(one, start(released, seed=1))
    assert len(one.flatten(0, 1).flatten(1).unique(dim=0)) == 6
    scores = released.embed(one.flatten(0, 1)) @ released.weight.T
    right = scores.argmax(dim=1) == torch.arange(3).repeat_interleave(2)
    assert float(right.float().mean()) > 0.8


def test_shrinking_halves_the_error_of_means_that_are_mostly_noise() -> None:
    """James and Stein's estimate, against the truth that noise was added to."""
    draws = np.random.default_rng(0)
    truth = draws.normal(size=(200, 50)) * 0.5
    noisy = torch.from_numpy(truth + draws.normal(size=truth.shape))
    raw = float((noisy - torch.from_numpy(truth)).square().mean())
    less = float((shrunk(noisy, 1.0) - torch.from_numpy(truth)).square().mean())
    assert less < 0.4 * raw
    assert torch.equal(shrunk(noisy, 0.0), noisy)
