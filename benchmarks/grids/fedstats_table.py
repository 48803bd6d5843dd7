"""FedStats: accuracy of the classifier on features by ε, noise, skew and clients.

Data sets MNIST, Fashion-MNIST, EMNIST letters and CIFAR-10; ε 0.5, 1, 3, 10 and none; Dir(0.01),
Dir(0.5), Dir(100); every client's own noise, and aggregated noise; ten clients, at ε = 1 also 3 and
50; 32 rounds; δ = 1e-5 (EMNIST letters 5e-6). Settings are the method's defaults, found on held-out
training images (docs/fedstats.md has the exception). Features are made once (`--cache`), so
seconds are those of all else.
"""

from __future__ import annotations

from typing import Any

from fedsynth import FedStats, PartitionSettings, PrivacySettings, RunSettings
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.simulation.simulate import simulate
from library.grid import Cell, Grid, Row
from library.runs import with_features

DATASETS = ("mnist", "fashion-mnist", "emnist-letters", "cifar10")
KEY = "{dataset} eps={epsilon} {noise} alpha={alpha:g} K={clients} seed={seed}"
# Below one over the number of records; 1e-5 for the other data sets.
DELTAS = {"emnist-letters": 5e-6}


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


def include(cell: Cell) -> bool:
    """Leaves out other numbers of clients but at ε = 1, own noise and Dir(0.5)."""
    if cell.clients != 10:
        return bool((cell.epsilon, cell.noise, cell.alpha) == ("1", "own", 0.5))
    return bool(cell.epsilon != "inf" or cell.noise == "own")


def work(cell: Cell) -> Row:
    """Returns the measurements of a run on training images whose features are kept."""
    train, test = with_features(cell.dataset, "auto", cell.cache)
    result = simulate(cell.settings, data=(train, None))
    return {
        "accuracy": accuracy(result.model, test),
        "bytes": result.summary["upload_bytes"],
        "seconds": round(sum(row["seconds"] for row in result.metrics), 3),
    }


GRID = Grid(
    axes={
        "seed": range(5),
        "clients": (10, 3, 50),
        "epsilon": ("1", "10", "3", "0.5", "inf"),
        "alpha": (0.5, 0.01, 100.0),
        "noise": ("own", "secure"),
        "dataset": DATASETS,
    },
    key=KEY,
    settings=settings_for,
    work=work,
    include=include,
)
