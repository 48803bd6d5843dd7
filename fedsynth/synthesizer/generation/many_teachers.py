"""Distillation of several models into one on the server, without data: DENSE (Zhang et al. 2022)
and FedHydra, Algorithm 1.

Each epoch draws noise and labels once, takes several generator steps on them (CE(P, y) + λ1·L_BN +
λ2·L_AD), and then trains the student on the ensemble's predictions P for the generated images.
Everything here is computed only from the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.data.registry import DatasetSpec
from fedsynth.evaluation.generated import tally
from fedsynth.keeping import StepKeeper
from fedsynth.mixed_precision import mixed, widened
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.augmentation import Views
from fedsynth.synthesizer.generation.ensembles import Aggregate, batch_norm_matching, has_statistics
from fedsynth.synthesizer.generation.generators import distillation_loss, make_generator
from fedsynth.training.loop import resumable
from fedsynth.validation import check_choices, check_ranges

IMAGES = ("all", "last", "best")


class Batch(NamedTuple):
    """Generated images [N, C, H, W], the ensemble's logits on them [N, classes], their target
    labels [N], and the generator's loss on them."""

    images: Tensor
    answer: Tensor
    labels: Tensor
    loss: Tensor


def adversarial_loss(ensemble_NC: Tensor, student_NC: Tensor, *, only_disagreement: bool) -> Tensor:
    """Returns −KL(P ‖ F_g), averaged over the batch (FedHydra, Eq. 15); DENSE (Eq. 4) counts only
    images on which the two disagree."""
    log_p = ensemble_NC.log_softmax(dim=1)
    log_q = student_NC.log_softmax(dim=1)
    each = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    if only_disagreement:
        each = torch.where(ensemble_NC.argmax(dim=1) != student_NC.argmax(dim=1), each, 0.0)
    return -each.mean()


def student_loss(ensemble_NC: Tensor, student_NC: Tensor, hard_weight: float) -> Tensor:
    """Returns KL(P ‖ F_g) + β·CE(F_g, argmax P) (FedHydra, Eqs. 17 to 19)."""
    return distillation_loss(ensemble_NC, student_NC) + hard_weight * F.cross_entropy(
        student_NC, ensemble_NC.argmax(dim=1)
    )


@dataclass(frozen=True)
class Distilled:
    """The results of a distillation other than the student.

    Attributes:
        tallies: of each epoch's images for the student, int64 [epochs, 3, classes], see
            `evaluation.generated`; the student's predictions are those after the epoch.
        notes: messages for users, for example about models without batch norm.
    """

    tallies: Tensor
    notes: tuple[str, ...]


