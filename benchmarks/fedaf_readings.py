"""FedAF's readings of what its paper leaves open, one changed at a time: Fashion-MNIST at the size
of `fedaf_table.py`.

    FEDSYNTH_DATA=... python benchmarks/fedaf_readings.py [--group matching] [--quick]
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

from library.fedaf import ALPHA, READING_SEEDS, READINGS, reading
from library.results import start, table_parser, tuning_data


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--group", choices=READINGS, nargs="+", default=list(READINGS))
    parser.set_defaults(seeds=None)
    options, results = start("fedaf_readings", parser)
    for group in options.group:
        alpha = ALPHA.get(group, 0.1)
        for seed in options.seeds or READING_SEEDS.get(group, (0, 1)):
            for name in READINGS[group]:
                settings = reading(group, name, alpha, seed, options.device, options.quick)
                row = f"{name}, Dir({alpha}) seed={seed}"
                results.get(row, settings, tuning_data("fashion-mnist"))
    results.show()


if __name__ == "__main__":
    main()
