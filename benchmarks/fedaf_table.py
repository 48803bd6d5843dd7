"""FedAF, its ablations and FedDM on Fashion-MNIST, 10 clients, Dir(0.02) and Dir(0.1), at a size that two CPU cores can do.

    FEDSYNTH_DATA=... python benchmarks/fedaf_table.py [--quick] [--json] [--device cuda] [--alphas 0.1] [--only 'seed=1']

The paper's settings for Fashion-MNIST (image lr 0.2, λ_loc 1e-3, λ_glob 2.0, γ 0.9, batch norm) but for the size: width 16, 5 rounds, ipc 10,
100 iterations, 64 real images a class, 100 server epochs. FedDM as the paper runs it: image lr 1, ρ 5 (its clipping of the gradient's norm at
2 is not there). The table gives the accuracy after the last round and, as the paper does, the best over rounds; nothing is chosen by the test
set. Resumes: finished runs are lines of results/fedaf_table.jsonl, and `--only` shares the work among processes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from fashion_table import RESULTS, Results, summarise

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset
from fedsynth.federation.settings import RunSettings, resolve

SIZE: dict[str, Any] = {"ipc": 10, "iterations": 100, "batch": 64, "server_epochs": 100}
FEDAF: dict[str, Any] = {**SIZE, "image_lr": 0.2, "local_weight": 1e-3, "global_weight": 2.0}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedDM": ("feddm", {**SIZE, "image_lr": 1.0}),
    "FedAF": ("fedaf", FEDAF),
    "without CDC": ("fedaf", {**FEDAF, "local_weight": 0.0}),
    "without LGKM": ("fedaf", {**FEDAF, "global_weight": 0.0}),
    "γ = 0.5": ("fedaf", {**FEDAF, "gamma": 0.5}),
    "γ = 1": ("fedaf", {**FEDAF, "gamma": 1.0}),
}


def settings_for(name: str, alpha: float, seed: int, device: str, quick: bool) -> RunSettings:
    method, values = ROWS[name]
    small = {"iterations": 2, "server_epochs": 1} if quick else {}
    return resolve(
        {
            "run": {"method": method, "rounds": 1 if quick else 5, "seed": seed, "device": device},
            "data": {"dataset": "fashion-mnist"},
            "partition": {"kind": "dirichlet", "alpha": alpha, "clients": 10},
            "model": {"width": 16, "norm": "batch"},
            "method": {**values, **small},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round and few steps, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.02])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="make only the runs whose name contains this")
    options = parser.parse_args()
    keep_large_allocations()
    data = load_dataset("fashion-mnist")
    results = Results(RESULTS / f"fedaf_table{'_quick' if options.quick else ''}.jsonl", options.only)
    table: dict[str, Any] = {}
    for alpha in options.alphas:
        for name in ROWS:
            made = []
            for seed in options.seeds:
                settings = settings_for(name, alpha, seed, options.device, options.quick)
                made.append(results.get(f"{name} alpha={alpha:g} seed={seed}", replace(settings, evaluate_every=1), data))
            rows = [row for row in made if row is not None]
            if len(rows) == len(made):
                last, best = ([100 * value(row) for row in rows] for value in (_last, _best))
                table[f"{name}, Dir({alpha:g})"] = {"last": summarise(last), "best": summarise(best)}
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        last, best = row["last"], row["best"]
        print(
            f"{name:28} last {last['mean']:6.2f} ± {last['sd']:.2f}   best {best['mean']:6.2f} ± {best['sd']:.2f}   {last['values']}"
        )


def _last(row: dict[str, Any]) -> float:
    return float(row["accuracy"])


def _best(row: dict[str, Any]) -> float:
    return float(max(row["curve"]))


if __name__ == "__main__":
    main()
