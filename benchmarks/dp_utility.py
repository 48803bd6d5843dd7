"""What accuracy an honest ε buys: FedDM's three mechanisms and DP-FedAvg on MNIST and
Fashion-MNIST, 10 clients, Dir(0.5), δ = 1e-5.

    FEDSYNTH_DATA=... python benchmarks/dp_utility.py [--quick] [--device cuda]
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

from dataclasses import replace
from itertools import product
from typing import Any

from library.fashion import TUNING_SEED
from library.private import CLIPS, EPSILONS, METHODS, RATES, TUNE_ON, settings_for
from library.results import best_key, start, table_parser, tuning_data


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--datasets", nargs="+", default=["fashion-mnist", "mnist"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--compile", action="store_true", help="as in `fedsynth train`")
    options, results = start("dp_utility", parser)

    def run(dataset: str, name: str, mechanism: str, data: Any = None, **values: Any) -> Any:
        settings = settings_for(
            dataset, mechanism, device=options.device, quick=options.quick, **values
        )
        return results.get(f"{dataset} {name}", replace(settings, compile=options.compile), data)

    for mechanism in options.methods:
        tried = {}
        for clip, rate in product(CLIPS, RATES):
            values = {"seed": TUNING_SEED, "budget": {"epsilon": 3.0}, "clip": clip, "rate": rate}
            name = f"tune {mechanism} clip={clip} rate={rate}"
            tried[clip, rate] = run(TUNE_ON, name, mechanism, tuning_data(TUNE_ON), **values)
        best = best_key(tried)
        if best is None:
            continue
        budgets = {f"{mechanism}, ε = {epsilon:g}": {"epsilon": epsilon} for epsilon in EPSILONS}
        if mechanism == "features":
            budgets["features, noiseless"] = {"noise_multiplier": 1e-3}
        for dataset, (name, budget), seed in product(
            options.datasets, budgets.items(), options.seeds
        ):
            values = {"seed": seed, "budget": budget, "clip": best[0], "rate": best[1]}
            run(dataset, f"{name} seed={seed}", mechanism, **values)
    results.show()


if __name__ == "__main__":
    main()
