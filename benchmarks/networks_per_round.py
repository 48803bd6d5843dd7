"""FedDM with M networks a round, whose exact class means are made once, beside the literal loop
with a new network and a minibatch in each step: accuracy. (`networks_time.py` has the time at the
paper's sizes, where real images take most of it.)

    FEDSYNTH_DATA=... python benchmarks/networks_per_round.py [--quick] [--device cuda]
        [--datasets mnist] [--seeds 0 1] [--networks 20] [--only 'M=20'] [--time-budget SECONDS]
        [--compile]

MNIST and Fashion-MNIST, 10 clients, Dir(0.5), 5 rounds: a tenth of each class, a ConvNet of width
16, ipc 10, 200 steps with batches of 64, 100 epochs on the server. All else is FedDM's default, and
both loops have the same partitions, start images and first networks. M = 0 is the literal loop.
Test accuracy of the last round; nothing is chosen by it. Each row has its rounds' accuracies.
`--compile` moves results by rounding alone, and is in a row's command.

Resumes: finished runs are lines of results/networks_per_round.jsonl; `--only` shares the work among
processes, and after `--time-budget` seconds no further run is begun.
"""

from __future__ import annotations

import argparse
from typing import Any

from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from library.results import start, table_parser

DATASETS = ("mnist", "fashion-mnist")
NETWORKS = (0, 5, 20, 50)
SIZE: dict[str, Any] = {"ipc": 10, "iterations": 200, "batch": 64, "server_epochs": 100}


def settings_for(
    dataset: str, networks: int, seed: int, options: argparse.Namespace
) -> RunSettings:
    few: dict[str, Any] = {"iterations": 3, "server_epochs": 2} if options.quick else {}
    return resolve(
        {
            "run": {
                "method": "feddm",
                "rounds": 1 if options.quick else 5,
                "seed": seed,
                "device": options.device,
                "compile": options.compile,
            },
            "data": {"dataset": dataset},
            "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 10, "subset": 0.1},
            "model": {"width": 16},
            "method": {**SIZE, "networks_per_round": networks, **few},
        }
    )


def main() -> None:
    parser = table_parser(__doc__, seeds=range(5))
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--networks", type=int, nargs="+", default=list(NETWORKS))
    parser.add_argument("--compile", action="store_true", help="compile condensation's passes")
    options, results = start("networks_per_round", parser)
    for dataset in options.datasets:
        for seed in options.seeds:  # one seed of every row before the next
            for networks in options.networks:
                settings = settings_for(dataset, networks, seed, options)
                results.get(f"{dataset} M={networks} seed={seed}", settings)
    results.show()


if __name__ == "__main__":
    main()
