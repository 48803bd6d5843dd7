"""FedAvgM: FedAvg with momentum on the server (Hsu, Qi and Brown 2019, arXiv 1909.06335).

The server computes Δ = w_t − Σ_k n_k/n w_k, v ← β·v + Δ and w_{t+1} = w_t − η_s·v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.methods.shared.aggregation import AveragingState, average, trainable
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.validation import in_range


@dataclass(frozen=True)
class VelocityState(AveragingState):
    """The server's state, including the velocity v. An empty mapping means that v is zero."""

    velocity: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FedAvgM(TrainsLocally):
    """FedAvg with momentum on the server.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        server_momentum: β, the momentum of the server. It is 0.9 in the paper's comparison.
        server_lr: η_s, the learning rate of the server. With β = 0 and η_s = 1, the method is
            FedAvg, weighted by n_k.

    >>> from fedsynth import FedAvgM, ModelSettings, RunSettings, simulate
    >>> def accuracy(momentum):
    ...     method = FedAvgM(server_momentum=momentum, local_steps=1)
    ...     return simulate(RunSettings(method, rounds=5, model=ModelSettings("linear"))).accuracy
    >>> accuracy(0.9) > accuracy(0.0)  # where clients move little, momentum carries the server on
    True
    """

    name = "fedavgm"
    summary = "FedAvg with momentum on the server"
    reference = "Hsu, Qi and Brown 2019, arXiv 1909.06335"
    one_pass = True
    state = VelocityState

    server_momentum: float = in_range(0.9, 0, 1)
    server_lr: float = in_range(1.0, 0)

    def combine(
        self, state: VelocityState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> VelocityState:
        parameters = average(uploads)
        velocity: dict[str, Tensor] = {}
        for name in trainable(context):
            w = state.parameters[name]
            v = w - parameters[name]
            if state.velocity:
                v = self.server_momentum * state.velocity[name] + v
            velocity[name] = v
            parameters[name] = w - self.server_lr * v
        return replace(state, parameters=parameters, velocity=velocity)
