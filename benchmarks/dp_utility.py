"""What accuracy an honest ε buys: FedDM's three mechanisms and DP-FedAvg on MNIST and Fashion-MNIST, 10 clients, Dir(0.5), δ = 1e-5.

    FEDSYNTH_DATA=... python benchmarks/dp_utility.py [--quick] [--json] [--device cuda] [--only 'seed=1'] [--datasets fashion-mnist]

All have the same rounds and the same model, at a size that two CPU cores can do. For each method and data set, clip and learning rate are
chosen from one grid (multiples of the method's defaults) on 5,000 training images held out of the run, at ε = 3, with a seed that the table
does not use; the choice is not accounted for (the data are public). σ is found for the whole run before it starts. The row "noiseless" is
`features` with σ = 1e-3 and the clip chosen for it. Resumes: finished runs are lines of results/dp_utility.jsonl.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from fashion_table import RESULTS, TUNING_SEED, Results, held_out, summarise

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.federation.settings import RunSettings, resolve

EPSILONS = (1.0, 3.0, 10.0)
CLIPS, RATES = (0.5, 1.0, 2.0), (1.0, 3.0)
FEDDM: dict[str, Any] = {"ipc": 5, "server_epochs": 60, "image_lr": 5.0}
METHODS: dict[str, dict[str, Any]] = {
    "features": {**FEDDM, "iterations": 40, "networks": 4},
    "residual": {**FEDDM, "iterations": 40, "batch": 32},
    "gradient": {**FEDDM, "iterations": 20, "batch": 8},
    "dp-sgd": {"local_epochs": 2, "batch": 256, "lr": 0.05},
}
CLIP: dict[str, float] = {"features": 6.0, "residual": 6.0, "gradient": 1.0, "dp-sgd": 1.0}


def settings_for(
    dataset: str, mechanism: str, seed: int, device: str, budget: dict[str, float], clip: float, rate: float, quick: bool
) -> RunSettings:
    """One run; `clip` and `rate` multiply the mechanism's own."""
    method = dict(METHODS[mechanism])
    key = "lr" if mechanism == "dp-sgd" else "image_lr"
    method[key] *= rate
    if quick:
        method |= {"local_epochs": 1} if mechanism == "dp-sgd" else {"iterations": 2, "server_epochs": 1}
    return resolve(
        {
            "run": {
                "method": "fedavg" if mechanism == "dp-sgd" else "feddm",
                "rounds": 1 if quick else 2,
                "seed": seed,
                "device": device,
                "evaluate_every": 2,
            },
            "data": {"dataset": dataset},
            "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 10},
            "model": {"width": 16},
            "method": method,
            "privacy": {"mechanism": mechanism, "clip": CLIP[mechanism] * clip, **budget},
        }
    )


class Table:
    """Tunes and runs one data set."""

    def __init__(self, dataset: str, options: argparse.Namespace) -> None:
        self.dataset, self.options = dataset, options
        self.train, self.test = load_dataset(dataset)
        self.tuning = held_out(self.train, 5000)
        self.results = Results(RESULTS / f"dp_utility{'_quick' if options.quick else ''}.jsonl", options.only)

    def run(self, name: str, data: tuple[ImageData, ImageData], mechanism: str, **kind: Any) -> float | None:
        """Accuracy in percent; None if `--only` leaves the run to another process."""
        settings = settings_for(self.dataset, mechanism, device=self.options.device, quick=self.options.quick, **kind)
        row = self.results.get(f"{self.dataset} {name}", replace(settings, compile=self.options.compile), data)
        return None if row is None else 100 * row["accuracy"]

    def tuned(self, name: str, mechanism: str, budget: dict[str, float]) -> tuple[float, float] | None:
        """(clip, rate) of the best run on the held-out images."""
        tried = {
            (clip, rate): self.run(
                f"tune {name} clip={clip} rate={rate}",
                self.tuning,
                mechanism,
                seed=TUNING_SEED,
                budget=budget,
                clip=clip,
                rate=rate,
            )
            for clip in CLIPS
            for rate in RATES
        }
        known = {key: value for key, value in tried.items() if value is not None}
        return max(known, key=lambda key: known[key]) if len(known) == len(tried) else None

    def rows(self) -> dict[str, Any]:
        table: dict[str, Any] = {}
        cases = [(m, m, {f"ε={e:g}": {"epsilon": e} for e in EPSILONS}) for m in METHODS]
        cases.append(("noiseless features", "features", {"no noise": {"noise_multiplier": 1e-3}}))
        for name, mechanism, budgets in cases:
            best = self.tuned(name, mechanism, budgets.get("ε=3", {"noise_multiplier": 1e-3}))
            if best is None:
                continue
            for label, budget in budgets.items():
                kind = {"budget": budget, "clip": best[0], "rate": best[1]}
                values = [
                    self.run(f"{name} {label} seed={s}", (self.train, self.test), mechanism, seed=s, **kind)
                    for s in self.options.seeds
                ]
                done = [v for v in values if v is not None]
                if len(done) == len(values):
                    table[f"{name}, {label}"] = {**summarise(done), "clip": CLIP[mechanism] * best[0], "rate": best[1]}
        return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round and few steps, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--datasets", nargs="+", default=["fashion-mnist", "mnist"])
    parser.add_argument("--only", default="", help="make only the runs whose name contains this, such as 'seed=1' or 'tune'")
    parser.add_argument("--compile", action="store_true", help="as in `fedsynth train`")
    options = parser.parse_args()
    keep_large_allocations()
    table = {dataset: Table(dataset, options).rows() for dataset in options.datasets}
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for dataset, rows in table.items():
        print(dataset)
        for name, row in rows.items():
            print(
                f"  {name:26} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['values']}  clip {row['clip']:g}, rate ×{row['rate']:g}"
            )


if __name__ == "__main__":
    main()
