"""Base classes for methods whose clients train the global model on their own data.

A method defines the addition to a client's cross-entropy (`task`), the server's message
(`broadcast`), and the models' aggregation (`combine`). `TrainsLocally` implements the settings, the
clients' training, stragglers, a private run's release plan, and the cache of the clients' last
models. The loop of local SGD is `fedsynth.training.sgd.train_on`.

A group's clients are trained one after another, or together where that is faster with the same
result (`fedsynth.training.many_clients`).

With differential privacy, the penalty's gradient is added to each step's noisy mean gradient. The
penalty must not use the client's data. It may depend on the current weights, which are computed
from releases, on the server's message, and on public values. It is then post-processing and costs
no budget.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.capabilities import Measurements
from fedsynth.core.client import ExactClientView, Group, PrivateClientView
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors
from fedsynth.core.method import (
    ClientState,
    ClientStates,
    Plans,
    Presets,
    ReleasePlan,
    Request,
    Results,
    State,
    Upload,
)
from fedsynth.core.uploads import most_examples
from fedsynth.errors import SettingError
from fedsynth.methods.shared.aggregation import (
    AveragingState,
    average,
    counted_uploads,
    update_cache,
)
from fedsynth.models.flat import replicator
from fedsynth.models.registry import parameter_count
from fedsynth.privacy.disclosure import COUNT, Disclosure, public
from fedsynth.privacy.dpsgd import DpSgdSettings, check_model
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import numpy_generator, torch_generator
from fedsynth.training import digest, many_clients, sgd
from fedsynth.training.segmentation import network_losses
from fedsynth.validation import in_range, one_of

# The name of the trained model's release plan.
MODEL = "model"
# How often a client's training reports its progress.
PARTS = 100


@dataclass(frozen=True)
class Trained:
    """The result of one client's training, from which the upload is built.

    Args:
        weight: the upload's weight in the average.
        steps: the number of steps that the client took.
        client: a `Group` that contains only this client, for values computed from its data.
    """

    weight: float
    steps: int
    client: Any


def plain_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
    """Returns an upload that contains only the trained model, and an empty client state."""
    # a dict, because the state dict's metadata has more objects than it has tensors
    return ModelParameters(dict(model.state_dict()), trained.weight), {}


@dataclass(frozen=True)
class LocalObjective(sgd.Objective):
    """A method's additions to a client's local training in one round.

    An objective also makes the client's upload.

    Args:
        loss: a function that replaces the cross-entropy. It takes the network, images x [N, C, H,
            W] and labels y [N] or masks [N, H, W], and returns the loss of each example [N]. With
            differential privacy, an example's loss must not depend on other examples.
        penalty: a function from the network in training to a scalar, which is added to each step's
            loss. It must not use the client's data.
        before_step: a function that is called with the network in training before each step, for
            example to train a generator. It must not use the client's data.
        state: the objects that the functions change, by name, including random generators. They are
            saved in checkpoints, and steps are then not recorded as CUDA graphs. The mapping is
            empty if the functions change nothing.
        make_upload: a function from the trained model and its `Trained` to the upload and the
            client's new state.

    >>> from fedsynth import ModelSettings, RunSettings, TrainsLocally, simulate
    >>> class Ridge(TrainsLocally):
    ...     name = "ridge"
    ...     def task(self, client, message, state, context):
    ...         squares = lambda model: model.classifier.weight.square().sum()
    ...         return LocalObjective(penalty=lambda model: 0.01 * squares(model))
    >>> result = simulate(RunSettings(Ridge(lr=0.1), rounds=1, model=ModelSettings("linear")))
    >>> result.accuracy > 0.5
    True
    """

    make_upload: Callable[[nn.Module, Trained], tuple[Message, ClientState]] = plain_upload


def _report_client(
    report: Callable[..., None], client: int, clients: int, stage: str, completed: int, total: int
) -> None:
    """Reports one client's progress as a part of its group's progress."""
    report(stage, client * total + completed, clients * total)


def _trained(learner: many_clients.Learner, client: ExactClientView) -> Trained:
    examples = len(learner.examples)
    return Trained(float(examples), learner.settings.total_steps(examples), client)


@dataclass(frozen=True)
class TrainsLocally(Measurements):
    """Base class for methods in which clients train locally and the server averages the models.

    Args:
        local_epochs: number of passes over the client's data in a round.
        batch: number of examples in a step.
        lr: learning rate of local training.
        momentum: local SGD's momentum, or Adam's β₁.
        weight_decay: weight decay of local training. λ·w is added to the gradient.
        optimiser: the optimiser of local training, "sgd" or "adam" (Kingma and Ba 2015). The public
            codes of HarmoFL and FedFA train by Adam on ProstateMRI, with lr=1e-4,
            weight_decay=1e-4, batch=16, local_epochs=1 and 500 rounds. Their clients keep Adam's
            moments between rounds. Here each round starts with new ones.
        local_steps: every client's number of steps per round. With 0, `local_epochs` determines it.
        equal_steps: whether every client takes the same number of steps, local_epochs ·
            ⌊N/(K·batch)⌋, which is the number for a client with the mean number of examples.
            FedKF's official code does so, and so do its paper's tables. With differential privacy,
            the steps are equal in any case.
        drop_last: whether an epoch leaves out its last batch if it is not full, unless it is the
            only one, as FedFA's public code does: batch norm is unstable on a few examples. It has
            no effect with differential privacy, which samples each batch.
        stragglers: share of a round's clients that complete only a random number of 1 …
            local_epochs passes (FedProx, Sec. 5.2). They are drawn publicly.
        drop_stragglers: whether the uploads of stragglers are ignored, as FedAvg does in the
            FedProx paper. Otherwise their partial work is used.
        final: the run's final model. "aca" is the average over the last round's active clients.
            "oca" is the average over all clients' last models (T1 in FedKF), for which the server
            caches each client's model. Clients start from ACA in both cases.
        oca: which models OCA averages. "seen" averages the clients that have taken part so far, as
            in FedKF's official code. "all" averages all K clients, as in FedKF's Algorithm 1, where
            a client that has not taken part has w⁰. In early rounds, most averaged models are
            therefore untrained.

    A custom method overrides only its differences, such as the server's aggregation:

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
    masks_refusal = ""
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        "stragglers": public("drawn from the run's seed", dict[str, COUNT]),
        "stragglers_dropped": public("a setting", bool),
    }
    variant_names = ("aca", "oca")
    oca_refusal: ClassVar[str] = ""
    """The reason why a run cannot end with the average of all clients' last models, or empty."""
    adam_refusal: ClassVar[str] = ""
    """The reason why clients cannot train by Adam, or empty."""
    presets: ClassVar[Presets] = {
        "digits": {"batch": 32},
        "plays": {"batch": 32, "lr": 1.0},
        "shapes": {"local_epochs": 2, "batch": 8, "lr": 0.05},
    }

    local_epochs: int = in_range(10, 1)
    batch: int = in_range(256, 1)
    lr: float = in_range(0.01, 0)
    momentum: float = in_range(0.9, 0, 1)
    weight_decay: float = in_range(0.0, 0)
    optimiser: str = one_of("sgd", "adam")
    local_steps: int = in_range(0, 0)
    equal_steps: bool = False
    drop_last: bool = False
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
            reason = (
                f"must be 'aca' for {self.name}, because {self.oca_refusal}. Set method.final=aca"
            )
            raise SettingError("method", "final", reason)
        if self.optimiser == "adam" and self.adam_refusal:
            reason = (
                f"must be 'sgd' for {self.name}, because {self.adam_refusal}. Set "
                "method.optimiser=sgd"
            )
            raise SettingError("method", "optimiser", reason)
        if self.optimiser == "adam" and self.momentum == 1:
            reason = "must be below 1 for Adam, got 1. Set method.momentum=0.9"
            raise SettingError("method", "momentum", reason)

    def task(
        self, client: int, message: Request, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        """Returns the method's additions to a client's local training."""
        return LocalObjective()

    def _objective(
        self, client: int, message: Request, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        """Returns the client's objective, with a segmentation loss as the default for masks."""
        objective = self.task(client, message, state, context)
        if context.spec.has_masks and objective.loss is None:
            return replace(objective, loss=network_losses)
        return objective

    def local_optimiser(self) -> sgd.Optimiser:
        """Returns the optimiser for local training, with and without differential privacy."""
        if self.optimiser == "adam":
            return sgd.Adam(self.lr, self.momentum, weight_decay=self.weight_decay)
        return sgd.MomentumSgd(self.lr, self.momentum, self.weight_decay)

    def start_model(
        self, client: int, message: Request, state: ClientState, context: RoundContext
    ) -> nn.Module:
        """Returns the network that a client trains.

        It is the server's model, or a newly initialised network if the clients have different
        architectures.
        """
        if context.client_architectures is None:
            return context.load(message.parameters)
        return copy.deepcopy(context.architecture_of(client)).to(context.device)

    def client_step(
        self, message: Request, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        if isinstance(clients, ExactClientView) and self.client_bytes(context) is not None:
            objectives = self._plain_objectives(message, clients, states, context)
            if objectives:
                # memory decides how many clients share a step, which must not change the precision
                context = replace(context, precision=torch.float32)
            if len(objectives) > 1:
                return self._train_together(objectives, message, clients, states, context)
        results: Results = []
        for client, state in zip(clients.split(), states, strict=True):
            report = partial(_report_client, context.report, len(results), len(states))
            turn = replace(context, report=report)
            if isinstance(client, PrivateClientView):
                results.append(self._train_privately(message, client, state, turn))
            else:
                results.append(self._train_openly(message, client, state, turn))
            turn.report("local training", 1, 1)
        return results

    def _train_openly(
        self, message: Request, client: ExactClientView, state: ClientState, context: RoundContext
    ) -> tuple[Message, ClientState]:
        """Trains one client's model without privacy, and returns the upload and new state."""
        (number,) = client.ids
        objective = self._objective(number, message, state, context)
        epochs = self.straggler_epochs(context).get(number)
        model = self.start_model(number, message, state, context)
        learner = self._learner(model, client, objective, epochs, context)
        examples = learner.examples
        keeper = None
        name = f"train-{number}"
        if objective.plain or objective.state:
            keeper = context.keeper
            if keeper.shares_trainings and digest.covers(objective):
                name = digest.training_name(
                    learner, client.images, client.labels, context.device, context.precision
                )
        sgd.train_on(
            model,
            lambda indices: client.images(examples[indices]),
            client.labels(examples),
            learner.settings,
            learner.generator,
            objective,
            partial(context.report, "local training"),
            keeper,
            name,
            context.precision,
        )
        return self._result(model, _trained(learner, client), objective, state, epochs)

    def _train_privately(
        self, message: Request, client: PrivateClientView, state: ClientState, context: RoundContext
    ) -> tuple[Message, ClientState]:
        """Trains one client's model by DP-SGD, with exactly the steps that the ledger records."""
        (number,) = client.ids
        objective = self._objective(number, message, state, context)
        model = self.start_model(number, message, state, context)
        plan = client.plan(MODEL)
        settings = DpSgdSettings(
            self.local_optimiser(),
            plan.sample_rate * context.nominal_size,
            objective.penalty,
            objective.loss,
            objective.before_step,
        )
        client.fit(client.mechanisms(MODEL), model, settings)
        epochs = self.straggler_epochs(context).get(number)
        return self._result(model, Trained(1.0, plan.steps, client), objective, state, epochs)

    def _plain_objectives(
        self, message: Request, clients: Group, states: ClientStates, context: RoundContext
    ) -> list[LocalObjective]:
        """Returns all objectives, or an empty list if the clients cannot be trained together.

        They can if all objectives are plain (`sgd.Objective.plain`).
        """
        objectives: list[LocalObjective] = []
        for client, state in zip(clients.ids, states, strict=True):
            objective = self._objective(client, message, state, context)
            if not objective.plain:
                return []
            objectives.append(objective)
        return objectives

    def _train_together(
        self,
        objectives: Sequence[LocalObjective],
        message: Request,
        clients: ExactClientView,
        states: ClientStates,
        context: RoundContext,
    ) -> Results:
        """Trains the models of all clients in a group together.

        All objectives must be plain (`sgd.Objective.plain`).
        """
        straggler_epochs = self.straggler_epochs(context)
        learners: list[many_clients.Learner] = []
        views = clients.split()
        same_start = type(self).start_model is TrainsLocally.start_model
        replicas: list[Callable[[Tensor], nn.Module]] = []
        for client, objective, state in zip(views, objectives, states, strict=True):
            (number,) = client.ids
            if not (replicas and same_start):
                model = self.start_model(number, message, state, context)
                replica = replicator(model)
            replicas.append(replica)
            epochs = straggler_epochs.get(number)
            learners.append(self._learner(model, client, objective, epochs, context))
        report = partial(context.report, "local training")
        weights = many_clients.train_together(learners, clients.images, clients.labels, report)
        results: Results = []
        for view, learner, objective, state, flat, replica in zip(
            views, learners, objectives, states, weights, replicas, strict=True
        ):
            epochs = straggler_epochs.get(view.ids[0])
            trained = _trained(learner, view)
            results.append(self._result(replica(flat), trained, objective, state, epochs))
        return results

    def _learner(
        self,
        model: nn.Module,
        client: ExactClientView,
        objective: LocalObjective,
        straggler_epochs: int | None,
        context: RoundContext,
    ) -> many_clients.Learner:
        """Returns all that one client needs for training: network, examples and settings."""
        return many_clients.Learner(
            model,
            client.examples(0),
            self._sgd(straggler_epochs or self.local_epochs, context),
            torch_generator(context.seed, "local training", context.round, client.ids[0]),
            objective.penalty,
        )

    def _result(
        self,
        model: nn.Module,
        trained: Trained,
        objective: LocalObjective,
        state: ClientState,
        straggler_epochs: int | None,
    ) -> tuple[Message, ClientState]:
        """Returns the upload and the new state of a client after training."""
        if self.drop_stragglers and straggler_epochs is not None:
            upload, _ = objective.make_upload(model, replace(trained, weight=0.0))
            return upload, state  # as if the client had not taken part
        return objective.make_upload(model, trained)

    def client_bytes(self, context: RoundContext) -> int | None:
        if context.client_architectures is not None or context.privacy is not None:
            return None
        needed = many_clients.learner_bytes(context.architecture, self.batch, context.spec)
        if needed is None or context.device.type != "cpu":
            return needed
        # so that a CPU trains no more clients at once than its caches hold
        return needed * max(1, context.memory_bytes // 2 // many_clients.CACHED_BYTES)

    def client_cost(self, examples: int, context: RoundContext) -> float:
        return min(examples, self.local_steps) or examples

    def straggler_epochs(self, context: RoundContext) -> dict[int, int]:
        """Maps the index of each straggler to the number of passes that it makes in the round."""
        if not self.stragglers:
            return {}
        active = context.active
        rng = numpy_generator(context.seed, "stragglers", context.round)
        drawn = rng.choice(len(active), round(self.stragglers * len(active)), replace=False)
        return {active[i]: int(rng.integers(1, self.local_epochs + 1)) for i in sorted(drawn)}

    def keeps_cache(self) -> bool:
        """Returns True if the server stores each client's latest model."""
        return self.final == "oca"

    def combine(
        self, state: State, uploads: Mapping[int, Upload], context: RoundContext
    ) -> AveragingState:
        """Computes the server's next state from the uploads with a weight above zero.

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

    def variants(self, state: State) -> Mapping[str, Tensors]:
        if not state.overall:
            return {}
        return {"aca": state.parameters, "oca": state.overall}

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        for architecture in (context.architecture, *(context.client_architectures or ())):
            check_model(architecture)
        rate = privacy.sample_rate or min(1.0, self.batch / context.nominal_size)
        plan = ReleasePlan(
            name=MODEL,
            quantity="model update",
            mechanism="dp-sgd",
            clipped="gradient of each example with respect to all parameters",
            clip=privacy.clip or 1.0,
            sample_rate=rate,
            steps=self.local_steps or math.ceil(self.local_epochs / rate - 1e-9),
            dimension=parameter_count(context.architecture),
        )
        return (plan,)

    def client_plans(self, plans: Plans, client: int, context: RoundContext) -> Plans:
        """Returns the plans with one client's number of steps and model dimension.

        A straggler takes fewer steps, and the clients may have different architectures.
        """
        model, *further = plans
        dimension = parameter_count(context.architecture_of(client))
        steps = model.steps
        epochs = self.straggler_epochs(context).get(client)
        if epochs is not None:
            steps = math.ceil(epochs / model.sample_rate - 1e-9)
        return replace(model, steps=steps, dimension=dimension), *further

    def _sgd(self, epochs: int, context: RoundContext) -> sgd.SgdSettings:
        """Returns the SGD settings for `epochs` passes over the data.

        With `local_steps` or `equal_steps`, all clients take the same number of steps instead.
        """
        steps = self.local_steps or None
        if self.equal_steps:
            sizes = context.sizes or (context.nominal_size,)
            mean = sum(sizes) / len(sizes)
            steps = epochs * max(1, int(mean / self.batch))
        optimiser = self.local_optimiser()
        return sgd.SgdSettings(epochs, self.batch, optimiser, steps=steps, drop_last=self.drop_last)

    def most_steps(self, client: int, context: RoundContext) -> int:
        """Returns an upper bound on a client's number of steps.

        The bound depends only on public sizes or on the size that the client has declared.
        """
        if context.privacy is not None:
            return self.release_plans(context.privacy, context)[0].steps
        examples = int(most_examples(client, context))
        return self._sgd(self.local_epochs, context).total_steps(examples)
