"""Which generated images teach a one-shot student: FedHydra's and DENSE's epochs against plain
loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.data.registry import dataset_spec
from fedsynth.evaluation.generated import tally
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.generation import many_teachers
from fedsynth.synthesizer.generation.ensembles import average_of_logits
from fedsynth.synthesizer.generation.generators import make_generator
from fedsynth.synthesizer.generation.many_teachers import (
    Distilled,
    OneShotDistillation,
    adversarial_loss,
)

DIGITS = dataset_spec("digits")
SMALL: dict[str, Any] = {"batch": 6, "width": 4, "latent": 5, "generator_lr": 0.05}
SEED, ROUND = 3, 2


def _models(device: torch.device, norm: str = "instance") -> list[nn.Module]:
    settings = ModelSettings(width=4, depth=2, norm=norm)
    made = [build_model(settings, (1, 8, 8), 10, seed).to(device).eval() for seed in range(3)]
    return [model.requires_grad_(False) for model in made]


class Lessons:
    """Records what the student is taught, and how many steps it takes; the student stays
    untrained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

        def step(
            settings: Any, student: Any, sgd: Any, images: Tensor, answer: Tensor, precision: Any
        ) -> None:
            self.seen.append((images.clone(), answer.clone()))

        monkeypatch.setattr(OneShotDistillation, "_student_step", step)

    def of(self, device: torch.device, **settings: Any) -> Distilled:
        """A distillation of three models into a fresh one."""
        self.seen.clear()
        *clients, student = _models(device)
        lessons = settings.pop("lessons", None)
        distillation = OneShotDistillation(**{**SMALL, **settings})
        return distillation.fit(
            clients, student, average_of_logits, DIGITS, SEED, ROUND, lessons=lessons
        )


@pytest.fixture
def lessons(monkeypatch: pytest.MonkeyPatch) -> Lessons:
    return Lessons(monkeypatch)


def _by_hand(
    device: torch.device, epochs: int, steps: int, **settings: Any
) -> list[tuple[list[Tensor], Tensor, list[float]]]:
    """Images of every step, and of the generator after the last, the labels, and the losses: by
    epoch."""
    *clients, student = _models(device)
    draws = torch_generator(SEED, "one-shot draws", ROUND, device=device)
    found = []
    for epoch in range(epochs):
        z = torch.randn(6, 5, generator=draws, device=device)
        labels = torch.randint(10, (6,), generator=draws, device=device)
        fresh = settings.get("reset", False)
        if epoch == 0 or fresh:
            number = (SEED, ROUND, epoch) if epoch else (SEED, ROUND)
            generator = make_generator(DIGITS, *number, latent=5, width=4).to(device).train()
            adam = torch.optim.Adam(
                [{"params": generator.parameters()}],
                0.05,
                betas=(settings.get("generator_beta1", 0.9), 0.999),
            )
        if settings.get("learn_noise", False):
            z.requires_grad_()
            adam.add_param_group({"params": [z]})
        images, losses = [], []
        for _ in range(steps):
            x = generator.normalised(z)
            p = torch.stack([model(x) for model in clients]).mean(dim=0)
            against = adversarial_loss(p, student(x), only_disagreement=False)
            loss = F.cross_entropy(p, labels) + 0.5 * against
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            images.append(x.detach())
            losses.append(float(loss.detach()))
        images.append(generator.normalised(z).detach())
        found.append((images, labels, losses))
    return found


def _same(found: list[Tensor], expected: list[Tensor]) -> None:
    """The same batches, in any order."""
    assert len(found) == len(expected)
    for batch in expected:
        assert any(torch.allclose(batch, other, atol=1e-4) for other in found)


