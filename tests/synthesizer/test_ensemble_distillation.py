"""Epochs of FedHydra's and DENSE's servers against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.data.registry import dataset_spec
from fedsynth.evaluation.generated import tally
from fedsynth.models.flat import flatten
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.ensemble import (
    Batch,
    OneShotDistillation,
    OneShotSettings,
    average_of_logits,
)
from fedsynth.synthesizer.distillation.generator import make_generator
from fedsynth.synthesizer.distillation.losses import adversarial_loss, student_loss

DIGITS = dataset_spec("digits")
SMALL_SETTINGS: dict[str, Any] = {
    "generator_batch": 6,
    "generator_width": 4,
    "latent": 5,
    "generator_lr": 0.05,
    "server_lr": 0.1,
}
DENSE: dict[str, Any] = {
    "generator_reset": True,
    "learn_noise": True,
    "generator_beta1": 0.5,
    "student_images": "best",
    "replay": True,
    "hard_weight": 0.0,
    "server_momentum": 0.9,
}
SEED, ROUND = 3, 2


def models(device: torch.device) -> list[nn.Module]:
    settings = ModelSettings(width=4, depth=2)
    networks = [build_model(settings, (1, 8, 8), 10, seed).to(device).eval() for seed in range(3)]
    for client in networks[:-1]:
        client.requires_grad_(False)
    return networks


def distil(
    device: torch.device, epochs: int, steps: int, targets: Any = None, **settings: Any
) -> tuple[OneShotDistillation, list[list[Batch]], nn.Module]:
    """Distils two models into a third; returns the distillation, batches per epoch and student."""
    *clients, student = models(device)
    values = {**SMALL_SETTINGS, "server_epochs": epochs, "generator_steps": steps, **settings}
    training = OneShotDistillation(
        OneShotSettings(**values),
        clients,
        average_of_logits,
        student,
        DIGITS,
        SEED,
        ROUND,
        targets=targets,
    )
    batches = []
    for epoch in range(epochs):
        batches.append(training.train_generator(epoch))
        training.train_student(epoch, batches[-1])
    return training, batches, student


def plain_epochs(
    device: torch.device, epochs: int, steps: int, **changes: Any
) -> tuple[list[Tensor], nn.Module]:
    """Runs Algorithm 1 in plain torch; returns the tally of each epoch, and the student."""
    settings = OneShotSettings(**{**SMALL_SETTINGS, **changes})
    *clients, student = models(device)
    draws = torch_generator(SEED, "one-shot draws", ROUND, device=device)
    shuffle = torch_generator(SEED, "one-shot replay", ROUND)
    sgd = torch.optim.SGD(student.parameters(), 0.1, settings.server_momentum)
    past: list[tuple[Tensor, Tensor]] = []
    tallies = []

    def answer(x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in clients]).mean(dim=0)

    for epoch in range(epochs):
        z = torch.randn(6, 5, generator=draws, device=device)
        labels = torch.randint(10, (6,), generator=draws, device=device)
        if epoch == 0 or settings.generator_reset:
            numbers = (SEED, ROUND, epoch) if epoch else (SEED, ROUND)
            generator = make_generator(DIGITS, *numbers, latent=5, width=4).to(device).train()
            adam = torch.optim.Adam(
                [{"params": generator.parameters()}], 0.05, betas=(settings.generator_beta1, 0.999)
            )
        if settings.learn_noise:
            adam.add_param_group({"params": [z.requires_grad_()]})
        batches, losses = [], []
        for _ in range(steps):
            x = generator.normalised(z)
            p = answer(x)
            disagreement = adversarial_loss(p, student(x), only_disagreement=False)
            loss = F.cross_entropy(p, labels) + 0.5 * disagreement
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            batches.append((x.detach(), p.detach()))
            losses.append(float(loss.detach()))
        if settings.student_images == "last":
            x = generator.normalised(z).detach()
            batches = [(x, answer(x))]
        if settings.student_images == "best":
            batches = [batches[losses.index(min(losses))]]
        past = [*(past if settings.replay else []), *batches]
        for position in torch.randperm(len(past), generator=shuffle).tolist():
            x, p = past[position]
            sgd.zero_grad()
            student_loss(p, student(x), settings.hard_weight).backward()  # type: ignore[no-untyped-call]
            sgd.step()
        with torch.no_grad():
            tallies.append(sum(tally(p, labels, student(x)) for x, p in batches))
    return tallies, student  # type: ignore[return-value]


@pytest.mark.parametrize(
    "settings",
    [{}, {"student_images": "last"}, {"replay": True}, DENSE],
    ids=["fedhydra", "last", "replay", "dense"],
)
def test_epochs_equal_plain_torch(settings: dict[str, Any], device: torch.device) -> None:
    """Compares the student's images and steps, and the tallies of each epoch."""
    training, _, student = distil(device, 3, 4, **settings)
    tallies, expected = plain_epochs(device, 3, 4, **settings)
    torch.testing.assert_close(flatten(student), flatten(expected), atol=1e-4, rtol=1e-3)
    assert torch.equal(training.tallies, torch.stack(tallies))
    _, other = plain_epochs(device, 3, 4, **{**settings, "hard_weight": 3.0})
    assert not torch.allclose(flatten(student), flatten(other), atol=1e-3)


class StudentPasses:
    """Records the images of the student's steps, and the logits that it learns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[tuple[Tensor, Tensor]] = []
        original = OneShotDistillation._images_and_targets

        def record(training: Any, batch: Batch) -> tuple[Tensor, Tensor]:
            self.recorded.append(original(training, batch))
            return self.recorded[-1]

        monkeypatch.setattr(OneShotDistillation, "_images_and_targets", record)


def test_ensemble_labels_new_views_in_each_pass(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Grey images are mirrored for the student but not cropped."""
    passes = StudentPasses(monkeypatch)
    frozen = {"server_lr": 0.0, "replay": True, "flips": True, "crop": 0.125}
    _, ((first,), *_), _ = distil(device, 3, 1, **frozen)
    variants = torch.stack([first.images, first.images.flip(3)])
    first_views = [
        x for x, _ in passes.recorded if (x == variants).all(dim=(2, 3, 4)).any(dim=0).all()
    ]
    assert len(passes.recorded) == 1 + 2 + 3
    assert len(first_views) == 3  # of the first epoch's images
    assert not torch.equal(first_views[0], first_views[1])
    *clients, _ = models(device)
    for images, answer in passes.recorded:
        torch.testing.assert_close(answer, torch.stack([m(images) for m in clients]).mean(dim=0))


def test_student_learns_custom_targets_on_the_same_images(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The generator is trained on the average; the student learns the first model's logits."""
    passes = StudentPasses(monkeypatch)
    distil(device, 2, 2, server_lr=0.0)
    distil(device, 2, 2, server_lr=0.0, targets=lambda logits, labels: logits[0])
    first = models(device)[0]
    for (x, _), (same, answer) in zip(passes.recorded[:4], passes.recorded[4:], strict=True):
        assert torch.equal(x, same)
        torch.testing.assert_close(answer, first(x))
