"""All methods that run over rounds, on Fashion-MNIST, 10 clients, Dir(0.1), at one budget: accuracy, bytes and seconds.

    FEDSYNTH_DATA=... python benchmarks/compare.py [--quick] [--json] [--device cuda] [--methods fedprox moon] [--only 'seed=1']

The budget is rounds and local work: 5 rounds, a ConvNet of width 16, 10 local passes of batch 256 at lr 0.01 for methods that send models
(FedAvg's rate is the best of {0.001, 0.01, 0.1} on held-out images, `fashion_table.py`; all others take it unchanged), ipc 10 and 100 steps of
64 real images a class for methods that condense. Everything else is each paper's. FedBN and SOLO have no common model: their column is the
average over the clients' own models on the clients' own test splits. One-shot methods are in `one_shot_table.py`. Resumes: finished runs are
lines of results/compare.jsonl, and `--only` shares the work among processes.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from fashion_table import RESULTS, Results, summarise

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset
from fedsynth.federation.settings import RunSettings, resolve

LOCAL: dict[str, Any] = {"local_epochs": 10, "batch": 256, "lr": 0.01}
CONDENSE: dict[str, Any] = {"ipc": 10, "iterations": 100, "batch": 64, "server_epochs": 100}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": LOCAL,
    "fedavgm": LOCAL,
    "fedprox": {**LOCAL, "mu": 0.01},
    "fednova": LOCAL,
    "scaffold": LOCAL,
    "feddyn": LOCAL,
    "moon": LOCAL,
    "fedgkd": LOCAL,
    "qffl": LOCAL,
    "fedkf": {**LOCAL, "generator_width": 8, "generator_batch": 32},
    "feddm": CONDENSE,
    "fedaf": {**CONDENSE, "image_lr": 0.2, "server_lr": 0.01},
    "real": {"ipc": 10, "server_epochs": 100},
    "solo": LOCAL,
    "fedbn": LOCAL,
}
PERSONAL = ("solo", "fedbn")


def settings_for(name: str, seed: int, device: str, quick: bool) -> RunSettings:
    values = METHODS[name]
    small = {"local_epochs": 1} if "local_epochs" in values else {"server_epochs": 1}
    small.update({"iterations": 2} if "iterations" in values else {})
    own = {"local_test": 0.2} if name in PERSONAL else {}
    return resolve(
        {
            "run": {"method": name, "rounds": 1 if quick else 5, "seed": seed, "device": device, "evaluate_every": 5},
            "data": {"dataset": "fashion-mnist"},
            "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 10, **own},
            "model": {"width": 16, "norm": "batch" if name == "fedbn" else "instance"},
            "method": {**values, **(small if quick else {})},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round and few steps, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="make only the runs whose name contains this")
    options = parser.parse_args()
    keep_large_allocations()
    data = load_dataset("fashion-mnist")
    results = Results(RESULTS / f"compare{'_quick' if options.quick else ''}.jsonl", options.only)
    table: dict[str, Any] = {}
    for name in options.methods:
        made = [
            results.get(f"{name} seed={seed}", settings_for(name, seed, options.device, options.quick), data)
            for seed in options.seeds
        ]
        rows = [row for row in made if row is not None]
        if len(rows) == len(made):
            measured = [100 * (row["local"]["amp"] if name in PERSONAL else row["accuracy"]) for row in rows]
            size, seconds = (sum(row[key] for row in rows) / len(rows) for key in ("bytes", "seconds"))
            table[name] = {**summarise(measured), "bytes": round(size), "seconds": round(seconds, 1)}
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        print(
            f"{name:9} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['bytes'] / 1e6:8.2f} MB  {row['seconds']:7.1f} s  {row['values']}"
        )


if __name__ == "__main__":
    main()
