"""Which constants suit the vectors of a public encoder? FedStats and DP-FedAvg at ε = 1, δ = 1e-5, on
MNIST and Fashion-MNIST, 10 clients, Dir(0.5).

The encoder was trained on EMNIST letters (`library/public_encoder.py`). Its maps divide a vector by
its norm (`unit`), subtract the mean of public letters before (`centred`), or clip the vector to the
median norm of random-process images (`random clip`) or of public letters (`public clip`). DP-FedAvg
trains a linear model; its settings are the same for all maps, and were not tuned.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fedsynth import (
    FedAvg,
    FedStats,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
)
from fedsynth.core.feature_cache import keep_features
from fedsynth.features import feature_map, register_features
from library.grid import Cell, Grid, Row
from library.kept_features import vectors
from library.public_encoder import MAPS
from library.runs import Data, dataset, one_run

for name, build in MAPS.items():
    register_features(name, build)


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of one run."""
    private = PrivacySettings(epsilon=1.0)
    method: FedAvg | FedStats = FedStats(features=cell.map)
    model = ModelSettings()
    rounds = 8
    if cell.method == "fedavg":
        method = FedAvg(local_steps=1, lr=64.0, momentum=0.0)
        private = PrivacySettings(epsilon=1.0, clip=0.5, sample_rate=1.0)
        model = ModelSettings(features=cell.map)
        rounds = 32
    return RunSettings(
        method,
        dataset=cell.dataset,
        rounds=2 if cell.quick else rounds,
        seed=cell.seed,
        device=cell.device,
        evaluate_every=rounds,
        partition=PartitionSettings("dirichlet-plain", clients=10, alpha=0.5),
        model=model,
        privacy=private,
    )


@cache
def with_features(name: str, kind: str, folder: Path) -> Data:
    """Returns a data set with the features of all its images."""
    data = dataset(name)
    for split, images in zip(("train", "test"), data, strict=True):
        features = feature_map(kind, images.spec.image_shape)
        keep_features(images, features, vectors(folder, split, images, features))
    return data


def work(cell: Cell) -> Row:
    """Returns a run's measurements."""
    return one_run(cell.settings, with_features(cell.dataset, cell.map, cell.cache))


GRID = Grid(
    axes={
        "dataset": ("mnist", "fashion-mnist"),
        "method": ("fedstats", "fedavg"),
        "map": tuple(MAPS),
        "seed": range(3),
    },
    key="{dataset} {method} {map} seed={seed}",
    settings=settings,
    work=work,
)
