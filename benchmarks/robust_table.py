"""What robust aggregation keeps of FedAvg's accuracy where two of ten clients lie, and what it
costs where nobody does.

    python benchmarks/robust_table.py [--quick] [--json] [--alphas 1 0.1] [--seeds 0 1 2]
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

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedsynth import FedAvg, ModelSettings, PartitionSettings, RunSettings
from fedsynth.cli.memory import keep_large_allocations
from fedsynth.core.client import ClientGroup
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import Memory, Results
from fedsynth.data.load import load_dataset
from fedsynth.methods.shared.robust import RULES
from library.options import add_share, table_options
from library.results import Results as Rows
from library.results import summarise

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
    parser = table_options(__doc__, "two rounds of one epoch, to see that it runs")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add_share(parser)
    options = parser.parse_args()
    keep_large_allocations()
    data = load_dataset("digits")
    results = Rows.of("robust_table", options)
    made: dict[str, list[dict[str, Any]]] = {}
    for alpha in options.alphas:
        for seed in options.seeds:
            for attack in ATTACKS:
                for rule in RULES:
                    name = f"{rule}, {attack}, alpha={alpha:g}"
                    settings = settings_for(
                        rule, attack, alpha, seed, options.device, options.quick
                    )
                    row = results.get(f"{name} seed={seed}", settings, data)
                    made.setdefault(name, []).extend([] if row is None else [row])
    for name, rows in made.items():
        summary = summarise([100 * row["accuracy"] for row in rows]) if rows else {}
        print(json.dumps({name: summary}) if options.json else f"{name}: {summary}")


if __name__ == "__main__":
    main()
