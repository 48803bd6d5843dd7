"""Attacks on released sets: the table of docs/evidence.md.

A tenth of the training images at five owners. The released sets are those of FedDM without privacy
(`feddm`), of FedStats at ε = 1 (`fedstats`), and a broken one (`copies`): random real images, with
a white square of 3×3 pixels at a place of their owner. Held out are the test images.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from fedsynth import RunSettings, resolve
from fedsynth.data.shared_set import TENSORS, SharedSet, read_set
from fedsynth.simulation.simulate import images_of_run, simulate
from library.grid import Cell, Grid, Row

METHODS: dict[str, dict[str, Any]] = {
    "feddm": {"ipc": 10, "iterations": 100, "batch": 64, "server_epochs": 1},
    "fedstats": {"ipc": 50},
    "copies": {"ipc": 10, "server_epochs": 1},
}
SQUARE = 3


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of one run."""
    private = cell.way == "fedstats"
    method = dict(METHODS[cell.way])
    if cell.quick:
        method = {**method, "ipc": 2, **({"iterations": 2} if cell.way == "feddm" else {})}
    sections: dict[str, dict[str, Any]] = {
        "run": {
            "method": "real" if cell.way == "copies" else cell.way,
            "rounds": 32 if private else 1,
            "seed": cell.seed,
            "device": cell.device,
        },
        "data": {"dataset": cell.dataset},
        "method": method,
        "model": {} if private else {"width": 16},
        "partition": {"kind": "iid", "clients": 5, "subset": 0.1},
        "privacy": {"epsilon": 1.0} if private else {},
    }
    return resolve({name: values for name, values in sections.items() if values})


def with_marks(released: SharedSet) -> SharedSet:
    """Draws the owner's square into each image."""
    owners = torch.zeros(0) if released.clients is None else released.clients
    for row, owner in enumerate(owners.tolist()):
        released.images[row, :, :SQUARE, owner * SQUARE : (owner + 1) * SQUARE] = 1
    return released


def work(cell: Cell) -> Row:
    """Returns the results of the attacks, and the fidelity."""
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(cell.settings, output=folder, quiet=True)
        released = read_set(Path(result.folder or "") / TENSORS)
    if cell.way == "copies":
        released = with_marks(released)
    pack = images_of_run(cell.settings, "pixels", simulation=True).evidence(released)
    attacks = {"membership": pack.membership, "site_inference": pack.site_inference}
    named = ("rate", "low", "high", "chance")
    rows = {k: a and {name: getattr(a, name) for name in named} for k, a in attacks.items()}
    return {
        **rows,
        "images": len(released.labels),
        "fid": pack.fidelity.fid,
        "kid": pack.fidelity.kid,
    }


GRID = Grid(
    axes={
        "dataset": ("mnist", "fashion-mnist"),
        "way": ("copies", "fedstats", "feddm"),
        "seed": range(3),
    },
    key="{dataset} {way} seed={seed}",
    settings=settings,
    work=work,
    threads=1,
)
