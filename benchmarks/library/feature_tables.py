"""The tables of docs/features.md: feature maps, and private baselines on them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from library.baselines import candidates
from library.rows import NOTHING, STATISTICS_SEEDS, Row, by_key, lines, percents, spread, table

DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
ALPHAS = ("0.5", "0.01")
NETWORK, LINEAR, FEDSTATS = range(3)
SEEDS = {NETWORK: (0, 1, 2), LINEAR: (0, 1, 2, 3, 4), FEDSTATS: STATISTICS_SEEDS}
EXPECTED = {NETWORK: 3, LINEAR: 5, FEDSTATS: 5}
CLIENTS = 10


def _name(kind: int, dataset: str, alpha: str) -> tuple[str, str]:
    """A results file, and the name of its rows without their seed."""
    if kind == FEDSTATS:
        return "fedstats_table", f"{dataset} eps=1 own alpha={alpha} K=10"
    if kind == NETWORK and alpha == "0.5":
        return "dp_utility", f"{dataset} dp-sgd, ε = 1"
    model = "linear" if kind == LINEAR else "convnet"
    return "private_baselines", f"{dataset} {model} alpha={alpha}"


def _rows(kind: int) -> list[Row]:
    """All rows of one way."""
    found: list[Row] = []
    for dataset in DATASETS:
        for alpha in ALPHAS:
            file, name = _name(kind, dataset, alpha)
            rows = by_key(file)
            keys = [f"{name} seed={seed}" for seed in SEEDS[kind]]
            found += [rows[key] for key in keys if key in rows]
    return found


def _cell(kind: int, dataset: str, alpha: str) -> str:
    file, name = _name(kind, dataset, alpha)
    return spread(percents(by_key(file), name, SEEDS[kind]), EXPECTED[kind], 1)


def _megabytes(rows: Sequence[Row]) -> str:
    sizes = {row["bytes"] for row in rows if "bytes" in row}
    return f"{max(sizes) / 1e6:.1f}" if sizes else NOTHING


def _seconds(rows: Sequence[Row]) -> str:
    return f"{statistics.median(row['seconds'] for row in rows):.0f}" if rows else NOTHING


def _baselines() -> str:
    """Accuracy at ε = 1, uploads of all clients in a run, and its median time."""
    titles = {
        NETWORK: "DP-FedAvg, ConvNet",
        LINEAR: "DP-FedAvg, linear on features",
        FEDSTATS: "FedStats",
    }
    body = []
    for kind, title in titles.items():
        cells = [_cell(kind, dataset, alpha) for dataset in DATASETS for alpha in ALPHAS]
        rows = _rows(kind)
        body.append([title, *cells, _megabytes(rows), _seconds(rows)])
    names = [f"{label}, Dir({alpha})" for label in DATASETS.values() for alpha in ALPHAS]
    return table(["", *names, "uploads, MB", "seconds"], body)


def _tuning() -> str:
    """Held-out accuracy of each candidate, by rounds."""
    rows = by_key("private_baselines")
    tried: dict[tuple[float, float, float], dict[int, str]] = {}
    for one in candidates():
        row = rows.get(f"tune {one.name}")
        shown = NOTHING if row is None else f"{100 * row['accuracy']:.1f}"
        tried.setdefault((one.rate, one.clip, one.lr), {})[one.rounds] = shown
    rounds = sorted({number for found in tried.values() for number in found})
    body = [
        [f"{rate:g}", f"{clip:g}", f"{lr:g}", *(found.get(number, "") for number in rounds)]
        for (rate, clip, lr), found in sorted(tried.items(), reverse=True)
    ]
    return table(["q", "clip", "rate", *(f"{number} rounds" for number in rounds)], body)


def _maps() -> str:
    """Held-out accuracy of a linear classifier by feature map."""
    rows = {row["key"]: row for row in lines("random_process_prior")}  # keys are the maps' names
    body = [
        [f"`{name}`", str(row["dimension"]), f"{100 * row['accuracy']:.1f}"]
        for name, row in sorted(rows.items(), key=lambda item: float(item[1]["accuracy"]))
    ]
    return table(["features", "dimension", "held-out accuracy"], body)


TABLES: dict[str, Callable[[], str]] = {
    "random-process": _maps,
    "private-baselines": _baselines,
    "private-baselines-tuning": _tuning,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = []
