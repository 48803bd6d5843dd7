"""FedSum beside FedDM, 10 clients, on the digits and Fashion-MNIST: accuracy by round, seconds of
CPU and bytes.

    FEDSYNTH_DATA=... python benchmarks/fedsum_table.py [--quick] [--device cuda]
        [--only 'open'] [--time-budget SECONDS]

"digits" runs have the embedded digits, a ConvNet of width 16 and depth 2, ipc 5 and 3 rounds: FedDM
with the digits' preset of 10 steps, FedSum with M = 4 and 100 steps, image rate 5 for both; and
FedSum with as many images a class as ten clients of FedDM have together, and a rate that is as many
times as large. "open" runs, on Fashion-MNIST without privacy, have a tenth of the training images,
a ConvNet of width 16, ipc 10 and 5 rounds, as `compare.py` has. FedDM makes 50 steps a round with
64 real images a class, at image rates 1 (the paper's) and 10; FedSum M = 8 passes over the data and
400 steps on the server, at rate 10, with start images from random processes; these were found on
3,000 held-out training images. FedDM's partition is Dir(0.1), FedSum's that and Dir(100), of which
it should not depend; FedSum also has five times as many images, at a rate five times as large.
"private" runs have all images, and the preset of `dp_utility.py`'s FedDM `features`, whose rows the
table shows beside them: Dir(0.5), 2 rounds of M = 4 networks, clip 6.
Seconds are of this process's CPU time, which other processes on the machine move little. Resumes:
finished runs are lines of results/fedsum_table.jsonl, and `--only` shares the work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData
from fedsynth.federation.observer import Observer
from fedsynth.simulation.simulate import simulate
from library.private import CLIP, FEDDM
from library.results import start, table_parser

OPEN: dict[str, tuple[str, float, dict[str, Any]]] = {
    "feddm, rate 1, Dir(0.1)": ("feddm", 0.1, {"iterations": 50, "batch": 64}),
    "feddm, rate 10, Dir(0.1)": ("feddm", 0.1, {"iterations": 50, "batch": 64, "image_lr": 10.0}),
}
FEDSUM: dict[str, Any] = {
    "networks": 8,
    "iterations": 400,
    "image_lr": 10.0,
    "start": "random-process",
}
for _alpha in (0.1, 100.0):
    OPEN[f"fedsum, Dir({_alpha:g})"] = ("fedsum", _alpha, FEDSUM)
OPEN["fedsum with 50 images, Dir(0.1)"] = ("fedsum", 0.1, {**FEDSUM, "ipc": 50, "image_lr": 50.0})
PRIVATE = {
    f"fedsum, ε = {epsilon:g}, {aggregation} noise": {
        "epsilon": epsilon,
        "aggregation": aggregation,
    }
    for epsilon in (1.0, 10.0)
    for aggregation in ("own", "secure")
}
DIGITS: dict[str, tuple[str, dict[str, Any]]] = {
    "feddm": ("feddm", {"iterations": 10}),
    "fedsum": ("fedsum", {"networks": 4, "iterations": 100, "start": "random-process"}),
}
DIGITS["fedsum with 50 images"] = ("fedsum", {**DIGITS["fedsum"][1], "ipc": 50, "image_lr": 50.0})
SKEWS = {f"{name}, Dir({alpha:g})": (name, alpha) for name in DIGITS for alpha in (0.05, 100.0)}
del SKEWS["fedsum with 50 images, Dir(100)"]  # as at any other
QUICK = {"iterations": 2, "server_epochs": 1}


class Clock(Observer):
    """CPU seconds at the end of each round."""

    def __init__(self) -> None:
        self._start = time.process_time()
        self.seconds: list[float] = []

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.seconds.append(round(time.process_time() - self._start, 2))


def open_settings(name: str, seed: int, device: str, quick: bool) -> RunSettings:
    method, alpha, values = OPEN[name]
    given = {"ipc": 10, "server_epochs": 100, **values, **(QUICK if quick else {})}
    return resolve(
        {
            "run": {
                "method": method,
                "rounds": 1 if quick else 5,
                "seed": seed,
                "device": device,
                "evaluate_every": 1,
            },
            "data": {"dataset": "fashion-mnist"},
            "partition": {"alpha": alpha, "clients": 10, "subset": 0.1},
            "model": {"width": 16},
            "method": given,
        }
    )


def digits_settings(name: str, seed: int, device: str, quick: bool) -> RunSettings:
    kind, alpha = SKEWS[name]
    method, values = DIGITS[kind]
    given = {"ipc": 5, "image_lr": 5.0, "server_epochs": 50, **values, **(QUICK if quick else {})}
    rounds = 1 if quick else 3
    run = {"method": method, "rounds": rounds, "seed": seed, "device": device, "evaluate_every": 1}
    return resolve(
        {
            "run": run,
            "partition": {"alpha": alpha, "clients": 10},
            "model": {"width": 16, "depth": 2},
            "method": given,
        }
    )


def private_settings(name: str, seed: int, device: str, quick: bool) -> RunSettings:
    budget = PRIVATE[name]
    given = {
        **FEDDM,
        "iterations": 400,
        "networks": 4,
        "start": "random-process",
        "aggregation": budget["aggregation"],
        **(QUICK if quick else {}),
    }
    return resolve(
        {
            "run": {
                "method": "fedsum",
                "rounds": 1 if quick else 2,
                "seed": seed,
                "device": device,
                "evaluate_every": 1,
            },
            "data": {"dataset": "fashion-mnist"},
            "partition": {"alpha": 0.5, "clients": 10},
            "model": {"width": 16},
            "method": given,
            "privacy": {"epsilon": budget["epsilon"], "clip": CLIP["features"]},
        }
    )


def run(settings: RunSettings, data: tuple[ImageData, ImageData]) -> dict[str, Any]:
    clock = Clock()
    result = simulate(settings, data=data, observer=clock)
    return {
        "accuracy": result.accuracy,
        "curve": [row["test_accuracy"] for row in result.metrics],
        "cpu_seconds": clock.seconds,
        "bytes": result.summary["upload_bytes"],
    }


def main() -> None:
    options, results = start("fedsum_table", table_parser(__doc__, seeds=(0,)))
    torch.set_num_threads(1)
    for seed in options.seeds:
        kinds = [("digits", name, digits_settings) for name in SKEWS]
        kinds += [("open", name, open_settings) for name in OPEN]
        kinds += [("private", name, private_settings) for name in PRIVATE]
        for kind, name, settings_for in kinds:
            settings = settings_for(name, seed, options.device, options.quick)
            results.get(f"{kind}: {name} seed={seed}", settings, run=run)
    results.show()


if __name__ == "__main__":
    main()