@dataclass(frozen=True)
class OneShotDistillation:
    """Settings with FedHydra's values, and reasons for those that the papers do not give.

    Args:
        epochs: T_g.
        generator_steps: T_G in an epoch.
        generator_lr, generator_beta1: Adam's; β₁ is 0.5 in DENSE's public code.
        batch: images of an epoch's draw (DENSE's public default is 256).
        latent, width: of the generator: DENSE's public code has 256, and 64.
        conditional: the label is an input of the generator; the papers' generators take only noise
            and learn an epoch's labels with it.
        reset: train a new generator in each epoch, as in DENSE's public code.
        learn_noise: Adam optimises the epoch's noise together with the generator (DENSE's public
            code).
        bn_weight, ad_weight: λ1, λ2.
        only_disagreement: DENSE's L_AD.
        images: which of an epoch's images the student is trained on. "all": those of every
            generator step, a student step for each batch ("leverages all generated intermediate
            images", FedHydra, Sec. 2); "last": one batch, generated after the last step (Algorithm
            1 taken literally, with its one student step); "best": the batch of the step with the
            lowest loss (DENSE's public code).
        replay: train on the images of all epochs so far (DENSE's public code) instead of this
            epoch's.
        flips, crop: random views, see `Views`. The ensemble receives views while the generator is
            trained. The student and its teacher receive new ones in each pass, cropped only if
            images are in colour (DENSE's public code, which crops CIFAR for the student, and flips
            digits, too).
        hard_weight: β; the paper gives none: 1.
        learning_rate: of the student's SGD.
        momentum: of the student's SGD: 0, as FedHydra's paper gives none (Sec. 4.1.4). With a
            student step for every generator step, on images that hardly differ, momentum
            accumulates the steps: at 0.9 students learn less at most skews, and their hidden units
            may die (docs/results.md). DENSE's public code, which trains on each image among many
            others (`replay`), has 0.9.
    """

    epochs: int = 200
    generator_steps: int = 30
    generator_lr: float = 1e-3
    generator_beta1: float = 0.9
    batch: int = 128
    latent: int = 100
    width: int = 64
    conditional: bool = False
    reset: bool = False
    learn_noise: bool = False
    bn_weight: float = 1.0
    ad_weight: float = 0.5
    only_disagreement: bool = False
    images: str = "all"
    replay: bool = False
    flips: bool = False
    crop: float = 0.0
    hard_weight: float = 1.0
    learning_rate: float = 0.01
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self, images=IMAGES)
        check_ranges(
            self,
            epochs=(0, inf),
            generator_steps=(1, inf),
            generator_lr=(0, inf),
            generator_beta1=(0, 0.9999),
            batch=(2, inf),
            latent=(1, inf),
        )
        check_ranges(
            self, width=(1, inf), bn_weight=(0, inf), ad_weight=(0, inf), hard_weight=(0, inf)
        )
        check_ranges(self, learning_rate=(0, inf), momentum=(0, 1), crop=(0, 0.5))

    def fit(
        self,
        models: Sequence[nn.Module],
        student: nn.Module,
        aggregate: Aggregate,
        spec: DatasetSpec,
        seed: int,
        round: int = 1,
        report: Callable[[int, int], None] = lambda done, total: None,
        *,
        lessons: Aggregate | None = None,
        keeper: StepKeeper | None = None,
        precision: torch.dtype = torch.float32,
    ) -> Distilled:
        """Trains `student` in place, starting from its current weights.

        Args:
            models: the clients', on the student's device; they are frozen and set to evaluation
                mode.
            aggregate: computes the ensemble's logits.
            lessons: computes the logits that the student learns, if they differ from those that the
                generator is trained on.
            keeper: checkpoints student, generator and images between epochs. If this distillation
                was interrupted before, it resumes from the checkpoint, with the same draws.
            precision: of the networks' passes (`fedsynth.mixed_precision`).
        """
        device = next(student.parameters()).device
        for model in models:
            model.requires_grad_(False).eval()
        student.eval()
        sgd = torch.optim.SGD(student.parameters(), self.learning_rate, self.momentum)
        shuffle = torch_generator(seed, "one-shot replay", round)
        past: list[Batch] = []
        tallies = torch.zeros(self.epochs, 3, spec.classes, dtype=torch.int64, device=device)
        with batch_norm_matching(models if self.bn_weight else []) as statistics:
            teacher = _Ensemble(models, aggregate, statistics, precision)
            other = None if lessons is None else replace(teacher, aggregate=lessons)
            images = _Images(self, teacher, other, student, spec, seed, round, device)
            changed: dict[str, Any] = {
                "student": student,
                "sgd": sgd,
                "shuffle": shuffle,
                "tallies": tallies,
            }
            if self.replay:
                changed["past"] = past
            for epoch in resumable(
                self.epochs,
                {**changed, **images.state},
                keeper=keeper,
                name="distillation",
                report=lambda done: report(done, self.epochs),
            ):
                made = images.train_generator(epoch)
                if not self.replay:
                    past.clear()
                past += made
                student.train()
                for position in torch.randperm(len(past), generator=shuffle).tolist():
                    batch = Batch(*(value.to(device) for value in past[position]))
                    self._student_step(student, sgd, *images.lesson(batch), precision)
                student.eval()
                tallies[epoch] = torch.stack([images.tally(batch) for batch in made]).sum(dim=0)
        without = [str(k) for k, model in enumerate(models) if not has_statistics(model)]
        note = (
            f"no batch-norm term for models {', '.join(without)}: they have no batch norm with "
            "running "
            "statistics"
        )
        return Distilled(tallies, (note,) if self.bn_weight and without else ())

    def _student_step(
        self,
        student: nn.Module,
        sgd: torch.optim.Optimizer,
        images: Tensor,
        answer: Tensor,
        precision: torch.dtype,
    ) -> None:
        with torch.enable_grad():
            sgd.zero_grad()
            with mixed(images.device, precision):
                said = student(images)
            student_loss(answer, widened(said), self.hard_weight).backward()
        sgd.step()


