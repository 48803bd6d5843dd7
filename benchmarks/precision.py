"""Does bf16 cost accuracy? fp32 against `--precision bf16`, the same seeds in pairs.

    FEDSYNTH_DATA=... python benchmarks/precision.py [--quick] [--device cuda]
        [--cases FedKF] [--only 'seed=1'] [--time-budget SECONDS]

- FedDM, on Fashion-MNIST at the size of `fashion_table.py`: real passes and the server's training.
- FedKF, on a tenth of EMNIST letters at Dir(0.1): 20 rounds at twice the paper's rate with
  generators of width 16, all else as in `fedkf_table.py`: local training and distillation.
- FedHydra, on a twentieth of Fashion-MNIST at Dir(0.1), all as in `one_shot_table.py`: local
  training and the server's distillation.

Accuracy of the last round. Two runs that differ by rounding are soon apart as two seeds are, so a
difference between precisions is to be held against its own spread.

Resumes: finished runs are lines of results/precision.jsonl; `--only` shares the work among
processes, and after `--time-budget` seconds no further run is begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from library.fashion import settings_for, short
from library.one_shot import LOCAL, SERVER
from library.results import start, table_parser


class Case(NamedTuple):
    """(seed, device, quick) -> settings in fp32; and how many seeds."""

    settings: Callable[[int, str, bool], RunSettings]
    seeds: int


def feddm(seed: int, device: str, quick: bool) -> RunSettings:
    made = settings_for("feddm", seed, device)
    return short(made) if quick else made


def fedkf(seed: int, device: str, quick: bool) -> RunSettings:
    few: dict[str, Any] = {"local_epochs": 1} if quick else {}
    return resolve(
        {
            "run": {
                "method": "fedkf",
                "rounds": 2 if quick else 20,
                "seed": seed,
                "device": device,
                "participation": 0.2,
                "evaluate_every": 5,
            },
            "data": {"dataset": "emnist-letters"},
            "partition": {
                "kind": "dirichlet-dominant",
                "alpha": 0.1,
                "clients": 20,
                "subset": 0.1,
                "local_test": 0.2,
            },
            "model": {"name": "lenet5"},
            "method": {
                "local_epochs": 10,
                "batch": 64,
                "lr": 0.02,
                "momentum": 0.0,
                "equal_steps": True,
                "generator_width": 16,
                **few,
            },
        }
    )


def fedhydra(seed: int, device: str, quick: bool) -> RunSettings:
    few: dict[str, Any] = {
        "local_epochs": 1,
        "server_epochs": 1,
        "generator_steps": 2,
        "stratification_steps": 2,
    }
    return resolve(
        {
            "run": {"method": "fedhydra", "rounds": 1, "seed": seed, "device": device},
            "data": {"dataset": "fashion-mnist"},
            "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 5, "subset": 0.05},
            "model": {"width": 8, "norm": "batch"},
            "method": {**LOCAL, **SERVER, **(few if quick else {})},
        }
    )


CASES = {
    "FedDM": Case(feddm, 3),
    "FedKF": Case(fedkf, 3),
    "FedHydra": Case(fedhydra, 5),
}


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options, results = start("precision", parser)
    for name in options.cases:
        case = CASES[name]
        for seed in range(1 if options.quick else case.seeds):
            for precision in ("fp32", "bf16"):
                settings = case.settings(seed, options.device, options.quick)
                settings = replace(settings, precision=precision)
                results.get(f"{name} {precision} seed={seed}", settings)
    results.show()


if __name__ == "__main__":
    main()
