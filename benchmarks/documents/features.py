"""Feature maps, and private baselines on them: docs/features.md."""

from __future__ import annotations

import statistics

from library.pivot import Axis, Cell, Table, axis, cross, figure, text
from library.rows import STATISTICS_SEEDS, Row, by_seed, lines

GRID = "private_baselines"
DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
PLACES = cross(axis("dataset", DATASETS), axis("alpha", ("0.5", "0.01"), "Dir({})"))


def _runs(way: str, dataset: str, alpha: str) -> list[Row]:
    file, name, seeds = GRID, f"{dataset} {way} alpha={alpha}", range(5)
    if way == "fedstats":
        file, name = "fedstats_table", f"{dataset} eps=1 own alpha={alpha} K=10"
        seeds = STATISTICS_SEEDS
    elif way == "convnet" and alpha == "0.5":
        file, name, seeds = "dp_utility", f"{dataset} dp-sgd, ε = 1", range(3)
    return list(by_seed(file, name, seeds).values())


def _records(cell: Cell) -> list[Row]:
    """The runs of a way, in the cell's place or in all."""
    if cell.get("dataset", None):
        return _runs(cell["way"], cell["dataset"], cell["alpha"])
    return [row for _, place in PLACES for row in _runs(cell["way"], **place)]


def _maps() -> Axis:
    """The maps, the least accurate first."""
    rows = sorted(lines("random_process_prior"), key=lambda row: float(row["accuracy"]))
    return [(f"`{row['key']}`", {"records": [row]}) for row in rows]


CONSTANTS = {
    "unit": "divided by the norm",
    "centred": "centred on public images, divided by the norm",
    "random clip": "clipped to the median norm of random-process images",
    "public clip": "clipped to the median norm of public images",
}
WAYS = {"fedstats": "FedStats", "fedavg": "DP-FedAvg"}


def _constants(cell: Cell) -> list[Row]:
    """The runs on one data set with one kind of constants."""
    name = f"{cell['dataset']} {cell['method']} {cell['map']}"
    return list(by_seed("encoder_constants", name, range(3)).values())


TABLES = {
    "encoder-constants": Table(
        axis("map", CONSTANTS),
        cross(axis("method", WAYS), axis("dataset", DATASETS)),
        {"records": _constants, "digits": 1, "expected": 3},
        corner="vectors",
    ),
    "random-process": Table(
        _maps,
        [("dimension", text("dimension")), ("held-out accuracy", figure("accuracy", ".1f", 100))],
        corner="features",
    ),
    "private-baselines": Table(
        [
            ("DP-FedAvg, ConvNet", {"way": "convnet", "expected": 3}),
            ("DP-FedAvg, linear on features", {"way": "linear"}),
            ("FedStats", {"way": "fedstats"}),
        ],
        [
            *PLACES,
            ("uploads, MB", figure(lambda row: row.get("bytes"), ".1f", 1e-6, of=max)),
            ("seconds", figure("seconds", ".0f", of=statistics.median)),
        ],
        {"records": _records, "digits": 1, "expected": 5},
    ),
}
