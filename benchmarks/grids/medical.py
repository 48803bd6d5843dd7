"""FedStats, DP-FedAvg, FedDM and FedSum on chest X-rays and brain MRI, three sites, ε = 1, 3 and 8.

The files have MedMNIST's layout: medical/pneumoniamnist.npz (28×28, 2 classes) and
medical/brain_mri_64.npz (64×64, 4 classes) in the folder FEDSYNTH_DATA. The unit of privacy is the
image, because the patients are unknown. Nothing is tuned on these data: the settings are those of
the tables of private accuracy on Fashion-MNIST. The images are divided among the sites by Dir(0.5).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.load import ROOT_VARIABLE
from fedsynth.data.registry import custom_spec
from fedsynth.evaluation import MEASURES
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.simulation.simulate import simulate
from grids.dp_utility import CLIP, FEDDM
from library.grid import Cell, Grid, Row
from library.runs import Data

FACTS: dict[str, dict[str, Any]] = {  # the declared number of training images
    "pneumonia": {"source": "pneumoniamnist.npz", "train_size": 3900},
    "brain-mri": {"source": "brain_mri_64.npz", "train_size": 5700},
}
CLASSES = {
    "pneumonia": ("normal", "pneumonia"),
    "brain-mri": ("glioma", "meningioma", "no tumour", "pituitary"),
}
CONDENSING: dict[str, Any] = {
    "run": {"rounds": 2},
    "method": {**FEDDM, "iterations": 40, "networks": 4},
    "model": {"width": 16},
    "privacy": {"clip": CLIP["features"]},
}
METHODS: dict[str, dict[str, Any]] = {
    "fedstats": {"run": {"rounds": 32}},
    "fedavg": {
        "run": {"rounds": 64},
        "method": {"local_steps": 1, "lr": 128.0, "momentum": 0.0},
        "model": {"features": "whitened-scattering"},
        "privacy": {"clip": 0.5, "sample_rate": 1.0},
    },
    "feddm": {**CONDENSING, "privacy": {"clip": CLIP["features"], "mechanism": "features"}},
    "fedsum": CONDENSING,
}


@cache
def images(dataset: str) -> Data:
    """Returns the training and test images of a file."""
    folder = Path(os.environ[ROOT_VARIABLE], "medical")
    with np.load(folder / FACTS[dataset]["source"], allow_pickle=False) as arrays:
        stored = dict(arrays)
    shape = (1, *stored["train_images"].shape[1:])
    spec = custom_spec(dataset, shape, CLASSES[dataset], **FACTS[dataset])

    def part(name: str) -> ImageData:
        return from_arrays(stored[f"{name}_images"], stored[f"{name}_labels"].ravel(), spec)

    return part("train"), part("test")


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of one run."""
    stated = METHODS[cell.method]
    run = {**stated["run"], "method": cell.method, "seed": cell.seed, "device": cell.device}
    if cell.quick:
        run["rounds"] = 1
    privacy = {**stated.get("privacy", {}), "epsilon": cell.epsilon, "ledger": NO_LEDGER}
    return resolve(
        {
            **stated,
            "run": {**run, "evaluate_every": 1000},
            "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 3},
            "privacy": privacy,
        }
    )


def work(cell: Cell) -> Row:
    """Returns the measures of a run on the test images."""
    result = simulate(cell.settings, data=images(cell.dataset), test="public")
    row = {name: result.summary[name] for name in MEASURES}
    seconds = sum(metrics["seconds"] for metrics in result.metrics)
    return {"accuracy": result.accuracy, **row, "seconds": round(seconds, 1)}


GRID = Grid(
    axes={
        "seed": range(5),
        "dataset": tuple(FACTS),
        "method": tuple(METHODS),
        "epsilon": (1.0, 3.0, 8.0),
    },
    key="{dataset} {method} eps={epsilon:g} seed={seed}",
    settings=settings,
    work=work,
)
