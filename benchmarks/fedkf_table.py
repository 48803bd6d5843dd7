"""FedAvg, FedAvg (OCA) and FedKF's four variants on a tenth of EMNIST letters, 4 of 20 clients a round, for two CPU cores.

    FEDSYNTH_DATA=... python benchmarks/fedkf_table.py [--quick] [--json] [--device cuda] [--alphas 0.1] [--only 'seed=1']

The paper's Table V setting (LeNet-5, batch 64, 20 % of each client's data tests, 10 % of each class is used) but for the size: 20 rounds of
4 local epochs where the paper has 100 of 10, and a generator of width 8 and batch 32. That is a twelfth of the paper's local steps, so the
learning rate is ten times the paper's, 0.1, for every row; nothing else is changed, and nothing is chosen by the test splits. One training
of FedAvg, FedKF and FedKF⁻ each gives both final models. AMP and WLP in %, FM in 10⁻³, of the last round; and the rounds until AMP reaches
FedAvg's last one (evaluated every second round). Resumes: finished runs are lines of results/fedkf_table.jsonl, and `--only` shares the
work among processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from typing import Any

from fashion_table import RESULTS, Results

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset
from fedsynth.evaluation.fairness import first_to_reach
from fedsynth.federation.settings import RunSettings, resolve

SIZE: dict[str, Any] = {"local_epochs": 4, "batch": 64, "lr": 0.1, "momentum": 0.0, "final": "oca"}
GENERATOR: dict[str, Any] = {"generator_width": 8, "generator_batch": 32}
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", SIZE),
    "FedKF-": ("fedkf", {**SIZE, **GENERATOR, "teacher": "aca"}),
    "FedKF": ("fedkf", {**SIZE, **GENERATOR}),
}


def settings_for(name: str, alpha: float, seed: int, device: str, quick: bool) -> RunSettings:
    method, values = TRAININGS[name]
    return resolve(
        {
            "run": {
                "method": method,
                "rounds": 2 if quick else 20,
                "seed": seed,
                "device": device,
                "participation": 0.2,
            },
            "data": {"dataset": "emnist-letters"},
            "partition": {
                "kind": "dirichlet",
                "alpha": alpha,
                "clients": 20,
                "subset": 0.1,
                "local_test": 0.2,
            },
            "model": {"name": "lenet5"},
            "method": {**values, **({"local_epochs": 1} if quick else {})},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two rounds and few steps, to see that it runs"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.01])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="make only the runs whose name contains this")
    options = parser.parse_args()
    keep_large_allocations()
    data = load_dataset("emnist-letters")
    results = Results(
        RESULTS / f"fedkf_table{'_quick' if options.quick else ''}.jsonl", options.only
    )
    made: dict[tuple[str, float, int], dict[str, Any]] = {}
    for alpha in options.alphas:
        for name in TRAININGS:
            for seed in options.seeds:
                settings = settings_for(name, alpha, seed, options.device, options.quick)
                row = results.get(
                    f"{name} alpha={alpha:g} seed={seed}", replace(settings, evaluate_every=2), data
                )
                if row is not None:
                    made[name, alpha, seed] = row
    table = {
        f"{name} ({kind.upper()}), Dir({alpha:g})": summary(
            [made[name, alpha, seed] for seed in options.seeds],
            [made["FedAvg", alpha, seed] for seed in options.seeds],
            kind,
        )
        for alpha in options.alphas
        for name in TRAININGS
        for kind in ("aca", "oca")
        if all((one, alpha, seed) in made for one in (name, "FedAvg") for seed in options.seeds)
    }
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        print(f"{name:28}", "  ".join(f"{key} {value}" for key, value in row.items()))


def summary(rows: list[dict[str, Any]], fedavg: list[dict[str, Any]], kind: str) -> dict[str, str]:
    last = [row["rows"][-1]["models"][kind]["local"] for row in rows]
    target = [row["rows"][-1]["models"]["aca"]["local"]["amp"] for row in fedavg]
    reached = [
        first_to_reach(t, row["rows"], f"models.{kind}.local.amp")
        for t, row in zip(target, rows, strict=True)
    ]
    shown = {
        name: [scale * one[name.lower()] for one in last]
        for name, scale in (("AMP", 100.0), ("FM", 1000.0), ("WLP", 100.0))
    }
    spread = {
        name: f"{statistics.mean(v):.2f} ± {statistics.stdev(v) if len(v) > 1 else 0:.2f}"
        for name, v in shown.items()
    }
    rounds = ", ".join("never" if r is None else str(r["round"]) for r in reached)
    seconds = ", ".join("–" if r is None else f"{r['seconds']:.0f}" for r in reached)
    return {**spread, "rounds to FedAvg's AMP": rounds, "seconds to it": seconds}


if __name__ == "__main__":
    main()
