"""Distillation without data: what the scale of the generator's activation loss does, and Table IV
of FedKF at small size.

    FEDSYNTH_DATA=... python benchmarks/generator_scale.py [--group scale] [--quick]
        [--seeds 0 1 2] [--only 'rate = 0.2'] [--time-budget 600]

The official code of FedKF takes the mean of |f| over the features and divides the information
entropy by log C; Eqs. 3 and 4 as printed sum over the features and do not divide. Adam does not see
a loss's scale, so the printed form is the same loss with the weights λ1/log C and λ2·D/log C (D
features, C classes), and that is how it is made here.

Group `scale`: a LeNet-5 learns from a LeNet-5 teacher of Fashion-MNIST (trained for half a pass,
some 82 %) on 600 batches of a generator of width 8, at λ1 = λ2 = 0.1 (FedKF's). Group `table`: from
a teacher of 8 passes, on more batches of a generator of width 16, at the weights that the paper has
on EMNIST and others, with replay (ours) and with the official code's −KL. Each row is a student,
with the facts of its generator in the end. Accuracy is that on 5,000 training images held out of
the teacher's training: the test set is not read. Finished rows are lines of
results/generator_scale.jsonl.
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
# the generator's; FedKF's own in a federation is the first, on EMNIST without data the last
RATES = (
    0.001,
    0.01,
    0.2,
)
TEACHERS = {
    "scale": SgdSettings(epochs=1, batch=64, optimiser=MomentumSgd(0.05, 0.9), steps=420),
    "table": SgdSettings(8, batch=128, optimiser=MomentumSgd(0.05, 0.9, 5e-4)),
}
SCALE: dict[str, Any] = {"steps": 600, "batch": 64, "learning_rate": 0.05, "width": 8}
TABLE: dict[str, Any] = {"steps": 2500, "batch": 128, "learning_rate": 0.1, "width": 16}
REPLAY: dict[str, Any] = {"replay": 8, "steps": 1500, "batch": 256}


def weights(one_hot: float, activation: float, summed: bool = False) -> dict[str, float]:
    """λ1 and λ2; `summed`: of Eqs. 3 and 4 as printed."""
    printed = math.log(CLASSES) if summed else 1.0
    features = FEATURES if summed else 1
    return {
        "one_hot_weight": one_hot / printed,
        "activation_weight": features * activation / printed,
    }


FORMS = {"sum": weights(0.1, 0.1, True), "mean": weights(0.1, 0.1), "without": weights(0.1, 0.0)}
STUDENTS: dict[str, dict[str, dict[str, Any]]] = {
    "scale": {
        f"{form}, rate = {rate:g}": {**SCALE, **FORMS[form], "generator_lr": rate}
        for rate in RATES
        for form in FORMS
    },
    "table": {
        "λ = 0.2, 0.02": {**TABLE, **weights(0.2, 0.02)},
        "λ = 0.2, 0.02, rate = 0.001": {**TABLE, **weights(0.2, 0.02), "generator_lr": 0.001},
        "λ = 0.2, 0.02, −KL": {**TABLE, **weights(0.2, 0.02), "kl_weight": 1.0},
        "λ = 0.2, 0.02, printed": {**TABLE, **weights(0.2, 0.02, True)},
        "λ = 0.2, 0.02, replay": {**TABLE, **weights(0.2, 0.02), **REPLAY},
        "λ = 0.05, 0.02, replay": {**TABLE, **weights(0.05, 0.02), **REPLAY},
        "λ = 0.05, 0, replay": {**TABLE, **weights(0.05, 0.0), **REPLAY},
        "λ = 0.2, 0.02, replay, −KL": {**TABLE, **weights(0.2, 0.02), **REPLAY, "kl_weight": 1.0},
    },
}


def lenet(data: ImageData, seed: int) -> LeNet5:
    model = build_model(ModelSettings("lenet5"), data.spec.image_shape, data.spec.classes, seed)
    if not isinstance(model, LeNet5):
        raise TypeError("lenet5 is no LeNet5")
    return model


@cache
def teacher_of(group: str, seed: int, quick: bool) -> tuple[LeNet5, ImageData, float]:
    """(a teacher, the held-out images, its accuracy on them)."""
    train, held = tuning_data("fashion-mnist")
    teacher = lenet(train, seed)
    sgd = replace(TEACHERS[group], steps=5) if quick else TEACHERS[group]
    draws = torch_generator(seed, "teacher")
    train_on(teacher, lambda i: normalise(train.images[i], train.spec), train.labels, sgd, draws)
    return teacher, held, accuracy(teacher, held)


def one(group: str, name: str, seed: int, quick: bool) -> dict[str, Any]:
    """A student's row."""
    teacher, held, right = teacher_of(group, seed, quick)
    settings = {**STUDENTS[group][name], **({"steps": 5} if quick else {})}
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
    parser = table_parser(__doc__, "few steps: a test")
    parser.add_argument("--group", choices=STUDENTS, nargs="+", default=list(STUDENTS))
    options, results = start("generator_scale", parser)
    for group in options.group:
        for seed, name in product(options.seeds, STUDENTS[group]):
            work = partial(one, group, name, seed, options.quick)
            results.measure(f"{group}: {name} seed={seed}", work)
    results.show()


if __name__ == "__main__":
    main()
