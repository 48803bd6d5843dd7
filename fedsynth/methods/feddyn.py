"""FedDyn: a dynamic regulariser aligns the local optima with the global one (Acar et al. 2021,
arXiv 2111.04263, Algorithm 1).

Client: min F_k(w) − ⟨g_k, w⟩ + α/2·‖w − w_t‖²; g_k ← g_k − α(w_k − w_t). Server: h ← h − α/K·Σ_{k
active}(w_k − w_t); w_{t+1} = mean_{k active} w_k − h/α.

With differential privacy g_k is computed from released iterates and stays at the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Memory
from fedsynth.core.state import ServerState
from fedsynth.methods.shared.aggregation import AveragingState, average, trainable
from fedsynth.methods.shared.client_training import LocalObjective, Trained
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.flat import flatten_named
from fedsynth.training.sgd import Pull
from fedsynth.validation import check_ranges


@dataclass(frozen=True)
class DriftState(AveragingState):
    """The state, with h (empty at first: zero)."""

    h: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FedDyn(TrainsLocally):
    """Settings: see `TrainsLocally`, and

    Args:
        alpha: α, 0.01 in FedAF's comparison. 0 is FedAvg, averaged uniformly.

    >>> from fedsynth import FedDyn, ModelSettings, PartitionSettings, RunSettings, simulate
    >>> skewed, linear = PartitionSettings("classes", classes_per_client=2), ModelSettings("linear")
    >>> def accuracy(alpha):
    ...     method = FedDyn(alpha=alpha, local_epochs=2, batch=32)
    ...     return simulate(RunSettings(method, rounds=3, partition=skewed, model=linear)).accuracy
    >>> accuracy(0.1) > accuracy(0.0)
    True
    """

    name: ClassVar[str] = "feddyn"
    summary: ClassVar[str] = (
        "a dynamic regulariser per client aligns local optima with the global optimum"
    )
    reference: ClassVar[str] = "Acar et al. 2021, FedDyn, arXiv 2111.04263"
    one_pass: ClassVar[bool] = True
    state: ClassVar[type[ServerState]] = DriftState

    alpha: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, alpha=(0, inf))

    def task(
        self, client: int, message: ModelParameters, memory: Memory, context: RoundContext
    ) -> LocalObjective:
        start = {name: message.parameters[name] for name in trainable(context)}
        g = {name: memory.get(name, value * 0) for name, value in start.items()}

        center, linear = (flatten_named(values, context.architecture) for values in (start, g))
        pull = Pull(self.alpha, center, -linear)

        def finish(model: nn.Module, trained: Trained) -> tuple[Message, Memory]:
            after = {
                name: g[name] - self.alpha * (p.detach() - start[name])
                for name, p in model.named_parameters()
            }
            return ModelParameters(model.state_dict(), trained.weight), after

        return LocalObjective(penalty=pull if self.alpha else None, finish=finish)

    def combine(
        self, state: DriftState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> DriftState:
        made = average(uploads, even=True)
        if self.alpha == 0:
            return replace(state, parameters=made)
        old = state.h
        h: dict[str, Tensor] = {}
        for name in trainable(context):
            moved = sum(
                (u.parameters[name] - state.parameters[name] for u in uploads.values()),
                start=state.parameters[name] * 0,
            )
            h[name] = (old[name] if old else 0) - self.alpha / context.clients * moved
            made[name] = made[name] - h[name] / self.alpha
        return replace(state, parameters=made, h=h)
