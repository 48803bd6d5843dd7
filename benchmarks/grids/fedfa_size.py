"""FedFA+ beside other methods on Office-Caltech-10 at two image sizes.

The AlexNet cells of `fedfa:images`, evaluated every tenth round, on the same 64×64 files, or
enlarged (bicubic) before training. At 64×64, AlexNet's last stage has one pixel; at 96×96 it has
four. FedBN's clients, which have models of their own, are left out. A killed run continues from its
last finished round if the command is repeated with the same --cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData
from fedsynth.experiments.presets import preset
from fedsynth.results.finished import is_unfinished
from fedsynth.simulation.simulate import simulate
from library.grid import Cell, Grid
from library.runs import Data, dataset

IMAGES = 100  # enlarged at a time


def _enlarged(images: ImageData, size: int) -> ImageData:
    if images.spec.height == size:
        return images
    pieces = [
        functional.interpolate(piece.float(), (size, size), mode="bicubic")
        for piece in images.images.split(IMAGES)
    ]
    pixels = torch.cat(pieces).round().clamp(0, 255).byte()
    spec = replace(images.spec, height=size, width=size)
    return replace(images, images=pixels, spec=spec, record_bytes=None)


@cache
def _data(size: int) -> Data:
    train, test = dataset("office-caltech-10")
    return _enlarged(train, size), _enlarged(test, size)


def settings(cell: Cell) -> RunSettings:
    """Returns the preset's settings, with fewer rounds."""
    table = preset("fedfa:images")
    (published,) = table.select(dataset="office_caltech", model="alexnet", method=cell.method)
    rounds = 2 if cell.quick else cell.rounds
    changes = {"run": {"rounds": rounds, "device": cell.device}}
    return table.settings(published, cell.seed, changes)


def work(cell: Cell) -> dict[str, Any]:
    """Runs a cell, or the rest of it, and returns its accuracies by round."""
    folder = cell.cache / f"fedfa-{cell.size}-{cell.rounds}-{cell.method}-{cell.seed}"
    started = [path for path in folder.glob("*") if is_unfinished(path)]
    place: dict[str, Any] = {"resume": started[0]} if started else {"output": folder}
    result = simulate(cell.settings, data=_data(cell.size), test="public", **place)
    evaluated = [row for row in result.metrics if "test_accuracy" in row]
    return {
        "accuracy": result.accuracy,
        "round": [row["round"] for row in evaluated],
        "domain_accuracy": [row["domain_accuracy"] for row in evaluated],
        "seconds": round(sum(row["seconds"] for row in result.metrics), 1),
    }


GRID = Grid(
    axes={
        "size": (64, 96),
        "rounds": (60,),
        "seed": (0, 1),
        "method": ("fedavg", "fedfa+", "fedprox", "fedavgm"),
    },
    key="{method}, {size}x{size}, {rounds} rounds seed={seed}",
    settings=settings,
    work=work,
)
