"""The Fashion-MNIST table's settings, which other grids share."""

from __future__ import annotations

from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from library.grid import Cell

METHODS: dict[str, dict[str, Any]] = {
    "feddm": {"ipc": 10, "iterations": 100, "batch": 64, "server_epochs": 100},
    "real": {"ipc": 10, "server_epochs": 100},
    "fedavg": {"local_epochs": 10, "batch": 256},
}
FEW = {"iterations": 2, "server_epochs": 2, "local_epochs": 1}


def settings_for(method: str, seed: int, cell: Cell, **changes: Any) -> RunSettings:
    """Returns the settings of one run of the table."""
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
