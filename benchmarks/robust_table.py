"""What robust aggregation keeps of FedAvg's accuracy where two of ten clients lie, and what it
costs where nobody does.

    python benchmarks/robust_table.py [--quick] [--alphas 1 0.1] [--seeds 0 1 2]
        [--only sign] [--time-budget 3600]

The embedded digits, ten clients by Dirichlet(α), ten rounds of five local epochs, the preset's
network; plain averaging and each rule (`run.robust`; `trimmed` leaves out a fifth at each end).
Clients 0 and 1 train as all others do and then send

    sign    w − 5·(w_k − w): away from where they should have gone, five times as far
    scale   100·w_k
    nan     w_k with a NaN in every tensor

A NaN is no matter of aggregation: an upload that is not finite ends the run or is rejected, by what
the server checks (a row says which, "diverged" where the run ended). Who changes that deletes the
rows "nan". Resumes: finished runs are lines of results/robust_table.jsonl, `--only` shares the work
among processes, and after `--time-budget` seconds no further run is begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from fedsynth import FedAvg, ModelSettings, PartitionSettings, RunSettings
from fedsynth.core.client import ClientGroup
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import Memory, Results
from fedsynth.methods.shared.robust import RULES
from library.results import start, table_parser

LIARS = (0, 1)  # of ten clients
ATTACKS = ("none", "sign", "scale", "nan")
FAR = 5.0
SCALE = 100.0


@dataclass(frozen=True)
class LiedTo(FedAvg):
    """FedAvg some of whose clients lie.

    Args:
        attack: what they send, one of `ATTACKS`.
    """

    attack: str = "none"

    def client_step(
        self,
        message: ModelParameters,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        honest = super().client_step(message, clients, memories, context)
        return [
            (self._lie(upload, message) if client in LIARS else upload, memory)
            for client, (upload, memory) in zip(clients.ids, honest, strict=True)
        ]

    def _lie(self, upload: Any, message: ModelParameters) -> Any:
        sent = dict(upload.parameters)
        if self.attack == "sign":
            sent = {n: message.parameters[n] * (1 + FAR) - value * FAR for n, value in sent.items()}
        elif self.attack == "scale":
            sent = {name: value * SCALE for name, value in sent.items()}
        elif self.attack == "nan":
            sent = {name: value.clone() for name, value in sent.items()}
            for value in sent.values():
                value.view(-1)[0] = torch.nan
        return replace(upload, parameters=sent)


def settings_for(
    rule: str, attack: str, alpha: float, seed: int, device: str, quick: bool
) -> RunSettings:
    return RunSettings(
        LiedTo(local_epochs=1 if quick else 5, batch=32, lr=0.02, attack=attack),
        rounds=2 if quick else 10,
        seed=seed,
        device=device,
        robust=rule,
        partition=PartitionSettings("dirichlet", clients=10, alpha=alpha),
        model=ModelSettings(width=32, depth=2),
    )


def main() -> None:
    parser = table_parser(__doc__, "two rounds of one epoch: a test")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0, 0.1])
    options, results = start("robust_table", parser)
    for alpha, seed, attack, rule in product(options.alphas, options.seeds, ATTACKS, RULES):
        settings = settings_for(rule, attack, alpha, seed, options.device, options.quick)
        results.get(f"{rule}, {attack}, alpha={alpha:g} seed={seed}", settings)
    results.show()


if __name__ == "__main__":
    main()
