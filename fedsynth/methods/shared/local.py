"""The base class of methods whose clients train the global model on their own data and send it.

A method defines what it adds to a client's cross-entropy (`task`), the server's message
(`broadcast`), and the aggregation of the models (`server_step`). This module implements the
settings, stragglers, the release plan of a private run, and the cache of every client's last model.
`client_training.py` trains a group of clients.

With differential privacy, the gradient of a task's penalty is added to the noisy mean gradient of
each step. The penalty must not use the client's data. It may depend on the current weights, which
are computed from releases, on the server's message, and on public values. It is then
post-processing and costs no budget.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from fedsynth.core.capabilities import Measurements
from fedsynth.core.client import Group, PrivateClientView
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors
from fedsynth.core.method import (
    ClientState,
    ClientStates,
    Presets,
    Request,
    Results,
    State,
    Upload,
)
from fedsynth.core.uploads import most_examples
from fedsynth.errors import SettingError
from fedsynth.methods.shared import client_training
from fedsynth.methods.shared.aggregation import (
    AveragingState,
    average,
    counted_uploads,
    update_cache,
)
from fedsynth.models.flat import FlatNetwork
from fedsynth.models.on_features import input_size
from fedsynth.models.registry import parameter_count
from fedsynth.privacy.disclosure import COUNT, Disclosure, public
from fedsynth.privacy.dpsgd import check_model
from fedsynth.privacy.plans import Plans, ReleasePlan
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import numpy_generator
from fedsynth.training.many_clients import learner_bytes, worth_batching
from fedsynth.training.sgd import MomentumSgd, Optimiser, SgdSettings, steps_of
from fedsynth.validation import in_range, one_of

# Number of copies of a network's parameters that are in memory for each client of a group whose
# models are trained in turn: memory before and after, the upload and a penalty.
PARAMETER_COPIES = 4


def _report_part(
    report: Callable[..., None], part: int, parts: int, stage: str, completed: int, total: int
) -> None:
    """Reports the progress of one of several equal parts."""
    report(stage, part * total + completed, parts * total)


@dataclass(frozen=True)
class TrainsLocally(Measurements):
    """Base class of methods with local training on the clients and an average on the server.

    Args:
        local_epochs: number of passes over the client's data in a round.
        batch: number of examples in a step.
        lr: learning rate of local SGD.
        momentum: momentum of local SGD.
        weight_decay: weight decay of local SGD.
        local_steps: number of steps of every client in a round. With 0, `local_epochs` determines
            the number of steps.
        equal_steps: whether every client takes the same number of steps, local_epochs ·
            ⌊N/(K·batch)⌋, which is the number for a client with the mean number of examples.
            FedKF's official code does this, so the tables of its paper do too. With differential
            privacy, the steps are equal in any case.
        stragglers: share of the clients of a round that complete only a random number of 1 …
            local_epochs passes (FedProx, Sec. 5.2). They are drawn publicly.
        drop_stragglers: whether the uploads of stragglers are ignored, as FedAvg does in the
            FedProx paper. Otherwise their partial work is used.
        final: the model that a run ends with. "aca" is the average over the active clients of the
            last round. "oca" is the average over the last models of all clients (T1 in FedKF), for
            which the server keeps a model of each client. Clients start from ACA in both cases.
        oca: which models OCA averages. "seen" averages the clients that have taken part so far, as
            in FedKF's official code. "all" averages all K clients, as in FedKF's Algorithm 1, where
            a client that has not taken part has w⁰. In early rounds, most models of that average
            are therefore untrained.

    A custom method overrides what differs, such as the server's aggregation:

    >>> import torch
    >>> from fedsynth import ModelSettings, RunSettings, simulate
    >>> class Median(TrainsLocally):
    ...     name = "median"
    ...     def combine(self, state, uploads, context):
    ...         of = lambda n: torch.stack([u.parameters[n] for u in uploads.values()])
    ...         return replace(state, parameters={n: of(n).median(0)[0] for n in state.parameters})
    >>> simulate(RunSettings(Median(), rounds=3, model=ModelSettings("linear"))).accuracy > 0.5
    True
    """

    upload: ClassVar[type[Message]] = ModelParameters
    state: ClassVar[type[ServerState]] = AveragingState
    dp_mechanisms: ClassVar[tuple[str, ...]] = ("dp-sgd",)
    robust_refusal = ""
    features_refusal = ""
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        "stragglers": public("drawn from the run's seed", dict[str, COUNT]),
        "stragglers_dropped": public("a setting", bool),
    }
    variant_names = ("aca", "oca")
    oca_refusal: ClassVar[str] = ""
    """The reason why a run cannot end with the average of all clients' last models, or empty."""
    presets: ClassVar[Presets] = {"digits": {"batch": 32}}
    one_pass: ClassVar[bool] = False
    """Whether all tasks of the method are plain (`LocalObjective.plain`). Several clients with a
    dense network can then be trained together."""

    local_epochs: int = in_range(10, 1)
    batch: int = in_range(256, 1)
    lr: float = in_range(0.01, 0)
    momentum: float = in_range(0.9, 0, 1)
    weight_decay: float = in_range(0.0, 0)
    local_steps: int = in_range(0, 0)
    equal_steps: bool = False
    stragglers: float = in_range(0.0, 0, 1)
    drop_stragglers: bool = False
    final: str = one_of("aca", "oca")
    oca: str = one_of("seen", "all")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("equal_steps", "stragglers"):
            if self.local_steps and getattr(self, key):
                reason = "has no effect with method.local_steps. Set method.local_steps=0"
                raise SettingError("method", key, reason)
        if self.final == "oca" and self.oca_refusal:
            reason = f"must be 'aca' for {self.name}, because {self.oca_refusal}"
            raise SettingError("method", "final", reason)

    def task(
        self, client: int, message: Request, state: ClientState, context: RoundContext
    ) -> client_training.LocalObjective:
        """Returns what the method adds to this client's local training in this round."""
        return client_training.LocalObjective()

    def optimiser(self) -> Optimiser:
        """Returns the optimiser with which a client trains its model. It is the same with and
        without differential privacy."""
        return MomentumSgd(self.lr, self.momentum, self.weight_decay)

    def start_model(
        self, client: int, message: Request, state: ClientState, context: RoundContext
    ) -> nn.Module:
        """Returns the network that a client trains.

        This is the model of the message, or a newly initialised network if the clients have
        different architectures.
        """
        if context.client_architectures is None:
            return context.load(message.parameters)
        return copy.deepcopy(context.architecture_of(client)).to(context.device)

    def client_step(
        self, message: Request, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        if isinstance(clients, PrivateClientView) or self._trains_together(context):
            models = []
            for client, state in zip(clients.ids, states, strict=True):
                models.append(self.start_model(client, message, state, context))
            return self._trained(models, message, clients, states, context)
        results: Results = []
        of_message = type(self).start_model is TrainsLocally.start_model
        reusable = of_message and next(context.architecture.buffers(), None) is None
        shared: FlatNetwork | None = None  # trains for all clients in turn
        start: Tensor | None = None  # its initial weights
        for view, state in zip(clients.split(), states, strict=True):
            if shared is not None and start is not None and reusable:
                shared.use(start.clone())  # the uploads before it keep their values
            else:
                model = self.start_model(view.ids[0], message, state, context)
                shared = FlatNetwork(model, requires_grad=True)
                start = shared.flat.clone()
            report = partial(_report_part, context.report, len(results), len(states))
            turn = replace(context, report=report)
            results += self._trained([shared.module], message, view, [state], turn, shared)
        return results

    def _trained(
        self,
        models: Sequence[nn.Module],
        message: Request,
        clients: Group,
        states: ClientStates,
        context: RoundContext,
        network: FlatNetwork | None = None,
    ) -> Results:
        """Trains the models of clients, and returns the clients' uploads and states.

        `network` is that of the only model, if it is already flat.
        """
        straggler_epochs = self.straggler_epochs(context)
        objectives: list[client_training.LocalObjective] = []
        settings: list[SgdSettings] = []
        for client, state in zip(clients.ids, states, strict=True):
            objectives.append(self.task(client, message, state, context))
            settings.append(self._sgd(straggler_epochs.get(client, self.local_epochs), context))
        if isinstance(clients, PrivateClientView):
            trained = client_training.train_privately(
                models, clients, objectives, self.optimiser(), context
            )
        else:
            trained = client_training.train_openly(
                models,
                clients,
                objectives,
                settings,
                context,
                together=self._trains_together(context),
                network=network,
            )
        results: Results = []
        for k, view in enumerate(clients.split()):
            if self.drop_stragglers and clients.ids[k] in straggler_epochs:
                upload, _ = objectives[k].make_upload(models[k], replace(trained[k], weight=0.0))
                state = states[k]  # as if the client had not taken part
            else:
                upload, state = objectives[k].make_upload(models[k], trained[k])
            results.append((self.finalize_upload(upload, view, message, context), state))
        return results

    def client_bytes(self, context: RoundContext) -> int | None:
        network = context.architecture
        if not self._steps_in_groups(context):
            return None
        if self._trains_together(context):
            return learner_bytes(network, self.batch, input_size(network, context.spec))
        return 4 * PARAMETER_COPIES * parameter_count(network)

    def _steps_in_groups(self, context: RoundContext) -> bool:
        return self.one_pass and context.client_architectures is None and context.privacy is None

    def _trains_together(self, context: RoundContext) -> bool:
        """Returns whether the models of a group are trained at once, and not in turn."""
        network = context.architecture
        scalars = input_size(network, context.spec)
        return self._steps_in_groups(context) and worth_batching(network, self.batch, scalars)

    def finalize_upload(
        self, upload: Upload, client: Any, message: Request, context: RoundContext
    ) -> Upload:
        """Adds fields to a client's upload that are computed from its data after training.

        Args:
            upload: the upload that the client's objective made.
            client: a `Group` that contains only this client.
            message: the server's message.
            context: the context of the round.
        """
        return upload

    def straggler_epochs(self, context: RoundContext) -> dict[int, int]:
        """Returns the number of passes that each straggler of the round completes, by client
        index."""
        if not self.stragglers:
            return {}
        active = context.active
        rng = numpy_generator(context.seed, "stragglers", context.round)
        drawn = rng.choice(len(active), round(self.stragglers * len(active)), replace=False)
        return {active[i]: int(rng.integers(1, self.local_epochs + 1)) for i in sorted(drawn)}

    def keeps_cache(self) -> bool:
        """Returns whether the server keeps the last model of every client."""
        return self.final == "oca"

    def combine(
        self, state: State, uploads: Mapping[int, Upload], context: RoundContext
    ) -> AveragingState:
        """Computes the server's next state from the uploads that have a weight above zero.

        With robust aggregation, all uploads are copies of the robust aggregate
        (`methods/shared/aggregation.py`).

        Args:
            state: the server's state.
            uploads: at least one upload, by client index. All weights are above zero.
            context: the context of the round.
        """
        averaged: AveragingState = replace(state, parameters=average(uploads))
        return averaged

    def server_step(
        self, state: State, uploads: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        counted = counted_uploads(uploads, state.parameters, context)
        if not counted:  # every client was dropped or has no examples: skip the round
            skipped: ServerState = state
            return skipped
        combined = self.combine(state, counted, context)
        if not self.keeps_cache():
            return combined
        return update_cache(combined, state, uploads, context, all_slots=self.oca == "all")

    def final_parameters(self, state: AveragingState) -> Tensors:
        if self.final == "oca" and state.overall:
            return state.overall
        return state.parameters

    def planned_facts(self, context: RoundContext) -> Mapping[str, Any]:
        """Returns the number of passes of each straggler, and whether stragglers are dropped.

        Both are public, because stragglers are drawn publicly.
        """
        epochs = self.straggler_epochs(context)
        if not epochs:
            return {}
        by_name = {str(client): count for client, count in epochs.items()}
        return {"stragglers": by_name, "stragglers_dropped": self.drop_stragglers}

    def variants(self, state: AveragingState) -> Mapping[str, Tensors]:
        if not state.overall:
            return {}
        return {"aca": state.parameters, "oca": state.overall}

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        for architecture in (context.architecture, *(context.client_architectures or ())):
            check_model(architecture)
        rate = privacy.sample_rate or min(1.0, self.batch / context.nominal_size)
        plan = ReleasePlan(
            name=client_training.MODEL,
            quantity="model update",
            mechanism="dp-sgd",
            clipped="gradient of each example with respect to all parameters",
            clip=privacy.clip or 1.0,
            sample_rate=rate,
            steps=self.local_steps or math.ceil(self.local_epochs / rate),
            dimension=parameter_count(context.architecture),
        )
        return (plan,)

    def client_plans(self, plans: Plans, client: int, context: RoundContext) -> Plans:
        """Returns the plans with this client's number of steps and this client's model dimension.

        A straggler takes fewer steps, and the clients may have different architectures.
        """
        model, *further = plans
        dimension = parameter_count(context.architecture_of(client))
        steps = model.steps
        epochs = self.straggler_epochs(context).get(client)
        if epochs is not None:
            steps = math.ceil(epochs / model.sample_rate)
        return replace(model, steps=steps, dimension=dimension), *further

    def _sgd(self, epochs: int, context: RoundContext) -> SgdSettings:
        """Returns the settings of SGD for `epochs` passes, or for a number of steps that is the
        same for all clients."""
        steps = self.local_steps or None
        if self.equal_steps:
            sizes = context.sizes or (context.nominal_size,)
            mean = sum(sizes) / len(sizes)
            steps = epochs * max(1, int(mean / self.batch))
        return SgdSettings(epochs, self.batch, self.optimiser(), steps=steps)

    def most_steps(self, client: int, context: RoundContext) -> int:
        """Returns an upper bound on the number of steps of this client, computed from public sizes
        or from the size that the client declared."""
        if context.privacy is not None:
            return self.release_plans(context.privacy, context)[0].steps
        return steps_of(self._sgd(self.local_epochs, context), int(most_examples(client, context)))
