"""FedSum beside FedDM, 10 clients, on the digits and Fashion-MNIST: accuracy by round, seconds of
CPU and bytes.

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
Seconds are of this process's CPU time, which other processes on the machine move little.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.federation.observer import Observer
from fedsynth.simulation.simulate import simulate
from library.grid import Cell, Grid, Row
from library.private import CLIP, FEDDM
from library.runs import dataset

Values = dict[str, Any]
DIGITS: dict[str, tuple[str, Values]] = {
    "feddm": ("feddm", {"iterations": 10}),
    "fedsum": ("fedsum", {"networks": 4, "iterations": 100, "start": "random-process"}),
}
DIGITS["fedsum with 50 images"] = ("fedsum", {**DIGITS["fedsum"][1], "ipc": 50, "image_lr": 50.0})
FEDDM_OPEN: Values = {"iterations": 50, "batch": 64}
FEDSUM_OPEN: Values = {
    "networks": 8,
    "iterations": 400,
    "image_lr": 10.0,
    "start": "random-process",
}
OPEN: dict[str, tuple[str, Values]] = {
    "feddm, rate 1": ("feddm", FEDDM_OPEN),
    "feddm, rate 10": ("feddm", {**FEDDM_OPEN, "image_lr": 10.0}),
    "fedsum": ("fedsum", FEDSUM_OPEN),
    "fedsum with 50 images": ("fedsum", {**FEDSUM_OPEN, "ipc": 50, "image_lr": 50.0}),
}
PRIVATE: Values = {**FEDDM, "iterations": 400, "networks": 4, "start": "random-process"}
QUICK = {"iterations": 2, "server_epochs": 1}


def digits(name: str, alpha: float) -> Values:
    method, values = DIGITS[name]
    return {
        "run": {"method": method, "rounds": 3},
        "partition": {"alpha": alpha, "clients": 10},
        "model": {"width": 16, "depth": 2},
        "method": {"ipc": 5, "image_lr": 5.0, "server_epochs": 50, **values},
    }


def on_fashion(name: str, alpha: float) -> Values:
    method, values = OPEN[name]
    return {
        "run": {"method": method, "rounds": 5},
        "data": {"dataset": "fashion-mnist"},
        "partition": {"alpha": alpha, "clients": 10, "subset": 0.1},
        "model": {"width": 16},
        "method": {"ipc": 10, "server_epochs": 100, **values},
    }


def private(epsilon: float, aggregation: str) -> Values:
    return {
        "run": {"method": "fedsum", "rounds": 2},
        "data": {"dataset": "fashion-mnist"},
        "partition": {"alpha": 0.5, "clients": 10},
        "model": {"width": 16},
        "method": {**PRIVATE, "aggregation": aggregation},
        "privacy": {"epsilon": epsilon, "clip": CLIP["features"]},
    }


RUNS: dict[str, Values] = {
    **{
        f"digits: {name}, Dir({alpha:g})": digits(name, alpha)
        for name in DIGITS
        for alpha in ((0.05,) if "50" in name else (0.05, 100.0))
    },
    **{
        f"open: {name}, Dir({alpha:g})": on_fashion(name, alpha)
        for name in OPEN
        for alpha in ((0.1, 100.0) if name == "fedsum" else (0.1,))
    },
    **{
        f"private: fedsum, ε = {epsilon:g}, {kind} noise": private(epsilon, kind)
        for epsilon in (1.0, 10.0)
        for kind in ("own", "secure")
    },
}


class Clock(Observer):
    """CPU seconds at the end of each round."""

    def __init__(self) -> None:
        self._start = time.process_time()
        self.seconds: list[float] = []

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.seconds.append(round(time.process_time() - self._start, 2))


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of one run."""
    sections = RUNS[cell.name]
    run = {**sections["run"], "seed": cell.seed, "device": cell.device, "evaluate_every": 1}
    few = {"rounds": 1} if cell.quick else {}
    steps = QUICK if cell.quick else {}
    return resolve({**sections, "run": {**run, **few}, "method": {**sections["method"], **steps}})


def work(cell: Cell) -> Row:
    """Returns a run's accuracy and CPU seconds by round."""
    clock = Clock()
    result = simulate(cell.settings, data=dataset(cell.settings.dataset), observer=clock)
    return {
        "accuracy": result.accuracy,
        "curve": [row["test_accuracy"] for row in result.metrics],
        "cpu_seconds": clock.seconds,
        "bytes": result.summary["upload_bytes"],
    }


GRID = Grid(
    axes={"seed": (0,), "name": tuple(RUNS)},
    key="{name} seed={seed}",
    settings=settings,
    work=work,
    threads=1,
)
