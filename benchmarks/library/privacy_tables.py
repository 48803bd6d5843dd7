"""Tables and sentences on what privacy costs in accuracy, and what audits find: docs/privacy.md and
README.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product

from library.rows import NOTHING, STATISTICS_SEEDS, by_key, lines, percents, spread, table

SEEDS = range(3)
MECHANISMS = {
    "residual": "FedDM, `residual`",
    "features": "FedDM, `features`",
    "gradient": "FedDM, `gradient`",
    "dp-sgd": "DP-FedAvg",
}
DATASETS = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
AUDITED = ("residual", "gradient", "features", "FedAF", "DP-SGD (FedAvg)", "FedFM")


def _private(dataset: str, mechanism: str, epsilon: str) -> list[float]:
    rows = by_key("dp_utility")
    budget = epsilon if epsilon == "noiseless" else f"ε = {epsilon}"
    return percents(rows, f"{dataset} {mechanism}, {budget}", SEEDS)


def _utility(epsilons: tuple[str, ...], digits: int, short: bool) -> str:
    head = [""]
    for title in DATASETS.values():
        head += [f"{title} ε = {epsilons[0]}", *(e if short else f"ε = {e}" for e in epsilons[1:])]
    body = [] if short else [_fedstats(epsilons, digits), _on_features(epsilons, digits)]
    for mechanism, title in MECHANISMS.items():
        cells = [title.removeprefix("FedDM, ") if short else title]
        for dataset in DATASETS:
            cells += [spread(_private(dataset, mechanism, e), 3, digits) for e in epsilons]
        body.append(cells)
    if short:
        without = ["`features` without noise"]
        for dataset in DATASETS:
            found = spread(_private(dataset, "features", "noiseless"), 3, digits)
            without += ["", "", found]
        body.append(without)
    return table(head, body)


def _fedstats(epsilons: tuple[str, ...], digits: int) -> list[str]:
    """Its row beside them."""
    rows = by_key("fedstats_table")
    keys = [f"{dataset} eps={e} own alpha=0.5 K=10" for dataset in DATASETS for e in epsilons]
    found = [percents(rows, key, STATISTICS_SEEDS) for key in keys]
    return ["FedStats", *(spread(one, 5, digits) for one in found)]


def _on_features(epsilons: tuple[str, ...], digits: int) -> list[str]:
    """DP-FedAvg of a linear model on features, likewise."""
    rows = by_key("private_baselines")
    cells = []
    for dataset in DATASETS:
        for epsilon in epsilons:
            chosen = "" if epsilon == "1" else f" eps={epsilon}"
            name = f"{dataset} linear{chosen} alpha=0.5"
            cells.append(spread(percents(rows, name, range(5)), 5, digits))
    return ["DP-FedAvg, linear on features", *cells]


def _mean(dataset: str, mechanism: str, epsilon: str) -> float:
    return statistics.mean(_private(dataset, mechanism, epsilon))


def _features_over_gradient() -> list[str]:
    ahead = [_mean(d, "features", "10") - _mean(d, "gradient", "10") for d in DATASETS]
    return [f"{value:.1f}" for value in ahead]


def _noise_costs_features() -> list[str]:
    fashion, mnist = (
        _mean(d, "features", "10") - _mean(d, "features", "noiseless") for d in DATASETS
    )
    return [f"{fashion:+.1f}", f"{-mnist:.1f}"]


def _residual_over_features() -> list[str]:
    ahead = [
        _mean(d, "residual", e) - _mean(d, "features", e)
        for d in DATASETS
        for e in ("1", "3", "10")
    ]
    return [f"{min(ahead):.1f}", f"{max(ahead):.1f}"]


def _bounds(key: str, name: str = "audit_table") -> str:
    """Mean (range) of the lower bounds that the audits of one kind found."""
    found = [row["epsilon_lower_bound"] for row in lines(name) if row["key"] == key]
    if not found:
        return NOTHING
    mean = f"{statistics.mean(found):.2f}"
    return mean if len(found) == 1 else f"{mean} ({min(found):.2f}–{max(found):.2f})"


def _audit() -> str:
    head = [
        "canaries",
        "ε",
        *(name if " " in name or name[0] == "F" else f"`{name}`" for name in AUDITED),
    ]
    body = [
        [kind, epsilon, *(_bounds(f"{name}, {kind}, ε = {epsilon}") for name in AUDITED)]
        for kind in ("vectors", "images")
        for epsilon in ("1", "3", "10")
    ]
    return table(head, body)


TWINS = ("honest", "no clip", "half the noise", "a quarter of the noise", "public mask")
OF_TWINS = (*AUDITED[:2], "DP-SGD (FedAvg)", "DP-SGD (FedAvg), q = 0.1", "FedSum", "FedStats")


def _twins() -> str:
    body = []
    for name, kind in product(OF_TWINS, ("vectors", "images", "images, earlier scores")):
        found = [_bounds(f"{name}, {kind}, {twin}", "audit_twins") for twin in TWINS]
        if set(found) != {NOTHING}:
            body.append([name, kind, *found])
    return table(["mechanism", "canaries", *TWINS], body)


TABLES: dict[str, Callable[[], str]] = {
    "audit": _audit,
    "audit-twins": _twins,
    "private-accuracy": partial(_utility, ("1", "10"), 1, False),
    "dp-utility": partial(_utility, ("1", "3", "10"), 2, True),
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = [
    (
        "docs/privacy.md",
        "by {} points on Fashion-MNIST and {} on MNIST (expected: at least 10)",
        _features_over_gradient,
    ),
    (
        "docs/privacy.md",
        "loses nothing on Fashion-MNIST ({}) and {} on MNIST",
        _noise_costs_features,
    ),
    (
        "docs/privacy.md",
        "`residual` is ahead of `features` at every ε, by {} to {} points",
        _residual_over_features,
    ),
    ("README.md", "2 log(1/δ)/σ² = {} for σ = 3", lambda: [f"{2 * math.log(1e5) / 9:.2f}"]),
    ("docs/privacy.md", "({} runs; rows with commits", lambda: [str(len(by_key("dp_utility")))]),
]
