"""FedDM's images as floats or as 8-bit pixels, on held-out training images.

FedDM's settings in the small edition of its paper's Table 2 and in the first table of
docs/results.md; accuracy on 5,000 training images that are held out of everything else. 8-bit
pixels are clipped to the valid range and rounded before they are sent; the client continues with
its floats.
"""

from __future__ import annotations

from fedsynth.config.settings import RunSettings
from fedsynth.experiments.presets import preset
from grids import fashion_table
from library.grid import Cell, Grid, Row
from library.runs import one_run, tuning_data

DATA = {
    "mnist dirichlet(0.1)": "mnist",
    "mnist dirichlet(0.01)": "mnist",
    "fashion-mnist dirichlet(0.1)": "fashion-mnist",
}


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of one run."""
    if DATA[cell.data] == "fashion-mnist":
        return fashion_table.settings_for("feddm", cell.seed, cell, image_dtype=cell.dtype)
    table = preset("feddm:table2").edition("small")
    dataset, partition = cell.data.split()
    (published,) = table.select(dataset=dataset, partition=partition, method="feddm")
    return table.settings(published, cell.seed, {"method": {"image_dtype": cell.dtype}})


def work(cell: Cell) -> Row:
    return one_run(cell.settings, tuning_data(DATA[cell.data]))


GRID = Grid(
    axes={"seed": range(5), "data": list(DATA), "dtype": ("float32", "uint8")},
    key="{data} {dtype} seed={seed}",
    settings=settings,
    work=work,
)
