"""Data-free distillation of one teacher into a student.

The distillation is FedKF's T2 at a single party (arXiv 2207.10447, Sec. IV-B to IV-E, Table IV). In
each step, the generator takes a step down L_G (Eq. 5), computed with the frozen teacher. The
student then minimises KL(teacher ‖ student) on the generated images (Eq. 6).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.data.registry import DatasetSpec
from fedsynth.evaluation.generated import describe, generator_tally
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.generator import Generator, descend, make_generator
from fedsynth.synthesizer.distillation.losses import distillation_loss, generator_loss
from fedsynth.validation import check_fields, in_range


@dataclass(frozen=True)
class DataFreeDistiller:
    """Trains a teacher's students without any data (FedKF, Table IV).

    Args:
        teacher: a trained classifier. Its features are the output of `embed` if it has this method,
            and otherwise the input of its last linear layer.
        images: the specification of the teacher's images. It may be only the shape (C, H, W) if
            the teacher's inputs are pixels in [0, 1].
        steps: the number of generator steps and student steps.
        batch: the number of images in a step. The paper does not state it.
        learning_rate: the learning rate of the student's SGD (0.01 for LeNet-5, 0.1 for ResNet-8).
            It falls to zero along a cosine.
        momentum: the momentum of the student's SGD.
        generator_lr: the learning rate of the generator's Adam, 0.2 on EMNIST and 0.02 on CIFAR.
            Values from 0.001 to 0.2 perform similarly (docs/results.md).
        one_hot_weight: λ1, which is 0.2 on EMNIST and 0.01 on CIFAR.
        activation_weight: λ2, which is 0.02 on EMNIST and 0.002 on CIFAR.
        latent: the length of the generator's noise vector.
        width: the width of the generator, see `Generator`.
        replay: the number of additional student steps in each step, on random earlier batches. The
            paper has 0. A student step costs little compared with a generator step, and the
            teacher's logits on earlier images remain valid.
        replay_batches: the number of most recent batches from which `replay` draws.
        seed: the seed of the generator's weights and noise.

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
    steps: int = in_range(5000, 1)
    batch: int = in_range(128, 2)
    learning_rate: float = in_range(0.01, 0)
    momentum: float = in_range(0.9, 0, 1)
    generator_lr: float = in_range(0.2, 0)
    one_hot_weight: float = in_range(0.2, 0)
    activation_weight: float = in_range(0.02, 0)
    latent: int = in_range(100, 1)
    width: int = in_range(64, 1)
    replay: int = in_range(0, 0)
    replay_batches: int = in_range(500, 1)
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def fit(
        self, student: nn.Module, report: Callable[[int, int], None] = lambda completed, total: None
    ) -> Generator:
        """Trains `student` in place on the teacher's device, and returns the generator.

        Args:
            student: any classifier with the teacher's classes.
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
            features, logits = features_and_logits(teacher, generator.normalised(z))
            weights = self.one_hot_weight, self.activation_weight
            descend(generator_loss(features, logits, *weights), adam)  # Eq. 5
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

    def facts(self, generator: Generator) -> dict[str, float]:
        """Returns metrics of the teacher's predictions on generated images.

        A low class entropy indicates that the generator has collapsed to few classes.
        `evaluation.generated.describe` defines the metrics.

        Args:
            generator: a generator that `fit` returned.
        """
        return describe(generator_tally(self.teacher, generator))


def features_and_logits(teacher: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a classifier's features [N, D] and logits [N, C] of images.

    Raises:
        ValueError: the classifier has neither `embed` and `classifier` nor a linear layer.
    """
    if hasattr(teacher, "embed") and hasattr(teacher, "classifier"):
        features = teacher.embed(x)
        return features, teacher.classifier(features)
    layers = [layer for layer in teacher.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ValueError(
            "the teacher must have `embed` and `classifier`, or a linear layer. Define `embed` and "
            "`classifier`"
        )
    inputs: list[Tensor] = []
    with layers[-1].register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
        logits = teacher(x)
    return inputs[-1], logits
