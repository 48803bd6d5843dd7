"""FedStats: accuracy of ConvNets trained on the images made of the statistics.

A student is a ConvNet of width 32 and depth 3, trained on 2,000 images of each class, of which 400
are moved and the others as they are drawn, and on nothing else: on the classes that they were made
for ("hard"), on the soft labels that are kept with them ("stored"), both for 2,000 steps, or on
these and four copies of each that the released classifier labels, for 5,000 ("taught"; found on
held-out training images). Own noise, Dir(0.5), ten clients; all else as in `fedstats_table`.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from fedsynth import ModelSettings, StudentSettings, train_student
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.models.registry import build_model
from fedsynth.simulation.simulate import simulate
from grids.fedstats_table import DATASETS, KEY, settings_for
from library.grid import Cell, Grid, Row
from library.runs import with_features

UNTAUGHT = StudentSettings(steps=2000, views=0, mixup=False)
TAUGHT = StudentSettings(steps=5000, views=4)


def work(cell: Cell) -> Row:
    """Returns the accuracy of the classifier and of three students on test images."""
    train, test = with_features(cell.dataset, "auto", cell.cache)
    with tempfile.TemporaryDirectory() as place:
        result = simulate(cell.settings, data=(train, None), output=place, quiet=True)
        synthetic = load_file(Path(str(result.folder)) / "synthetic.safetensors")
    row: Row = {"accuracy": accuracy(result.model, test)}
    students = {
        "hard": (synthetic["labels"], None, UNTAUGHT),
        "stored": (synthetic["soft_labels"], None, UNTAUGHT),
        "taught": (synthetic["soft_labels"], result.model, TAUGHT),
    }
    spec = train.spec
    for name, (labels, teacher, student_settings) in students.items():
        network = build_model(ModelSettings(width=32), spec.image_shape, spec.classes, 0)
        student_settings = replace(student_settings, steps=20) if cell.quick else student_settings
        train_student(network, synthetic["images"], labels, student_settings, teacher=teacher)
        row[f"student_{name}"] = accuracy(network, test)
    seconds = sum(metrics["seconds"] for metrics in result.metrics)
    return {**row, "images": len(synthetic["labels"]), "seconds": round(seconds, 3)}


GRID = Grid(
    axes={
        "dataset": DATASETS,
        "seed": range(5),
        "epsilon": ("1",),
        "noise": ("own",),
        "alpha": (0.5,),
        "clients": (10,),
    },
    key=KEY,
    settings=lambda cell: settings_for(
        cell, ipc=4 if cell.quick else 400, drawn_ipc=4 if cell.quick else 1600
    ),
    work=work,
)
