"""FedGKD: local training is distilled from the average of the last global models (Yao et al. 2021, arXiv 2107.00051).

Server: keeps the last M global models and sends w_t with their average w̄. Client: CE + γ/2·KL(p(x; w̄) ‖ p(x; w)) on its own examples.

The loss of an example depends on that example and on released models alone, so DP-SGD clips and charges it as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.messages import Message, ModelParameters, public
from fedsynth.core.method import Memory, RoundContext, ServerState
from fedsynth.core.validation import check_ranges
from fedsynth.methods.shared.aggregation import average
from fedsynth.methods.shared.local import Task, TrainsLocally, prefixed, unprefixed
from fedsynth.privacy.dpsgd import cross_entropies


@dataclass(frozen=True)
class TeacherDown(ModelParameters):
    """Down: w_t, and the average of the last M global models."""

    teacher: Mapping[str, Tensor] = public("goes down, not up")


@dataclass(frozen=True)
class FedGKD(TrainsLocally):
    """Settings: see `TrainsLocally`, and

    Args:
        gamma: γ: 0.2 on CIFAR, 0.001 on EMNIST in FedKF's comparison. 0 is FedAvg, weighted by n_k. buffer: M, 5 there.
    """

    name: ClassVar[str] = "fedgkd"
    summary: ClassVar[str] = "local training distilled from the average of the last global models"
    reference: ClassVar[str] = "Yao et al. 2021, FedGKD, arXiv 2107.00051"

    gamma: float = 0.2
    buffer: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, gamma=(0, inf), buffer=(1, inf))

    def broadcast(self, state: ServerState, context: RoundContext) -> Message:
        past = unprefixed("past.", state.kept)
        floats = {
            name: value.double().mean(dim=0).to(value.dtype)
            for name, value in past.items()
            if value.is_floating_point()
        }
        return TeacherDown(state.parameters, 1.0, {**state.parameters, **floats})

    def task(self, client: int, message: Message, memory: Memory, context: RoundContext) -> Task:
        if not isinstance(message, TeacherDown):
            raise TypeError(f"expected TeacherDown, got {type(message).__name__}")
        teacher = context.load(message.teacher).requires_grad_(False).eval()

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = network(x)
            with torch.no_grad():
                target = teacher(x).log_softmax(dim=1)
            apart = F.kl_div(
                logits.log_softmax(dim=1), target, log_target=True, reduction="none"
            ).sum(dim=1)
            return F.cross_entropy(logits, y, reduction="none") + self.gamma / 2 * apart

        return Task(loss=loss if self.gamma else cross_entropies)

    def combine(
        self, state: ServerState, uploads: Sequence[ModelParameters], context: RoundContext
    ) -> ServerState:
        made, past = average(uploads), unprefixed("past.", state.kept)
        first = {name: value[None] for name, value in state.parameters.items()}
        kept = {
            name: torch.cat([past.get(name, first[name]), value[None]])[-self.buffer :]
            for name, value in made.items()
        }
        return ServerState(made, prefixed("past.", kept))
