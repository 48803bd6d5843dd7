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

from library.fashion import settings_for
from library.grid import Cell, Grid, Rows, best
from library.runs import TUNING_SEED, tuning_data

RATES = (0.001, 0.01, 0.1)


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
    axes={"seed": (0, 1, 2), "method": ("feddm", "real", "fedavg")},
    key="{method} seed={seed}",
    settings=lambda cell: settings_for(cell.method, cell.seed, cell, **cell.chosen),
    choose=chosen,
)
