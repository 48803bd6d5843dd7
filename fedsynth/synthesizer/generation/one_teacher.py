"""Distillation of a teacher into a student without data: FedKF's T2 at a single party (arXiv
2207.10447, Sec. IV-B to IV-E).

In each step, the generator descends L_G (Eq. 5) of the frozen teacher, and its images transfer the
teacher's knowledge to the student by KL(teacher ‖ student) (Eq. 6). `Distillation` is the pair of
teacher and generator that a client or server holds; `DataFreeDistiller` is the whole experiment of
Table IV.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.data.registry import DatasetSpec
from fedsynth.evaluation.generated import describe, tally
from fedsynth.mixed_precision import mixed, widened
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.generation.ensembles import batch_norm_matching
from fedsynth.synthesizer.generation.generators import (
    Generator,
    distillation_loss,
    generator_loss,
    make_generator,
)
from fedsynth.synthesizer.generation.many_teachers import adversarial_loss
from fedsynth.validation import check_ranges

TALLIED = 256  # images of a tally: enough that 26 equal classes are 3.2 and not 3.1 nats


def generated_tally(teacher: nn.Module, generator: Generator, images: int = TALLIED) -> Tensor:
    """Returns the counts of the teacher's predictions on a batch of `images` generated images
    (`evaluation.generated`), [1, C].

    The batch is generated as in training, with batch statistics in batch norm. Neither network
    changes, nor any random stream.
    """
    device = next(generator.parameters()).device
    draws = torch_generator(0, "tally of generated images", device=device)
    z = torch.randn(images, generator.latent, generator=draws, device=device)
    mode = teacher.training
    with torch.no_grad():  # a copy, because the pass updates the running statistics
        made = copy.deepcopy(generator).train().normalised(z)
        answer: Tensor = teacher.eval()(made)
    teacher.train(mode)
    return tally(answer)


class Distillation:
    """A frozen teacher and a generator in training.

    Args:
        teacher: has `embed` and `classifier`; its weights are not changed.
        draws: of the noise z, on the teacher's device.
        kl_weight: of −KL(teacher ‖ student) in the generator's loss, without a gradient through the
            teacher: it favours images on which the student still errs. The official code's
            `g_use_kl`, with γ as the weight.
        bn_weight, ad_weight: of DENSE's terms.
        precision: of the networks' passes (`fedsynth.mixed_precision`), including the student's in
            `loss`.

    Attributes:
        state: generator and optimiser, which change (`fedsynth.training.loop`).
    """

    def __init__(
        self,
        teacher: nn.Module,
        generator: Generator,
        draws: torch.Generator,
        *,
        batch: int,
        learning_rate: float,
        one_hot_weight: float,
        activation_weight: float,
        kl_weight: float = 0.0,
        bn_weight: float = 0.0,
        ad_weight: float = 0.0,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self._precision = precision
        self._teacher = copy.deepcopy(teacher).requires_grad_(False).eval()
        self.generator = generator.train()
        self._draws = draws
        self._batch = batch
        self._weights = one_hot_weight, activation_weight
        self._kl_weight = kl_weight
        self._bn_weight = bn_weight
        self._ad_weight = ad_weight
        # The hooks are on this object's own copy of the teacher and are freed with it. The stack
        # is stored because it would remove them when collected.
        self._hooks = ExitStack()
        self._statistics = self._hooks.enter_context(
            batch_norm_matching([self._teacher] if bn_weight else [])
        )
        self._adam = torch.optim.Adam(generator.parameters(), learning_rate)
        self.state = {"generator": self.generator, "adam": self._adam}

    def step(self, student: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Takes one step of the generator; returns images of the same z from the updated generator,
        and the teacher's logits on them, without graph.

        Args:
            student: the network that should disagree with the teacher, for a `kl_weight` or an
                `ad_weight`; its weights and their gradients are not changed.
        """
        z = torch.randn(
            self._batch, self.generator.latent, generator=self._draws, device=self._draws.device
        )
        with torch.enable_grad():
            with mixed(z.device, self._precision):
                images = self.generator.normalised(z)
                features = self._teacher.embed(images)  # type: ignore[operator]
                logits = widened(self._teacher.classifier(features))  # type: ignore[operator]
            loss = generator_loss(
                widened(features), logits, *self._weights
            ) + self._bn_weight * self._statistics().to(z.device, non_blocking=True)
            loss = loss + self._against(student, images, logits)
            weights = list(self.generator.parameters())
            for p, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                p.grad = gradient
            self._adam.step()
        with torch.no_grad(), mixed(z.device, self._precision):
            images = widened(self.generator.normalised(z))
            answer = widened(self._teacher(images))
            self._statistics()
            return images, answer

    def _against(self, student: nn.Module | None, images: Tensor, logits: Tensor) -> Tensor:
        """Returns the generator's loss terms that reward disagreement between student and
        teacher."""
        loss = images.new_zeros(())
        if student is None or not (self._kl_weight or self._ad_weight):
            return loss
        answer = self._says(student, images)
        if self._kl_weight:
            loss = loss - self._kl_weight * distillation_loss(logits.detach(), answer)
        if self._ad_weight:
            disagree = adversarial_loss(logits, answer, only_disagreement=True)
            loss = loss + self._ad_weight * disagree
        return loss

    def loss(self, student: nn.Module) -> Tensor:
        """Takes a `step` and returns KL(teacher ‖ student) on its images (Eq. 6), with the graph to
        the student."""
        images, logits = self.step(student)
        return distillation_loss(logits, self._says(student, images))

    def _says(self, student: nn.Module, images: Tensor) -> Tensor:
        with mixed(images.device, self._precision):
            answer: Tensor = student(images)
        return widened(answer)

    def tally(self) -> Tensor:
        """Returns the counts of the teacher's predictions on a batch of the current generator
        (`evaluation.generated`), [1, C].

        The batch's noise is always the same and does not advance the random stream, so training is
        not affected.
        """
        counts = generated_tally(self._teacher, self.generator)
        self._statistics()  # discards this batch's, which the next step must not use
        return counts


