"""What privacy costs in accuracy, and what audits find: docs/privacy.md and README.md."""

from __future__ import annotations

import math
import statistics

from library.pivot import Axis, Cell, Fields, Table, axis, cross, spread_of
from library.rows import NOTHING, STATISTICS_SEEDS, by_key, number, percents

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
AUDITED = ("residual", "gradient", "features", "FedAF", "DP-SGD (FedAvg)", "FedFM")


def _budgets(epsilons: tuple[str, ...], title: str) -> Axis:
    return [
        (
            f"{DATASETS[dataset]} ε = {epsilon}" if place == 0 else f"{title}{epsilon}",
            {
                "dataset": dataset,
                "epsilon": epsilon,
                "chosen": "" if epsilon == "1" else f" eps={epsilon}",
            },
        )
        for dataset in DATASETS
        for place, epsilon in enumerate(epsilons)
    ]


def _at_last(cell: Cell) -> str:
    """A run without noise stands below the largest ε."""
    return spread_of(cell) if cell["epsilon"] == "10" else ""


NOISELESS: Fields = {"key": "{dataset} features, noiseless", "show": _at_last}


def _bounds(cell: Cell) -> str:
    """Mean (range) of the lower bounds that the audits of one kind found."""
    found = [row["epsilon_lower_bound"] for row in cell.records]
    if not found:
        return NOTHING
    mean = f"{statistics.mean(found):.2f}"
    return mean if len(found) == 1 else f"{mean} ({min(found):.2f}–{max(found):.2f})"


TABLES = {
    "audit": Table(
        cross(axis("kind", ("vectors", "images")), axis("epsilon", ("1", "3", "10")), join=None),
        axis("name", {one: f"`{one}`" if one.islower() else one for one in AUDITED}),
        {"file": "audit_table", "key": "{name}, {kind}, ε = {epsilon}", "show": _bounds},
        corner=("canaries", "ε"),
    ),
    "private-accuracy": Table(
        [("FedStats", STATISTICS), ("DP-FedAvg, linear on features", ON_FEATURES), *MECHANISMS],
        _budgets(("1", "10"), "ε = "),
        {**UTILITY, "digits": 1},
    ),
    "dp-utility": Table(
        [
            *((str(title).removeprefix("FedDM, "), fields) for title, fields in MECHANISMS),
            ("`features` without noise", NOISELESS),
        ],
        _budgets(("1", "3", "10"), ""),
        UTILITY,
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


SENTENCES = [
    (
        "docs/privacy.md",
        "`residual` is ahead of `features` at every ε, by {} to {} points",
        _residual_over_features,
    ),
    ("README.md", "2 log(1/δ)/σ² = {} for σ = 3", lambda: [f"{2 * math.log(1e5) / 9:.2f}"]),
    ("docs/privacy.md", "({} runs)", lambda: [str(len(by_key("dp_utility")))]),
]
