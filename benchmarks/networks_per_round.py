"""FedDM with M networks a round, whose exact class means are made once, beside the literal loop
with a new network and a minibatch in each step: accuracy. (`networks_time.py` has the time at the
paper's sizes, where real images take most of it.)

    FEDSYNTH_DATA=... python benchmarks/networks_per_round.py [--quick] [--json] [--device cuda]
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
import json
import statistics
from typing import Any

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from library.options import add_share, table_options
from library.results import Results, summarise

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
    parser = table_options(__doc__, "one round, few steps and one seed, to see that it runs")
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--networks", type=int, nargs="+", default=list(NETWORKS))
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile makes condensation's passes"
    )
    add_share(parser)
    options = parser.parse_args()
    seeds = options.seeds[:1] if options.quick else options.seeds
    keep_large_allocations()
    results = Results.of("networks_per_round", options)
    made: dict[str, list[dict[str, Any]]] = {}
    for dataset in options.datasets:
        data = load_dataset(dataset)
        for seed in seeds:  # one seed of every row before the next
            for networks in options.networks:
                settings = settings_for(dataset, networks, seed, options)
                name = f"{dataset} M={networks}"
                row = results.get(f"{name} seed={seed}", settings, data)
                if row is not None:
                    made.setdefault(name, []).append(row)
    table = {
        name: {
            **summarise([100 * row["accuracy"] for row in rows]),
            "seconds": round(statistics.mean(row["seconds"] for row in rows), 1),
        }
        for name, rows in made.items()
    }
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        print(f"{name:22} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['seconds']:7.1f} s")


if __name__ == "__main__":
    main()
