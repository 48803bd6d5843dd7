"""One owner's private synthetic set by number of patients and ε: the table of docs/own-data.md.

Digits, one image for each patient: 3 against 8, or all ten. `fedsynth synthesize`'s own settings.
The patients of a seed are drawn from the training images. The accuracy is that of the run's model,
which is trained on the synthetic set, on the test images of these classes.
"""

from __future__ import annotations

import numpy as np

from fedsynth import RunSettings, from_arrays, load_dataset, owner_settings
from fedsynth.data.images import ImageData
from fedsynth.data.registry import custom_spec
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.simulation.simulate import simulate
from library.grid import Cell, Grid, Row

TWO, TEN = (3, 8), tuple(range(10))
TRAIN = {2: 286, 10: 1438}  # images of these classes


def part(data: ImageData, cell: Cell, count: int | None = None) -> ImageData:
    """Returns images of the cell's classes, `count` of them at random."""
    classes = TWO if cell.classes == 2 else TEN
    labels = data.labels.numpy()
    rows = np.flatnonzero(np.isin(labels, classes))
    if count is not None:
        rows = np.random.default_rng(cell.seed).permutation(rows)[:count]
    facts = {"train_size": cell.patients, "source": data.spec.source}
    spec = custom_spec("patients", data.spec.image_shape, list(map(str, classes)), **facts)
    return from_arrays(data.images[rows].numpy(), np.searchsorted(classes, labels[rows]), spec)


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of one run."""
    privacy = {"epsilon": cell.epsilon, "max_records": 10 * cell.patients, "ledger": NO_LEDGER}
    run = {"method": cell.method, "seed": cell.seed, "device": cell.device}
    if cell.quick:
        run["rounds"] = 2
    sizes = {"nominal_size": cell.patients}
    return owner_settings({"run": run, "model": {"depth": 2}, "privacy": {**privacy, **sizes}})


def work(cell: Cell) -> Row:
    """Returns a run's accuracy and AUROC."""
    train, test = load_dataset("digits")
    data = part(train, cell, cell.patients), part(test, cell)
    result = simulate(cell.settings, data=data, test="public", quiet=True)
    return {"accuracy": result.accuracy, "auroc": result.summary["auroc"]}


GRID = Grid(
    axes={
        "seed": range(3),
        "patients": (60, 250, 1400),
        "classes": (2, 10),
        "epsilon": (1.0, 3.0, 8.0),
        "method": ("feddm", "fedstats"),
    },
    key="{method} classes={classes} patients={patients} eps={epsilon:g} seed={seed}",
    settings=settings,
    work=work,
    include=lambda cell: cell.patients <= TRAIN[cell.classes],
    threads=1,
)
