"""A server's distillation of several models into one, without data: DENSE (Zhang et al. 2022) and
FedHydra, Algorithm 1.

Each epoch draws noise and labels once, takes some generator steps on them (CE(P, y) + λ1·L_BN +
λ2·L_AD), and then teaches the student the ensemble's answer P on the generated images. Everything
here is computed from the models alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.data.registry import DatasetSpec
from fedsynth.evaluation.generated import tally
from fedsynth.keeping import KeepsNothing, StepKeeper
from fedsynth.mixed_precision import mixed, widened
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.generation.ensembles import Aggregate, batch_norm_matching, has_statistics
from fedsynth.synthesizer.generation.generator_memory import remembered, restore
from fedsynth.synthesizer.generation.generators import Generator, distillation_loss, make_generator
from fedsynth.synthesizer.generation.progress import DISTILLATION, Batch, Progress
from fedsynth.synthesizer.generation.views import Views
from fedsynth.validation import check_choices, check_ranges

IMAGES = ("all", "last", "best")


def adversarial_loss(ensemble_NC: Tensor, student_NC: Tensor, *, only_disagreement: bool) -> Tensor:
    """−KL(P ‖ F_g), averaged over the batch (FedHydra, Eq. 15); DENSE (Eq. 4) counts only images on
    which the two disagree."""
    log_p = ensemble_NC.log_softmax(dim=1)
    log_q = student_NC.log_softmax(dim=1)
    each = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    if only_disagreement:
        each = torch.where(ensemble_NC.argmax(dim=1) != student_NC.argmax(dim=1), each, 0.0)
    return -each.mean()


def student_loss(ensemble_NC: Tensor, student_NC: Tensor, hard_weight: float) -> Tensor:
    """KL(P ‖ F_g) + β·CE(F_g, argmax P) (FedHydra, Eqs. 17 to 19)."""
    return distillation_loss(ensemble_NC, student_NC) + hard_weight * F.cross_entropy(
        student_NC, ensemble_NC.argmax(dim=1)
    )


@dataclass(frozen=True)
class Distilled:
    """What a distillation leaves beside the student.

    Attributes:
        tallies: of each epoch's images for the student, int64 [epochs, 3, classes], see
            `evaluation.generated`: of the student after the epoch.
        notes: for people, such as models without batch norm.
    """

    tallies: Tensor
    notes: tuple[str, ...]


@dataclass(frozen=True)
class OneShotDistillation:
    """Settings, with FedHydra's values; where papers are silent, the reason.

    Args:
        epochs: T_g.
        generator_steps: T_G in an epoch.
        generator_lr, generator_beta1: Adam's; β₁ is 0.5 in DENSE's public code.
        batch: images of an epoch's draw (DENSE's public default is 256).
        latent, width: of the generator: DENSE's public code has 256, and 64.
        conditional: the label is an input of the generator; the papers' generators take noise alone
            and learn an epoch's labels with it.
        reset: a fresh generator in each epoch, as DENSE's public code has it.
        learn_noise: Adam moves the epoch's noise along with the generator (DENSE's public code).
        bn_weight, ad_weight: λ1, λ2.
        only_disagreement: DENSE's L_AD.
        images: which of an epoch's images teach the student. "all": those of every generator step,
            a student step for each batch ("leverages all generated intermediate images", FedHydra,
            Sec. 2); "last": one batch, made after the last step (Algorithm 1 alone, which names one
            student step); "best": the batch of the step with the lowest loss (DENSE's public code).
        replay: pass over the images of all epochs so far (DENSE's public code), and not of this
            alone.
        flips, crop: random views, see `Views`. The ensemble sees views while the generator learns;
            the student and its teacher see others in each pass, crops of colour images alone
            (DENSE's public code, which crops CIFAR for the student, and flips digits, too).
        hard_weight: β; the paper gives none: 1.
        learning_rate: of the student's SGD.
        momentum: of the same: 0, as FedHydra's paper names none (Sec. 4.1.4). With a student step
            for every generator step, on images that hardly differ, momentum adds the steps up: at
            0.9 students learn less at most skews, and may die (docs/results.md). DENSE's public
            code, which shows each image among many others, has 0.9.
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
        """Trains `student` in place from its present weights.

        Args:
            models: the clients', on the student's device; frozen and set to evaluation for the
                time.
            aggregate: makes the ensemble's logits.
            lessons: what makes the logits that the student learns, where they are others than those
                that the generator is to please.
            keeper: keeps student, generator and images between epochs, and has them if this
                distillation was cut off before: then it goes on from there, with the same draws.
            precision: of the networks' passes (`fedsynth.mixed_precision`).
        """
        keeper = keeper or KeepsNothing()
        device = next(student.parameters()).device
        for model in models:
            model.requires_grad_(False).eval()
        student.eval()
        sgd = torch.optim.SGD(student.parameters(), self.learning_rate, self.momentum)
        shuffle = torch_generator(seed, "one-shot replay", round)
        past: list[Batch] = []
        tallies = [torch.zeros(0, 3, spec.classes, dtype=torch.int64, device=device)]
        with batch_norm_matching(models if self.bn_weight else []) as statistics:
            teacher = _Ensemble(models, aggregate, statistics, precision)
            other = None if lessons is None else replace(teacher, aggregate=lessons)
            epochs = _Images(self, teacher, other, student, spec, seed, round, device)
            kept_past = past if self.replay else []
            progress = Progress(student, sgd, shuffle, epochs, kept_past, tallies)
            done = progress.put_back(keeper.found(DISTILLATION))
            for epoch, made in enumerate(epochs, start=done + 1):
                if not self.replay:
                    past.clear()
                past += made
                student.train()
                for position in torch.randperm(len(past), generator=shuffle).tolist():
                    self._student_step(student, sgd, *epochs.lesson(past[position]), precision)
                student.eval()
                counts = torch.stack([epochs.tally(batch) for batch in made])
                tallies.append(counts.sum(dim=0, keepdim=True))
                keeper.offer(DISTILLATION, epoch, progress.kept)
                report(epoch, self.epochs)
        without = [str(k) for k, model in enumerate(models) if not has_statistics(model)]
        note = (
            f"no batch-norm term for models {', '.join(without)}: they have no batch norm with "
            "running "
            "statistics"
        )
        return Distilled(torch.cat(tallies), (note,) if self.bn_weight and without else ())

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
        self.statistics()  # of a pass that no generator learns from: forgotten
        return logits


@dataclass(frozen=True)
class _Learner:
    """A generator and the optimiser of its weights."""

    generator: Generator
    adam: torch.optim.Optimizer


class _Images:
    """The epochs' images for the student: iterating trains the generator for one epoch at a
    time."""

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
        self._current = self._learner(0)
        self._done = 0

    def kept(self) -> dict[str, Tensor]:
        """Where the generator stands between two epochs, by name."""
        streams = {"draws": self._draws.get_state(), "chance": self._chance.get_state()}
        if self._settings.reset:
            return streams
        return {**streams, **remembered(self._current.generator, self._current.adam)}

    def put_back(self, epochs: int, kept: Mapping[str, Tensor]) -> None:
        """Goes on after so many epochs."""
        self._done = epochs
        self._draws.set_state(kept["draws"])
        self._chance.set_state(kept["chance"])
        if not self._settings.reset:
            restore(self._current.generator, self._current.adam, kept)

    def __iter__(self) -> Iterator[list[Batch]]:
        settings = self._settings
        for epoch in range(self._done, settings.epochs):
            size = settings.batch
            z = torch.randn(size, settings.latent, generator=self._draws, device=self._device)
            labels = torch.randint(
                self._spec.classes, (size,), generator=self._draws, device=self._device
            )
            if settings.reset and epoch:
                self._current = self._learner(epoch)
            yield self._epoch(self._current, z, labels)

    def lesson(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images and the answers to them for one student step: of new views, if there are any."""
        if not self._lesson_views and self._lessons is None:
            return batch.images, batch.answer
        images = self._lesson_views(batch.images, self._spec, self._chance)
        return images, (self._lessons or self._teacher).answer(images, batch.labels)

    def _epoch(self, learner: _Learner, z: Tensor, labels: Tensor) -> list[Batch]:
        settings = self._settings
        optimisers = [learner.adam]
        if settings.learn_noise:
            optimisers.append(self._adam([z.requires_grad_()]))
        made: list[Batch] = []
        for _ in range(settings.generator_steps):
            batch = self._step(learner.generator, optimisers, z, labels)
            if settings.images == "all":
                made.append(batch)
            elif settings.images == "best":
                made = [_better(made[0], batch) if made else batch]
        if settings.images == "last":
            with torch.no_grad():
                images = self._made(learner.generator, z, labels)
            answer = self._teacher.answer(images, labels)
            made = [Batch(images, answer, labels, torch.zeros(()))]
        return made

    def _step(
        self,
        generator: Generator,
        optimisers: Sequence[torch.optim.Optimizer],
        z: Tensor,
        labels: Tensor,
    ) -> Batch:
        """One step down CE(P, y) + λ1·L_BN + λ2·L_AD (FedHydra, Eq. 16); the images before it."""
        settings = self._settings
        learning = [p for one in optimisers for group in one.param_groups for p in group["params"]]
        with torch.enable_grad():
            images = self._made(generator, z, labels)
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

    def _made(self, generator: Generator, z: Tensor, labels: Tensor) -> Tensor:
        with mixed(self._device, self._teacher.precision):
            return widened(generator.normalised(z, self._asked(labels)))

    def _said(self, images: Tensor) -> Tensor:
        with mixed(self._device, self._teacher.precision):
            return widened(self._student(images))

    @torch.no_grad()
    def tally(self, batch: Batch) -> Tensor:
        """What ensemble and student say of a batch, as `evaluation.generated` counts it."""
        return tally(batch.answer, batch.labels, self._said(batch.images))

    def _asked(self, labels: Tensor) -> Tensor | None:
        return labels if self._settings.conditional else None

    def _learner(self, epoch: int) -> _Learner:
        """A fresh generator with its Adam; after the first epoch, where each has its own,
        another."""
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
        return _Learner(generator, self._adam(generator.parameters()))

    def _adam(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        settings = self._settings
        betas = (settings.generator_beta1, 0.999)
        return torch.optim.Adam(parameters, settings.generator_lr, betas)


def _better(one: Batch, other: Batch) -> Batch:
    """The batch of the lower loss, chosen on the device; the first of two equal ones."""
    lower = other.loss < one.loss
    return Batch(
        torch.where(lower, other.images, one.images),
        torch.where(lower, other.answer, one.answer),
        one.labels,
        torch.where(lower, other.loss, one.loss),
    )
