"""FedStats on chest X-rays and brain MRI: AUROC of ConvNets trained on the released images alone.

Sites, data and privacy are those of `medical`. A student is a ConvNet of width 32 and depth 3,
trained on 1,000 images of each class, of which 200 are moved, with their soft labels ("stored"), or
on these and two copies of each that the released classifier labels ("taught"), for 2,000 steps.
Nothing is tuned on these data, except two steps that PneumoniaMNIST's validation images decided:
images with a bright border are rendered as drawn, and the classifier is balanced.

The files name no patients. With `each=1`, ε holds for an image. With `each=2`, it holds for a
patient, and patients are simulated: two images of one class at one site count as one patient's.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import nn

from fedsynth import FedStats, ModelSettings, StudentSettings, from_arrays, train_student
from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData
from fedsynth.data.partition import partition
from fedsynth.evaluation.accuracy import predict
from fedsynth.evaluation.classification import classification_measures
from fedsynth.models.registry import build_model
from fedsynth.simulation.simulate import simulate
from grids import medical
from grids.fedstats_students import guarantee
from library.grid import Cell, Grid, Row

STUDENTS = {
    "stored": StudentSettings(steps=2000, views=0, mixup=False),
    "taught": StudentSettings(steps=2000, views=2),
}


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of one run: those of `medical`, with images."""
    run = medical.settings(Cell(**vars(cell), method="fedstats"))
    few = 4 if cell.quick else 200
    run = replace(run, method=FedStats(ipc=few, drawn_ipc=4 * few, pictures=cell.pictures))
    if cell.each == 1 or run.privacy is None:
        return run
    patients = medical.FACTS[cell.dataset]["train_size"] / cell.each
    nominal_size = patients / run.partition.clients
    return replace(run, privacy=replace(run.privacy, unit="user", nominal_size=nominal_size))


def with_patients(data: ImageData, cell: Cell) -> ImageData:
    """Returns the images with simulated patients, each with images of one class at one site."""
    labels = data.labels.numpy()
    patients = np.arange(len(labels))
    for site in partition(labels, cell.settings.resolved_partition, data.spec.classes):
        for label in range(data.spec.classes):
            rows = site[labels[site] == label]
            patients[rows] = rows[np.arange(len(rows)) // cell.each * cell.each]
    return from_arrays(data.images.numpy(), labels, data.spec, groups=patients)


def work(cell: Cell) -> Row:
    """Returns the measures of the classifier and of the students on the test images."""
    train, test = medical.images(cell.dataset)
    train = train if cell.each == 1 else with_patients(train, cell)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        result = simulate(cell.settings, data=(train, None), output=place, quiet=True)
        released = load_file(Path(str(result.folder)) / "synthetic.safetensors")
    spec = train.spec
    row: Row = {"classifier": measures(result.model, test)}
    for name, student in STUDENTS.items():
        network = build_model(ModelSettings(width=32), spec.image_shape, spec.classes, cell.seed)
        teacher = result.model if student.views else None
        steps = 20 if cell.quick else student.steps
        labels = released["soft_labels"]
        train_student(
            network, released["images"], labels, replace(student, steps=steps), teacher=teacher
        )
        row[name] = measures(network, test)
    cpu_seconds = round(time.process_time() - started, 1)
    count = len(released["labels"])
    return {**row, "images": count, **guarantee(result.privacy), "cpu_seconds": cpu_seconds}


def measures(network: nn.Module, data: ImageData) -> dict[str, float | None]:
    """Returns a network's measures on images."""
    return classification_measures(predict(network, data), data.labels)


GRID = Grid(
    axes={
        "seed": range(5),
        "epsilon": (1.0, 3.0, 8.0),
        "dataset": tuple(medical.FACTS),
        "pictures": ("auto", "no"),
        "each": (1, 2),
    },
    key="{dataset} eps={epsilon:g} pictures={pictures} each={each} seed={seed}",
    settings=settings,
    work=work,
)
