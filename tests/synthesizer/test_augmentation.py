"""Siamese augmentation, warped copies and views of images, a student of a synthetic set, and images
from class statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth import ModelSettings
from fedsynth.data.registry import dataset_spec
from fedsynth.features.registry import feature_map
from fedsynth.models.flat import flatten
from fedsynth.models.on_features import embedded
from fedsynth.models.registry import build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation import from_statistics
from fedsynth.synthesizer.condensation.augmentation import (
    SiameseAugmentation,
    Views,
    blended,
    warped,
)
from fedsynth.synthesizer.condensation.from_statistics import (
    ImageSteps,
    ReleasedStatistics,
    images_from_statistics,
    public_start,
    shrunk,
    total_variation,
)
from fedsynth.synthesizer.condensation.student import (
    StudentSettings,
    augmented,
    soft_labels,
    train_student,
)


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def transform(seed: int, segments: int = 40, flip: bool = True) -> SiameseAugmentation:
    return SiameseAugmentation(segments, torch.Generator().manual_seed(seed), flip=flip)


def test_images_of_a_segment_are_transformed_alike_and_each_by_itself() -> None:
    x = torch.rand(1, 3, 16, 16, generator=draws())
    t = transform(1)
    out = t(x.expand(80, -1, -1, -1), torch.arange(40).repeat(2))
    assert torch.equal(out[:40], out[40:])
    assert len(out[:40].flatten(1).unique(dim=0)) > 30  # segments differ
    torch.testing.assert_close(t(x, torch.tensor([7])), out[7:8])


def test_without_flip_no_image_is_mirrored() -> None:
    ramp = torch.linspace(0, 1, 16).expand(400, 1, 16, 16)
    for flip in (False, True):
        out = transform(3, segments=400, flip=flip)(ramp, torch.arange(400))
        slopes = out[:, 0, 6:10, 12].mean(1) - out[:, 0, 6:10, 3].mean(1)
        assert bool((slopes < -0.5).any()) is flip


def test_warped_images_stay_within_their_range_and_differ() -> None:
    x = torch.zeros(5, 1, 16, 16)
    x[:, :, 5:11, 6:10] = 1.0
    made = warped(x, draws())
    assert 0 <= float(made.min()) <= float(made.max()) <= 1
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


COLOUR = dataset_spec("cifar10")


def _images(device: torch.device) -> torch.Tensor:
    draws = torch_generator(0, "test images", device=device)
    return torch.randn(40, 3, 32, 32, generator=draws, device=device)


def test_each_image_is_mirrored_or_not(device: torch.device) -> None:
    x = _images(device)
    seen = Views(flips=True)(x, COLOUR, torch_generator(0, "views", device=device))
    mirrored = (seen == x.flip(3)).flatten(1).all(dim=1)
    same = (seen == x).flatten(1).all(dim=1)
    assert bool((mirrored != same).all())
    assert 8 < int(mirrored.sum()) < 32  # of 40, a half each: outside with probability 1e-4


def test_crops_are_windows_of_the_image_in_black(device: torch.device) -> None:
    """Each of 9 × 9 windows of a picture with 4 black pixels at each edge, and several of them."""
    x = _images(device)
    views = Views(crop=0.125)
    assert views.edge(COLOUR) == 4
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
    x = _images(device).requires_grad_()
    seen = Views(True, 0.125)(x, COLOUR, torch_generator(1, "views", device=device))
    (gradient,) = torch.autograd.grad((seen * 2).sum(), x)
    assert set(gradient.unique().tolist()) == {0.0, 2.0}  # cut off, or seen once


IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3


def network(seed: int = 0) -> nn.Module:
    return build_model(ModelSettings("linear"), (1, 8, 8), classes=3, seed=seed)


def test_copies_have_the_teacher_s_labels_and_originals_their_own() -> None:
    teacher = network(1)
    own = torch.eye(3)[LABELS]
    images, rows = augmented(IMAGES, own, StudentSettings(views=2), teacher)
    assert images.shape == (18, 1, 8, 8)
    assert torch.equal(images[:6], IMAGES)
    assert torch.equal(rows[:6], own)
    torch.testing.assert_close(rows[6:], soft_labels(teacher, images[6:]))
    assert not torch.equal(images[6:12], IMAGES)
    alone = augmented(IMAGES, own, StudentSettings(views=2), None)[1]
    assert torch.equal(alone, own.repeat(3, 1))


def test_without_copies_batches_are_mixed_whether_or_not_there_is_a_teacher() -> None:
    made = []
    for teacher, mixup in ((None, True), (network(1), True), (network(1), False)):
        student = network()
        settings = StudentSettings(steps=5, views=0, mixup=mixup)
        train_student(student, IMAGES, LABELS, settings, teacher=teacher)
        made.append(flatten(student))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[1], made[2])


def test_it_is_trained_on_the_set_by_the_seed_and_the_global_draws_are_left() -> None:
    made, before = [], torch.get_rng_state()
    for labels, seed in ((LABELS, 0), (torch.eye(3)[LABELS], 0), (LABELS, 1)):
        student = network().eval()
        train_student(student, IMAGES, labels, StudentSettings(steps=100, views=1, seed=seed))
        assert student(IMAGES).argmax(dim=1).tolist() == LABELS.tolist()
        made.append(flatten(student))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(made[0], made[1])  # a one-hot row is its class
    assert not torch.equal(made[0], made[2])


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


def start_images(released: ReleasedStatistics, seed: int = 0) -> Tensor:
    return public_start(released, 2, SHAPE, torch.Generator().manual_seed(seed))


def test_images_come_nearer_to_the_released_class_means() -> None:
    released = statistics()
    begun = start_images(released)
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
    pixels = start_images(released).flatten(0, 1).requires_grad_(True)
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
    one = start_images(released)
    assert torch.equal(one, start_images(released))
    assert not torch.equal(one, start_images(released, seed=1))
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
