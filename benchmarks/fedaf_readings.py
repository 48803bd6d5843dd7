"""FedAF's readings of what its paper leaves open, one changed at a time: Fashion-MNIST at the size
of `fedaf_table.py`.

    FEDSYNTH_DATA=... python benchmarks/fedaf_readings.py [--group matching] [--quick] [--json]
        [--seeds 0 1] [--only 'τ = 4'] [--time-budget 3600]

Groups: `rates` (the image rate at the table's number of steps, of FedAF and of FedDM, which the
table takes), `real` (how strong knowledge matching is, how soft, when, and by which batch norm, and
the paper's number of server epochs: on random real images in place of condensed ones, kept over
the rounds, at width 8, so that a row costs a minute), `matching` (the same for few readings with
condensed images, at the table's size), `late` (the paper's image rate over the table's ten rounds,
from averages of images and from images), `skew` (the table's own settings at Dir(0.02)), `steps`
(with the paper's number of server epochs, and four times the condensation steps, at width 8).
Accuracy is that on 5,000 training images held out of the run: the test set is not read. Finished
runs are lines of results/fedaf_readings.jsonl.
"""

from __future__ import annotations

import json
from typing import Any

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset
from library.fedaf import ALPHA, READING_SEEDS, READINGS, reading
from library.options import add_share, table_options
from library.results import Results, held_out, summarise


def main() -> None:
    parser = table_options(__doc__)
    parser.add_argument("--group", choices=READINGS, nargs="+", default=list(READINGS))
    parser.add_argument("--seeds", type=int, nargs="+", help="0 and 1; of `skew` 0, 1 and 2")
    add_share(parser)
    options = parser.parse_args()
    keep_large_allocations()
    data = held_out(load_dataset("fashion-mnist")[0], 5000)
    results = Results.of("fedaf_readings", options)
    table: dict[tuple[float, str, str], list[dict[str, Any]]] = {}
    for group in options.group:
        alpha = ALPHA.get(group, 0.1)
        for seed in options.seeds or READING_SEEDS.get(group, (0, 1)):  # one of every reading first
            for name in READINGS[group]:
                settings = reading(group, name, alpha, seed, options.device, options.quick)
                row = results.get(f"{name}, Dir({alpha}) seed={seed}", settings, data)
                if row is not None:
                    table.setdefault((alpha, group, name), []).append(row)
    shown = {
        f"{name}, Dir({alpha:g})": {
            "last": summarise([100 * row["accuracy"] for row in rows]),
            "best": summarise([100 * max(row["curve"]) for row in rows]),
        }
        for (alpha, _, name), rows in table.items()
    }
    if options.json:
        print(json.dumps(shown, indent=2))
        return
    for title, columns in shown.items():
        last = columns["last"]
        best = columns["best"]
        print(
            f"{title:48} last {last['mean']:6.2f} ± {last['sd']:.2f}   best {best['mean']:6.2f} ± "
            f"{best['sd']:.2f}   {last['values']}"
        )


if __name__ == "__main__":
    main()
