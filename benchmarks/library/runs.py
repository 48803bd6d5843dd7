"""Simulated runs and the data that they have."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.errors import DivergedError
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.simulation.simulate import simulate

Data = tuple[ImageData, ImageData]
HELD_OUT = 5000
"""Training images on which settings are chosen."""
TUNING_SEED = 1000
"""A seed that no table uses."""


@cache
def dataset(name: str) -> Data:
    """Returns the training and test images of a data set, which stay in memory."""
    return load_dataset(name)


def split(count: int) -> tuple[Any, Any]:
    """Returns the positions of (the other images, `HELD_OUT` random ones) of `count` images."""
    order = np.random.default_rng(0).permutation(count)
    return np.sort(order[HELD_OUT:]), np.sort(order[:HELD_OUT])


@cache
def tuning_data(name: str) -> Data:
    """Returns the training images of a data set, split as `split` does."""
    train, _ = dataset(name)
    rest, validation = split(len(train))
    return train.subset(rest), train.subset(validation)


def one_run(settings: RunSettings, data: Data) -> dict[str, Any]:
    """Simulates a run and returns its measurements."""
    try:
        result = simulate(settings, data=data)
    except DivergedError as error:  # a learning rate that is too high is a result, too
        return {"accuracy": 0.0, "diverged": str(error)}
    last = result.metrics[-1]
    row: dict[str, Any] = {"accuracy": result.accuracy}
    if GENERATOR in result.summary:
        row[GENERATOR] = result.summary[GENERATOR]
    if "local" in last:
        row["local"] = {k: v for k, v in last["local"].items() if k != "client_accuracy"}
    row["bytes"] = result.summary["upload_bytes"]
    row["curve"] = [
        metrics["test_accuracy"] for metrics in result.metrics if "test_accuracy" in metrics
    ]
    row["floats"] = result.summary["upload_floats_per_round"]
    row["round_seconds"] = [metrics["seconds"] for metrics in result.metrics]
    row["seconds"] = round(sum(row["round_seconds"]), 3)
    return row
