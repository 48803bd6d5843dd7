"""What methods share whose clients train the global model on their own data and send it.

A method says what a client's training adds to the cross-entropy (`task`), what the server sends (`broadcast`), and what it makes of the models
(`server_step`); the rest is here: open training by SGD, private training by DP-SGD, and the cache of every client's last model.

With differential privacy a task's penalty is added to each step's noisy mean gradient. It may depend on the iterate, which is computed from
releases, on the server's message and on public values: post-processing, at no cost. It must not see the client's data.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, OpenClients, PrivateClients
from fedsynth.core.messages import Message, ModelParameters, parameters_of
from fedsynth.core.method import Memory, Method, PrivatePlan, RoundContext, ServerState, check_choice, check_ranges
from fedsynth.core.random import torch_generator
from fedsynth.errors import SettingError
from fedsynth.methods.aggregation import average, cached, overall_average
from fedsynth.models.registry import parameter_count
from fedsynth.privacy.dpsgd import DpSgdSettings, Penalty, check_model
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.training import SgdSettings, train_on


@dataclass(frozen=True)
class Task:
    """What one client's training of a round adds to plain SGD on its cross-entropy.

    Args:
        penalty: (the network in training) -> a scalar added to each step's loss; sees no data of the client.
        memory: what the client keeps, asked after the training.
    """

    penalty: Penalty | None = None
    memory: Callable[[], Memory] = dict


@dataclass(frozen=True)
class TrainsLocally(Method):
    """Local training, and averaging on the server.

    Args:
        local_epochs, batch, lr, momentum, weight_decay: local SGD.
        local_steps: 0: `local_epochs` passes over the client's own data; else so many steps, the same for every client.
        final: the model that the run ends with: "aca", the average of the round's active clients, or "oca", that of every client's last
            model (FedKF's T1; the server then keeps a model of each client). Clients start from ACA in any case.
    """

    upload: ClassVar[type[Message]] = ModelParameters
    protects: ClassVar[tuple[str, ...]] = ("dp-sgd",)

    local_epochs: int = 10
    batch: int = 256
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    local_steps: int = 0
    final: str = "aca"

    def __post_init__(self) -> None:
        check_ranges(self, local_epochs=(1, inf), batch=(1, inf), lr=(0, inf), momentum=(0, 1), weight_decay=(0, inf))
        check_ranges(self, local_steps=(0, inf))
        check_choice("final", self.final, ("aca", "oca"))

    def broadcast(self, state: ServerState, context: RoundContext) -> Message:
        return ModelParameters(state.parameters, 1.0)

    def task(self, client: int, message: Message, memory: Memory, context: RoundContext) -> Task:
        """What this client's training of this round adds."""
        return Task()

    def client_step(
        self, message: Message, clients: ClientGroup, memories: Sequence[Memory], context: RoundContext
    ) -> list[tuple[Message, Memory]]:
        if context.client_architectures is None:
            start = context.load(parameters_of(message))
            models = [copy.deepcopy(start) for _ in clients.ids]
        else:
            models = [copy.deepcopy(context.architecture_of(k)).to(context.device) for k in clients.ids]
        tasks = [self.task(k, message, memory, context) for k, memory in zip(clients.ids, memories, strict=True)]
        if isinstance(clients, PrivateClients):
            self._train_privately(models, clients, tasks, context)
            weights = [1.0] * len(models)
        else:
            self._train(models, clients, tasks, context)
            weights = [float(n) for n in clients.sizes()]
        return [
            (ModelParameters(model.state_dict(), weight), task.memory())
            for model, weight, task in zip(models, weights, tasks, strict=True)
        ]

    def keeps_cache(self) -> bool:
        """Whether the server needs every client's last model."""
        return self.final == "oca"

    def server_step(self, state: ServerState, uploads: Sequence[Message], context: RoundContext) -> ServerState:
        models = [u for u in uploads if isinstance(u, ModelParameters)]
        if not self.keeps_cache():
            return ServerState(average(models))
        cache = cached(state, models, context)
        return ServerState(average(models), {**cache, **prefixed("oca.", overall_average(cache, context))})

    def final_parameters(self, state: ServerState) -> Mapping[str, Tensor]:
        return unprefixed("oca.", state.kept) or state.parameters if self.final == "oca" else state.parameters

    def variants(self, state: ServerState) -> Mapping[str, Mapping[str, Tensor]]:
        overall = unprefixed("oca.", state.kept)
        return {"aca": state.parameters, "oca": overall} if overall else {}

    def private_plans(self, privacy: PrivacySettings, context: RoundContext) -> tuple[PrivatePlan, ...]:
        for architecture in (context.architecture, *(context.client_architectures or ())):
            check_model(architecture)
        rate = privacy.sample_rate or min(1.0, self.batch / context.nominal_size)
        plan = PrivatePlan(
            quantity="model update",
            mechanism="dp-sgd",
            clipped="gradient of each example with respect to all parameters",
            clip=privacy.clip or 1.0,
            sample_rate=rate,
            steps=self.local_steps or math.ceil(self.local_epochs / rate),
            dimension=parameter_count(context.architecture),
        )
        return (plan,)

    def _train(self, models: Sequence[nn.Module], clients: OpenClients, tasks: Sequence[Task], context: RoundContext) -> None:
        sgd = SgdSettings(
            self.local_epochs, self.batch, self.lr, self.momentum, self.weight_decay, steps=self.local_steps or None
        )
        for position, (client, model, task) in enumerate(zip(clients.ids, models, tasks, strict=True)):
            mine = clients.examples(position)
            train_on(
                model,
                lambda where, mine=mine: clients.images(mine[where]),  # type: ignore[misc]
                clients.labels(mine),
                sgd,
                torch_generator(context.seed, "local training", context.round, client),
                penalty=task.penalty,
            )
            context.report("local training", position + 1, len(models))

    def _train_privately(
        self, models: Sequence[nn.Module], clients: PrivateClients, tasks: Sequence[Task], context: RoundContext
    ) -> None:
        privacy = context.privacy
        if privacy is None or privacy.noise_multiplier is None:
            raise SettingError("private clients need privacy settings with a noise multiplier")
        (plan,) = self.private_plans(privacy, context)
        settings = DpSgdSettings(self.lr, plan.sample_rate * context.nominal_size, self.momentum, self.weight_decay)

        release = plan.release(context.round, privacy.noise_multiplier)
        if context.client_architectures is not None:  # clients come one at a time, each with a network of its own size
            release = replace(release, dimension=parameter_count(models[0]))
        series = clients.charge(release, 1)
        clients.fit(
            series,
            models,
            plan.steps,
            settings,
            [task.penalty for task in tasks],
            lambda done: context.report("local training", done, len(models)),
        )


def prefixed(prefix: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under names that start with `prefix`."""
    return {prefix + name: value for name, value in parameters.items()}


def unprefixed(prefix: str, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}
