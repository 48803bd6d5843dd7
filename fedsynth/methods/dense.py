"""DENSE: one-shot federated learning by distillation without data (Zhang et al. 2022, arXiv 2112.12371).

Server: a generator makes images on which the average of the clients' logits answers the labels that were asked for, looks to their batch
norms like data, and disagrees with the student; the student learns that average on all images made so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedsynth.core.method import RoundContext, ServerState
from fedsynth.methods.one_shot import DistilsEnsemble
from fedsynth.synthesizer.ensembles import Aggregate, average_of_logits
from fedsynth.synthesizer.one_shot import OneShotDistillation


@dataclass(frozen=True)
class DistilsWithoutData(DistilsEnsemble):
    """Settings of the server's distillation.

    Args:
        server_epochs, generator_steps, generator_lr, generator_batch, latent, generator_width, conditional, bn_weight, ad_weight,
            only_disagreement, hard_weight, server_lr, server_momentum, replay: see `OneShotDistillation` (λ1 is bn_weight, λ2 ad_weight,
            β hard_weight).
    """

    server_epochs: int = 200
    generator_steps: int = 30
    generator_lr: float = 1e-3
    generator_batch: int = 128
    latent: int = 100
    generator_width: int = 64
    conditional: bool = False
    bn_weight: float = 1.0
    ad_weight: float = 0.5
    only_disagreement: bool = False
    hard_weight: float = 1.0
    server_lr: float = 0.01
    server_momentum: float = 0.9
    replay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distillation()

    def distillation(self) -> OneShotDistillation:
        """The server's distillation, checked."""
        return OneShotDistillation(
            epochs=self.server_epochs,
            generator_steps=self.generator_steps,
            generator_lr=self.generator_lr,
            batch=self.generator_batch,
            latent=self.latent,
            width=self.generator_width,
            conditional=self.conditional,
            bn_weight=self.bn_weight,
            ad_weight=self.ad_weight,
            only_disagreement=self.only_disagreement,
            hard_weight=self.hard_weight,
            learning_rate=self.server_lr,
            momentum=self.server_momentum,
            replay=self.replay,
        )

    def fit_student(
        self,
        models: Sequence[nn.Module],
        student: nn.Module,
        aggregate: Aggregate,
        context: RoundContext,
    ) -> None:
        notes = self.distillation().fit(
            models,
            student,
            aggregate,
            context.spec,
            context.seed,
            context.round,
            lambda done, total: context.report("distillation", done, total),
        )
        for note in notes:
            context.note(note)


@dataclass(frozen=True)
class Dense(DistilsWithoutData):
    """Settings: `DistilsWithoutData`, as DENSE has them: no cross-entropy on hard labels, adversarial only where student and ensemble disagree,
    the student passes over all images so far in each epoch (its public code; the paper does not say)."""

    name: ClassVar[str] = "dense"
    summary: ClassVar[str] = (
        "one-shot: the server distils the average of the clients' logits, on generated images"
    )
    reference: ClassVar[str] = "Zhang et al. 2022, DENSE, arXiv 2112.12371"

    only_disagreement: bool = True
    hard_weight: float = 0.0
    replay: bool = True

    def distil(
        self,
        models: Sequence[nn.Module],
        student: nn.Module,
        state: ServerState,
        context: RoundContext,
    ) -> ServerState:
        self.fit_student(models, student, average_of_logits, context)
        return ServerState({})
