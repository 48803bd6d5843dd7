"""The documents' tables and sentences about private accuracy and about speed, from rows (see
`tables.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from library.rows import by_key, case, lines, percents, spread, table

SEEDS = range(3)
MECHANISMS = {
    "residual": "FedDM, `residual`",
    "features": "FedDM, `features`",
    "gradient": "FedDM, `gradient`",
    "dp-sgd": "DP-FedAvg",
}
DATASETS = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
ENGINES = {
    "reference": "plain loop",
    "engine fp32": "fp32",
    "engine fp32 compiled": "fp32, `--compile`",
    "engine bf16": "bf16",
    "engine bf16 compiled": "bf16, `--compile`",
}
KEPT = "--keep-allocations"


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
    return ["FedStats", *(spread(percents(rows, key, range(5)), 5, digits) for key in keys)]


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


def _full(row: Mapping[str, Any]) -> bool:
    """A condensation timing of every engine, with the allocator as it is."""
    return KEPT not in row["command"] and set(ENGINES) == set(row["seconds per step"])


def _condense() -> str:
    body = []
    for name, shape in (("mnist", "1×28×28"), ("cifar10", "3×32×32")):
        row = case("condense", name, _full)
        cells = [shape]
        for engine in ENGINES:
            seconds = row["seconds per step"][engine]
            ratio = row["ratio to reference"][engine]
            times = "" if engine == "reference" else f" ({ratio:.1f}×)"
            cells.append(f"{seconds:.2f}{times}")
        body.append(cells)
    return table(["", *ENGINES.values()], body)


def _floor() -> list[str]:
    row = case("condense", "mnist", _full)
    return [f"{row['floor'][kind]:.2f}" for kind in ("fp32", "bf16")]


def _kept_allocations() -> list[str]:
    row = case("condense", "mnist", lambda row: KEPT in row["command"])
    ratios = [row["ratio to reference"][engine] for engine in list(ENGINES)[1:]]
    return [f"{row['seconds per step']['reference']:.1f}", *(f"{r:.1f}" for r in ratios)]


def _growth() -> list[str]:
    rows = [row for row in lines("condense") if row["case"].startswith("growth")]
    free = [r["microseconds per real image"] for r in rows if r["memory bound GB"] is None]
    return [f"{min(free):.0f}", f"{max(free):.0f}"]


def _precision() -> list[str]:
    rows = by_key("precision")
    half, full = (percents(rows, kind, SEEDS) for kind in ("bf16", "fp32"))
    found = []
    for values in (half, full):
        found += spread(values, 3).split(" ± ")
    return [*found, *(f"{a - b:+.2f}".replace("-", "−") for a, b in zip(half, full, strict=True))]


def _private_steps() -> list[str]:
    residual = case("dp_step", "residual")["residual over non-private"]
    gradient = case("dp_step", "gradient")["ratio to the loop"]
    found = [residual["fp32"], residual["bf16"]]
    return [
        *(f"{value:.2f}" for value in found),
        *(f"{gradient[kind]:.1f}" for kind in ("gradient", "gradient bf16")),
    ]


def _server() -> list[str]:
    rows = [case("server_step", name) for name in ("mnist", "cifar10")]
    shares = sorted(100 * row["share of the floor"] for row in rows)
    slower = sorted(
        100 * (row["seconds per epoch"]["engine"] / row["seconds per epoch"]["reference"] - 1)
        for row in rows
    )
    return [f"{value:.0f}" for value in (*shares, *slower)]


AUDITED = ("residual", "gradient", "features", "FedAF", "DP-SGD (FedAvg)", "FedFM")


def _bounds(key: str) -> str:
    """Mean (range) of the lower bounds that the audits of one kind found."""
    found = [row["epsilon_lower_bound"] for row in lines("audit_table") if row["key"] == key]
    if not found:
        return "–"
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


def _fixed_passes() -> str:
    """The newest row of each case."""
    newest = {row["case"]: row["constant over as the sample"] for row in lines("fixed_passes")}
    body = [[case_, f"{ratio:.2f}"] for case_, ratio in newest.items()]
    return table(["private step", "time over passes as long as the sample"], body)


def _local_training() -> str:
    """How many times as fast clients are trained together, and whether the rule takes it."""
    body = [
        [
            row["case"],
            str(row["batch"]),
            f"{row['ratio']:.1f}",
            "yes" if row["used together"] else "no",
        ]
        for row in lines("local_training")
        if row["machine"].startswith("CPU")
    ]
    return table(["clients and network", "batch", "times as fast", "together"], body)


TABLES: dict[str, Callable[[], str]] = {
    "audit": _audit,
    "local-training": _local_training,
    "fixed-passes": _fixed_passes,
    "private-accuracy": partial(_utility, ("1", "10"), 1, False),
    "dp-utility": partial(_utility, ("1", "3", "10"), 2, True),
    "condense": _condense,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = [
    (
        "docs/speed.md",
        "the floor of the first row at {} in fp32 and {} with bf16 real passes",
        _floor,
    ),
    (
        "docs/speed.md",
        "the loop takes {} and the ratios are {}, {}, {} and {}.",
        _kept_allocations,
    ),
    ("docs/speed.md", "classes (10, 100): {} to {} microseconds a real image at width 32", _growth),
    (
        "docs/speed.md",
        "{} ± {} against {} ± {} in fp32 on the setting of [Fashion-MNIST's table](results.md), "
        "by seed {}, {}, {}.",
        _precision,
    ),
    (
        "docs/speed.md",
        "`residual` takes {} times the non-private step ({} in bf16); `gradient` is {} times as "
        "fast "
        "as a loop over examples, {} with bf16",
        _private_steps,
    ),
    (
        "docs/speed.md",
        "({} to {} % of the floor) and {} to {} % slower than a DataLoader with torch's SGD",
        _server,
    ),
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
