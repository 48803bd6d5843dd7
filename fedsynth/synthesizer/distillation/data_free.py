"""Distillation of one teacher into a student without data: FedKF's T2 at a single party (arXiv
2207.10447, Sec. IV-B to IV-E, Table IV).

In each step, the generator descends L_G (Eq. 5) of the frozen teacher, and its images transfer the
teacher's knowledge to the student by KL(teacher ‖ student) (Eq. 6).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.data.registry import DatasetSpec
from fedsynth.evaluation.generated import describe, generator_tally
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.generator import Generator, descend, make_generator
from fedsynth.synthesizer.distillation.losses import distillation_loss, generator_loss
from fedsynth.validation import check_ranges


@dataclass(frozen=True)
class DataFreeDistiller:
    """Trains students of a teacher without any data (FedKF, Table IV).

    Args:
        teacher: a trained classifier. Its features are those of `embed`, if it has that, otherwise
            the input of its last linear layer.
        images: the specification of the teacher's images, or their shape (C, H, W) if its inputs
            are pixels in [0, 1].
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
        latent: length of the generator's noise.
        width: of the generator.
        replay: additional student steps, in each step, on random earlier batches; the paper has 0.
            A student's step costs little compared with a generator's, and the teacher's logits on
            old images are still valid.
        replay_batches: number of the last batches that `replay` draws from.
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
    images: DatasetSpec | tuple[int, int, int]
    steps: int = 5000
    batch: int = 128
    learning_rate: float = 0.01
    momentum: float = 0.9
    generator_lr: float = 0.2
    one_hot_weight: float = 0.2
    activation_weight: float = 0.02
    kl_weight: float = 0.0
    latent: int = 100
    width: int = 64
    replay: int = 0
    replay_batches: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        weights = ("one_hot_weight", "activation_weight", "kl_weight")
        check_ranges(
            self,
            batch=(2, inf),
            momentum=(0, 1),
            **dict.fromkeys(("steps", "latent", "width", "replay_batches"), (1, inf)),
            **dict.fromkeys(("learning_rate", "generator_lr", "replay", *weights), (0, inf)),
        )

    def fit(
        self, student: nn.Module, report: Callable[[int, int], None] = lambda completed, total: None
    ) -> Generator:
        """Trains `student`, in place, on the teacher's device; returns the generator.

        Args:
            student: any classifier of the same classes.
            report: receives (finished steps, total steps).
        """
        device = next(self.teacher.parameters()).device
        teacher = copy.deepcopy(self.teacher).requires_grad_(False).eval()
        generator = make_generator(self.images, self.seed, latent=self.latent, width=self.width)
        adam = torch.optim.Adam(generator.to(device).train().parameters(), self.generator_lr)
        sgd = torch.optim.SGD(student.to(device).parameters(), self.learning_rate, self.momentum)
        schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, self.steps)
        draws = torch_generator(self.seed, "distillation noise", device=device)
        shuffle = torch_generator(self.seed, "distillation replay")
        past: deque[tuple[Tensor, Tensor]] = deque(maxlen=self.replay_batches)
        mode = student.training
        student.train()
        for step in range(self.steps):
            z = torch.randn(self.batch, self.latent, generator=draws, device=device)
            descend(self._generator_loss(generator.normalised(z), teacher, student), adam)  # Eq. 5
            with torch.no_grad():
                x = generator.normalised(z)
                past.append((x, teacher(x)))
            replayed = torch.randint(len(past), (self.replay,), generator=shuffle).tolist()
            for position in (-1, *replayed):
                x, logits = past[position]
                sgd.zero_grad()
                distillation_loss(logits, student(x)).backward()  # Eq. 6
                sgd.step()
            schedule.step()
            report(step + 1, self.steps)
        student.train(mode)
        return generator

    def _generator_loss(self, x: Tensor, teacher: Any, student: nn.Module) -> Tensor:
        """Returns L_G of generated images, and the term of `kl_weight`."""
        features, logits = features_and_logits(teacher, x)
        loss = generator_loss(features, logits, self.one_hot_weight, self.activation_weight)
        if self.kl_weight:
            loss = loss - self.kl_weight * distillation_loss(logits.detach(), student(x))
        return loss

    def facts(self, generator: Generator) -> dict[str, float]:
        """Returns metrics of the teacher's predictions on a batch from a generator that `fit`
        returned; a low class entropy indicates a collapse.

        The names are those of `evaluation.generated.describe`.
        """
        return describe(generator_tally(self.teacher, generator))


def features_and_logits(teacher: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a classifier's features [N, D] and logits [N, C] of images.

    Raises:
        ValueError: it has neither `embed` and `classifier` nor a linear layer.
    """
    if hasattr(teacher, "embed") and hasattr(teacher, "classifier"):
        features = teacher.embed(x)
        return features, teacher.classifier(features)
    layers = [layer for layer in teacher.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ValueError("the teacher needs a linear layer, whose input is taken as its features")
    inputs: list[Tensor] = []
    with layers[-1].register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
        logits = teacher(x)
    return inputs[-1], logits
