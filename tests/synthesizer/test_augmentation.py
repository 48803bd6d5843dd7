"""Siamese augmentation, warped copies, views, students of synthetic sets, images from statistics."""

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


def test_images_of_a_segment_share_their_transform() -> None:
    x = torch.rand(1, 3, 16, 16, generator=draws())
    t = transform(1)
    out = t(x.expand(80, -1, -1, -1), torch.arange(40).repeat(2))
    assert torch.equal(out[:40], out[40:])
    assert len(out[:40].flatten(1).unique(dim=0)) > 30  # segments differ
    torch.testing.assert_close(t(x, torch.tensor([7])), out[7:8])


def test_images_are_mirrored_only_with_flip() -> None:
    ramp = torch.linspace(0, 1, 16).expand(400, 1, 16, 16)
    for flip in (False, True):
        out = transform(3, segments=400, flip=flip)(ramp, torch.arange(400))
        slopes = out[:, 0, 6:10, 12].mean(1) - out[:, 0, 6:10, 3].mean(1)
        assert bool((slopes < -0.5).any()) is flip


def test_warped_images_stay_in_range_and_differ() -> None:
    x = torch.zeros(5, 1, 16, 16)
    x[:, :, 5:11, 6:10] = 1.0
    copies = warped(x, draws())
    assert 0 <= float(copies.min()) <= float(copies.max()) <= 1
    distances = (copies[:, None] - copies[None]).abs().amax(dim=(2, 3, 4))
    assert (
        float(distances[~torch.eye(5, dtype=torch.bool)].min()) > 0.2
    )  # equal images, different draws
    brightness = copies.sum(dim=(1, 2, 3)) / x.sum(dim=(1, 2, 3))
    assert (
        0.4 < float(brightness.min()) < float(brightness.max()) < 2.0
    )  # the figure remains visible


def test_blends_mix_two_images() -> None:
    x = torch.eye(4).view(4, 1, 2, 2)
    blends = blended(x, draws()).flatten(1)
    torch.testing.assert_close(blends.sum(dim=1), torch.ones(4))
    assert int((blends > 1e-6).sum(dim=1).max()) <= 2
    assert bool((blends.diagonal() > 0).all())  # each image contributes to its blend


COLOUR = dataset_spec("cifar10")


def _images(device: torch.device) -> torch.Tensor:
    draws = torch_generator(0, "test images", device=device)
    return torch.randn(40, 3, 32, 32, generator=draws, device=device)


def test_views_mirror_about_half_of_the_images(device: torch.device) -> None:
    x = _images(device)
    views = Views(flips=True)(x, COLOUR, torch_generator(0, "views", device=device))
    mirrored = (views == x.flip(3)).flatten(1).all(dim=1)
    unchanged = (views == x).flatten(1).all(dim=1)
    assert bool((mirrored != unchanged).all())
    assert 8 < int(mirrored.sum()) < 32  # of 40 images; fails with probability 1e-4


def test_crops_are_windows_of_the_padded_image(device: torch.device) -> None:
    """Crops are various windows (of 9 × 9) of a picture with 4 black pixels at each edge."""
    x = _images(device)
    views = Views(crop=0.125)
    assert views.edge(COLOUR) == 4
    crops = views(x, COLOUR, torch_generator(0, "views", device=device)).cpu().numpy()
    black = -np.array(COLOUR.mean, np.float32) / np.array(COLOUR.std, np.float32)
    padded = np.tile(black[None, :, None, None], (40, 1, 40, 40))
    padded[:, :, 4:36, 4:36] = x.cpu().numpy()
    corners = set()
    for image, picture in zip(crops, padded, strict=True):
        fits = [
            (row, column)
            for row in range(9)
            for column in range(9)
            if np.allclose(image, picture[:, row : row + 32, column : column + 32], atol=1e-6)
        ]
        assert len(fits) == 1
        corners.add(fits[0])
    assert len(corners) > 20


