"""Settings chosen by a private selection, and on public images: the table of docs/sweeps.md.

One owner's digits, and DP-FedAvg of a linear model in 20 steps of all records, with one of nine
settings: three clips, three learning rates. What the owner hands over costs ε in all: the best of
a random number of runs (`poisson`, `logarithmic`, 10 expected), one run with the settings that were
best on 120 public images (`public`), one run with settings drawn at random (`random`), or the best
of one run of each setting, by a score of the same share (`every`). The public images are the first
half of the test images. The accuracy is that of the run's model on the second half.
"""

from __future__ import annotations

import math
import random
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedsynth import RunSettings, load_dataset, resolve
from fedsynth.data.images import ImageData
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.experiments import select_privately
from fedsynth.experiments.selection import result_folder
from fedsynth.experiments.sweep import Cell as Candidate
from fedsynth.experiments.sweep import SelectionSettings, Sweep
from fedsynth.federation.context import plan_of
from fedsynth.privacy.accounting import (
    Merged,
    Totals,
    calibrate_noise_multiplier,
    epsilon_of,
)
from fedsynth.results.saved_model import model_in
from fedsynth.simulation.simulate import simulate
from library.grid import Cell, Grid, Row

PUBLIC, PUBLIC_TRAIN, REPEATS = 180, 120, 5
CLIPS, RATES = (0.1, 1.0, 10.0), (0.1, 1.0, 10.0)
LAWS = {"poisson": "poisson", "logarithmic": "negative-binomial"}
DELTA = 1e-5  # the default of privacy.delta
SHARE = 0.1  # of the score


def candidate(cell: Cell, clip: float, rate: float, privacy: dict[str, Any]) -> RunSettings:
    """Returns the settings of one run."""
    return resolve(
        {
            "run": {"method": "fedavg", "rounds": 5, "seed": cell.seed, "device": "cpu"},
            "data": {"dataset": "digits"},
            "method": {"local_steps": 4, "lr": rate},
            "model": {"name": "linear"},
            "partition": {"kind": "iid", "clients": 1, "local_test": 0.2},
            "privacy": {"clip": clip, "sample_rate": 1.0, **privacy},
        }
    )


def part(data: ImageData, start: int, end: int) -> ImageData:
    """Returns some images."""
    return data.subset(np.arange(start, end))


def selected(cell: Cell, folder: str, test: ImageData) -> Row:
    """Returns the accuracy after a private selection, and the ε of one trial."""
    privacy = {"epsilon": cell.epsilon, "ledger": f"{folder}/ledger"}
    cells = []
    for clip, rate in product(CLIPS, RATES):
        settings = candidate(cell, clip, rate, privacy)
        cells.append(Candidate({"clip": clip, "lr": rate}, settings, f"{clip}-{rate}"))
    law = SelectionSettings(LAWS[cell.way], 10.0, score_share=SHARE)
    sweep = Sweep(Path(folder, "out"), 1, ("test_accuracy",), tuple(cells), law)
    result = select_privately(sweep, lambda text: None)
    if result["run"] is None:
        return {"accuracy": None, "run_epsilon": result["trial_epsilon"], "values": None}
    model, _ = model_in(result_folder(sweep) / result["run"])
    figures = {"run_epsilon": result["trial_epsilon"], "values": result["values"]}
    return {"accuracy": accuracy(model, test), **figures}


def on_public(cell: Cell, public: ImageData) -> tuple[float, float]:
    """Returns the clip and rate that are best on public images.

    Their noise has the same size, relative to the sum of all records, as that of the private run.
    """
    train, test = part(public, 0, PUBLIC_TRAIN), part(public, PUBLIC_TRAIN, PUBLIC)
    plan = plan_of(candidate(cell, 1.0, 1.0, {"epsilon": cell.epsilon}))
    sizes = {"nominal_size": PUBLIC_TRAIN * 0.8}
    noise = plan.sigma * sizes["nominal_size"] / plan.nominal_size
    accuracies = {}
    for clip, rate in product(CLIPS, RATES):
        settings = candidate(cell, clip, rate, {"noise_multiplier": noise, **sizes})
        results = []
        for _ in range(REPEATS):
            results.append(simulate(settings, data=(train, test), test="public", quiet=True))
        accuracies[clip, rate] = np.mean([result.accuracy for result in results])
    return max(accuracies, key=lambda key: accuracies[key])


def every(cell: Cell, test: ImageData) -> Row:
    """Returns the accuracy of the best of one run of each setting, which compose to ε."""
    σ = calibrate_noise_multiplier(cell.epsilon, DELTA, lambda s: total(s, len(CLIPS) * len(RATES)))
    budget = epsilon_of(Merged(math.sqrt(1 - SHARE) / σ), DELTA)
    held_out = len(load_dataset("digits")[0]) * 0.2
    noise = np.random.default_rng(cell.seed)
    runs = {}
    for clip, rate in product(CLIPS, RATES):
        settings = candidate(cell, clip, rate, {"epsilon": budget})
        result = simulate(settings, quiet=True)
        score = result.metrics[-1]["local"]["amp"]
        score += noise.normal() * σ / math.sqrt(SHARE) / held_out
        runs[score] = result.model, {"clip": clip, "lr": rate}
    model, values = runs[max(runs)]
    return {"accuracy": accuracy(model, test), "run_epsilon": budget, "values": values}


def total(σ: float, runs: int) -> Totals:
    """Returns the totals of some Gaussian releases with noise multiplier σ."""
    return Totals(((σ, 1.0, runs),))


def work(cell: Cell) -> Row:
    """Returns the accuracy of the model that the owner hands over."""
    _, images = load_dataset("digits")
    public, test = part(images, 0, PUBLIC), part(images, PUBLIC, len(images))
    if cell.way in LAWS:
        with tempfile.TemporaryDirectory() as folder:
            return selected(cell, folder, test)
    if cell.way == "every":
        return every(cell, test)
    clip, rate = random.Random(cell.seed).choice(list(product(CLIPS, RATES)))
    if cell.way == "public":
        clip, rate = on_public(cell, public)
    result = simulate(candidate(cell, clip, rate, {"epsilon": cell.epsilon}), quiet=True)
    values = {"clip": clip, "lr": rate}
    return {"accuracy": accuracy(result.model, test), "run_epsilon": cell.epsilon, "values": values}


GRID = Grid(
    axes={
        "seed": range(8),
        "epsilon": (1.0, 3.0),
        "way": ("public", "poisson", "logarithmic", "every", "random"),
    },
    key="{way} eps={epsilon:g} seed={seed}",
    work=work,
    threads=1,
)
