"""Where students of FedStats' images lose: accuracy by where their images come from, ε = 1.

    FEDSYNTH_DATA=DIR python benchmarks/student_images.py [--quick] [--datasets fashion-mnist]
        [--only moved] [--time-budget 600]

A run (defaults, ten clients, own noise, 32 rounds) sees all training images but the last 10,000. A
ConvNet of width 32 learns from 2,000 images with soft labels by the run's classifier, and nothing
else: the run's training images themselves ("real": an upper bound, which is not private), these as
small pictures show them ("small": what drawing from small pictures can come to), random processes
("random"), images drawn from released small pictures ("drawn"), or moved as well ("moved"). In
colour moved ones start from random processes, as is the default there, and drawn ones are what
`pictures=yes` would start from. It is measured on 4,000 of the 10,000; no test image is read.

Resumes: finished rows are lines of results/student_images.jsonl.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedsynth import FedStats, ModelSettings, StudentSettings, train_student
from fedsynth.core.feature_cache import keep_features
from fedsynth.data.images import ImageData, normalise
from fedsynth.data.load import load_dataset
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.features.low_pass import low_pass
from fedsynth.features.random_images import random_images
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.methods.statistics.images import clear
from fedsynth.methods.statistics.pixel_moments import enlarged
from fedsynth.models.registry import build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.student import soft_labels
from library.fedstats import Case, settings_for
from library.kept_features import add_cache, vectors
from library.results import start, table_parser

SOURCES = ("real", "small", "random", "drawn", "moved")
HELD_OUT, MEASURED = 10_000, 4000
IPC = 200
STUDENT = StudentSettings(steps=500, views=0, mixup=False)


def diagnosis(
    settings: RunSettings, data: tuple[ImageData, ImageData], source: str
) -> dict[str, Any]:
    """A run, and its student's accuracy on `data[1]`."""
    train, held_out = data
    with tempfile.TemporaryDirectory() as place:
        result = simulate(settings, data=(train, None), output=place, quiet=True)
        made = load_file(Path(str(result.folder)) / "synthetic.safetensors")["images"]
    images = _images(source, made, train)
    network = build_model(ModelSettings(width=32), train.spec.image_shape, train.spec.classes, 0)
    labels = soft_labels(result.model, images)
    train_student(network, images, labels, STUDENT)
    return {
        "accuracy": accuracy(network, held_out),
        "classifier": accuracy(result.model, held_out),
        "images": len(images),
    }


def _images(source: str, made: Tensor, train: ImageData) -> Tensor:
    """As many as the run made, normalised."""
    draws = torch_generator(0, "images of a diagnosis")
    if source in ("real", "small"):
        some = train.images[torch.randperm(len(train), generator=draws)[: len(made)]]
        if source == "small":
            shape = train.spec.image_shape
            pictures = low_pass(shape)(some)[:, :-1]
            some = clear(enlarged(pictures, shape), draws).mul(255).round().to(torch.uint8)
        return normalise(some, train.spec)
    if source == "random":
        drawn = random_images(len(made), train.spec.image_shape, draws)
        return normalise(drawn.mul(255).round().to(torch.uint8), train.spec)
    return made


def main() -> None:
    parser = table_parser(__doc__, "two rounds and few images: a test", (0,))
    all_of_them = ["mnist", "fashion-mnist", "cifar10"]
    parser.add_argument("--datasets", nargs="+", default=all_of_them, choices=all_of_them)
    add_cache(parser)
    options, results = start("student_images", parser)
    for dataset in options.datasets:
        whole, _ = load_dataset(dataset)
        count = len(whole) - HELD_OUT
        seen = whole.subset(torch.arange(count))
        held_out = whole.subset(torch.arange(count, count + MEASURED))
        for source in SOURCES:
            steps = FedStats().image_steps if source == "moved" else 0
            ipc = 4 if options.quick else IPC
            method = FedStats(ipc=ipc, image_steps=steps)
            if source == "drawn" and whole.spec.channels == 3:
                method = replace(method, pictures="yes")
            features = method.map_of(whole.spec)
            keep_features(seen, features, vectors(options.cache, "train", whole, features)[:count])
            case = Case(dataset, "1", "own", 0.5, 10)
            base = settings_for(case, 0, options.device, options.quick)
            settings = replace(base, method=method)
            run = partial(diagnosis, source=source)
            results.get(f"{dataset} {source} seed=0", settings, (seen, held_out), run)


if __name__ == "__main__":
    main()
