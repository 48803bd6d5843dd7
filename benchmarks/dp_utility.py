"""What accuracy an honest ε buys: FedDM's three mechanisms and DP-FedAvg on MNIST and
Fashion-MNIST, 10 clients, Dir(0.5), δ = 1e-5.

    FEDSYNTH_DATA=... python benchmarks/dp_utility.py [--quick] [--json] [--device cuda]
        [--methods features residual]

All have the same rounds and the same model, at a size that two CPU cores can do. For each method,
clip and learning rate are chosen from one grid (multiples of the method's own) on 5,000
Fashion-MNIST training images held out of the run, at ε = 3, with a seed that the table does not
use, and then serve both data sets; the choice is not accounted for (the data are public). σ is
found for the whole run before it starts. The row "noiseless" is `features` as chosen, with σ =
1e-3. Resumes: finished runs are lines of results/dp_utility.jsonl; `--methods` shares the work
among processes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from library.fashion import TUNING_SEED
from library.options import table_options
from library.private import CLIP, CLIPS, EPSILONS, METHODS, RATES, TUNE_ON, settings_for
from library.results import Results, held_out, summarise


class Table:
    """Runs on one data set."""

    def __init__(self, dataset: str, options: argparse.Namespace) -> None:
        self.dataset = dataset
        self.options = options
        self.train, self.test = load_dataset(dataset)
        self.results = Results.of("dp_utility", options)

    def run(
        self, name: str, data: tuple[ImageData, ImageData], mechanism: str, **kind: Any
    ) -> float:
        """Accuracy in percent."""
        settings = settings_for(
            self.dataset, mechanism, device=self.options.device, quick=self.options.quick, **kind
        )
        row: Any = self.results.get(
            f"{self.dataset} {name}", replace(settings, compile=self.options.compile), data
        )
        return 100 * float(row["accuracy"])

    def tuned(self, mechanism: str) -> tuple[float, float]:
        """(clip, rate) of the best run on held-out training images."""
        data = held_out(self.train, 5000)
        budget = {"epsilon": 3.0}
        tried = {
            (c, r): self.run(
                f"tune {mechanism} clip={c} rate={r}",
                data,
                mechanism,
                seed=TUNING_SEED,
                budget=budget,
                clip=c,
                rate=r,
            )
            for c in CLIPS
            for r in RATES
        }
        return max(tried, key=lambda key: tried[key])

    def rows(self, mechanism: str, best: tuple[float, float]) -> dict[str, Any]:
        budgets: dict[str, dict[str, float]] = {
            f"{mechanism}, ε = {e:g}": {"epsilon": e} for e in EPSILONS
        }
        if mechanism == "features":
            budgets["features, noiseless"] = {"noise_multiplier": 1e-3}
        table = {}
        for name, budget in budgets.items():
            kind = {"budget": budget, "clip": best[0], "rate": best[1]}
            values = [
                self.run(f"{name} seed={s}", (self.train, self.test), mechanism, seed=s, **kind)
                for s in self.options.seeds
            ]
            table[name] = {**summarise(values), "clip": CLIP[mechanism] * best[0], "rate": best[1]}
        return table


def main() -> None:
    parser = table_options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--datasets", nargs="+", default=["fashion-mnist", "mnist"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--compile", action="store_true", help="as in `fedsynth train`")
    options = parser.parse_args()
    keep_large_allocations()
    chosen = {mechanism: Table(TUNE_ON, options).tuned(mechanism) for mechanism in options.methods}
    table: dict[str, dict[str, Any]] = {}
    for dataset in options.datasets:
        runs = Table(dataset, options)
        table[dataset] = {
            name: row for m, best in chosen.items() for name, row in runs.rows(m, best).items()
        }
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for dataset, rows in table.items():
        print(dataset)
        for name, row in rows.items():
            print(
                f"  {name:26} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['values']}  clip "
                f"{row['clip']:g}, rate ×{row['rate']:g}"
            )


if __name__ == "__main__":
    main()
