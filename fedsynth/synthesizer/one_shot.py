"""A server's distillation of several models into one, without data: DENSE (Zhang et al. 2022) and FedHydra, Algorithm 1.

Each epoch draws noise and labels once, takes some generator steps on them (CE(P, y) + λ1·L_BN + λ2·L_AD), and then teaches the student the
ensemble's answer P on the generated images. Everything here is computed from the models alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.method import check_ranges
from fedsynth.core.random import torch_generator
from fedsynth.data.registry import DatasetSpec
from fedsynth.synthesizer.ensembles import Aggregate, batch_norm_matching, has_statistics
from fedsynth.synthesizer.generators import Generator, distillation_loss, make_generator


def adversarial_loss(ensemble_NC: Tensor, student_NC: Tensor, *, only_disagreement: bool) -> Tensor:
    """−KL(P ‖ F_g), averaged over the batch (FedHydra, Eq. 15); DENSE (Eq. 4) counts only images on which the two disagree."""
    log_p, log_q = ensemble_NC.log_softmax(dim=1), student_NC.log_softmax(dim=1)
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
class OneShotDistillation:
    """Settings, with FedHydra's values; where papers are silent, the reason.

    Args:
        epochs: T_g. generator_steps: T_G in an epoch. generator_lr: Adam's. batch: images of an epoch's draw (DENSE's public default is 256).
        latent, width: of the generator: DENSE's public code has 256, and 64. conditional: the label is an input of the generator; the papers'
            generators take noise alone and learn an epoch's labels with it.
        bn_weight, ad_weight: λ1, λ2. only_disagreement: DENSE's L_AD.
        hard_weight: β; the paper gives none: 1.
        learning_rate, momentum: the student's SGD; momentum is not named.
        replay: False: one student step an epoch, on the images just made, as Algorithm 1 has it. True: a pass over all images so far, as
            DENSE's public code does.
    """

    epochs: int = 200
    generator_steps: int = 30
    generator_lr: float = 1e-3
    batch: int = 128
    latent: int = 100
    width: int = 64
    conditional: bool = False
    bn_weight: float = 1.0
    ad_weight: float = 0.5
    only_disagreement: bool = False
    hard_weight: float = 1.0
    learning_rate: float = 0.01
    momentum: float = 0.9
    replay: bool = False

    def __post_init__(self) -> None:
        check_ranges(
            self,
            epochs=(0, inf),
            generator_steps=(1, inf),
            generator_lr=(0, inf),
            batch=(2, inf),
            latent=(1, inf),
        )
        check_ranges(
            self, width=(1, inf), bn_weight=(0, inf), ad_weight=(0, inf), hard_weight=(0, inf)
        )
        check_ranges(self, learning_rate=(0, inf), momentum=(0, 1))

    def fit(
        self,
        models: Sequence[nn.Module],
        student: nn.Module,
        aggregate: Aggregate,
        spec: DatasetSpec,
        seed: int,
        round: int = 1,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[str]:
        """Trains `student` in place from its present weights; returns notes for people, such as models without batch norm.

        Args:
            models: the clients', on the student's device; frozen and set to evaluation for the time.
            aggregate: makes the ensemble's logits.
        """
        device = next(student.parameters()).device
        for model in models:
            model.requires_grad_(False).eval()
        classes = spec.classes if self.conditional else 0
        generator = (
            make_generator(spec, seed, round, latent=self.latent, width=self.width, classes=classes)
            .to(device)
            .train()
        )
        adam = torch.optim.Adam(generator.parameters(), self.generator_lr)
        sgd = torch.optim.SGD(student.parameters(), self.learning_rate, self.momentum)
        draws, shuffle = (
            torch_generator(seed, "one-shot draws", round, device=device),
            torch_generator(seed, "one-shot replay", round),
        )
        past: list[tuple[Tensor, Tensor]] = []
        with batch_norm_matching(models if self.bn_weight else []) as statistics:
            for epoch in range(self.epochs):
                z = torch.randn(self.batch, self.latent, generator=draws, device=device)
                labels = torch.randint(spec.classes, (self.batch,), generator=draws, device=device)
                asked = labels if self.conditional else None
                student.eval()
                for _ in range(self.generator_steps):
                    self._generator_step(
                        generator, adam, (z, asked, labels), models, student, aggregate, statistics
                    )
                with torch.no_grad():
                    images = generator.normalised(z, asked)
                    answer = aggregate(torch.stack([model(images) for model in models]), labels)
                    statistics()
                past = [*past, (images, answer)] if self.replay else [(images, answer)]
                student.train()
                order = torch.randperm(len(past), generator=shuffle).tolist()
                for images, answer in (past[i] for i in order):
                    with torch.enable_grad():
                        sgd.zero_grad()
                        student_loss(answer, student(images), self.hard_weight).backward()
                    sgd.step()
                report(epoch + 1, self.epochs)
        student.eval()
        without = [str(k) for k, model in enumerate(models) if not has_statistics(model)]
        if self.bn_weight and without:
            return [
                f"no batch-norm term for models {', '.join(without)}: they have no batch norm with running statistics"
            ]
        return []

    def _generator_step(
        self,
        generator: Generator,
        adam: torch.optim.Optimizer,
        draw: tuple[Tensor, Tensor | None, Tensor],
        models: Sequence[nn.Module],
        student: nn.Module,
        aggregate: Aggregate,
        statistics: Callable[[], Tensor],
    ) -> None:
        """One step down CE(P, y) + λ1·L_BN + λ2·L_AD (FedHydra, Eq. 16) on a draw of (noise, the generator's labels, the asked labels)."""
        z, given, labels = draw
        weights = list(generator.parameters())
        with torch.enable_grad():
            images = generator.normalised(z, given)
            answer = aggregate(torch.stack([model(images) for model in models]), labels)
            loss = F.cross_entropy(answer, labels) + self.bn_weight * statistics().to(z.device)
            if self.ad_weight:
                against = adversarial_loss(
                    answer, student(images), only_disagreement=self.only_disagreement
                )
                loss = loss + self.ad_weight * against
            gradients = torch.autograd.grad(loss, weights)
        for p, gradient in zip(weights, gradients, strict=True):
            p.grad = gradient
        adam.step()