def test_views_pass_gradients_to_visible_pixels(device: torch.device) -> None:
    x = _images(device).requires_grad_()
    views = Views(True, 0.125)(x, COLOUR, torch_generator(1, "views", device=device))
    (gradient,) = torch.autograd.grad((views * 2).sum(), x)
    assert set(gradient.unique().tolist()) == {0.0, 2.0}  # cropped, or visible once


IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3


def network(seed: int = 0) -> nn.Module:
    return build_model(ModelSettings("linear"), (1, 8, 8), classes=3, seed=seed)


def test_augmented_copies_have_the_labels_of_the_teacher() -> None:
    teacher = network(1)
    one_hot = torch.eye(3)[LABELS]
    images, rows = augmented(IMAGES, one_hot, StudentSettings(views=2), teacher)
    assert images.shape == (18, 1, 8, 8)
    assert torch.equal(images[:6], IMAGES)
    assert torch.equal(rows[:6], one_hot)
    torch.testing.assert_close(rows[6:], soft_labels(teacher, images[6:]))
    assert not torch.equal(images[6:12], IMAGES)
    untaught = augmented(IMAGES, one_hot, StudentSettings(views=2), None)[1]
    assert torch.equal(untaught, one_hot.repeat(3, 1))


def test_mixup_without_copies_ignores_the_teacher() -> None:
    weights = []
    for teacher, mixup in ((None, True), (network(1), True), (network(1), False)):
        student = network()
        settings = StudentSettings(steps=5, views=0, mixup=mixup)
        train_student(student, IMAGES, LABELS, settings, teacher=teacher)
        weights.append(flatten(student))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_student_training_is_reproducible() -> None:
    weights, rng_state = [], torch.get_rng_state()
    for labels, seed in ((LABELS, 0), (torch.eye(3)[LABELS], 0), (LABELS, 1)):
        student = network().eval()
        train_student(student, IMAGES, labels, StudentSettings(steps=100, views=1, seed=seed))
        assert student(IMAGES).argmax(dim=1).tolist() == LABELS.tolist()
        weights.append(flatten(student))
    assert torch.equal(rng_state, torch.get_rng_state())
    assert torch.equal(weights[0], weights[1])  # a one-hot row equals its class
    assert not torch.equal(weights[0], weights[2])


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


def test_images_approach_the_released_class_means() -> None:
    released = statistics()
    start = start_images(released)
    start_copy = start.clone()
    images = images_from_statistics(released, start, ImageSteps(steps=30))
    start_distance, distance = (
        float(released.distance(released.embed(batch.flatten(0, 1)).unflatten(0, (3, 2))))
        for batch in (start, images)
    )
    assert distance < 0.7 * start_distance
    assert torch.equal(start, start_copy)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_gradient_in_parts_equals_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares autograd over all images with parts of two images."""
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
    actual, embeddings = from_statistics._gradient(released, pixels.detach(), pulled, settings)
    torch.testing.assert_close(embeddings, z.detach())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert float(actual.abs().amax(dim=(1, 2, 3)).min()) > 0  # every image has a gradient


def test_start_images_match_their_seed_and_classes() -> None:
    released = statistics()
    images = start_images(released)
    assert torch.equal(images, start_images(released))
    assert not torch.equal(images, start_images(released, seed=1))
    assert len(images.flatten(0, 1).flatten(1).unique(dim=0)) == 6
    scores = released.embed(images.flatten(0, 1)) @ released.weight.T
    correct = scores.argmax(dim=1) == torch.arange(3).repeat_interleave(2)
    assert float(correct.float().mean()) > 0.8


def test_shrinkage_halves_the_error_of_noisy_means() -> None:
    """Compares James and Stein's estimate with the true means."""
    draws = np.random.default_rng(0)
    truth = draws.normal(size=(200, 50)) * 0.5
    noisy = torch.from_numpy(truth + draws.normal(size=truth.shape))
    noisy_error = float((noisy - torch.from_numpy(truth)).square().mean())
    shrunk_error = float((shrunk(noisy, 1.0) - torch.from_numpy(truth)).square().mean())
    assert shrunk_error < 0.4 * noisy_error
    assert torch.equal(shrunk(noisy, 0.0), noisy)
