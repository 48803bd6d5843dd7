"""DENSE: one-shot federated learning by distillation without data (Zhang et al. 2022, arXiv
2112.12371).

Server, for each epoch: a generator produces images that the average of the clients' logits (Eq. 1)
classifies as the requested labels, that match the clients' batch-norm statistics, and on which the
student disagrees with that average (Eqs. 2 to 5). The student then learns the average on all images
generated so far (Eq. 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedsynth.core.context import RoundContext
from fedsynth.methods.shared.ensemble import DataFreeEnsembleDistillation, EnsembleState
from fedsynth.synthesizer.distillation.ensemble import OneShotDistillation, average_of_logits


@dataclass(frozen=True)
class Dense(DataFreeEnsembleDistillation):
    """Settings: `DataFreeEnsembleDistillation`, as DENSE has them: no cross-entropy on hard labels,
    adversarial only where student and ensemble disagree.

    What the paper does not say is as in its public code: each epoch has a fresh generator, whose
    noise is learned, too, by Adam with β₁ = 0.5, on randomly mirrored and shifted images; the batch
    with the lowest loss is kept, and the student, by SGD with momentum, passes over all of these.

    >>> from fedsynth import resolve, simulate
    >>> run, split = {"method": "dense", "rounds": 1}, {"kind": "iid", "clients": 2}
    >>> quick = {"local_epochs": 3, "server_epochs": 2, "generator_steps": 2}
    >>> result = simulate(resolve({"run": run, "partition": split, "method": quick}))
    >>> result.accuracy > 0.5  # on images that no client has sent
    True
    """

    name: ClassVar[str] = "dense"
    summary: ClassVar[str] = (
        "one-shot: the server distils the average of the clients' logits, on generated images"
    )
    reference: ClassVar[str] = "Zhang et al. 2022, DENSE, arXiv 2112.12371"

    generator_beta1: float = 0.5
    generator_reset: bool = True
    learn_noise: bool = True
    only_disagreement: bool = True
    student_images: str = "best"
    replay: bool = True
    flips: bool = True
    crop: float = 0.125
    hard_weight: float = 0.0
    server_momentum: float = 0.9

    def distil(
        self, models: Sequence[nn.Module], student: nn.Module, context: RoundContext
    ) -> EnsembleState:
        """The server's part of Algorithm 1."""
        training = OneShotDistillation(
            self,
            models,
            average_of_logits,  # Eq. 1
            student,
            context.spec,
            context.seed,
            context.round,
            precision=context.precision,
        )
        for epoch in context.server_loop("distillation", self.server_epochs, training.state):
            batches = training.train_generator(epoch)  # Eqs. 2 to 5
            training.train_student(epoch, batches)  # Eq. 6
        self.note_models(models, context)
        return EnsembleState({}, tallies=training.tallies)
