"""FedStats: accuracy of the classifier on features ("teacher") by ε, noise, skew and clients; with
`--students` that of ConvNets trained on the images made of the statistics.

    FEDSYNTH_DATA=DIR python benchmarks/fedstats_table.py [--quick] [--only "mnist eps=1 "]
        [--datasets mnist fashion-mnist] [--epsilons 1] [--seeds 0] [--time-budget 3600]
        [--students]

Data sets MNIST, Fashion-MNIST, EMNIST letters and CIFAR-10; ε 0.5, 1, 3, 10 and none; Dir(0.01),
Dir(0.5), Dir(100); every client's own noise, and aggregated noise; ten clients, at ε = 1 also 3 and
50; 32 rounds; δ = 1e-5 (EMNIST letters 5e-6). Settings are the method's defaults, found on held-out
training images (docs/fedstats.md says with which exception). Features are made once (`--cache`), so
seconds are those of all else.

A student is a ConvNet of width 32 and depth 3, trained on 2,000 images of each class, of which 400
are moved and the others as they are drawn, and on nothing else: on the classes that they were made
for ("hard"), on the soft labels that are kept with them ("stored"), both for 2,000 steps, or on
these and four copies of each that the released classifier labels, for 5,000 ("taught"; found on
held-out training images). Own noise, Dir(0.5), and ε = 1 where `--epsilons` names no others.

Resumes: finished runs are lines of results/fedstats_table.jsonl (of fedstats_students.jsonl with
`--students`), the important ones first; `--only` shares the work among processes, and after
`--time-budget` seconds no further run is begun.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from fedsynth import FedStats, ModelSettings, RunSettings, StudentSettings, train_student
from fedsynth.core.feature_cache import keep_features
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import dataset_spec
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.models.registry import build_model
from fedsynth.simulation.simulate import simulate
from library.fedstats import Case, classifier_accuracy, settings_for
from library.kept_features import add_cache, vectors
from library.results import Results, start, table_parser

DATASETS = ("mnist", "fashion-mnist", "emnist-letters", "cifar10")
EPSILONS = ("1", "10", "3", "0.5", "inf")
ALPHAS = (0.01, 0.5, 100.0)
SEEDS = (0, 1, 2, 3, 4)
IPC, DRAWN = 400, 1600
ALONE = StudentSettings(steps=2000, views=0, mixup=False)
TAUGHT = StudentSettings(steps=5000, views=4)
QUICK_STEPS = 20


def cases(datasets: list[str], epsilons: list[str]) -> Iterator[Case]:
    """All cells, those that the README and the summary need first."""
    for epsilon in epsilons:
        noises = ("own",) if epsilon == "inf" else ("own", "secure")
        for alpha in (0.5, 0.01, 100.0):
            for noise in noises:
                for dataset in datasets:
                    yield Case(dataset, epsilon, noise, alpha, 10)
    if "1" in epsilons:
        for clients in (3, 50):
            for dataset in datasets:
                yield Case(dataset, "1", "own", 0.5, clients)


def teacher_run(
    settings: RunSettings, data: tuple[ImageData, ImageData], test_Nd: Tensor, labels_N: Tensor
) -> dict[str, Any]:
    """A run on training images whose features are kept, and its accuracy on kept test features."""
    result = simulate(settings, data=(data[0], None))
    return {
        "accuracy": classifier_accuracy(result.model, FedStats(), data[0].spec, test_Nd, labels_N),
        "bytes": result.summary["upload_bytes"],
        "seconds": round(sum(row["seconds"] for row in result.metrics), 3),
    }


def student_run(
    settings: RunSettings, data: tuple[ImageData, ImageData], test_Nd: Tensor, quick: bool
) -> dict[str, Any]:
    """A run that makes images, and the accuracy of the classifier and of three students on
    `data[1]`, whose features are `test_Nd`."""
    train, test = data
    with tempfile.TemporaryDirectory() as place:
        result = simulate(settings, data=(train, None), output=place, quiet=True)
        found = load_file(Path(str(result.folder)) / "synthetic.safetensors")
    row = {
        "accuracy": classifier_accuracy(result.model, FedStats(), train.spec, test_Nd, test.labels)
    }
    chosen = {
        "hard": (found["labels"], None, ALONE),
        "stored": (found["soft_labels"], None, ALONE),
        "taught": (found["soft_labels"], result.model, TAUGHT),
    }
    for name, (labels, teacher, how) in chosen.items():
        network = build_model(
            ModelSettings(width=32), train.spec.image_shape, train.spec.classes, 0
        )
        how = replace(how, steps=QUICK_STEPS) if quick else how
        train_student(network, found["images"], labels, how, teacher=teacher)
        row[f"student_{name}"] = accuracy(network, test)
    seconds = sum(one["seconds"] for one in result.metrics)
    return {**row, "images": len(found["labels"]), "seconds": round(seconds, 3)}


def students(options: argparse.Namespace, results: Results) -> None:
    """Makes the rows of `--students`."""
    for dataset in options.datasets:
        train, test, vectors_test = _prepared(dataset, options.cache)
        run = partial(student_run, test_Nd=vectors_test, quick=options.quick)
        for seed, epsilon in product(options.seeds, options.epsilons or ["1"]):
            case = Case(dataset, epsilon, "own", 0.5, 10)
            settings = settings_for(case, seed, options.device, options.quick)
            ipc, drawn = (4, 4) if options.quick else (IPC, DRAWN)
            settings = replace(settings, method=FedStats(ipc=ipc, drawn_ipc=drawn))
            results.get(f"{case.name} seed={seed}", settings, (train, test), run)


def teachers(options: argparse.Namespace, results: Results) -> None:
    """Makes the rows of classifiers."""
    for seed in options.seeds:
        for case in cases(options.datasets, options.epsilons or list(EPSILONS)):
            name = f"{case.name} seed={seed}"
            if options.only in name:
                settings = settings_for(case, seed, options.device, options.quick)
                train, test, vectors_test = _prepared(case.dataset, options.cache)
                run = partial(teacher_run, test_Nd=vectors_test, labels_N=test.labels)
                results.get(name, settings, (train, test), run)


def main() -> None:
    parser = table_parser(__doc__, "two rounds and few steps: a test", SEEDS)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--epsilons", nargs="+", choices=EPSILONS)
    parser.add_argument("--students", action="store_true", help="train students on the images")
    add_cache(parser)
    wants_students = "--students" in sys.argv
    options, results = start("fedstats_students" if wants_students else "fedstats_table", parser)
    (students if options.students else teachers)(options, results)
    results.show()


@lru_cache(maxsize=1)  # one data set's features at a time
def _prepared(dataset: str, cache: Path) -> tuple[ImageData, ImageData, Tensor]:
    """Returns the data set with kept features of its training images, and the test features."""
    train, test = load_dataset(dataset)
    features = FedStats().map_of(dataset_spec(dataset))
    keep_features(train, features, vectors(cache, "train", train, features))
    return train, test, vectors(cache, "test", test, features)


if __name__ == "__main__":
    main()