def test_fedhydra_s_student_sees_the_images_of_every_step(
    lessons: Lessons, device: torch.device
) -> None:
    """Sec. 2, "all generated intermediate images": those that each step was taken on; or the last
    ones alone."""
    made = lessons.of(device, epochs=2, generator_steps=3)
    expected = _by_hand(device, 2, 3)
    _same([x for x, _ in lessons.seen[:3]], expected[0][0][:3])
    _same([x for x, _ in lessons.seen[3:]], expected[1][0][:3])
    *clients, _ = _models(device)
    for (images, labels, _), found in zip(expected, made.tallies, strict=True):
        said = [torch.stack([m(x) for m in clients]).mean(dim=0) for x in images[:3]]
        assert torch.equal(found[:2], tally(torch.cat(said), labels.repeat(3)))
    lessons.of(device, epochs=2, generator_steps=3, images="last")
    _same([x for x, _ in lessons.seen], [images[-1] for images, *_ in expected])


def test_dense_s_epochs(lessons: Lessons, device: torch.device) -> None:
    """A fresh generator each epoch, its noise learned, β₁ 0.5; kept is the batch of the lowest
    loss."""
    own = {"reset": True, "learn_noise": True, "generator_beta1": 0.5}
    lessons.of(device, epochs=3, generator_steps=4, images="best", **own)
    best = [
        images[losses.index(min(losses))] for images, _, losses in _by_hand(device, 3, 4, **own)
    ]
    _same([x for x, _ in lessons.seen], best)
    lessons.of(device, epochs=3, generator_steps=4, images="best")
    assert not torch.allclose(lessons.seen[2][0], best[2], atol=1e-2)


def test_replay_passes_over_all_epochs_so_far(lessons: Lessons, device: torch.device) -> None:
    for images, replay, expected in (
        ("last", False, 3),
        ("last", True, 1 + 2 + 3),
        ("all", False, 3 * 2),
        ("all", True, 2 * (1 + 2 + 3)),
    ):
        lessons.of(device, epochs=3, generator_steps=2, images=images, replay=replay)
        assert len(lessons.seen) == expected


def test_views_are_new_in_each_pass_and_the_ensemble_answers_them(
    lessons: Lessons, device: torch.device
) -> None:
    lessons.of(device, epochs=1, generator_steps=1)
    plain = lessons.seen[0][0]
    either = torch.stack([plain, plain.flip(3)])
    lessons.of(device, epochs=3, generator_steps=1, replay=True, flips=True, crop=0.125)
    passes = [x for x, _ in lessons.seen if bool((x == either).all(dim=(2, 3, 4)).any(dim=0).all())]
    assert len(passes) == 3  # of the first epoch's images: mirrored, and as grey ones not cropped
    assert not torch.equal(passes[0], passes[1])
    *clients, _ = _models(device)
    for images, answer in lessons.seen:
        said = torch.stack([model(images) for model in clients]).mean(dim=0)
        torch.testing.assert_close(answer, said)


def test_lessons_of_another_ensemble_are_on_the_same_images(
    lessons: Lessons, device: torch.device
) -> None:
    """The generator pleases the average, the student learns the first model's answers."""
    lessons.of(device, epochs=2, generator_steps=2)
    images = [x for x, _ in lessons.seen]
    lessons.of(device, epochs=2, generator_steps=2, lessons=lambda logits, labels: logits[0])
    first = _models(device)[0]
    for (x, answer), same in zip(lessons.seen, images, strict=True):
        assert torch.equal(x, same)
        torch.testing.assert_close(answer, first(x))


def test_the_generator_learns_on_views(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    calls: list[bool] = []
    original = many_teachers.Views.__call__

    def look(views: Any, x: Tensor, *others: Any) -> Tensor:
        calls.append(x.requires_grad)
        return original(views, x, *others)

    monkeypatch.setattr(many_teachers.Views, "__call__", look)
    *clients, student = _models(device)
    settings = OneShotDistillation(**SMALL, epochs=1, generator_steps=2, flips=True)
    settings.fit(clients, student.requires_grad_(True), average_of_logits, DIGITS, 0)
    assert calls == [True, True, False, False]  # two generator steps, and two of the student