@dataclass(frozen=True)
class DataFreeDistiller:
    """Trains students of a teacher without any data (FedKF, Table IV).

    Args:
        teacher: a trained network with `embed` and `classifier`.
        spec: of the teacher's images; only public facts of it are used.
        steps: of generator and student.
        batch: images of a step; the paper gives none.
        learning_rate: of the student's SGD (0.01 for LeNet-5, 0.1 for ResNet-8); it decays to zero
            by a cosine.
        momentum: of the student's SGD.
        generator_lr: Adam's, 0.2 on EMNIST and 0.02 on CIFAR; values from 0.001 to 0.2 perform
            similarly (docs/results.md).
        one_hot_weight: λ1: 0.2 on EMNIST, 0.01 on CIFAR.
        activation_weight: λ2: 0.02 on EMNIST, 0.002 on CIFAR.
        kl_weight: of −KL(teacher ‖ student) in the generator's loss (the official code's
            `g_use_kl`, which it sets to γ = 1 on CIFAR and omits on EMNIST).
        bn_weight: of DENSE's term on the teacher's batch-norm statistics, if it has any; 0 omits
            it, as FedKF does.
        ad_weight: of DENSE's term on disagreement with the student; 0 omits it, as FedKF does.
        latent: length of the generator's noise.
        width: of the generator.
        replay: additional student steps, in each step, on random earlier batches; the paper has 0.
            A student's step costs little compared with a generator's, and the teacher's logits on
            old images are still valid.
        kept: number of the last batches that `replay` draws from.
        seed: of the generator's weights and noise.

    >>> from fedsynth import load_dataset, resolve, simulate
    >>> from fedsynth.evaluation.accuracy import accuracy
    >>> model = simulate(resolve({"run": {"method": "fedavg"}, "model": {"name": "linear"}})).model
    >>> test = load_dataset("digits")[1]
    >>> student = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> distiller = DataFreeDistiller(model, test.spec, steps=50, batch=32, width=8, replay=9)
    >>> generator = distiller.fit(student)
    >>> accuracy(student, test) > 0.5  # of a student that has seen no image of the data set
    True
    """

    teacher: nn.Module
    spec: DatasetSpec
    steps: int = 5000
    batch: int = 128
    learning_rate: float = 0.01
    momentum: float = 0.9
    generator_lr: float = 0.2
    one_hot_weight: float = 0.2
    activation_weight: float = 0.02
    kl_weight: float = 0.0
    bn_weight: float = 0.0
    ad_weight: float = 0.0
    latent: int = 100
    width: int = 64
    replay: int = 0
    kept: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        big = float("inf")
        check_ranges(
            self,
            steps=(1, big),
            batch=(2, big),
            learning_rate=(0, big),
            momentum=(0, 1),
            generator_lr=(0, big),
        )
        check_ranges(
            self,
            one_hot_weight=(0, big),
            activation_weight=(0, big),
            latent=(1, big),
            width=(1, big),
        )
        check_ranges(self, replay=(0, big), kept=(1, big), bn_weight=(0, big), ad_weight=(0, big))
        check_ranges(self, kl_weight=(0, big))

    def fit(
        self, student: nn.Module, report: Callable[[int, int], None] = lambda done, total: None
    ) -> Generator:
        """Trains `student`, in place, on the teacher's device; returns the generator.

        Args:
            student: any classifier of the same classes.
            report: receives (finished steps, total steps).
        """
        device = next(self.teacher.parameters()).device
        generator = make_generator(self.spec, self.seed, latent=self.latent, width=self.width).to(
            device
        )
        pair = Distillation(
            self.teacher,
            generator,
            torch_generator(self.seed, "distillation noise", device=device),
            batch=self.batch,
            learning_rate=self.generator_lr,
            one_hot_weight=self.one_hot_weight,
            activation_weight=self.activation_weight,
            kl_weight=self.kl_weight,
            bn_weight=self.bn_weight,
            ad_weight=self.ad_weight,
        )
        sgd = torch.optim.SGD(student.to(device).parameters(), self.learning_rate, self.momentum)
        schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, self.steps)
        mode = student.training
        student.train()
        past: deque[tuple[Tensor, Tensor]] = deque(maxlen=self.kept)
        shuffle = torch_generator(self.seed, "distillation replay")
        for done in range(self.steps):
            past.append(pair.step(student))
            again = torch.randint(len(past), (self.replay,), generator=shuffle).tolist()
            for images, logits in (past[i] for i in (-1, *again)):
                sgd.zero_grad()
                distillation_loss(logits, student(images)).backward()
                sgd.step()
            schedule.step()
            report(done + 1, self.steps)
        student.train(mode)
        return generator

    def facts(self, generator: Generator) -> dict[str, float]:
        """Returns metrics of the teacher's predictions on a batch from a generator that `fit`
        returned; a low class entropy indicates a collapse.

        The names are those of `evaluation.generated.describe`.
        """
        return describe(generated_tally(self.teacher, generator))
