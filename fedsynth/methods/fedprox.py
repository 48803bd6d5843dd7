"""FedProx: local training is kept near the global model, and partial work is kept (Li et al. 2020,
arXiv 1812.06127).

Client: min F_k(w) + μ/2·‖w − w_t‖² (Eq. 2). Server: the average, weighted by n_k where clients are
drawn uniformly, plain where they are drawn by their sizes. Stragglers' partial work counts
(`stragglers`, `drop_stragglers`). Adaptive μ (Sec. 5.3.2): raised by 0.1 when the loss rises,
lowered by 0.1 after five falls in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

import torch
from torch import nn

from fedsynth.core.client import ClientGroup, ExactClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, public
from fedsynth.core.method import Memory, PrivatePlan
from fedsynth.core.state import ServerState
from fedsynth.core.uploads import Number, Rule
from fedsynth.errors import SettingError
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.client_training import LocalObjective, Trained, mean_loss
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.flat import flatten_named
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.training.sgd import Pull
from fedsynth.validation import check_ranges

CHANGE = 0.1  # of an adaptive μ: up when the loss rises,
PATIENCE = 5  # down when it fell this many times in a row


@dataclass(frozen=True)
class ProxMessage(ModelParameters):
    """Sent to clients: w_t and the μ of this round."""

    mu: float = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class LossModel(ModelParameters):
    """The upload: the model, and the mean loss of w_t on the client's data, for adaptive μ."""

    loss: float = public("0 with DP on, because adaptive μ is refused with DP")


@dataclass(frozen=True)
class ProxState(AveragingState):
    """The state, with the values that adaptive μ depends on.

    Args:
        mu: the next round's μ; None: the setting's.
        loss: the clients' mean loss in the last round; None: there was none.
        falls: rounds in a row in which it fell.
    """

    mu: float | None = None
    loss: float | None = None
    falls: int = 0


@dataclass(frozen=True)
class FedProx(TrainsLocally):
    """Settings: see `TrainsLocally`, and

    Args:
        mu: μ; the comparison papers take 0.001 (FedAF, FedKF on EMNIST and CIFAR-10) or the best of
            {0.01, 0.1, 1} (FedDM). 0 is FedAvg, weighted by n_k (by_size=False: averaged
            uniformly).
        adaptive: change μ by the loss over rounds, starting from `mu`; not with differential
            privacy.
        by_size: weigh the average by n_k, for clients that are drawn uniformly; False averages them
            alike, for clients that are drawn by size (the run's sampling="size"), as the paper's
            Algorithm 2 does. Both estimate the same objective.

    >>> from fedsynth import FedProx, ModelSettings, RunSettings, simulate
    >>> method = FedProx(mu=0.1, local_epochs=3, batch=32, lr=0.1, stragglers=0.9)
    >>> result = simulate(RunSettings(method, rounds=3, model=ModelSettings("linear")))
    >>> len(result.metrics[0]["stragglers"]), result.accuracy > 0.8  # of ten clients
    (9, True)
    """

    name: ClassVar[str] = "fedprox"
    summary: ClassVar[str] = "FedAvg with a proximal term that also uses stragglers' partial work"
    reference: ClassVar[str] = "Li et al. 2020, FedProx, arXiv 1812.06127"
    one_pass: ClassVar[bool] = True
    downlink: ClassVar[type[Message]] = ProxMessage
    upload: ClassVar[type[Message]] = LossModel
    state: ClassVar[type[ServerState]] = ProxState

    mu: float = 0.01
    adaptive: bool = False
    by_size: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, mu=(0, inf))

    def release_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        if self.adaptive:
            raise SettingError(
                "method",
                "adaptive",
                "must be false with differential privacy: an adaptive μ needs the clients' "
                "losses, which no mechanism protects",
            )
        return super().release_plans(privacy, context)

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        loss = Number() if self.adaptive else Number(most=0.0)
        return {**super().upload_rules(phase, client, context), "loss": loss}

    def broadcast(self, state: ProxState, context: RoundContext) -> Message:
        return ProxMessage(state.parameters, 1.0, self.mu if state.mu is None else state.mu)

    def complete(
        self,
        upload: LossModel,
        clients: ClientGroup,
        position: int,
        message: ProxMessage,
        context: RoundContext,
    ) -> Message:
        if not (self.adaptive and isinstance(clients, ExactClientView)):
            return upload
        model = context.load(message.parameters).eval()
        return replace(upload, loss=mean_loss(model, clients, position))

    def task(
        self, client: int, message: ProxMessage, memory: Memory, context: RoundContext
    ) -> LocalObjective:
        center = flatten_named(message.parameters, context.architecture)
        pull = Pull(message.mu, center, torch.zeros_like(center))

        def finish(model: nn.Module, trained: Trained) -> tuple[Message, Memory]:
            return LossModel(model.state_dict(), trained.weight, 0.0), {}

        return LocalObjective(penalty=pull if message.mu else None, finish=finish)

    def facts(self, state: ProxState, context: RoundContext) -> Mapping[str, Any]:
        """Returns the facts, with the next round's μ if it is adaptive."""
        facts = super().facts(state, context)
        return facts if state.mu is None else {**facts, "mu": state.mu}

    def combine(
        self, state: ProxState, uploads: Mapping[int, LossModel], context: RoundContext
    ) -> ProxState:
        made = average(uploads, even=not self.by_size)
        if not self.adaptive:
            return replace(state, parameters=made)
        sizes = sum(u.weight for u in uploads.values())
        loss = sum(u.loss * u.weight for u in uploads.values()) / sizes
        mu = self.mu if state.mu is None else state.mu
        falls = state.falls
        if state.loss is not None:
            rises = loss > state.loss
            falls = 0 if rises else falls + 1
            if rises:
                mu += CHANGE
            elif falls == PATIENCE:
                mu = max(0.0, mu - CHANGE)
                falls = 0
        return replace(state, parameters=made, mu=mu, loss=loss, falls=falls)
