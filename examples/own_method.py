"""A method of your own, outside the package: FedAvg whose server takes Adam's steps (FedAdam, Reddi et al. 2021, arXiv 2003.00295).

A method is a frozen dataclass: settings, checked in `__post_init__`, and steps that are pure functions of what they are given. Whatever
trains locally inherits `TrainsLocally` and says what is different: here `combine`, the server's step; `task` would change the clients' loss.
What the server keeps from round to round is in `ServerState.kept`, by name. With differential privacy nothing more is needed: clients'
training is DP-SGD then, and the server computes with what they released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch

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
from fedsynth.core.method import Method
from fedsynth.core.validation import check_ranges
from fedsynth.methods.shared.aggregation import average


@dataclass(frozen=True)
class FedAdam(TrainsLocally):
    """Server: Δ = mean(w_k) − w; m ← β₁m + (1 − β₁)Δ; v ← β₂v + (1 − β₂)Δ²; w ← w + η·m/(√v + τ) (Algorithm 2 there).

    Args:
        server_lr: η. beta1, beta2: of the two moments. adaptivity: τ.
    """

    name: ClassVar[str] = "fedadam"
    summary: ClassVar[str] = "FedAvg with Adam on the server"
    reference: ClassVar[str] = "Reddi et al. 2021, arXiv 2003.00295"
    one_pass: ClassVar[bool] = True  # clients' training is plain SGD

    server_lr: float = 0.03
    beta1: float = 0.9
    beta2: float = 0.99
    adaptivity: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, server_lr=(0, inf), beta1=(0, 1), beta2=(0, 1), adaptivity=(1e-12, inf))

    def combine(
        self, state: ServerState, uploads: Sequence[ModelParameters], context: RoundContext
    ) -> ServerState:
        made, kept = average(uploads), {}
        for name, _ in context.architecture.named_parameters():
            old = state.parameters[name]
            change = made[name] - old
            m = (
                self.beta1 * state.kept.get(f"m.{name}", torch.zeros_like(old))
                + (1 - self.beta1) * change
            )
            v = (
                self.beta2 * state.kept.get(f"v.{name}", torch.zeros_like(old))
                + (1 - self.beta2) * change.square()
            )
            made[name] = old + self.server_lr * m / (v.sqrt() + self.adaptivity)
            kept.update({f"m.{name}": m, f"v.{name}": v})
        return ServerState(made, kept)


def main(rounds: int = 10) -> dict[str, float]:
    """Test accuracy of FedAvg and FedAdam on the digits with softmax regression, and of FedAdam at ε = 8."""
    local = {"batch": 32, "local_epochs": 2}
    methods: dict[str, tuple[Method, PrivacySettings | None]] = {
        "FedAvg": (FedAvg(**local), None),  # type: ignore[arg-type]
        "FedAdam": (FedAdam(**local), None),  # type: ignore[arg-type]
        "FedAdam, ε = 8": (FedAdam(**local), PrivacySettings(epsilon=8.0)),  # type: ignore[arg-type]
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
        accuracy[name] = result.accuracy
        print(f"{name:16} {100 * result.accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    main()
