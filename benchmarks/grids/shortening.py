"""FedStats: accuracy with and without shortened directions, on held-out training images.

MNIST and Fashion-MNIST without 5,000 images, ten clients, Dir(0.5), ε = 1, own noise, 32 rounds,
released thumbnails. Features are made once (`--cache`).
"""

from __future__ import annotations

from typing import Any

from fedsynth import FedStats
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.simulation.simulate import simulate
from grids.fedstats_table import settings_for
from library.grid import Cell, Grid, Row
from library.runs import keep_features, tuning_data


def work(cell: Cell) -> Row:
    """Returns the accuracy of the classifier on held-out images."""
    rest, held_out = keep_features(tuning_data(cell.dataset), "auto", cell.cache)
    result = simulate(cell.settings, data=(rest, None), quiet=True)
    return {"accuracy": accuracy(result.model, held_out)}


def settings(cell: Cell) -> Any:
    """Returns the settings of one run, with as few images as thumbnails need."""
    values = vars(cell) | {"epsilon": "1", "noise": "own", "alpha": 0.5, "clients": 10}
    images = {"ipc": 0, "drawn_ipc": 1, "principal_share": cell.share}
    return settings_for(Cell(**values), **images)


GRID = Grid(
    axes={
        "seed": range(5),
        "dataset": ("mnist", "fashion-mnist"),
        "share": (FedStats.principal_share, 0.0),
    },
    key="{dataset} share={share:g} seed={seed}",
    settings=settings,
    work=work,
)
