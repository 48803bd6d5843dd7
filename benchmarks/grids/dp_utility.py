"""Accuracy by ε: FedDM's three mechanisms and DP-FedAvg on MNIST and
Fashion-MNIST, 10 clients, Dir(0.5), δ = 1e-5.

All have the same rounds and the same model, at a size that two CPU cores can do. For each method,
clip and learning rate are chosen from one grid (multiples of the method's own) on 5,000
Fashion-MNIST training images held out of the run, at ε = 3, with a seed that the table does not
use, and then serve both data sets; the choice is not accounted for (the data are public). σ is
found for the whole run before it starts. The row "noiseless" is `features` as chosen, with σ =
1e-3.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from library.grid import Cell, Grid, Rows, best
from library.runs import TUNING_SEED, tuning_data

BUDGETS = {
    **{f"ε = {epsilon}": {"epsilon": float(epsilon)} for epsilon in (1, 3, 10)},
    "noiseless": {"noise_multiplier": 1e-3},
}
CLIPS = (0.5, 1.0, 2.0)
RATES = (1.0, 3.0)
TUNE_ON = "fashion-mnist"
FEDDM: dict[str, Any] = {"ipc": 5, "server_epochs": 60, "image_lr": 20.0}
METHODS: dict[str, dict[str, Any]] = {
    "features": {**FEDDM, "iterations": 40, "networks": 4},
    "residual": {**FEDDM, "iterations": 40, "batch": 32},
    "gradient": {**FEDDM, "iterations": 15, "batch": 6},
    "dp-sgd": {"local_epochs": 1, "batch": 256, "lr": 0.1},
}
CLIP: dict[str, float] = {"features": 6.0, "residual": 6.0, "gradient": 1.0, "dp-sgd": 1.0}


def settings_for(
    dataset: str,
    mechanism: str,
    budget: dict[str, float],
    tuned: tuple[float, float],
    seed: int,
    cell: Cell,
) -> RunSettings:
    """Returns the settings of one run; a clip and a rate, in `tuned`, multiply the mechanism's
    own."""
    clip, rate = tuned
    local = mechanism == "dp-sgd"
    method = dict(METHODS[mechanism])
    method["lr" if local else "image_lr"] *= rate
    if cell.quick:
        method |= {"local_epochs": 1} if local else {"iterations": 2, "server_epochs": 1}
    run = {"method": "fedavg" if local else "feddm", "rounds": 1 if cell.quick else 2}
    return resolve(
        {
            "run": {**run, "seed": seed, "device": cell.device},
            "data": {"dataset": dataset},
            "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 10},
            "model": {"width": 16},
            "method": method,
            "privacy": {"mechanism": mechanism, "clip": CLIP[mechanism] * clip, **budget},
        }
    )


def chosen(cell: Cell, rows: Rows) -> tuple[float, float] | None:
    """Returns the best clip and rate of a mechanism."""
    tried = {}
    for pair in product(CLIPS, RATES):
        name = "{} tune {} clip={} rate={}".format(TUNE_ON, cell.mechanism, *pair)
        settings = settings_for(TUNE_ON, cell.mechanism, BUDGETS["ε = 3"], pair, TUNING_SEED, cell)
        tried[pair] = rows.run(name, settings, partial(tuning_data, TUNE_ON))
    return best(tried)


GRID = Grid(
    axes={
        "mechanism": tuple(METHODS),
        "dataset": ("fashion-mnist", "mnist"),
        "budget": tuple(BUDGETS),
        "seed": (0, 1, 2),
    },
    key="{dataset} {mechanism}, {budget} seed={seed}",
    settings=lambda cell: settings_for(
        cell.dataset, cell.mechanism, BUDGETS[cell.budget], cell.chosen, cell.seed, cell
    ),
    choose=chosen,
    include=lambda cell: cell.budget != "noiseless" or cell.mechanism == "features",
)
