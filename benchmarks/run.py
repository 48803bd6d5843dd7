"""Makes the missing rows of a declared grid.

    python benchmarks/run.py                      lists the grids
    python benchmarks/run.py GRID --help          what it measures, and its options
    python benchmarks/run.py GRID [--quick] [--device cuda] [--AXIS VALUE ...] [--only 'seed=1']
        [--time-budget SECONDS]

A grid is a file of `grids/`, and its rows are lines of results/GRID.jsonl. A row that is there is
not made again, so a further call resumes where the last one stopped, and `--only` shares the work
among processes. `--quick` runs every cell with few steps, to see that it runs, and writes to
results/GRID_quick.jsonl. Most grids read their data sets from the folder FEDSYNTH_DATA.
"""

from __future__ import annotations

import argparse
import importlib
import math
import pkgutil
import sys
import tempfile
import time
from pathlib import Path

import torch

import grids
from fedsynth.cli.application import keep_large_allocations
from library.grid import Grid, Rows
from library.machine import plain_options, rows_file

NAMES = [module.name for module in pkgutil.iter_modules(grids.__path__)]


def grid_options(grid: Grid, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a grid, whose axes are options."""
    parser = plain_options(description)
    parser.add_argument("grid", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="make only rows whose key contains this")
    parser.add_argument("--time-budget", type=float, default=math.inf, help="seconds")
    folder = Path(tempfile.gettempdir()) / "fedsynth-features"
    parser.add_argument("--cache", type=Path, default=folder, help="folder of kept features")
    parser.add_argument("--repeats", type=int, default=grid.repeats, help="rows of each key")
    for name, values in grid.axes.items():
        parser.add_argument(
            f"--{name}", nargs="+", type=type(values[0]), default=values, help=f"of {list(values)}"
        )
    return parser


def main() -> None:
    if sys.argv[1:2] == [] or sys.argv[1] not in NAMES:
        sys.exit(f"{__doc__}\nThe grids: {', '.join(NAMES)}")
    module = importlib.import_module(f"grids.{sys.argv[1]}")
    grid: Grid = module.GRID
    options = grid_options(grid, module.__doc__).parse_args()
    keep_large_allocations()
    if grid.threads is not None:
        torch.set_num_threads(grid.threads)
    deadline = time.monotonic() + options.time_budget
    rows = Rows(rows_file(options.grid, options.quick), deadline, options.only)
    axes = {name: getattr(options, name) for name in grid.axes}
    same = {"device": options.device, "quick": options.quick, "cache": options.cache}
    for cell in grid.cells(axes, **same):
        grid.make(cell, rows, options.repeats)


if __name__ == "__main__":
    main()
