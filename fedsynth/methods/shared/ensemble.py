"""Base classes of DENSE, FedHydra and FedDF.

The clients train as in FedAvg, and the server distils their models into one. Each method defines
its distillation in `distil`.

A run with one round is the one-shot setting, in which the clients may have different architectures
(`ModelSettings.clients`). In further rounds, clients start from the distilled model, so all clients
must have the architecture of the server. If all architectures are equal, the student can start from
the average of the clients' models.

With differential privacy, the clients train by DP-SGD, and the distillation is post-processing of
their uploads. Batch norm is then refused, because the upload of its statistics would be a release
without noise. Use group norm instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, ClassVar

from torch import Tensor, nn

from fedsynth.core.capabilities import HeterogeneousClients
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters, Tensors
from fedsynth.core.method import Presets
from fedsynth.evaluation import EPOCHS, GENERATOR, GeneratorFacts
from fedsynth.evaluation.generated import average as average_facts
from fedsynth.evaluation.generated import describe
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.privacy.disclosure import SHARE, Disclosure, released
from fedsynth.synthesizer.distillation.ensemble import OneShotDistillation, OneShotSettings
from fedsynth.synthesizer.distillation.losses import has_statistics
from fedsynth.validation import one_of


@dataclass(frozen=True)
class EnsembleState(AveragingState):
    """The server's state in methods that distil the clients' models. It contains the measurements
    of the last round.

    Args:
        tallies: each epoch's tallies of generated images, [epochs, C, C], or None if no images were
            generated.
        matrices: measurements of the round's clients, by name, each [C, clients].
        accuracies: the student's accuracy after each epoch, [epochs], or None.
        other: the student that the round did not end with ("student_weights"), or empty.
    """

    tallies: Tensor | None = None
    matrices: Tensors = field(default_factory=dict)
    accuracies: Tensor | None = None
    other: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class EnsembleDistillation(TrainsLocally):
    """Base class for methods whose server distils the clients' models into one model.

    The defaults are those of FedHydra's comparison: SGD with lr=0.01, a batch of 128 examples, and
    200 local epochs. It does not state the momentum. `TrainsLocally` documents the settings of
    local training.

    Args:
        start: the student's initial model. "server" is the model from which the clients started,
            which is newly initialised in a one-shot run (FedHydra, Algorithm 1). "average" is the
            average of the clients' models (FedDF). If the clients have different architectures,
            "average" starts from the server's model too.
    """

    state = EnsembleState
    presets: ClassVar[Presets] = {"digits": {"local_epochs": 20}}
    features_refusal = "the server distils on images. Use fedavg instead"
    masks_refusal = "the server distils class probabilities"
    robust_refusal = "the server distils the clients' models and averages no models"
    oca_refusal = "a run ends with the distilled model"

    local_epochs: int = 200
    batch: int = 128
    momentum: float = 0.9
    start: str = one_of("server", "average")

    def distil(
        self, models: Mapping[int, Tensors], student: nn.Module, context: RoundContext
    ) -> EnsembleState:
        """Trains the student in place by distilling the clients' models.

        Returns a state without the student's parameters, which `server_step` adds.

        Args:
            models: the parameters and buffers of the clients' models, by client.
            student: the model to train.
            context: the context of the round.
        """
        raise NotImplementedError  # abstract

    def server_step(
        self, state: EnsembleState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> EnsembleState:
        models = {client: u.parameters for client, u in uploads.items() if u.weight > 0}
        if not models:
            return state
        initial = state.parameters
        if self.start == "average" and context.client_architectures is None:
            initial = average(uploads)
        student = context.load(initial)
        return replace(self.distil(models, student, context), parameters=student.state_dict())


@dataclass(frozen=True)
class DataFreeEnsembleDistillation(EnsembleDistillation, HeterogeneousClients, OneShotSettings):
    """Base class for methods whose server distils the clients' models on generated images.

    `OneShotSettings` documents the distillation's settings.
    """

    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **EnsembleDistillation.metric_privacy,
        GENERATOR: released("the server makes the generators from uploaded models", GeneratorFacts),
        EPOCHS: released("accuracies of students on public images", list[SHARE]),
    }
    variant_names = ("last", "average")
    presets: ClassVar[Presets] = {
        "digits": {
            "server_epochs": 20,
            "generator_steps": 10,
            "generator_width": 8,
            "generator_batch": 64,
            "generator_lr": 0.01,
            "start": "average",
        }
    }

    def result(
        self,
        training: OneShotDistillation,
        clients: Iterable[int],
        context: RoundContext,
        matrices: Tensors | None = None,
    ) -> EnsembleState:
        """Gives the student its final weights, and returns the state after the last epoch.

        Args:
            training: the finished training on the models of `clients`, in their order.
            clients: the indices of the clients.
            context: the round's context.
            matrices: matrices for the run folder.
        """
        self._note_models(training.models, clients, context)
        student, other = training.student, training.average.state_dict()
        if self.student_weights == "average":
            other = {name: value.clone() for name, value in student.state_dict().items()}
            student.load_state_dict(training.average.state_dict())
        return EnsembleState(
            {},
            tallies=training.tallies,
            matrices=matrices or {},
            accuracies=training.accuracies,
            other=other,
        )

    def variants(self, state: EnsembleState) -> Mapping[str, Tensors]:
        """Returns two students by name: one with the last weights, one with averaged weights."""
        if not state.other:
            return {}
        names = self.variant_names
        if self.student_weights == "average":
            names = names[::-1]
        return dict(zip(names, (state.parameters, state.other), strict=True))

    def _note_models(
        self, models: Sequence[nn.Module], clients: Iterable[int], context: RoundContext
    ) -> None:
        """Warns the user if the batch-norm loss leaves out some clients' models.

        These models have no batch norm with running statistics.
        """
        pairs = zip(clients, models, strict=True)
        without = [str(client) for client, model in pairs if not has_statistics(model)]
        if self.bn_weight and without:
            context.note(
                f"the batch-norm loss cannot use the models of clients {', '.join(without)}, "
                "because they have no batch norm with running statistics"
            )

    def facts(self, state: EnsembleState, context: RoundContext) -> Mapping[str, Any]:
        """Returns the round's metrics, including quality measures of the generated images
        (`GENERATOR`) and the student's accuracy after each epoch (`EPOCHS`).

        Both are post-processing of the uploads.
        """
        facts = dict(super().facts(state, context))
        if state.tallies is not None and len(state.tallies):
            facts[GENERATOR] = generated_facts(state.tallies)
        if state.accuracies is not None and bool(state.accuracies.isfinite().any()):
            facts[EPOCHS] = state.accuracies.tolist()
        return facts


def generated_facts(tallies: Tensor) -> dict[str, float]:
    """Computes quality measures of the generated images, averaged over the epochs of the round.

    `evaluation.generated` defines the measures.

    The student's agreement with the ensemble is averaged over the last tenth of the epochs only.

    Args:
        tallies: the tallies of at least one epoch, [epochs, C, C].
    """
    epochs = list(map(describe, tallies))
    last = average_facts(epochs[-ceil(len(epochs) / 10) :])
    return {**average_facts(epochs), "student": last["student"]}
