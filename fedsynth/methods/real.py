"""REAL: clients send random real images (the control of FedDM's Sec. 4.5). It shows what condensation adds, and protects nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from torch import Tensor

from fedsynth.core.client import ClientGroup, OpenClients
from fedsynth.core.messages import Message, ModelParameters, unprotected
from fedsynth.core.method import Memory, Method, RoundContext, ServerState, check_ranges
from fedsynth.errors import SettingError
from fedsynth.synthesizer.sets import SyntheticSet, real_start, split_uploads, train_on_union
from fedsynth.synthesizer.training import SgdSettings


@dataclass(frozen=True)
class RealImages(SyntheticSet):
    """A client's own images, as they are."""

    images: Tensor = unprotected()
    labels: Tensor = unprotected()


@dataclass(frozen=True)
class Real(Method):
    """Settings.

    Args:
        ipc, min_examples, server_*: as in FedDM. The images are FedDM's start images of the same seed.
        resample: False sends the same images every round; True draws others.
    """

    name: ClassVar[str] = "real"
    summary: ClassVar[str] = "clients send random real images: FedDM's control, without privacy of any kind"
    reference: ClassVar[str] = "Xiong et al. 2023, FedDM, Sec. 4.5, arXiv 2207.09653"
    upload: ClassVar[type[Message]] = RealImages
    refusal: ClassVar[str] = "it sends clients' own images, which no mechanism protects"

    ipc: int = 10
    min_examples: int = 10
    resample: bool = False
    radius: float = 5.0
    server_epochs: int = 500
    server_batch: int = 256
    server_lr: float = 0.01
    server_momentum: float = 0.9
    server_weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        check_ranges(self, ipc=(1, inf), min_examples=(0, inf), radius=(0, inf), server_epochs=(0, inf), server_batch=(1, inf))
        check_ranges(self, server_lr=(0, inf), server_momentum=(0, 1), server_weight_decay=(0, inf))

    def broadcast(self, state: ServerState, context: RoundContext) -> Message:
        return ModelParameters(state.parameters, 1.0)

    def client_step(
        self, message: Message, clients: ClientGroup, memories: Sequence[Memory], context: RoundContext
    ) -> list[tuple[Message, Memory]]:
        if not isinstance(clients, OpenClients):
            raise SettingError(f"real cannot run with differential privacy: {self.refusal}")
        segments = clients.segments(self.min_examples)
        seed = context.seed + (context.round - 1 if self.resample else 0)
        sets = split_uploads(real_start(clients, segments, self.ipc, seed), segments, len(clients.ids))
        return [(RealImages(s.images, s.labels), {}) for s in sets]

    def server_step(self, state: ServerState, uploads: Sequence[Message], context: RoundContext) -> ServerState:
        model = context.load(state.parameters)
        sgd = SgdSettings(
            self.server_epochs, self.server_batch, self.server_lr, self.server_momentum, self.server_weight_decay, self.radius
        )
        train_on_union(model, uploads, sgd, context)
        return ServerState(model.state_dict())
