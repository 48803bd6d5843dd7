"""The common part of DENSE, FedHydra and FedDF: clients train as in FedAvg, and the server distils
their models into one (`distil`, on each page).

One round is the one-shot setting. In further rounds clients start from the distilled model, so all
must have the server's architecture; in a single round each client may have a different one
(`ModelSettings.clients`). Homogeneous students start from the clients' average.

With differential privacy the clients train by DP-SGD, and the server only post-processes their
uploads. Uploaded batch-norm statistics would be a release without noise, so batch norm is then
refused; use group norm instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, ClassVar

from torch import Tensor, nn

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import Presets
from fedsynth.errors import SettingError
from fedsynth.evaluation.generated import GENERATOR, GeneratorFacts, describe
from fedsynth.evaluation.generated import average as average_facts
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.privacy.disclosure import Disclosure, released
from fedsynth.synthesizer.distillation.ensemble import OneShotSettings
from fedsynth.synthesizer.distillation.losses import has_statistics
from fedsynth.validation import one_of


@dataclass(frozen=True)
class EnsembleState(AveragingState):
    """The state of a distilling server, with measurements of the last round.

    Args:
        tallies: of the generated images, for the round's facts [epochs, C, C]; None: none were
            generated.
        matrices: measurements of its clients, each [C, clients].
    """

    tallies: Tensor | None = None
    matrices: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class EnsembleDistillation(TrainsLocally):
    """Settings of FedHydra's comparison: SGD 0.01, batch 128, 200 local epochs; momentum is not
    named.

    Args:
        start: of the student: "server", the model that clients started from, which is fresh in a
            one-shot run (FedHydra's Algorithm 1), or "average" of the clients' models (FedDF's;
            with clients of other architectures it is a fresh network too).
    """

    heterogeneous: ClassVar[bool] = True
    state: ClassVar[type[ServerState]] = EnsembleState
    presets: ClassVar[Presets] = {"digits": {"local_epochs": 20}}
    features_refusal: ClassVar[str] = "its server distils on generated or public images: use fedavg"
    robust_refusal: ClassVar[str] = (
        "its server distils the logits of the clients' models and does not average the models"
    )

    local_epochs: int = 200
    batch: int = 128
    momentum: float = 0.9
    start: str = one_of("server", "average")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final == "oca":
            reason = f"does not apply to {self.name}, whose final model is the distilled one"
            raise SettingError("method", "final", reason, value="oca")

    def distil(
        self, models: Sequence[nn.Module], student: nn.Module, context: RoundContext
    ) -> EnsembleState:
        """Trains `student` in place, and returns the state without its parameters.

        Args:
            models: the clients', frozen and in evaluation mode.
        """
        raise NotImplementedError  # abstract

    def server_step(
        self, state: EnsembleState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> EnsembleState:
        models = [
            context.load(u.parameters, client).requires_grad_(False).eval()
            for client, u in uploads.items()
            if u.weight > 0
        ]
        if not models:
            return state
        initial = state.parameters
        if self.start == "average" and context.client_architectures is None:
            initial = average(uploads)
        student = context.load(initial)
        distilled = self.distil(models, student, context)
        return replace(distilled, parameters=student.state_dict())


@dataclass(frozen=True)
class DataFreeEnsembleDistillation(OneShotSettings, EnsembleDistillation):
    """Settings of the server's distillation: see `OneShotSettings`."""

    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **EnsembleDistillation.metric_privacy,
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

    def __post_init__(self) -> None:
        EnsembleDistillation.__post_init__(self)
        OneShotSettings.__post_init__(self)

    def note_models(self, models: Sequence[nn.Module], context: RoundContext) -> None:
        """Notes which models have no statistics for L_BN."""
        without = [str(k) for k, model in enumerate(models) if not has_statistics(model)]
        if self.bn_weight and without:
            context.note(
                f"the batch-norm term skips models {', '.join(without)}, which have no batch "
                "norm with running statistics"
            )

    def facts(self, state: EnsembleState, context: RoundContext) -> Mapping[str, Any]:
        """Returns the facts, with `generated_facts` under `GENERATOR`: post-processing."""
        facts = dict(super().facts(state, context))
        if state.tallies is not None and len(state.tallies):
            facts[GENERATOR] = generated_facts(state.tallies)
        return facts


def generated_facts(tallies: Tensor) -> dict[str, float]:
    """Returns how often the ensemble assigns the requested class to generated images, and how many
    classes an epoch's images have (`evaluation.generated`), averaged over the round's epochs.

    The student's agreement with the ensemble is averaged over the last tenth of the epochs.

    Args:
        tallies: [epochs, C, C], of at least one epoch.
    """
    epochs = [describe(tally) for tally in tallies]
    tenth = ceil(len(epochs) / 10)
    last = [{"student": epoch["student"]} for epoch in epochs[-tenth:]]
    return {**average_facts(epochs), **average_facts(last)}
