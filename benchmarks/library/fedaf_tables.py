"""The tables of `fedaf_table.py`, and of the readings that were tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from library.rows import NOTHING, Row, apart, by_key, percents, spread, table

SEEDS = range(5)
DOMAIN_SEEDS = range(3)
FEDAF_ROWS = ("FedDM", "FedAF", "FedAF, τ = 4", "without CDC", "without LGKM", "γ = 0.5", "γ = 1")
READINGS = {
    "rates": "(FedDM, )?image rate",
    "real": "real",
    "matching": "condensed:",
    "late": "late:",
    "skew": "skew:",
    "steps": "condensed, long:",
}
"""A group of readings: how its rows' names begin."""
FEDAF_TITLES = {"FedAF": "FedAF (γ = 0.9, τ = 1)"}


def _best(row: Row) -> float:
    return float(max(row["curve"]))


def _fedaf(alphas: Sequence[str]) -> str:
    rows = by_key("fedaf_table")
    head = [""]
    for alpha in alphas:
        head += [f"Dir({alpha}), last", "best", "last − FedDM's"]
    body = []
    for name in FEDAF_ROWS:
        cells = []
        for alpha in alphas:
            key = f"{name} alpha={alpha}"
            cells.append(spread(percents(rows, key, SEEDS), 5))
            cells.append(spread(percents(rows, key, SEEDS, _best), 5))
            cells.append(NOTHING if name == "FedDM" else _fedaf_ahead(rows, name, alpha))
        if set(cells) != {NOTHING}:
            body.append([FEDAF_TITLES.get(name, name), *cells])
    return table(head, body)


def _fedaf_ahead(rows: Mapping[str, Row], name: str, alpha: str) -> str:
    """Paired differences to FedDM."""
    keys = [f"{one} alpha={alpha}" for one in (name, "FedDM")]
    both = [seed for seed in SEEDS if all(f"{key} seed={seed}" in rows for key in keys)]
    own, feddm = (percents(rows, key, both) for key in keys)
    return apart(own, feddm, 5)


def _fedaf_domains() -> str:
    rows = by_key("fedaf_table")
    columns: dict[str, Callable[[Row], Any]] = {
        "test accuracy, last": lambda row: row["accuracy"],
        "best": _best,
        "average over domains, last": lambda row: row["domain_average"],
    }
    body = [
        [
            FEDAF_TITLES.get(name, name),
            *(
                spread(percents(rows, f"{name} domains", DOMAIN_SEEDS, v), 3)
                for v in columns.values()
            ),
        ]
        for name in FEDAF_ROWS
        if any(key.startswith(f"{name} domains") for key in rows)
    ]
    return table(["", *columns], body)


def _fedaf_readings(group: str) -> str:
    """Readings of one group on held-out images, with the seeds that are made."""
    rows = by_key("fedaf_readings")
    seeds = range(3 if group == "skew" else 2)
    keys = dict.fromkeys(key.rsplit(" seed=", 1)[0] for key in rows)
    body = []
    for key in keys:
        name = key.rsplit(", Dir(", 1)[0]
        if not re.match(READINGS[group], name):
            continue
        last, best = (
            spread(percents(rows, key, seeds, value), len(seeds))
            for value in (lambda row: row["accuracy"], _best)
        )
        if last != NOTHING:
            body.append([name, last, best])
    return table(["", "last", "best"], body)


TABLES: dict[str, Callable[[], str]] = {
    "fedaf": partial(_fedaf, ("0.1", "0.02")),
    "fedaf-domains": _fedaf_domains,
    **{f"fedaf-{group}": partial(_fedaf_readings, group) for group in READINGS},
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = []
