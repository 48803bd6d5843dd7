"""What FedAF's temperature τ, which its paper does not give, is worth: on Fashion-MNIST at the size of `fedaf_table.py`, at its λ_glob.

    FEDSYNTH_DATA=... python benchmarks/fedaf_readings.py [--quick] [--json] [--device cuda] [--alphas 0.02] [--seeds 0 1] [--only 'τ = 4']

Accuracy is that on 5,000 training images held out of the run: the test set is not read.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from fashion_table import RESULTS, Results, held_out, summarise
from fedaf_table import settings_for

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset

READINGS: dict[str, dict[str, float]] = {
    "τ = 1": {},
    "τ = 2": {"temperature": 2.0},
    "τ = 4": {"temperature": 4.0},
    "τ = 8": {"temperature": 8.0},
    "τ = 16": {"temperature": 16.0},
    "without LGKM": {"global_weight": 0.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round and few steps, to see that it runs"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.02])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", default="", help="make only the runs whose name contains this")
    options = parser.parse_args()
    keep_large_allocations()
    data = held_out(load_dataset("fashion-mnist")[0], 5000)
    results = Results(
        RESULTS / f"fedaf_readings{'_quick' if options.quick else ''}.jsonl", options.only
    )
    table = {}
    for alpha in options.alphas:
        for name, changes in READINGS.items():
            values = []
            for seed in options.seeds:
                settings = settings_for(
                    "fashion", "FedAF", alpha, seed, options.device, options.quick
                )
                settings = replace(settings, method=replace(settings.method, **changes))  # type: ignore[arg-type]
                row = results.get(f"{name}, Dir({alpha}) seed={seed}", settings, data)
                if row is not None:
                    values.append(100 * row["accuracy"])
            if values:
                table[f"Dir({alpha}), {name}"] = summarise(values)
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        print(f"{name:30} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['values']}")


if __name__ == "__main__":
    main()
