"""DENSE: in one round, the server distils the clients' models without data (Zhang et al. 2022,
arXiv 2112.12371).

The server repeats two steps in each epoch. First, it trains a generator against the ensemble, which
averages the clients' logits (Eq. 1). The generator's loss has three terms (Eqs. 2 to 5). The
ensemble should classify the images as the requested labels, their batch-norm statistics should
match those of the clients' models, and the student should disagree with the ensemble on them.
Second, the student is trained to predict the ensemble's output on all images generated so far (Eq.
6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Tensors
from fedsynth.methods.shared.ensemble import DataFreeEnsembleDistillation, EnsembleState
from fedsynth.synthesizer.distillation.ensemble import OneShotDistillation, average_of_logits


@dataclass(frozen=True)
class Dense(DataFreeEnsembleDistillation):
    """DENSE: the server trains a student to match the clients' averaged logits on generated images.

    The settings are those of `DataFreeEnsembleDistillation`, with DENSE's defaults. There is no
    cross-entropy on hard labels, and the adversarial term counts only images on which the student
    and the ensemble disagree.

    Where the paper gives no details, the defaults follow its public code. Each epoch starts with a
    new generator. Adam with β₁ = 0.5 optimises the generator together with its noise, on randomly
    mirrored and shifted images. The batch of images with the lowest loss is kept. The student
    passes over all kept batches by SGD with momentum.

    >>> from fedsynth import resolve, simulate
    >>> run, split = {"method": "dense", "rounds": 1}, {"kind": "iid", "clients": 2}
    >>> quick = {"local_epochs": 3, "server_epochs": 2, "generator_steps": 2}
    >>> result = simulate(resolve({"run": run, "partition": split, "method": quick}))
    >>> result.accuracy > 0.5  # on images that no client has sent
    True
    """

    name = "dense"
    summary = "one-shot: the server distils the clients' averaged logits on generated images"
    reference = "Zhang et al. 2022, DENSE, arXiv 2112.12371"

    generator_beta1: float = 0.5
    learn_noise: bool = True
    only_disagreement: bool = True
    flips: bool = True
    crop: float = 0.125
    hard_weight: float = 0.0

    def distil(
        self, models: Mapping[int, Tensors], student: nn.Module, context: RoundContext
    ) -> EnsembleState:
        """Trains the generator and then the student in each epoch (Algorithm 1)."""
        training = OneShotDistillation(
            self,
            context.load_frozen(models),
            average_of_logits,  # Eq. 1
            student,
            context.spec,
            context.seed,
            context.round,
            precision=context.precision,
            measure=context.measure,
        )
        for epoch in context.server_loop("distillation", self.server_epochs, training.state):
            batches = training.train_generator(epoch)  # Eqs. 2 to 5
            training.train_student(epoch, batches)  # Eq. 6
            training.measure_student(epoch)
        return self.result(training, models, context)
