"""FedDM, REAL and FedAvg on Fashion-MNIST, 10 clients, Dir(0.1): the README's table, at a size that two CPU cores can do.

    FEDSYNTH_DATA=... python benchmarks/fashion_table.py [--quick] [--json] [--device cuda]

FedAvg's learning rate is chosen from the comparison papers' grid on 5,000 training images held out of everything else, after one round
with a seed that the table does not use. The test set is read once, at the end of each run. FedDM and REAL keep the papers' settings where two
cores allow, and start from the same real images. Each finished run is a line in the results file; a second call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.federation.settings import RunSettings, resolve
from fedsynth.federation.simulation import simulate

RESULTS = Path(__file__).parent / "results"
PRESET: dict[str, dict[str, Any]] = {
    "run": {"rounds": 5, "evaluate_every": 1},
    "data": {"dataset": "fashion-mnist"},
    "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 10},
    "model": {"width": 16},
}
METHODS: dict[str, dict[str, Any]] = {
    "feddm": {"ipc": 10, "iterations": 100, "batch": 64, "server_epochs": 100},
    "real": {"ipc": 10, "server_epochs": 100},
    "fedavg": {"local_epochs": 10, "batch": 256},
}
FEDAVG_GRID = (0.001, 0.01, 0.1)
TUNING_SEED = 1000


def settings_for(method: str, seed: int, device: str, **changes: Any) -> RunSettings:
    """The table's settings of one run."""
    run = {**PRESET["run"], "method": method, "seed": seed, "device": device}
    return resolve({**PRESET, "run": run, "method": {**METHODS[method], **changes}})


def held_out(train: ImageData, size: int) -> tuple[ImageData, ImageData]:
    """(the rest, `size` random training images) for choosing learning rates."""
    order = np.random.default_rng(0).permutation(len(train))
    return train.subset(np.sort(order[size:])), train.subset(np.sort(order[:size]))


class Results:
    """A JSON-lines file of finished runs, keyed by name."""

    def __init__(self, path: Path) -> None:
        self.path, self._machine = path, machine()
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}

    def get(self, key: str, run: Any) -> dict[str, Any]:
        if key not in self.rows:
            self.rows[key] = {"key": key, **run(), **self._machine}
            with self.path.open("a") as file:
                file.write(json.dumps(self.rows[key]) + "\n")
            print(json.dumps(self.rows[key]), file=sys.stderr, flush=True)
        return self.rows[key]


def machine() -> dict[str, Any]:
    """Where and with what a result was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "date": str(date.today()),
        "machine": device,
        "torch": torch.__version__,
        "commit": commit,
        "command": " ".join(sys.argv),
    }


def one_run(settings: RunSettings, data: tuple[ImageData, ImageData]) -> dict[str, Any]:
    result = simulate(settings, data=data)
    curve = [row["test_accuracy"] for row in result.metrics]
    return {
        "accuracy": result.accuracy,
        "curve": curve,
        "floats": result.summary["upload_floats_per_round"],
        "seconds": result.summary["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round and few steps, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    train, test = load_dataset("fashion-mnist")
    results = Results(RESULTS / ("fashion_table_quick.jsonl" if options.quick else "fashion_table.jsonl"))
    if options.quick:
        results.path.unlink(missing_ok=True)
        results.rows.clear()

    def run(method: str, seed: int, data: tuple[ImageData, ImageData], **changes: Any) -> dict[str, Any]:
        quick = {"feddm": {"iterations": 2, "server_epochs": 2}, "real": {"server_epochs": 2}, "fedavg": {"local_epochs": 1}}[
            method
        ]
        settings = settings_for(method, seed, options.device, **changes, **(quick if options.quick else {}))
        rounds = 1 if options.quick or seed == TUNING_SEED else settings.rounds
        return one_run(replace(settings, rounds=rounds), data)

    def tuned_rate() -> dict[str, Any]:
        tuning = held_out(train, 5000)
        tried = {
            lr: results.get(f"tune fedavg lr={lr}", lambda lr=lr: run("fedavg", TUNING_SEED, tuning, lr=lr)) for lr in FEDAVG_GRID
        }
        table["fedavg tuning"] = {str(lr): row["accuracy"] for lr, row in tried.items()}
        return {"lr": max(tried, key=lambda rate: tried[rate]["accuracy"])}

    table: dict[str, Any] = {}
    for method in METHODS:
        changes = tuned_rate() if method == "fedavg" else {}
        rows = [
            results.get(f"{method} seed={s}", lambda m=method, s=s, c=changes: run(m, s, (train, test), **c))
            for s in options.seeds
        ]
        table[method] = summarise([100 * row["accuracy"] for row in rows])
    pairs = [
        100 * (results.rows[f"feddm seed={s}"]["accuracy"] - results.rows[f"real seed={s}"]["accuracy"]) for s in options.seeds
    ]
    table["feddm - real, same start images"] = summarise(pairs)
    if options.json:
        print(json.dumps(table, indent=2))
        return
    print(f"FedAvg's accuracy after a round on 5,000 held-out training images, by learning rate: {table['fedavg tuning']}")
    for name, row in table.items():
        if isinstance(row, dict) and "mean" in row:
            print(f"{name:35} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['values']}")


def summarise(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "sd": sd, "values": [round(v, 2) for v in values]}


if __name__ == "__main__":
    main()
