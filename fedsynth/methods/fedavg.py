"""FedAvg (McMahan et al. 2017): clients train the global model on their data, the server averages the results.

With DP off the average is weighted by n_k. With DP on each client trains by DP-SGD (`fedsynth.privacy.dpsgd`), the steps of a round
are ceil(local_epochs / q) whatever the client's true size, and the average is uniform: n_k is private.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, OpenClients, PrivateClients
from fedsynth.core.messages import Message, ModelParameters, parameters_of
from fedsynth.core.method import Memory, Method, PrivatePlan, RoundContext, ServerState, check_ranges
from fedsynth.core.random import torch_generator
from fedsynth.errors import SettingError
from fedsynth.models.registry import parameter_count
from fedsynth.privacy.dpsgd import DpSgdSettings, check_model
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.training import SgdSettings, train_on


@dataclass(frozen=True)
class FedAvg(Method):
    """Settings; the comparison papers tune lr in {0.001, 0.01, 0.1} and local epochs in {10, 15, 20} (FedDM, Sec. 4.1).

    Args:
        local_epochs, batch, lr, momentum, weight_decay: local SGD; NIID-Bench's momentum, which FedDM's comparison uses.
    """

    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "clients train the global model locally, the server averages"
    reference: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    upload: ClassVar[type[Message]] = ModelParameters
    protects: ClassVar[tuple[str, ...]] = ("dp-sgd",)

    local_epochs: int = 10
    batch: int = 256
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, local_epochs=(1, inf), batch=(1, inf), lr=(0, inf), momentum=(0, 1), weight_decay=(0, inf))

    def broadcast(self, state: ServerState, context: RoundContext) -> Message:
        return ModelParameters(state.parameters, 1.0)

    def client_step(
        self, message: Message, clients: ClientGroup, memories: Sequence[Memory], context: RoundContext
    ) -> list[tuple[Message, Memory]]:
        start = context.load(parameters_of(message))
        models = [copy.deepcopy(start) for _ in clients.ids]
        if isinstance(clients, PrivateClients):
            self._train_privately(models, clients, context)
            weights = [1.0] * len(models)
        else:
            self._train(models, clients, context)
            weights = [float(n) for n in clients.sizes()]
        return [(ModelParameters(model.state_dict(), weight), {}) for model, weight in zip(models, weights, strict=True)]

    def server_step(self, state: ServerState, uploads: Sequence[Message], context: RoundContext) -> ServerState:
        return ServerState(average([u for u in uploads if isinstance(u, ModelParameters)]))

    def private_plans(self, privacy: PrivacySettings, context: RoundContext) -> tuple[PrivatePlan, ...]:
        check_model(context.architecture)
        rate = privacy.sample_rate or min(1.0, self.batch / context.nominal_size)
        plan = PrivatePlan(
            quantity="model update",
            mechanism="dp-sgd",
            clipped="gradient of each example with respect to all parameters",
            clip=privacy.clip or 1.0,
            sample_rate=rate,
            steps=math.ceil(self.local_epochs / rate),
            dimension=parameter_count(context.architecture),
        )
        return (plan,)

    def _train(self, models: Sequence[nn.Module], clients: OpenClients, context: RoundContext) -> None:
        sgd = SgdSettings(self.local_epochs, self.batch, self.lr, self.momentum, self.weight_decay)
        for position, (client, model) in enumerate(zip(clients.ids, models, strict=True)):
            mine = clients.examples(position)
            generator = torch_generator(context.seed, "local training", context.round, client)
            train_on(model, lambda where, mine=mine: clients.images(mine[where]), clients.labels(mine), sgd, generator)  # type: ignore[misc]
            context.report("local training", position + 1, len(models))

    def _train_privately(self, models: Sequence[nn.Module], clients: PrivateClients, context: RoundContext) -> None:
        privacy = context.privacy
        if privacy is None or privacy.noise_multiplier is None:
            raise SettingError("private clients need privacy settings with a noise multiplier")
        (plan,) = self.private_plans(privacy, context)
        settings = DpSgdSettings(self.lr, plan.sample_rate * context.nominal_size, self.momentum, self.weight_decay)

        series = clients.charge(plan.release(context.round, privacy.noise_multiplier), 1)
        clients.fit(series, models, plan.steps, settings, lambda done: context.report("local training", done, len(models)))


def average(uploads: Sequence[ModelParameters]) -> dict[str, Tensor]:
    """Σ_k weight_k · parameters_k / Σ_k weight_k, in float64; counters (integer buffers) are taken from the first upload."""
    total = sum(u.weight for u in uploads)
    first = uploads[0].parameters
    return {
        name: torch.stack([u.parameters[name].double() * (u.weight / total) for u in uploads]).sum(dim=0).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }
