"""FedAvg, FedAvg (OCA) and FedKF's four variants on a tenth of EMNIST letters, 4 of 20 clients a
round, for two CPU cores.

    FEDSYNTH_DATA=... python benchmarks/fedkf_table.py [--size long] [--quick]
        [--alphas 0.1] [--seeds 0] [--only 'seed=1'] [--time-budget 3600]

The paper's Table V setting as its official code has it: LeNet-5, batch 64, 10 local epochs, every
client with the same number of steps, the code's own partition, 20 % of each client's data test, 10
% of each class is used. What differs: 50 rounds where the paper has 100, so the learning rate is
twice the paper's, 0.02, for every row; and generators of width 8 (the paper's: 64). Nothing is
chosen by the test splits. `--size long` has the paper's 100 rounds and rate with the small
generators, and `--size paper` its generators too (hours a run); both take Dir(0.1), and `paper` one
seed, unless others are named.

One training of FedAvg, FedKF and FedKF⁻ each gives both final models. AMP and WLP in %, FM in 10⁻³,
of the last round; the rounds until AMP reaches FedAvg's last one (evaluated every fifth round);
what the last round's generators made. Resumes: finished runs are lines of
results/fedkf_table.jsonl, `--only` shares the work among processes, and after `--time-budget`
seconds no further run is begun.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from library.results import start, table_parser

SIZE: dict[str, Any] = {
    "local_epochs": 10,
    "batch": 64,
    "momentum": 0.0,
    "final": "oca",
    "equal_steps": True,
}


class Length(NamedTuple):
    """How long a training is, and with which generators; the rate goes with the rounds."""

    rounds: int
    lr: float
    generator_width: int | None


SIZES = {
    "table": Length(50, 0.02, 8),
    "long": Length(100, 0.01, 8),
    "paper": Length(100, 0.01, None),
}
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedKF-": ("fedkf", {"teacher": "aca"}),
    "FedKF": ("fedkf", {}),
}
EVERY = 5


def settings_for(
    name: str, alpha: float, seed: int, device: str, quick: bool, size: str = "table"
) -> RunSettings:
    method, values = TRAININGS[name]
    length = SIZES[size]
    steps = {**SIZE, "lr": length.lr, **({"local_epochs": 1} if quick else {})}
    generator: dict[str, Any] = {}
    if method == "fedkf" and length.generator_width is not None:
        generator["generator_width"] = length.generator_width
    return resolve(
        {
            "run": {
                "method": method,
                "rounds": 2 if quick else length.rounds,
                "seed": seed,
                "device": device,
                "participation": 0.2,
                "evaluate_every": EVERY,
            },
            "data": {"dataset": "emnist-letters"},
            "partition": {
                "kind": "dirichlet-dominant",
                "alpha": alpha,
                "clients": 20,
                "subset": 0.1,
                "local_test": 0.2,
            },
            "model": {"name": "lenet5"},
            "method": {**steps, **generator, **values},
        }
    )


def main() -> None:
    parser = table_parser(__doc__, "two rounds and few steps: a test")
    parser.add_argument("--size", choices=SIZES, default="table", help="how much of the paper's")
    parser.add_argument("--alphas", type=float, nargs="+")
    parser.set_defaults(seeds=None)
    options, results = start("fedkf_table", parser)
    alphas = options.alphas or ([0.1, 0.01] if options.size == "table" else [0.1])
    seeds = options.seeds or ([0] if options.size == "paper" else range(5))
    prefix = "" if options.size == "table" else f"{options.size} "
    for alpha, seed, name in product(alphas, seeds, TRAININGS):
        settings = settings_for(name, alpha, seed, options.device, options.quick, options.size)
        results.get(f"{prefix}{name} alpha={alpha:g} seed={seed}", settings)
    results.show()


if __name__ == "__main__":
    main()
