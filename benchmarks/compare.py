"""All methods on Fashion-MNIST, 10 clients, Dir(0.1), at one budget, for two CPU cores: accuracy, bytes and seconds.

    FEDSYNTH_DATA=... python benchmarks/compare.py [--quick] [--json] [--device cuda] [--methods fedprox moon] [--only 'seed=1']

A tenth of each class, a ConvNet of width 16. The budget is passes over a client's own data: 5 rounds of 5 for methods that send models,
batches of 32, one round of 25 for one-shot methods. Each method's learning rate is the better of 0.01 and 0.1 on 5,000 held-out training
images with seed 0 (rows "rate …"); FedNova, FedGKD, q-FFL, FedBN, SOLO and the one-shot methods take FedAvg's. Nothing else is tuned:
everything not named here is each paper's, but for generators, which are small. Methods that condense take 5 rounds of 50 steps, ipc 10.
FedBN and SOLO have no common model: their column is the average over the clients' own models on the clients' own test splits, a fifth of
their data, which is another, easier question at Dir(0.1). Resumes: finished runs are lines of results/compare.jsonl, and `--only` shares
the work among processes.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from fashion_table import RESULTS, Results, summarise

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.federation.settings import RunSettings, resolve

RATES = (0.01, 0.1)
LOCAL: dict[str, Any] = {"local_epochs": 5, "batch": 32}
CONDENSE: dict[str, Any] = {"ipc": 10, "iterations": 50, "batch": 64, "server_epochs": 100}
ONE_SHOT: dict[str, Any] = {
    **LOCAL, "local_epochs": 25, "server_epochs": 15, "generator_steps": 10, "generator_batch": 32, "generator_width": 8,
    "generator_lr": 0.01, "replay": True, "start": "average",
}  # fmt: skip
# name in the table: method, settings
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, LOCAL)
        for name in ("fedavg", "fedavgm", "fedprox", "fednova", "feddyn", "fedgkd", "qffl")
    },
    "scaffold": ("scaffold", LOCAL),
    "moon": ("moon", LOCAL),
    "fedfm": ("fedfm", LOCAL),
    "fedfm, l2": ("fedfm", {**LOCAL, "matching": "l2"}),
    "fedfm, from round 3": ("fedfm", {**LOCAL, "start_round": 3}),
    "fedfm-lite": ("fedfm-lite", LOCAL),
    "fedgen": ("fedgen", LOCAL),
    "fedgen, α = β = 1": ("fedgen", {**LOCAL, "alpha": 1.0, "beta": 1.0}),
    "fedfa-l": ("fedfa-plus", {**LOCAL, "parts": "augmentation"}),
    "fedfa-h": ("fedfa-plus", {**LOCAL, "parts": "alignment"}),
    "fedfa+": ("fedfa-plus", LOCAL),
    "fedkf": ("fedkf", {**LOCAL, "generator_width": 8, "generator_batch": 32}),
    "feddm": ("feddm", CONDENSE),
    "fedaf": ("fedaf", {**CONDENSE, "image_lr": 0.2, "server_lr": 0.01}),
    "real": ("real", {"ipc": 10, "server_epochs": 100}),
    "fedavg, one shot": ("fedavg", {**LOCAL, "local_epochs": 25}),
    "feddf": (
        "feddf",
        {**LOCAL, "local_epochs": 25, "server_steps": 200, "server_batch": 64, "proxy": "mnist"},
    ),
    "dense": ("dense", ONE_SHOT),
    "fedhydra": ("fedhydra", {**ONE_SHOT, "stratification_steps": 15, "stratification_batch": 8}),
    "fedhydra, probabilities": (
        "fedhydra",
        {
            **ONE_SHOT,
            "stratification_steps": 15,
            "stratification_batch": 8,
            "outputs": "probabilities",
        },
    ),
    "solo": ("solo", LOCAL),
    "fedbn": ("fedbn", LOCAL),
}
PERSONAL = ("solo", "fedbn")
SINGLE_ROUND = ("fedavg, one shot", "feddf", "dense", "fedhydra", "fedhydra, probabilities")
TAKE_FEDAVGS_RATE = (*PERSONAL, *SINGLE_ROUND, "fednova", "fedgkd", "qffl")


def settings_for(name: str, seed: int, device: str, quick: bool, rate: float | None) -> RunSettings:
    method, values = METHODS[name]
    values = values if rate is None else {**values, "lr": rate}
    small = {key: 1 for key in ("local_epochs", "server_epochs", "server_steps") if key in values}
    small.update({"iterations": 2} if "iterations" in values else {})
    own = {"local_test": 0.2} if name in PERSONAL else {}
    return resolve(
        {
            "run": {
                "method": method,
                "rounds": 1 if quick or name in SINGLE_ROUND else 5,
                "seed": seed,
                "device": device,
                "evaluate_every": 5,
            },
            "data": {"dataset": "fashion-mnist"},
            "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 10, "subset": 0.1, **own},
            "model": {"width": 16, "norm": "batch" if name == "fedbn" else "instance"},
            "method": {**values, **(small if quick else {})},
        }
    )


def best_rate(
    name: str, results: Results, held_out: tuple[ImageData, ImageData], device: str, quick: bool
) -> float | None:
    """The better rate on held-out training images; None: not known yet, as another process makes it, or the method has no local training."""
    if "local_epochs" not in METHODS[name][1]:
        return None
    found = {}
    for rate in RATES:
        chosen = "fedavg" if name in TAKE_FEDAVGS_RATE else name
        row = results.get(
            f"rate {chosen} {rate}", settings_for(chosen, 0, device, quick, rate), held_out
        )
        if row is None:
            return None
        found[rate] = row["accuracy"]
    return max(RATES, key=lambda rate: found[rate])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round and few steps, to see that it runs"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="make only the runs whose name contains this")
    options = parser.parse_args()
    keep_large_allocations()
    data = load_dataset("fashion-mnist")
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(0))
    held_out = data[0].subset(order[5000:]), data[0].subset(order[:5000])
    results = Results(RESULTS / f"compare{'_quick' if options.quick else ''}.jsonl", options.only)
    table: dict[str, Any] = {}
    for name in options.methods:
        rate = best_rate(name, results, held_out, options.device, options.quick)
        if rate is None and "local_epochs" in METHODS[name][1]:
            continue
        made = [
            results.get(
                f"{name} seed={seed}",
                settings_for(name, seed, options.device, options.quick, rate),
                data,
            )
            for seed in options.seeds
        ]
        rows = [row for row in made if row is not None]
        if len(rows) == len(made):
            measured = [
                100 * (row["local"]["amp"] if name in PERSONAL else row["accuracy"]) for row in rows
            ]
            size, seconds = (
                sum(row[key] for row in rows) / len(rows) for key in ("bytes", "seconds")
            )
            table[name] = {
                **summarise(measured),
                "bytes": round(size),
                "seconds": round(seconds, 1),
                "rate": rate,
            }
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():  # bytes: all clients' uploads of a round
        print(
            f"{name:23} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['bytes'] / 1e6:8.2f} MB  {row['seconds']:7.1f} s  "
            f"rate {row['rate']}  {row['values']}"
        )


if __name__ == "__main__":
    main()
