"""FedStats on chest X-rays and brain MRI: AUROC of ConvNets trained on the released images alone.

Sites, data and privacy are those of `medical`. A student is a ConvNet of width 32 and depth 3,
trained on 1,000 images of each class, of which 200 are moved, with their soft labels ("stored"), or
on these and two copies of each that the released classifier labels ("taught"), for 2,000 steps.
Nothing is tuned on these data.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from fedsynth import FedStats, ModelSettings, StudentSettings, train_student
from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData
from fedsynth.evaluation.accuracy import predict
from fedsynth.evaluation.classification import classification_measures
from fedsynth.models.registry import build_model
from fedsynth.simulation.simulate import simulate
from grids import medical
from library.grid import Cell, Grid, Row

STUDENTS = {
    "stored": StudentSettings(steps=2000, views=0, mixup=False),
    "taught": StudentSettings(steps=2000, views=2),
}


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of one run: those of `medical`, with images."""
    run = medical.settings(Cell(**vars(cell), method="fedstats"))
    few = 4 if cell.quick else 200
    return replace(run, method=FedStats(ipc=few, drawn_ipc=4 * few, pictures=cell.pictures))


def work(cell: Cell) -> Row:
    """Returns the measures of the classifier and of the students on the test images."""
    train, test = medical.images(cell.dataset)
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
    return {**row, "images": len(released["labels"])}


def measures(network: nn.Module, data: ImageData) -> dict[str, float | None]:
    """Returns a network's measures on images."""
    return classification_measures(predict(network, data), data.labels)


GRID = Grid(
    axes={
        "dataset": tuple(medical.FACTS),
        "seed": range(5),
        "epsilon": (1.0, 3.0, 8.0),
        "pictures": ("auto", "no"),
    },
    key="{dataset} eps={epsilon:g} pictures={pictures} seed={seed}",
    settings=settings,
    work=work,
)
