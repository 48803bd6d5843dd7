"""Distillation without data: Table IV of FedKF at small size.

    FEDSYNTH_DATA=... python benchmarks/generator_scale.py [--quick] [--only 'replay']

A LeNet-5 learns from a LeNet-5 teacher of Fashion-MNIST (8 passes) on batches of a generator of
width 16, at the weights that the paper has on EMNIST and others, with replay (ours) and with the
official code's −KL. "printed": Eqs. 3 and 4 as printed sum over the features and do not divide by
log C; Adam does not see a loss's scale, so that is λ1/log C and λ2·D/log C (D features, C classes).
Accuracy is that on 5,000 training images held out of the teacher's training.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

from fedsynth.data.images import ImageData, normalise
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.models.small import LeNet5
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.generation.one_teacher import DataFreeDistiller
from fedsynth.training.optimisers import MomentumSgd
from fedsynth.training.sgd import SgdSettings, train_on
from library.results import start, table_parser, tuning_data

FEATURES, CLASSES = 84, 10
TEACHER = SgdSettings(8, batch=128, optimiser=MomentumSgd(0.05, 0.9, 5e-4))
SIZE: dict[str, Any] = {"steps": 2500, "batch": 128, "learning_rate": 0.1, "width": 16}
REPLAY: dict[str, Any] = {"replay": 8, "steps": 1500, "batch": 256}


def weights(one_hot: float, activation: float, summed: bool = False) -> dict[str, float]:
    """λ1 and λ2; `summed`: of Eqs. 3 and 4 as printed."""
    printed = math.log(CLASSES) if summed else 1.0
    features = FEATURES if summed else 1
    return {
        "one_hot_weight": one_hot / printed,
        "activation_weight": features * activation / printed,
    }


STUDENTS: dict[str, dict[str, Any]] = {
    "λ = 0.2, 0.02": weights(0.2, 0.02),
    "λ = 0.2, 0.02, rate = 0.001": {**weights(0.2, 0.02), "generator_lr": 0.001},
    "λ = 0.2, 0.02, −KL": {**weights(0.2, 0.02), "kl_weight": 1.0},
    "λ = 0.2, 0.02, printed": weights(0.2, 0.02, True),
    "λ = 0.2, 0.02, replay": {**weights(0.2, 0.02), **REPLAY},
    "λ = 0.05, 0.02, replay": {**weights(0.05, 0.02), **REPLAY},
    "λ = 0.05, 0, replay": {**weights(0.05, 0.0), **REPLAY},
    "λ = 0.2, 0.02, replay, −KL": {**weights(0.2, 0.02), **REPLAY, "kl_weight": 1.0},
}


def lenet(data: ImageData, seed: int) -> LeNet5:
    model = build_model(ModelSettings("lenet5"), data.spec.image_shape, data.spec.classes, seed)
    if not isinstance(model, LeNet5):
        raise TypeError("lenet5 is no LeNet5")
    return model


@cache
def teacher_of(seed: int, quick: bool) -> tuple[LeNet5, ImageData, float]:
    """(a teacher, the held-out images, its accuracy on them)."""
    train, held = tuning_data("fashion-mnist")
    teacher = lenet(train, seed)
    sgd = replace(TEACHER, steps=5) if quick else TEACHER
    draws = torch_generator(seed, "teacher")
    train_on(teacher, lambda i: normalise(train.images[i], train.spec), train.labels, sgd, draws)
    return teacher, held, accuracy(teacher, held)


def one(name: str, seed: int, quick: bool) -> dict[str, Any]:
    """A student's row."""
    teacher, held, right = teacher_of(seed, quick)
    settings = {**SIZE, **STUDENTS[name], **({"steps": 5} if quick else {})}
    distiller = DataFreeDistiller(teacher, held.spec, seed=seed, **settings)
    student = lenet(held, seed + 100)
    started = time.perf_counter()
    generator = distiller.fit(student)
    return {
        "accuracy": accuracy(student, held),
        "teacher": right,
        **distiller.facts(generator),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    options, results = start("generator_scale", table_parser(__doc__, "few steps: a test"))
    for seed, name in product(options.seeds, STUDENTS):
        work = partial(one, name, seed, options.quick)
        results.measure(f"table: {name} seed={seed}", work)
    results.show()


if __name__ == "__main__":
    main()
