"""Robust aggregation: FedAvg's accuracy if two of ten clients are malicious, and the cost if none
is.

The embedded digits, ten clients by Dirichlet(α), ten rounds of five local epochs, the preset's
network; plain averaging and each rule (`run.robust`; `trimmed` leaves out a fifth at each end).
Clients 0 and 1 train as all others do and then send

    sign    w − 5·(w_k − w): away from where they should have gone, five times as far
    scale   100·w_k
    nan     w_k with a NaN in every tensor

An upload that is not finite ends the run or is rejected by the server, whatever the rule is; a row
has "diverged" where the run ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsynth import FedAvg, ModelSettings, PartitionSettings, RunSettings
from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import ClientState, Results
from fedsynth.methods.shared.aggregation import RULES
from library.grid import Cell, Grid

LIARS = (0, 1)  # of ten clients
SIGN_SCALE = 5.0
SCALE = 100.0


@dataclass(frozen=True)
class LiedTo(FedAvg):
    """FedAvg some of whose clients lie.

    Args:
        attack: what they send: "none", "sign", "scale" or "nan".
    """

    attack: str = "none"

    def client_step(
        self,
        message: ModelParameters,
        clients: Group,
        states: Sequence[ClientState],
        context: RoundContext,
    ) -> Results:
        honest = super().client_step(message, clients, states, context)
        results = []
        for client, (upload, state) in zip(clients.ids, honest, strict=True):
            if client in LIARS:
                sent: Any = upload
                parameters = {
                    name: lie(self.attack, value, message.parameters[name])
                    for name, value in sent.parameters.items()
                }
                upload = replace(sent, parameters=parameters)
            results.append((upload, state))
        return results


def lie(attack: str, sent: Tensor, received: Tensor) -> Tensor:
    """Returns what a client sends in place of a tensor."""
    if attack == "sign":
        return received * (1 + SIGN_SCALE) - sent * SIGN_SCALE
    if attack == "scale":
        return sent * SCALE
    if attack == "nan":
        sent = sent.clone()
        sent.view(-1)[0] = torch.nan
    return sent


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of one run."""
    epochs = 1 if cell.quick else 5
    return RunSettings(
        LiedTo(local_epochs=epochs, batch=32, lr=0.02, attack=cell.attack),
        rounds=2 if cell.quick else 10,
        seed=cell.seed,
        device=cell.device,
        robust=cell.rule,
        partition=PartitionSettings("dirichlet", clients=10, alpha=cell.alpha),
        model=ModelSettings(width=32, depth=2),
    )


GRID = Grid(
    axes={
        "alpha": (1.0, 0.1),
        "seed": (0, 1, 2),
        "attack": ("none", "sign", "scale", "nan"),
        "rule": tuple(RULES),
    },
    key="{rule}, {attack}, alpha={alpha:g} seed={seed}",
    settings=settings,
)
