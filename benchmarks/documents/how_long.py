"""Durations of runs: docs/how-long.md and docs/own-data.md."""

from __future__ import annotations

import statistics

from library.pivot import Axis, Cell, Table, figure, text
from library.rows import NOTHING, Row, by_key, case, lines

DOCUMENT = "docs/how-long.md"
RELEASES, EPOCHS = 40, 200
"""Of `fedsynth synthesize`'s own settings: two rounds of 20, and of 100."""

FEDERATIONS = (
    ("FedDM", "Fashion-MNIST, 10 clients", "precision", "FedDM fp32 seed="),
    ("FedDM, bf16", "the same", "precision", "FedDM bf16 seed="),
    ("FedAvg", "the same", "fashion_table", "fedavg seed="),
)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def _whole_set(row: Row) -> str:
    seconds = RELEASES * row["seconds_a_release"] + EPOCHS * row["seconds_an_epoch"]
    return _duration(seconds)


def _owners() -> Axis:
    return [(f"{row['images']:,}", {"records": [row]}) for row in lines("how_long")]


def _federations() -> Axis:
    entries: list[tuple[tuple[str, ...], dict[str, object]]] = []
    for method, place, file, prefix in FEDERATIONS:
        rows = [row for key, row in by_key(file).items() if key.startswith(prefix)]
        entries.append(((method, place, "5"), {"records": rows}))
    for clients, active in ((10, "10"), (1000, "all")):
        row = case("load", f"digits, {clients} clients, {active} a round")
        label = ("FedAvg", f"digits, {clients:,} clients, {active} a round", str(row["rounds"]))
        entries.append((label, {"records": [row], **figure("seconds", ".1f", unit=" s")}))
    return entries


def _mean_duration(cell: Cell) -> str:
    return _duration(statistics.mean(cell.values)) if cell.values else NOTHING


TABLES = {
    "how-long-owner": Table(
        _owners,
        [
            ("pixels a side", text("side")),
            ("classes", text("classes")),
            ("width", text("width")),
            ("per release", figure("seconds_a_release", ".2f", unit=" s")),
            ("per epoch", figure("seconds_an_epoch", ".0f", 1000, unit=" ms")),
            ("total", text(_whole_set)),
        ],
        corner="images",
    ),
    "how-long-federation": Table(
        _federations,
        [("time", {"value": "seconds", "scale": 1, "show": _mean_duration})],
        corner=("method", "data", "rounds"),
    ),
}


def _paper() -> list[str]:
    """A step's seconds at the size of FedDM's paper, and the days of its whole run."""
    seconds = case("condense", "cifar10")["seconds per step"]["engine fp32"]
    return [f"{seconds:.2f}", f"{seconds * 20 * 1000 * 10 / 86400:.1f}"]


SENTENCES = [
    (DOCUMENT, "takes {} s, and 20 rounds of 1,000 steps for ten clients {} days", _paper),
]
