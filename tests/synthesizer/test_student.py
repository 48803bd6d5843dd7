"""A student of a synthetic set: mixing, relabelled copies, and what it learns."""

from __future__ import annotations

import torch
from torch import nn

from fedsynth import ModelSettings
from fedsynth.models.registry import build_model
from fedsynth.synthesizer.condensation.student import (
    StudentSettings,
    augmented,
    soft_labels,
    train_student,
)

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
        made.append(torch.cat([p.flatten() for p in student.parameters()]))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[1], made[2])


def test_it_is_trained_on_the_set_by_the_seed_and_the_global_draws_are_left() -> None:
    made = []
    before = torch.get_rng_state()
    for labels in (LABELS, torch.eye(3)[LABELS]):  # a one-hot row is its class
        student = network().eval()
        train_student(student, IMAGES, labels, StudentSettings(steps=200, views=1))
        assert not student.training
        assert student(IMAGES).argmax(dim=1).tolist() == LABELS.tolist()
        made.append(student.state_dict())
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())
    other = network()
    train_student(other, IMAGES, LABELS, StudentSettings(steps=200, views=1, seed=1))
    assert any(not torch.equal(v, made[0][name]) for name, v in other.state_dict().items())
