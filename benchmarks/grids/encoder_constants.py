"""Which constants suit the vectors of a public encoder? FedStats and DP-FedAvg at ε = 1, δ = 1e-5, on
MNIST and Fashion-MNIST, 10 clients, Dir(0.5).

The encoder is a small network, trained on EMNIST letters, so that it needs no download. Its maps
divide a vector by its norm (`unit`), subtract the mean of public letters before (`centred`), or
clip the vector to the median norm of random-process images (`random clip`) or of public letters
(`public clip`). DP-FedAvg trains a linear model; its settings are the same for all maps, and were
not tuned.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedsynth import (
    FedAvg,
    FedStats,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
)
from fedsynth.features import FeatureMap, measured_map, normalised_map, register_features
from fedsynth.seeding import forked_rng
from library.grid import Cell, Grid, Row
from library.runs import dataset, one_run, with_features

LETTERS = "emnist-letters"
FILE = Path(tempfile.gettempdir()) / "fedsynth-emnist-encoder.safetensors"
IMAGES = 40_000
PUBLIC = 2000
"""The number of EMNIST letters on which constants are measured."""
MAPS: dict[str, tuple[Callable[..., FeatureMap], bool]] = {
    "unit": (normalised_map, False),
    "centred": (normalised_map, True),
    "random clip": (measured_map, False),
    "public clip": (measured_map, True),
}
"""The kind of constants, and True where they are measured on letters."""


def network() -> nn.Sequential:
    """Returns the untrained network: three blocks with batch norm, and a mean over positions."""
    layers: list[nn.Module] = []
    for inside, outside in ((1, 32), (32, 64), (64, 256)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 26))


@cache
def trained() -> nn.Sequential:
    """Returns the trained network without its last layer. It is trained at the first call."""
    with forked_rng(0, "public encoder"):
        model = network()
        if FILE.exists():
            model.load_state_dict(load_file(FILE))
        else:
            _train(model)
            save_file(model.state_dict(), FILE)
    return model[:-1].eval()


def _train(model: nn.Module) -> None:
    letters, _ = dataset(LETTERS)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        rows = torch.randperm(len(letters))[:IMAGES]
        for batch in rows.split(128):
            logits = model(letters.images[batch].float() / 255)
            loss = nn.functional.cross_entropy(logits, letters.labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")


def encoder(name: str, image_shape: tuple[int, int, int]) -> FeatureMap:
    """Returns one of `MAPS`."""
    build, on_letters = MAPS[name]
    images = dataset(LETTERS)[1].images[:PUBLIC] if on_letters else None
    return build(name, image_shape, trained(), images)


for name in MAPS:
    register_features(name, partial(encoder, name))


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
