"""The runs of FedStats' tables: settings, data with kept features, and accuracy on them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedsynth import FedStats, PartitionSettings, PrivacySettings, RunSettings
from fedsynth.core.feature_cache import keep_features
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.models.on_features import Embedding
from library.grid import Cell
from library.kept_features import vectors

DATASETS = ("mnist", "fashion-mnist", "emnist-letters", "cifar10")
KEY = "{dataset} eps={epsilon} {noise} alpha={alpha:g} K={clients} seed={seed}"
DELTAS = {"emnist-letters": 5e-6}
"""Below one over the number of records; 1e-5 for the other data sets."""


def settings_for(cell: Cell, **images: Any) -> RunSettings:
    """Returns the settings of one run."""
    private = None
    if cell.epsilon != "inf":
        delta = DELTAS.get(cell.dataset, 1e-5)
        private = PrivacySettings(epsilon=float(cell.epsilon), delta=delta)
    return RunSettings(
        FedStats(aggregation=cell.noise, **images),
        dataset=cell.dataset,
        rounds=2 if cell.quick else 32,
        seed=cell.seed,
        device=cell.device,
        partition=PartitionSettings("dirichlet-plain", clients=cell.clients, alpha=cell.alpha),
        privacy=private,
    )


@lru_cache(maxsize=1)  # one data set's features at a time
def prepared(dataset: str, cache: Path) -> tuple[ImageData, ImageData, Tensor]:
    """Returns the data set with kept features of its training images, and the test features."""
    train, test = load_dataset(dataset)
    features = FedStats().map_of(train.spec)
    keep_features(train, features, vectors(cache, "train", train, features))
    return train, test, vectors(cache, "test", test, features)


def classifier_accuracy(model: nn.Module, features_Nd: Tensor, test: ImageData) -> float:
    """Returns the accuracy of a run's classifier on kept features of test images."""
    parameters = {name: value.cpu() for name, value in model.state_dict().items()}
    z = Embedding.of(parameters, FedStats().map_of(test.spec))(features_Nd)
    guessed = (z @ parameters["classifier.weight"].T).argmax(dim=1)
    return float((guessed == test.labels).float().mean())