@dataclass(frozen=True)
class _Ensemble:
    """The clients' models as one teacher, and the batch-norm term of its last pass."""

    models: Sequence[nn.Module]
    aggregate: Aggregate
    statistics: Callable[[], Tensor]
    precision: torch.dtype

    def logits(self, images: Tensor, labels: Tensor) -> Tensor:
        with mixed(images.device, self.precision):
            said = torch.stack([model(images) for model in self.models])
        return self.aggregate(widened(said), labels)

    @torch.no_grad()
    def answer(self, images: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(images, labels)
        self.statistics()  # discarded: no generator learns from this pass
        return logits


class _Images:
    """The generator in training, and its images for the student.

    Attributes:
        state: the objects that an epoch changes and the next one needs (`fedsynth.training.loop`).
    """

    def __init__(
        self,
        settings: OneShotDistillation,
        teacher: _Ensemble,
        lessons: _Ensemble | None,
        student: nn.Module,
        spec: DatasetSpec,
        seed: int,
        round: int,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._teacher = teacher
        self._lessons = lessons
        self._student = student
        self._spec = spec
        self._where = seed, round
        self._device = device
        self._draws = torch_generator(seed, "one-shot draws", round, device=device)
        self._chance = torch_generator(seed, "one-shot views", round, device=device)
        self._views = Views(settings.flips, settings.crop)
        self._lesson_views = Views(settings.flips, settings.crop if spec.channels > 1 else 0.0)
        self._restart(0)
        self.state: dict[str, Any] = {"draws": self._draws, "chance": self._chance}
        if not settings.reset:
            self.state |= {"generator": self._generator, "adam": self._adam}

    def lesson(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns images and the ensemble's predictions on them for one student step: of new views,
        if there are any."""
        if not self._lesson_views and self._lessons is None:
            return batch.images, batch.answer
        images = self._lesson_views(batch.images, self._spec, self._chance)
        return images, (self._lessons or self._teacher).answer(images, batch.labels)

    def train_generator(self, epoch: int) -> list[Batch]:
        """Trains the generator for one epoch and returns the batches that the student learns
        from."""
        settings = self._settings
        shape = (settings.batch, settings.latent)
        z = torch.randn(shape, generator=self._draws, device=self._device)
        labels = torch.randint(
            self._spec.classes, shape[:1], generator=self._draws, device=self._device
        )
        if settings.reset and epoch:
            self._restart(epoch)
        optimisers = [self._adam]
        if settings.learn_noise:
            optimisers.append(self._optimiser([z.requires_grad_()]))
        made: list[Batch] = []
        for _ in range(settings.generator_steps):
            batch = self._step(optimisers, z, labels)
            if settings.images == "all":
                made.append(batch)
            elif settings.images == "best":
                made = [_better(made[0], batch) if made else batch]
        if settings.images == "last":
            with torch.no_grad():
                images = self._made(z, labels)
            answer = self._teacher.answer(images, labels)
            made = [Batch(images, answer, labels, torch.zeros(()))]
        return made

    def _step(
        self, optimisers: Sequence[torch.optim.Optimizer], z: Tensor, labels: Tensor
    ) -> Batch:
        """Takes one step down CE(P, y) + λ1·L_BN + λ2·L_AD (FedHydra, Eq. 16); returns the images
        before it."""
        settings = self._settings
        learning = [p for one in optimisers for group in one.param_groups for p in group["params"]]
        with torch.enable_grad():
            images = self._made(z, labels)
            seen = self._views(images, self._spec, self._chance)
            answer = self._teacher.logits(seen, labels)
            loss = F.cross_entropy(answer, labels)
            loss = loss + settings.bn_weight * self._teacher.statistics().to(
                z.device, non_blocking=True
            )
            if settings.ad_weight:
                loss = loss + settings.ad_weight * adversarial_loss(
                    answer, self._said(seen), only_disagreement=settings.only_disagreement
                )
            gradients = torch.autograd.grad(loss, learning)
        for p, gradient in zip(learning, gradients, strict=True):
            p.grad = gradient
        for optimiser in optimisers:
            optimiser.step()
        return Batch(images.detach(), answer.detach(), labels, loss.detach())

    def _made(self, z: Tensor, labels: Tensor) -> Tensor:
        asked = labels if self._settings.conditional else None
        with mixed(self._device, self._teacher.precision):
            return widened(self._generator.normalised(z, asked))

    def _said(self, images: Tensor) -> Tensor:
        with mixed(self._device, self._teacher.precision):
            return widened(self._student(images))

    @torch.no_grad()
    def tally(self, batch: Batch) -> Tensor:
        """Returns the counts of the ensemble's and the student's predictions on a batch, see
        `evaluation.generated`."""
        return tally(batch.answer, batch.labels, self._said(batch.images))

    def _restart(self, epoch: int) -> None:
        """Creates the epoch's new generator, and its Adam."""
        settings = self._settings
        numbers = (*self._where, epoch) if epoch else self._where
        generator = make_generator(
            self._spec,
            *numbers,
            latent=settings.latent,
            width=settings.width,
            classes=self._spec.classes if settings.conditional else 0,
        )
        generator.to(self._device, non_blocking=True).train()
        self._generator = generator
        self._adam = self._optimiser(generator.parameters())

    def _optimiser(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        settings = self._settings
        betas = (settings.generator_beta1, 0.999)
        return torch.optim.Adam(parameters, settings.generator_lr, betas)


def _better(one: Batch, other: Batch) -> Batch:
    """Returns the batch with the lower loss, compared on the device; the first one on a tie."""
    lower = other.loss < one.loss
    return Batch(
        torch.where(lower, other.images, one.images),
        torch.where(lower, other.answer, one.answer),
        one.labels,
        torch.where(lower, other.loss, one.loss),
    )
