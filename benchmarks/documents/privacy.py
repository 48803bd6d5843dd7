"""Accuracy under privacy, and the bounds of audits: README.md, docs/privacy.md and
docs/verification.md."""

from __future__ import annotations

import math
import statistics
from itertools import product
from typing import Any

from library.pages import markdown, pivot, sentence, table
from library.rows import STATISTICS_SEEDS, lines, percents, spread, spread_of

DATASETS = {"Fashion-MNIST": "fashion-mnist", "MNIST": "mnist"}


METHODS = {
    "FedStats": "fedstats",
    "DP-FedAvg, linear on features": "linear",
    "FedDM, `residual`": "residual",
    "FedDM, `features`": "features",
    "FedDM, `gradient`": "gradient",
    "DP-FedAvg": "dp-sgd",
}


def _percents(method: str, dataset: str, epsilon: str) -> list[float]:
    if method == "fedstats":
        key = f"{dataset} eps={epsilon} own alpha=0.5 K=10"
        return percents("fedstats_table", key, STATISTICS_SEEDS)
    if method == "linear":
        chosen = "" if epsilon == "1" else f" eps={epsilon}"
        return percents("private_baselines", f"{dataset} linear{chosen} alpha=0.5", range(5))
    return percents("dp_utility", f"{dataset} {method}, ε = {epsilon}", range(3))


@table("private-accuracy")
def _accuracy() -> str:
    columns = {
        f"{title} ε = {epsilon}": (dataset, epsilon)
        for (title, dataset), epsilon in product(DATASETS.items(), ("1", "10"))
    }

    def cell(method: str, place: tuple[str, str]) -> str:
        seeds = 5 if method in ("fedstats", "linear") else 3
        return spread(_percents(method, *place), seeds, 1)

    return pivot("", METHODS, columns, cell)


@table("patients")
def _patients() -> str:
    body = []
    for count, classes in ((60, 2), (60, 10), (250, 10), (1400, 10)):
        for method in ("FedDM", "FedStats"):
            key = f"{method.lower()} {classes=} patients={count}"
            keys = [f"{key} eps={epsilon}" for epsilon in (1, 3, 8)]
            aurocs = [spread_of("patients", key, range(3), "auroc", 0) for key in keys]
            body.append([f"{count:,}", f"{classes}", method, *aurocs])
    return markdown(["patients", "classes", "method", "ε = 1", "ε = 3", "ε = 8"], body)


CHOICES = {
    "public": "best of nine on public images",
    "poisson": "selection, Poisson law",
    "logarithmic": "selection, logarithmic law",
    "every": "best of nine private runs",
    "random": "one setting at random",
}


@table("selection")
def _selection() -> str:
    body = []
    for way, words in CHOICES.items():
        cells = [words]
        for epsilon in (1, 3):
            rows = lines("selection")
            keys = {f"{way} eps={epsilon} seed={seed}" for seed in range(8)}
            found = [row for row in rows if row["key"] in keys]
            accuracies = [100 * row["accuracy"] for row in found]
            mean, std = statistics.mean(accuracies), statistics.stdev(accuracies)
            cells += [f"{found[0]['run_epsilon']:.2f}", f"{mean:.1f} ± {std:.1f}"]
        body.append(cells)
    heads = ["the settings", "ε of the run", "ε = 1 in all", "ε of the run", "ε = 3 in all"]
    return markdown(heads, body)


SETS = {"copies": "real images, marked", "feddm": "FedDM", "fedstats": "FedStats, ε = 1"}


def _attacked(rows: list[dict[str, Any]], attack: str) -> list[str]:
    """Returns the mean rate with chance in %, and how often the interval is above chance."""
    results = [row[attack] for row in rows]
    if None in results:
        return ["", ""]
    rate, chance = (100 * statistics.mean(r[name] for r in results) for name in ("rate", "chance"))
    above = sum(r["low"] > r["chance"] for r in results)
    return [f"{rate:.0f} ({chance:.0f})", f"{above} of {len(results)}"]


@table("evidence")
def _evidence() -> str:
    body = []
    for (title, dataset), (way, words) in product(sorted(DATASETS.items()), SETS.items()):
        rows = [row for row in lines("evidence") if row["key"].startswith(f"{dataset} {way} ")]
        attacks = [*_attacked(rows, "membership"), *_attacked(rows, "site_inference")]
        body.append([title, words, *attacks])
    heads = ["data", "set", "nearer to training", "above chance", "owner told", "above chance"]
    return markdown(heads, body)


@sentence(
    "docs/privacy.md",
    "`residual` is ahead of `features` at every ε, by {:.1f} to {:.1f} points",
)
def _residual_over_features() -> list[float]:
    ahead = []
    for place in product(DATASETS.values(), ("1", "3", "10")):
        residual, features = (_percents(name, *place) for name in ("residual", "features"))
        ahead.append(statistics.mean(residual) - statistics.mean(features))
    return [min(ahead), max(ahead)]


AUDITED = ("statistics", "residual", "gradient", "features", "DP-SGD", "DP-SGD, q = 0.1")
BOUNDS = ("Steinke et al.", "f-DP", "order statistics", "Gaussian pair")
FAULTS = ("half the noise", "√2 sensitivity", "no clip", "shared mask")


def _audits(name: str, twin: str, epsilon: int = 3) -> list[dict[str, Any]]:
    start = f"{name}, {twin}, ε = {epsilon}, "
    return [row for row in lines("audit_table") if row["key"].startswith(start)]


def _bound(name: str, bound: str, epsilon: int = 3) -> str:
    """The mean lower bound. With sampling, the pair is that of single steps."""
    if bound == "Gaussian pair" and "q =" in name:
        bound = "Gaussian pair of each step"
    rows = _audits(name, "honest", epsilon)
    if not rows or bound not in rows[0]["bounds"]:
        return ""
    return f"{statistics.mean(row['bounds'][bound] for row in rows):.2f}"


@table("audits")
def _audit_bounds() -> str:
    columns = [*BOUNDS, "Gaussian pair at ε = 1"]

    def cell(name: str, column: str) -> str:
        bound = column.removesuffix(" at ε = 1")
        return _bound(name, bound, 3 if bound == column else 1)

    same = dict(zip(AUDITED, AUDITED, strict=True))
    return pivot("mechanism", same, {column: column for column in columns}, cell)


@table("audit-faults")
def _audit_faults() -> str:
    """The refuted audits of all mechanisms together."""
    body = []
    for twin in ("honest", *FAULTS):
        rows = [row for name in AUDITED for row in _audits(name, twin)]
        body.append([twin, f"{sum(row['refuted'] for row in rows)} of {len(rows)}"])
    return markdown(["mechanism", "refuted"], body)


@sentence("README.md", "2 log(1/δ)/σ² = {:.2f} for σ = 3")
def _noise() -> list[float]:
    return [2 * math.log(1e5) / 9]
