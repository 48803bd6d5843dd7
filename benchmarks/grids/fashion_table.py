"""FedDM, REAL and FedAvg on Fashion-MNIST, 10 clients, Dir(0.1): the first table of
docs/results.md, at a size that two CPU cores can do.

FedAvg's learning rate is chosen from the comparison papers' grid by 5,000 training images held out
of everything else, with a seed that the table does not use and the table's number of rounds. The
test set is read after each round, for the curves; nothing is chosen by it. FedDM and REAL keep the
papers' settings where two cores allow, and start from the same real images.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from library.grid import Cell, Grid, Rows, best
from library.runs import TUNING_SEED, tuning_data

METHODS: dict[str, dict[str, Any]] = {
    "feddm": {"ipc": 10, "iterations": 100, "batch": 64, "server_epochs": 100},
    "real": {"ipc": 10, "server_epochs": 100},
    "fedavg": {"local_epochs": 10, "batch": 256},
}
FEW = {"iterations": 2, "server_epochs": 2, "local_epochs": 1}
RATES = (0.001, 0.01, 0.1)


def settings_for(method: str, seed: int, cell: Cell, **changes: Any) -> RunSettings:
    """Returns the settings of one run."""
    values = {**METHODS[method], **changes}
    if cell.quick:
        values |= {name: few for name, few in FEW.items() if name in values}
    rounds = 1 if cell.quick else 5
    run = {"method": method, "seed": seed, "device": cell.device, "rounds": rounds}
    return resolve(
        {
            "run": {**run, "evaluate_every": 1},
            "data": {"dataset": "fashion-mnist"},
            "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 10},
            "model": {"width": 16},
            "method": values,
        }
    )


def chosen(cell: Cell, rows: Rows) -> dict[str, Any] | None:
    """Returns FedAvg's best rate; the other methods are not tuned."""
    if cell.method != "fedavg":
        return {}
    rows_by_rate = {}
    for lr in RATES:
        settings = settings_for("fedavg", TUNING_SEED, cell, lr=lr)
        data = partial(tuning_data, "fashion-mnist")
        rows_by_rate[lr] = rows.run(f"tune fedavg lr={lr}", settings, data)
    rate = best(rows_by_rate)
    return None if rate is None else {"lr": rate}


GRID = Grid(
    axes={"seed": (0, 1, 2), "method": tuple(METHODS)},
    key="{method} seed={seed}",
    settings=lambda cell: settings_for(cell.method, cell.seed, cell, **cell.chosen),
    choose=chosen,
)
