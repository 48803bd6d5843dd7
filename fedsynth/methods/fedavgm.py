"""FedAvgM: FedAvg with momentum on the server (Hsu, Qi and Brown 2019, arXiv 1909.06335).

Server: Δ = w_t − Σ_k n_k/n w_k; v ← β·v + Δ; w_{t+1} = w_t − η_s·v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import RoundContext, ServerState
from fedsynth.core.validation import check_ranges
from fedsynth.methods.shared.aggregation import average, trainable
from fedsynth.methods.shared.local import TrainsLocally, prefixed, unprefixed


@dataclass(frozen=True)
class FedAvgM(TrainsLocally):
    """Settings: see `TrainsLocally`, and

    Args:
        server_momentum: β, 0.9 in the paper's comparison. server_lr: η_s. β = 0 and η_s = 1 is FedAvg, weighted by n_k.
    """

    name: ClassVar[str] = "fedavgm"
    summary: ClassVar[str] = "FedAvg with momentum on the server"
    reference: ClassVar[str] = "Hsu, Qi and Brown 2019, arXiv 1909.06335"
    one_pass: ClassVar[bool] = True

    server_momentum: float = 0.9
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, server_momentum=(0, 1), server_lr=(0, inf))

    def combine(
        self, state: ServerState, uploads: Sequence[ModelParameters], context: RoundContext
    ) -> ServerState:
        mean, velocity = average(uploads), unprefixed("velocity.", state.kept)
        made, kept = dict(mean), {}
        for name in trainable(context):
            step = state.parameters[name] - mean[name]
            kept[name] = self.server_momentum * velocity[name] + step if velocity else step
            made[name] = state.parameters[name] - self.server_lr * kept[name]
        return ServerState(made, prefixed("velocity.", kept))
