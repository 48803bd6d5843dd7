"""What FedDM's open readings are worth: each one changed alone, on Fashion-MNIST at the size of
`fashion_table.py`.

    FEDSYNTH_DATA=... python benchmarks/feddm_readings.py [--quick] [--json] [--device cuda]
        [--seeds 0 1]

Accuracy is that on 5,000 training images held out of the run: the test set is not read.
"""

from __future__ import annotations

import json

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset
from library.fashion import settings_for, short
from library.options import table_options
from library.results import Results, held_out, summarise

READINGS: dict[str, dict[str, object]] = {
    "defaults": {},
    "restart each round": {"restart": True},
    "inside the ball": {"perturbation": "ball"},
    "siamese augmentation": {"augment": "siamese"},
    "small classes resampled": {"small_class": "resample"},
    "image momentum 0.5": {"image_momentum": 0.5},
    "server without momentum and decay": {"server_momentum": 0.0, "server_weight_decay": 0.0},
}


def main() -> None:
    parser = table_options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    keep_large_allocations()
    data = held_out(load_dataset("fashion-mnist")[0], 5000)
    results = Results.of("feddm_readings", options)
    table = {}
    for name, changes in READINGS.items():
        values = []
        for seed in options.seeds:
            settings = settings_for("feddm", seed, options.device, **changes)
            if options.quick:
                settings = short(settings)
            row = results.get(f"{name} seed={seed}", settings, data)
            if row is not None:
                values.append(100 * row["accuracy"])
        table[name] = summarise(values)
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        print(f"{name:36} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['values']}")


if __name__ == "__main__":
    main()
