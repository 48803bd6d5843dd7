"""Simulated runs and the data that they have."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsynth import FedStats
from fedsynth.config.settings import RunSettings
from fedsynth.core.feature_cache import keep_on_disk
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.errors import DivergedError
from fedsynth.evaluation import GENERATOR
from fedsynth.simulation.simulate import simulate

Data = tuple[ImageData, ImageData]
# Training images on which settings are chosen.
HELD_OUT = 5000
# A seed that no table uses.
TUNING_SEED = 1000


def keep_features(data: Data, features: str, folder: Path) -> Data:
    """Computes the features of all images, or reads them from a folder, and returns the images.

    Seconds of a run are then those of all else.
    """
    for images in data:
        features_of = FedStats(features=features).map_of(images.spec)
        keep_on_disk(folder, images, features_of, torch.arange(len(images)))
    return data


@lru_cache(maxsize=1)  # one data set's features at a time
def with_features(name: str, features: str, folder: Path) -> Data:
    """Returns the training and test images of a data set, whose features are kept."""
    return keep_features(load_dataset(name), features, folder)


@cache
def dataset(name: str) -> Data:
    """Returns the training and test images of a data set, which stay in memory."""
    return load_dataset(name)


@cache
def tuning_data(name: str) -> Data:
    """Returns (the other training images, `HELD_OUT` random ones) of a data set."""
    train, _ = dataset(name)
    order = np.random.default_rng(0).permutation(len(train))
    return train.subset(np.sort(order[HELD_OUT:])), train.subset(np.sort(order[:HELD_OUT]))


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
