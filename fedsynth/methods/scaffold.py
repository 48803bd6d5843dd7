"""SCAFFOLD: control variates correct the clients' drift (Karimireddy et al. 2020, arXiv 1910.06378,
Algorithm 1 with option II).

Client: y ← y − η(g_k(y) − c_k + c) for K steps; c_k⁺ = c_k − c + (x − y)/(K·η). It sends y and Δc =
c_k⁺ − c_k. Server: x ← x + η_g·mean(y − x), c ← c + |S|/N·mean(Δc).

With differential privacy y's iterates are releases, and c_k is computed only from them: sending it
costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, public, released
from fedsynth.core.method import Memory
from fedsynth.core.state import ServerState
from fedsynth.core.uploads import Named, Rule
from fedsynth.errors import SettingError
from fedsynth.methods.shared.aggregation import AveragingState, average, trainable
from fedsynth.methods.shared.client_training import LocalObjective, Trained
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.flat import flatten_named
from fedsynth.privacy.requests import check_named
from fedsynth.training.sgd import Pull
from fedsynth.validation import check_ranges


@dataclass(frozen=True)
class ControlDown(ModelParameters):
    """Sent to clients: x and c (empty at first: zero)."""

    control: Mapping[str, Tensor] = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class ControlUp(ModelParameters):
    """The upload: y and Δc."""

    control: Mapping[str, Tensor] = released()


@dataclass(frozen=True)
class ControlState(AveragingState):
    """The state, with c (empty at first: zero)."""

    control: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Scaffold(TrainsLocally):
    """Settings: see `TrainsLocally`, and

    Args:
        server_lr: η_g, 1 in the paper's experiments. In the first round, with all controls zero, it
            is FedAvg, averaged uniformly.
        momentum: 0, as option II's control takes plain steps.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, Scaffold, simulate
    >>> def floats(method):
    ...     result = simulate(RunSettings(method, rounds=1, model=ModelSettings("linear")))
    ...     return result.metrics[-1]["upload_floats"]
    >>> floats(FedAvg(local_steps=1)), floats(Scaffold(local_steps=1))  # controls, as many again
    (6500, 13000)
    """

    name: ClassVar[str] = "scaffold"
    summary: ClassVar[str] = "control variates correct the drift of local training"
    reference: ClassVar[str] = "Karimireddy et al. 2020, SCAFFOLD, arXiv 1910.06378"
    one_pass: ClassVar[bool] = True
    downlink: ClassVar[type[Message]] = ControlDown
    upload: ClassVar[type[Message]] = ControlUp
    state: ClassVar[type[ServerState]] = ControlState

    momentum: float = 0.0
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, server_lr=(0, inf), lr=(1e-12, inf))
        if self.momentum:
            raise SettingError(
                "method",
                "momentum",
                f"must be 0, got {self.momentum}: scaffold's option II computes its control "
                "variate from plain SGD steps",
            )

    def check_request(self, message: ControlDown, context: RoundContext) -> None:
        own = dict(context.architecture.named_parameters())
        check_named("control", message.control, own)

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        own = Named.like(dict(context.architecture.named_parameters()))
        return {**super().upload_rules(phase, client, context), "control": own}

    def broadcast(self, state: ControlState, context: RoundContext) -> Message:
        return ControlDown(state.parameters, 1.0, state.control)

    def task(
        self, client: int, message: ControlDown, memory: Memory, context: RoundContext
    ) -> LocalObjective:
        x = {name: message.parameters[name] for name in trainable(context)}
        c = {name: message.control.get(name, value * 0) for name, value in x.items()}
        mine = {name: memory.get(name, value * 0) for name, value in x.items()}
        center = flatten_named(x, context.architecture)
        correction = Pull(
            0.0,
            center,
            flatten_named({name: c[name] - mine[name] for name in x}, context.architecture),
        )

        def finish(model: nn.Module, trained: Trained) -> tuple[Message, Memory]:
            y = dict(model.named_parameters())
            far = max(1, trained.steps) * self.lr
            after = (
                {name: mine[name] - c[name] + (x[name] - y[name].detach()) / far for name in x}
                if trained.steps
                else mine
            )
            delta = {name: after[name] - mine[name] for name in x}
            return ControlUp(model.state_dict(), trained.weight, delta), after

        return LocalObjective(penalty=correction, finish=finish)

    def combine(
        self, state: ControlState, uploads: Mapping[int, ControlUp], context: RoundContext
    ) -> ControlState:
        mean = average(uploads, even=True)
        old = state.control
        control: dict[str, Tensor] = {}
        made = dict(mean)
        for name in trainable(context):
            made[name] = state.parameters[name] + self.server_lr * (
                mean[name] - state.parameters[name]
            )
            change = (
                sum((u.control[name] for u in uploads.values()), start=state.parameters[name] * 0)
                / context.clients
            )
            control[name] = old[name] + change if old else change
        return replace(state, parameters=made, control=control)
