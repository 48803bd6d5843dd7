"""Implements a custom method outside the package: FedAvg with Adam on the server (FedAdam, Reddi et
al. 2021, arXiv 2003.00295).

A method is a frozen dataclass. Its fields are settings with their ranges, and its steps are pure
functions of their arguments. A method with local training inherits from `TrainsLocally` and
overrides what differs. Here this is `combine`, the server's step; `task` would change the clients'
loss. The server keeps its state between rounds in a custom class, `AdamState`. Differential privacy
needs no further code: the clients then train by DP-SGD, and the server computes with their
releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsynth import (
    FedAvg,
    ModelParameters,
    ModelSettings,
    PrivacySettings,
    RoundContext,
    RunSettings,
    ServerState,
    TrainsLocally,
    simulate,
)
from fedsynth.methods.kit import AveragingState, Method, average, in_range


@dataclass(frozen=True)
class AdamState(AveragingState):
    """The server's state, including the two moments of Adam for each parameter. The moments are zero if the
    mapping is empty.
    """

    m: Mapping[str, Tensor] = field(default_factory=dict)
    v: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FedAdam(TrainsLocally):
    """FedAvg with Adam on the server.

    The server computes Δ = mean(w_k) − w, m ← β₁m + (1 − β₁)Δ, v ← β₂v + (1 − β₂)Δ² and w ← w +
    η·m/(√v + τ) (Algorithm 2 of the paper).

    Args:
        server_lr: η.
        beta1, beta2: the decay rates of the two moments.
        adaptivity: τ.
    """

    name: ClassVar[str] = "fedadam"
    summary: ClassVar[str] = "FedAvg with Adam on the server"
    reference: ClassVar[str] = "Reddi et al. 2021, arXiv 2003.00295"
    state: ClassVar[type[ServerState]] = AdamState

    server_lr: float = in_range(0.03, 0)
    beta1: float = in_range(0.9, 0, 1)
    beta2: float = in_range(0.99, 0, 1)
    adaptivity: float = in_range(1e-3, 1e-12)

    def combine(
        self, state: AdamState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> AdamState:
        parameters = average(uploads)
        m: dict[str, Tensor] = {}
        v: dict[str, Tensor] = {}
        for name, _ in context.architecture.named_parameters():
            old = state.parameters[name]
            change = parameters[name] - old
            zero = torch.zeros_like(old)
            m[name] = self.beta1 * state.m.get(name, zero) + (1 - self.beta1) * change
            v[name] = self.beta2 * state.v.get(name, zero) + (1 - self.beta2) * change.square()
            parameters[name] = old + self.server_lr * m[name] / (v[name].sqrt() + self.adaptivity)
        return replace(state, parameters=parameters, m=m, v=v)


def main(rounds: int = 10) -> dict[str, float]:
    """Returns the test accuracy of FedAvg, of FedAdam, and of FedAdam with ε = 8, on the digits
    with softmax regression.
    """
    local: dict[str, Any] = {"batch": 32, "local_epochs": 2}
    methods: dict[str, tuple[Method, PrivacySettings | None]] = {
        "FedAvg": (FedAvg(**local), None),
        "FedAdam": (FedAdam(**local), None),
        "FedAdam, ε = 8": (FedAdam(**local), PrivacySettings(epsilon=8.0)),
    }
    accuracy = {}
    for name, (method, privacy) in methods.items():
        result = simulate(
            RunSettings(
                method,
                rounds=rounds,
                model=ModelSettings("linear"),
                privacy=privacy,
                evaluate_every=rounds,
            )
        )
        accuracy[name] = result.summary["test_accuracy"]
        print(f"{name:16} {100 * accuracy[name]:.1f} %")
    return accuracy


if __name__ == "__main__":
    main()
