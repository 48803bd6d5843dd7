"""Does a bf16 real pass cost accuracy? FedDM on Fashion-MNIST at the size of `fashion_table.py`,
fp32 against bf16, the same seeds.

    FEDSYNTH_DATA=... python benchmarks/precision.py [--quick] [--json] [--device cuda]
        [--seeds 0 1 2]

Resumes: finished runs are lines of results/precision.jsonl.
"""

from __future__ import annotations

import json
from dataclasses import replace

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset
from library.fashion import settings_for, short
from library.options import table_options
from library.results import Results, summarise


def main() -> None:
    parser = table_options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    keep_large_allocations()
    data = load_dataset("fashion-mnist")
    results = Results.of("precision", options)
    accuracy: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for seed in options.seeds:
        for precision, values in accuracy.items():
            settings = replace(settings_for("feddm", seed, options.device), precision=precision)
            if options.quick:
                settings = short(settings)
            row = results.get(f"{precision} seed={seed}", settings, data)
            if row is not None:
                values.append(100 * row["accuracy"])
    accuracy["bf16 - fp32"] = [
        a - b for a, b in zip(accuracy["bf16"], accuracy["fp32"], strict=True)
    ]
    table = {name: summarise(values) for name, values in accuracy.items()}
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        print(f"{name:12} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['values']}")


if __name__ == "__main__":
    main()
