"""DENSE: one-shot federated learning by distillation without data (Zhang et al. 2022, arXiv
2112.12371).

Server: a generator produces images that the average of the clients' logits classifies as the
requested labels, that match the clients' batch-norm statistics, and on which the student disagrees
with that average. The student learns the average on all images generated so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, ClassVar

from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Presets
from fedsynth.errors import SettingError
from fedsynth.evaluation.generated import GENERATOR, GeneratorFacts, average, describe
from fedsynth.methods.shared.ensemble import DistilsEnsemble, EnsembleState
from fedsynth.privacy.disclosure import Disclosure, released
from fedsynth.synthesizer.generation.ensembles import Aggregate, average_of_logits
from fedsynth.synthesizer.generation.many_teachers import IMAGES, OneShotDistillation
from fedsynth.validation import check_choices

_OWN_NAMES = {
    "epochs": "server_epochs",
    "batch": "generator_batch",
    "width": "generator_width",
    "reset": "generator_reset",
    "images": "student_images",
    "learning_rate": "server_lr",
    "momentum": "server_momentum",
}
"""The method's setting for each field of `OneShotDistillation` that has another name there."""


@dataclass(frozen=True)
class DistilsWithoutData(DistilsEnsemble):
    """Settings of the server's distillation.

    Args:
        server_epochs, generator_steps, generator_lr, generator_beta1, generator_batch, latent,
        generator_width, conditional, generator_reset, learn_noise, bn_weight, ad_weight,
        only_disagreement, student_images, replay, flips, crop, hard_weight, server_lr,
        server_momentum: see `OneShotDistillation` (λ1 is bn_weight, λ2 ad_weight, β hard_weight).
    """

    discloses: ClassVar[Mapping[str, Disclosure]] = {
        **DistilsEnsemble.discloses,
        GENERATOR: released("the server makes the generators from uploaded models", GeneratorFacts),
    }
    presets: ClassVar[Presets] = {
        "digits": {
            "server_epochs": 40,
            "generator_steps": 10,
            "generator_width": 8,
            "generator_batch": 64,
            "generator_lr": 0.01,
            "replay": True,
            "start": "average",
        }
    }

    server_epochs: int = 200
    generator_steps: int = 30
    generator_lr: float = 1e-3
    generator_beta1: float = 0.9
    generator_batch: int = 128
    latent: int = 100
    generator_width: int = 64
    conditional: bool = False
    generator_reset: bool = False
    learn_noise: bool = False
    bn_weight: float = 1.0
    ad_weight: float = 0.5
    only_disagreement: bool = False
    student_images: str = "all"
    replay: bool = False
    flips: bool = False
    crop: float = 0.0
    hard_weight: float = 1.0
    server_lr: float = 0.01
    server_momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, student_images=IMAGES)
        self.distillation()

    def distillation(self) -> OneShotDistillation:
        """Returns the server's distillation, checked.

        Raises:
            SettingError: names the method's setting.
        """
        names = {f.name: _OWN_NAMES.get(f.name, f.name) for f in fields(OneShotDistillation)}
        try:
            return OneShotDistillation(**{name: getattr(self, own) for name, own in names.items()})
        except SettingError as error:
            raise error.of("method", names[error.key]) from None

    def fit_student(
        self,
        models: Sequence[nn.Module],
        student: nn.Module,
        aggregate: Aggregate,
        context: RoundContext,
        lessons: Aggregate | None = None,
    ) -> Tensor:
        """Trains the student, and returns the tallies of the round's images, for the state.

        Args:
            lessons: as in `OneShotDistillation.fit`.
        """
        done = self.distillation().fit(
            models,
            student,
            aggregate,
            context.spec,
            context.seed,
            context.round,
            lambda done, total: context.report("distillation", done, total),
            lessons=lessons,
            keeper=context.server_keeper,
            precision=context.precision,
        )
        for note in done.notes:
            context.note(note)
        return done.tallies

    def facts(self, state: EnsembleState, context: RoundContext) -> Mapping[str, Any]:
        """Returns the facts, with `generated_facts` under `GENERATOR`: post-processing."""
        found = generated_facts(state)
        return {**super().facts(state, context), **({GENERATOR: found} if found else {})}


def generated_facts(state: EnsembleState) -> dict[str, float]:
    """Returns how often the ensemble assigns the requested class to generated images, and how many
    classes an epoch's images have (`evaluation.generated`), averaged over the round's epochs. The
    student's agreement with the ensemble is averaged over the last tenth of the epochs. Empty if no
    image was generated."""
    tallies = () if state.tallies is None else state.tallies
    epochs = [describe(epoch) for epoch in tallies]
    found = average(epochs)
    return {**found, **average([{"student": epoch["student"]} for epoch in _last_tenth(epochs)])}


def _last_tenth(epochs: list[dict[str, float]]) -> list[dict[str, float]]:
    return epochs[len(epochs) - ceil(len(epochs) / 10) :]


@dataclass(frozen=True)
class Dense(DistilsWithoutData):
    """Settings: `DistilsWithoutData`, as DENSE has them: no cross-entropy on hard labels,
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
        self,
        models: Sequence[nn.Module],
        student: nn.Module,
        state: EnsembleState,
        context: RoundContext,
    ) -> EnsembleState:
        tallies = self.fit_student(models, student, average_of_logits, context)
        return EnsembleState({}, tallies=tallies)
