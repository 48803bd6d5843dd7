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

from library.grid import Cell, Grid, Rows, best
from library.private import CLIPS, METHODS, RATES, TUNE_ON, settings_for
from library.runs import TUNING_SEED, tuning_data

BUDGETS = {
    **{f"ε = {epsilon}": {"epsilon": float(epsilon)} for epsilon in (1, 3, 10)},
    "noiseless": {"noise_multiplier": 1e-3},
}


def chosen(cell: Cell, rows: Rows) -> tuple[float, float] | None:
    """Returns the best clip and rate of a mechanism."""
    options = {"seed": TUNING_SEED, "device": cell.device, "quick": cell.quick}
    tried = {}
    for clip, rate in product(CLIPS, RATES):
        settings = settings_for(TUNE_ON, cell.mechanism, BUDGETS["ε = 3"], clip, rate, **options)
        name = f"{TUNE_ON} tune {cell.mechanism} clip={clip} rate={rate}"
        tried[clip, rate] = rows.run(name, settings, partial(tuning_data, TUNE_ON))
    choice: tuple[float, float] | None = best(tried)
    return choice


GRID = Grid(
    axes={
        "mechanism": tuple(METHODS),
        "dataset": ("fashion-mnist", "mnist"),
        "budget": tuple(BUDGETS),
        "seed": (0, 1, 2),
    },
    key="{dataset} {mechanism}, {budget} seed={seed}",
    settings=lambda cell: settings_for(
        cell.dataset,
        cell.mechanism,
        BUDGETS[cell.budget],
        *cell.chosen,
        seed=cell.seed,
        device=cell.device,
        quick=cell.quick,
    ),
    choose=chosen,
    include=lambda cell: cell.budget != "noiseless" or cell.mechanism == "features",
)
