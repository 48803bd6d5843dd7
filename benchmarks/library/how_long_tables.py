"""The tables and sentences of docs/how-long.md and docs/own-data.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from library.rows import NOTHING, by_key, case, lines, table

DOCUMENT = "docs/how-long.md"
RELEASES, EPOCHS = 40, 200
"""Of `fedsynth synthesize`'s own settings: two rounds of 20, and of 100."""


def _one_owner() -> str:
    rows = [_owner_row(row) for row in lines("how_long")]
    head = ["images", "pixels a side", "classes", "width", "a release", "an epoch", "the whole set"]
    return table(head, rows)


def _owner_row(row: dict[str, Any]) -> list[str]:
    release = row["seconds_a_release"]
    epoch = row["seconds_an_epoch"]
    whole = RELEASES * release + EPOCHS * epoch
    return [
        f"{row['images']:,}",
        str(row["side"]),
        str(row["classes"]),
        str(row["width"]),
        f"{release:.2f} s",
        f"{1000 * epoch:.0f} ms",
        spoken(whole),
    ]


def spoken(seconds: float) -> str:
    """A duration as one says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def _federation() -> str:
    precision = by_key("precision")
    fashion = by_key("fashion_table")
    load = {row["case"]: row for row in lines("load")}
    body = [
        ["FedDM", "Fashion-MNIST, 10 clients", "5", _mean(precision, "FedDM fp32 seed=")],
        ["FedDM, bf16", "the same", "5", _mean(precision, "FedDM bf16 seed=")],
        ["FedAvg", "the same", "5", _mean(fashion, "fedavg seed=")],
    ]
    for clients, active in (("10", "10"), ("1000", "10"), ("1000", "all")):
        row = load[f"digits, {clients} clients, {active} a round"]
        where = f"digits, {int(clients):,} clients, {active} a round"
        body.append(["FedAvg", where, str(row["rounds"]), f"{row['seconds']:.1f} s"])
    return table(["method", "data", "rounds", "time"], body)


def _mean(rows: dict[str, dict[str, Any]], prefix: str) -> str:
    found = [row["seconds"] for name, row in rows.items() if name.startswith(prefix)]
    return spoken(statistics.mean(found)) if found else NOTHING


def _paper() -> list[str]:
    """A step's seconds at the size of FedDM's paper, and the days of its whole run."""
    step = case("condense", "cifar10")
    seconds = step["seconds per step"]["engine fp32"]
    return [f"{seconds:.2f}", f"{seconds * 20 * 1000 * 10 / 86400:.1f}"]


def _private_step() -> list[str]:
    return [f"{case('dp_step', 'residual')['residual over non-private']['fp32']:.2f}"]


def _own_images() -> str:
    body = [
        [
            row["case"].removesuffix(" pixels"),
            f"{row['describe_seconds']:.0f} s",
            f"{row['synthesize_seconds']:.0f} s",
            f"{100 * row['accuracy']:.1f}",
        ]
        for row in lines("own_images")
    ]
    return table(["pixels a side", "`describe`", "`synthesize`", "test accuracy"], body)


TABLES: dict[str, Callable[[], str]] = {
    "how-long-owner": _one_owner,
    "how-long-federation": _federation,
    "own-images": _own_images,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = [
    (DOCUMENT, "takes {} s, and 20 rounds of 1,000 steps for ten clients {} days", _paper),
    (DOCUMENT, "A private step takes {} times one without privacy", _private_step),
]
