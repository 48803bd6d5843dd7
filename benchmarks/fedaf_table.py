"""FedAF, its ablations and FedDM on Fashion-MNIST (10 clients, Dirichlet) or Office-Caltech-10 (a domain a client), for two CPU cores.

    FEDSYNTH_DATA=... python benchmarks/fedaf_table.py [--data office] [--quick] [--json] [--device cuda] [--alphas 0.1] [--seeds 0]
        [--only 'seed=1'] [--time-budget 3600]

The paper's settings (on Fashion-MNIST λ_loc 1e-3, λ_glob 2.0; on Office-Caltech those of DomainNet: 0.01, 0.1; γ 0.9, batch norm) but for
the size: width 16, 10 rounds, ipc 10, 50 iterations, 64 real images a class, 60 server epochs (Office-Caltech: width 8, 5 rounds, 20
iterations, 24 real images, 40 server epochs). That leaves a thirtieth of the paper's server steps, so the server's learning rate is ten
times the paper's, 0.01, for every row; and a twentieth of its condensation steps, so the image rates are those that are best on held-out
training images at this number of steps (`fedaf_readings.py --group rates`), for FedAF's rows and for FedDM's. Each round starts anew from
averaged images (the paper's Sec. 3 has initialisation as condensation's first step). FedDM as that paper runs it: momentum 0.9, gradient
norm clipped at 2, averaged start images, ρ 5. The table gives the accuracy after the last round and, as the paper does, the best over
rounds; on Office-Caltech also the last round's average over domains. Nothing is chosen by the test set. Resumes: finished runs are lines of
results/fedaf_table.jsonl, `--only` shares the work among processes, and after `--time-budget` seconds no further run is begun.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import Any

from fashion_table import RESULTS, Results, summarise

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset
from fedsynth.federation.settings import RunSettings, resolve

SIZE: dict[str, Any] = {
    "ipc": 10, "iterations": 50, "batch": 64, "server_epochs": 60, "server_lr": 0.01, "server_weight_decay": 0.0,
    "start_average": 10, "min_examples": 1, "image_momentum": 0.9, "restart": True,
}  # fmt: skip
RATES = {  # of images, by data and method: the best on held-out images (`fedaf_readings.py --group rates`)
    "fashion": {"feddm": 1.0, "fedaf": 1.0},
    "office": {"feddm": 1.0, "fedaf": 1.0},
}
FEDDM: dict[str, Any] = {**SIZE, "image_clip": 2.0, "radius": 5.0}
FEDAF: dict[str, dict[str, Any]] = {
    "fashion": {**SIZE, "local_weight": 1e-3, "global_weight": 2.0},
    "office": {**SIZE, "local_weight": 1e-2, "global_weight": 0.1},
}
ROUNDS = {"fashion": 10, "office": 5}
ROWS: dict[str, dict[str, Any] | None] = {  # what differs from FedAF's settings; None: FedDM
    "FedDM": None,
    "FedAF": {},
    "without CDC": {"local_weight": 0.0},
    "without LGKM": {"global_weight": 0.0},
    "γ = 0.5": {"gamma": 0.5},
    "γ = 1": {"gamma": 1.0},
}
# Four times as many pixels: a narrower network, fewer steps.
SMALLER: dict[str, dict[str, int]] = {
    "fashion": {},
    "office": {"iterations": 20, "batch": 24, "server_epochs": 40},
}
DATASETS = {"fashion": "fashion-mnist", "office": "office-caltech-10"}


def settings_for(
    data: str, name: str, alpha: float, seed: int, device: str, quick: bool
) -> RunSettings:
    changes = ROWS[name]
    method, values = ("feddm", FEDDM) if changes is None else ("fedaf", {**FEDAF[data], **changes})
    dirichlet = {"kind": "dirichlet", "alpha": alpha, "clients": 10}
    small = {"iterations": 2, "server_epochs": 1} if quick else SMALLER[data]
    return resolve(
        {
            "run": {
                "method": method,
                "rounds": 1 if quick else ROUNDS[data],
                "seed": seed,
                "device": device,
            },
            "data": {"dataset": DATASETS[data]},
            "partition": dirichlet if data == "fashion" else {"kind": "domain", "clients": 4},
            "model": {"width": 16 if data == "fashion" else 8, "norm": "batch"},
            "method": {"image_lr": RATES[data][method], **values, **small},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round and few steps, to see that it runs"
    )
    parser.add_argument("--data", choices=DATASETS, default="fashion")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.02])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", default="", help="make only the runs whose name contains this")
    parser.add_argument("--time-budget", type=float, default=math.inf, help="seconds")
    options = parser.parse_args()
    keep_large_allocations()
    data = load_dataset(DATASETS[options.data])
    path = RESULTS / f"fedaf_table{'_quick' if options.quick else ''}.jsonl"
    results = Results(path, options.only, options.time_budget)
    made: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for alpha in options.alphas if options.data == "fashion" else [0.0]:
        where = f"alpha={alpha:g}" if options.data == "fashion" else "domains"
        for seed in options.seeds:  # one seed of every row before the next
            for name in ROWS:
                settings = settings_for(
                    options.data, name, alpha, seed, options.device, options.quick
                )
                settings = replace(settings, evaluate_every=1)
                row = results.get(f"{name} {where} seed={seed}", settings, data)
                if row is not None:
                    made.setdefault((name, where), []).append(row)
    columns = ("last", "best", *(("domains",) if options.data == "office" else ()))
    table: dict[str, Any] = {
        f"{name}, {where}": {
            column: summarise([100 * _value(row, column) for row in rows]) for column in columns
        }
        for (name, where), rows in made.items()
        if len(rows) == len(options.seeds)
    }
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        print(
            f"{name:28}",
            *(f"{c} {v['mean']:6.2f} ± {v['sd']:.2f}  " for c, v in row.items()),
            row["best"]["values"],
        )


def _value(row: dict[str, Any], column: str) -> float:
    return float(
        {
            "last": row["accuracy"],
            "best": max(row["curve"]),
            "domains": row.get("domain_average", 0.0),
        }[column]
    )


if __name__ == "__main__":
    main()
