"""What the scale of the generator's activation loss does: classes in a generated batch, and a student's accuracy without data.

    FEDSYNTH_DATA=... python benchmarks/generator_scale.py [--quick] [--json] [--seeds 0 1 2] [--only 'rate = 0.2'] [--time-budget 600]

The official code of FedKF takes the mean of |f| over the features and divides the information entropy by log C; Eqs. 3 and 4 as printed
sum over the features and do not divide. Adam does not see a loss's scale, so the printed form is the same loss with the weights
λ1/log C and λ2·D/log C (D features, C classes), and that is how it is made here. Each row is one student: a LeNet-5 that learns from a
LeNet-5 teacher of Fashion-MNIST (trained for a fraction of a pass, to some 82 %) on 600 batches of a generator of width 8, at λ1 = λ2 =
0.1 (FedKF's), with the facts of the generator's last batch. Accuracy is that on 5,000 training images held out of the teacher's training:
the test set is not read. Finished rows are lines of results/generator_scale.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from functools import cache
from typing import Any

from fashion_table import held_out, summarise
from machine import RESULTS, machine

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.core.random import torch_generator
from fedsynth.data.images import ImageData, normalise
from fedsynth.data.load import load_dataset
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.models.small import LeNet5
from fedsynth.synthesizer.distiller import DataFreeDistiller
from fedsynth.synthesizer.training import SgdSettings, train_on

WEIGHT = 0.1
FEATURES, CLASSES = 84, 10
FORMS = {
    "sum": {
        "one_hot_weight": WEIGHT / math.log(CLASSES),
        "activation_weight": FEATURES * WEIGHT / math.log(CLASSES),
    },
    "mean": {"one_hot_weight": WEIGHT, "activation_weight": WEIGHT},
    "without": {"one_hot_weight": WEIGHT, "activation_weight": 0.0},
}
RATES = (
    0.001,
    0.01,
    0.2,
)  # the generator's; FedKF's own in a federation, and on EMNIST without data
TEACHER = SgdSettings(epochs=1, batch=64, learning_rate=0.05, momentum=0.9, steps=420)
STUDENT = {"steps": 600, "batch": 64, "learning_rate": 0.05, "width": 8}


def lenet(data: ImageData, seed: int) -> LeNet5:
    model = build_model(ModelSettings("lenet5"), data.spec.image_shape, data.spec.classes, seed)
    if not isinstance(model, LeNet5):
        raise TypeError("lenet5 is no LeNet5")
    return model


@cache
def teacher_of(seed: int) -> tuple[LeNet5, ImageData, float]:
    """(a teacher, the held-out images, its accuracy on them)."""
    train, held = held_out(load_dataset("fashion-mnist")[0], 5000)
    teacher = lenet(train, seed)
    draws = torch_generator(seed, "teacher")
    train_on(
        teacher, lambda i: normalise(train.images[i], train.spec), train.labels, TEACHER, draws
    )
    return teacher, held, accuracy(teacher, held)


def one(form: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """A student's row."""
    teacher, held, right = teacher_of(seed)
    settings: dict[str, Any] = {**STUDENT, **FORMS[form], "steps": steps, "generator_lr": rate}
    distiller = DataFreeDistiller(teacher, held.spec, seed=seed, **settings)
    student, started = lenet(held, seed + 100), time.perf_counter()
    generator = distiller.fit(student)
    return {
        "accuracy": accuracy(student, held),
        "teacher": right,
        **distiller.facts(generator),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="make only the rows whose name contains this")
    parser.add_argument("--time-budget", type=float, default=math.inf, help="seconds")
    options = parser.parse_args()
    keep_large_allocations()
    end = time.monotonic() + options.time_budget
    path = RESULTS / f"generator_scale{'_quick' if options.quick else ''}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}
    table: dict[str, list[dict[str, Any]]] = {}
    for rate in RATES:
        for form in FORMS:
            for seed in options.seeds:
                name = f"{form}, rate = {rate:g}"
                key = f"{name} seed={seed}"
                if key not in rows and options.only in name and time.monotonic() < end:
                    made = one(form, rate, seed, 5 if options.quick else int(STUDENT["steps"]))
                    rows[key] = {"key": key, **made, **machine()}
                    with path.open("a") as file:
                        file.write(json.dumps(rows[key]) + "\n")
                    print(json.dumps(rows[key]), file=sys.stderr, flush=True)
                if key in rows:
                    table.setdefault(name, []).append(rows[key])
    shown = {
        name: {
            "accuracy": summarise([100 * row["accuracy"] for row in made]),
            "teacher": summarise([100 * row["teacher"] for row in made]),
            "classes": summarise([row["classes"] for row in made]),
            "entropy / log C": summarise([row["class_entropy_share"] for row in made]),
        }
        for name, made in table.items()
    }
    if options.json:
        print(json.dumps(shown, indent=2))
        return
    for name, row in shown.items():
        print(f"{name:22}", *(f"{c} {v['mean']:5.2f} ± {v['sd']:.2f} " for c, v in row.items()))


if __name__ == "__main__":
    main()
