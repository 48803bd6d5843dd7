"""Accuracy under privacy, and the bounds of audits: docs/privacy.md and README.md."""

from __future__ import annotations

import math
import statistics

from library.pivot import Axis, Fields, Table, axis
from library.rows import STATISTICS_SEEDS, lines, number, percents

SEEDS = range(3)
DATASETS = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
MECHANISMS = axis(
    "mechanism",
    {
        "residual": "FedDM, `residual`",
        "features": "FedDM, `features`",
        "gradient": "FedDM, `gradient`",
        "dp-sgd": "DP-FedAvg",
    },
)
UTILITY: Fields = {
    "file": "dp_utility",
    "key": "{dataset} {mechanism}, ε = {epsilon}",
    "seeds": SEEDS,
}
STATISTICS: Fields = {
    "file": "fedstats_table",
    "key": "{dataset} eps={epsilon} own alpha=0.5 K=10",
    "seeds": STATISTICS_SEEDS,
    "expected": 5,
}
ON_FEATURES: Fields = {
    "file": "private_baselines",
    "key": "{dataset} linear{chosen} alpha=0.5",
    "seeds": range(5),
}


BUDGETS: Axis = [
    (f"{title} ε = {epsilon}", {"dataset": dataset, "epsilon": epsilon, "chosen": chosen})
    for dataset, title in DATASETS.items()
    for epsilon, chosen in (("1", ""), ("10", " eps=10"))
]
TABLES = {
    "private-accuracy": Table(
        [("FedStats", STATISTICS), ("DP-FedAvg, linear on features", ON_FEATURES), *MECHANISMS],
        BUDGETS,
        {**UTILITY, "digits": 1},
    ),
}


def _mean(dataset: str, mechanism: str, budget: str) -> float:
    return statistics.mean(percents("dp_utility", f"{dataset} {mechanism}, {budget}", SEEDS))


def _residual_over_features() -> list[str]:
    ahead = [
        _mean(d, "residual", f"ε = {e}") - _mean(d, "features", f"ε = {e}")
        for d in DATASETS
        for e in ("1", "3", "10")
    ]
    return [number(min(ahead), ".1f"), number(max(ahead), ".1f")]


def _audits() -> list[str]:
    """The smallest and the largest mean lower bound at ε = 3."""
    bounds: dict[str, list[float]] = {}
    for row in lines("audit_table"):
        if row["key"].endswith(", vectors, ε = 3"):
            bounds.setdefault(row["key"], []).append(row["epsilon_lower_bound"])
    means = [statistics.mean(values) for values in bounds.values()]
    return [number(min(means), ".2f"), number(max(means), ".2f")]


SENTENCES = [
    (
        "docs/privacy.md",
        "`residual` is ahead of `features` at every ε, by {} to {} points",
        _residual_over_features,
    ),
    (
        "docs/verification.md",
        "mean bounds of {} to {} (digits' preset",
        _audits,
    ),
    ("README.md", "2 log(1/δ)/σ² = {} for σ = 3", lambda: [f"{2 * math.log(1e5) / 9:.2f}"]),
]
