"""FedStats' images, measured as in the literature on private image synthesis: the accuracy of
networks trained on the released images alone, and FID.

Ten clients (Dir(0.5)), own or aggregated noise. The server releases `images` images of each class,
of which 400 are optimised and the others as they are drawn. `fedsynth export --with-model` would
export them with the classifier. A student is a network that sees nothing else. Its training has a
fixed number of steps and is measured at the last one, so no test image chooses a step. It learns
the classes that the images were made for ("hard", 2,000 steps), the soft labels that are kept with
them ("stored", 2,000 steps), or these and four copies of each that the released classifier labels
("taught", 5,000 steps; found on held-out training images). On CIFAR-10 this network can be trained
for longer: 20,000 steps with eight copies, of which half are mirrored.

`student` is `convnet` (width 32, depth 3), `convnet-64` (width 64, chosen on held-out training
images), or `resnet8`. `map` is FedStats' feature map; `deskewed-scattering+random-process` is for
handwriting. DPImageBench (arXiv 2503.14681) trains ResNet-110, WRN-40-4 and a ResNeXt for
50 epochs of 55,000 images, which two cores cannot do. FID and KID compare the released images with
all test images, by the features of `features`: a map of fedsynth, or `torchvision:NAME@FILE` or
`timm:NAME@FILE` with a file of weights. `real` is the FID of as many training images. Seconds are
those of the processor, without the clients' features. The rows of CIFAR-10 were made without the
check of hashes, as 104 of the 60,000 images here are near copies of the published ones.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

from safetensors.torch import load_file

from fedsynth import StudentSettings, load_dataset, train_student
from fedsynth.data.images import ImageData
from fedsynth.data.shared_set import BYTES, TENSORS, write_set
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.evaluation.fidelity import Fidelity
from fedsynth.features.pretrained import PRETRAINED
from fedsynth.models.registry import build_model
from fedsynth.sharing.fidelity import fidelity_of_set
from fedsynth.sharing.student import network_for
from fedsynth.simulation.simulate import simulate
from grids.fedstats_table import DATASETS, KEY, settings_for
from library.grid import Cell, Grid, Row
from library.runs import with_features

OPTIMISED = 400
UNTAUGHT = StudentSettings(steps=2000, views=0, mixup=False)
TAUGHT = StudentSettings(steps=5000, views=4)
LONG = StudentSettings(steps=20_000, views=8, flip=True)
# Rows of older code have keys without this part.
RELEASED = "images={images} student={student} features={features}"
AUTO = "auto"


def key_of(cell: Cell) -> str:
    """Returns the key of a row, which names a map or steps only if they are not the default."""
    named = "" if cell.map == AUTO else f" map={cell.map}"
    named += "" if cell.steps == TAUGHT.steps else f" steps={cell.steps}"
    return KEY.replace("seed", f"{RELEASED}{named} seed", 1).format(**vars(cell))


def work(cell: Cell) -> Row:
    """Returns the measurements of one release on test images."""
    train, test = with_features(cell.dataset, cell.map, cell.cache)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        result = simulate(cell.settings, data=(train, None), output=place, quiet=True)
        synthetic = load_file(Path(str(result.folder)) / TENSORS)
        measured = distances(Path(str(result.folder)), test, cell.features)
    row: Row = {"accuracy": accuracy(result.model, test)}
    students = {
        "hard": (synthetic["labels"], None, UNTAUGHT),
        "stored": (synthetic["soft_labels"], None, UNTAUGHT),
        "taught": (synthetic["soft_labels"], result.model, TAUGHT),
    }
    if cell.steps == LONG.steps:
        students = {"taught": (synthetic["soft_labels"], result.model, LONG)}
    spec = train.spec
    name, _, width = cell.student.partition("-")
    model = network_for(spec, name=name, **({"width": int(width)} if width else {}))
    for name, (labels, teacher, student_settings) in students.items():
        network = build_model(model, spec.image_shape, spec.classes, 0)
        student_settings = replace(student_settings, steps=20) if cell.quick else student_settings
        train_student(network, synthetic["images"], labels, student_settings, teacher=teacher)
        row[f"student_{name}"] = accuracy(network, test)
    cpu_seconds = round(time.process_time() - started, 1)
    count = len(synthetic["labels"])
    fid = {"released": measured.fid, "real": real_distances(cell.dataset, cell.features, count).fid}
    return {
        **row,
        "images": count,
        "fid": fid,
        "kid": measured.kid,
        **guarantee(result.privacy),
        "cpu_seconds": cpu_seconds,
    }


def guarantee(report: Row | None) -> Row:
    """Returns ε, δ and the noise multiplier σ of a run's privacy report."""
    if report is None:
        return {}
    parts = {name: report["guarantee"][name] for name in ("epsilon", "delta")}
    return {**parts, "noise_multiplier": report["noise_multiplier"]}


def distances(folder: Path, test: ImageData, features: str) -> Fidelity:
    """Returns the distances between a folder's images and test images."""
    network, _, weights = features.partition("@")
    return fidelity_of_set(folder, test, network, weights or PRETRAINED)


def include(cell: Cell) -> bool:
    """Keeps deskewing to handwriting, and long training to colour images and wide networks."""
    if cell.steps == LONG.steps:
        return bool((cell.dataset, cell.student, cell.map) == ("cifar10", "convnet-64", AUTO))
    return bool(cell.map == AUTO or cell.dataset == "mnist")


@cache
def real_distances(dataset: str, features: str, count: int) -> Fidelity:
    """Returns the distances between the first training images and the test images."""
    train, test = load_dataset(dataset)
    with tempfile.TemporaryDirectory() as place:
        images, labels = train.images[:count], train.labels[:count]
        write_set(Path(place, TENSORS), images, labels, train.spec, pixels=BYTES)
        return distances(Path(place), test, features)


GRID = Grid(
    axes={
        "seed": range(5),
        "epsilon": ("1", "10"),
        "noise": ("own", "secure"),
        "dataset": DATASETS,
        "alpha": (0.5,),
        "clients": (10,),
        "images": (2000,),
        "student": ("convnet", "convnet-64"),
        "features": ("whitened-scattering",),
        "map": (AUTO, "deskewed-scattering+random-process"),
        "steps": (TAUGHT.steps, LONG.steps),
    },
    key=key_of,
    settings=lambda cell: settings_for(
        cell,
        features=cell.map,
        ipc=4 if cell.quick else OPTIMISED,
        drawn_ipc=4 if cell.quick else cell.images - OPTIMISED,
    ),
    work=work,
    include=include,
)
