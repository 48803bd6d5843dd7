"""The tables and sentences of docs/reliability.md on robust aggregation and on load."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from library.rows import NOTHING, by_key, lines, percents, spread, table

SEEDS = (0, 1, 2)
DOCUMENT = "docs/reliability.md"
RULES = {"none": "average", "median": "`median`", "trimmed": "`trimmed`", "clip": "`clip`"}
ATTACKS = {
    "none": "nobody lies",
    "sign": "sign flipped, five times as far",
    "scale": "100 times the model",
    "nan": "a NaN",
}
ACTIVE = {"10": "10", "tenth": "a tenth", "all": "all"}


def _accuracy(rule: str, attack: str, alpha: str) -> str:
    """Mean ± deviation over seeds, or that runs end."""
    rows = by_key("robust_table")
    name = f"{rule}, {attack}, alpha={alpha}"
    made = [rows[f"{name} seed={s}"] for s in SEEDS if f"{name} seed={s}" in rows]
    ended = sum("diverged" in row for row in made)
    if made and ended == len(made):
        return "the run ends"
    text = spread(percents(rows, name, SEEDS), len(SEEDS), 1)
    return f"{text} ({ended} of {len(made)} runs end)" if ended else text


def _robust(alpha: str) -> str:
    body = [
        [label, *(_accuracy(rule, attack, alpha) for attack in ATTACKS)]
        for rule, label in RULES.items()
    ]
    return table(["", *ATTACKS.values()], body)


def _costs(alpha: str) -> list[str]:
    """Points that each rule loses to the average, where nobody lies."""
    rows = by_key("robust_table")
    plain = statistics.mean(percents(rows, f"none, none, alpha={alpha}", SEEDS))
    found = []
    for rule in ("median", "trimmed", "clip"):
        own = statistics.mean(percents(rows, f"{rule}, none, alpha={alpha}", SEEDS))
        found.append(f"{plain - own:.1f}".replace("-", "−"))
    return found


def _load_rows() -> Mapping[str, Mapping[str, Any]]:
    return {row["case"]: row for row in lines("load")}


def _load() -> str:
    """Peak memory of the run, and processor time of a round, by clients and by who is active."""
    rows = _load_rows()
    body = []
    for active, label in ACTIVE.items():
        for clients in (10, 100, 300, 1000):
            row = rows.get(f"digits, {clients} clients, {active} a round")
            found = [NOTHING] * 3
            if row is not None:
                each = 1000 * row["seconds"] / row["rounds"] / row["active"]
                found = [str(row["active"]), f"{row['peak_mib']:.0f}", f"{each:.1f}"]
            body.append([label, f"{clients:,}", *found])
    head = ["take part", "clients", "active", "peak, MiB", "ms a client and round"]
    return table(head, body)


def _soak() -> str:
    rows = _load_rows()
    body = []
    for case in ("fedavg", "fedavg private", "feddm", "feddm private"):
        row = rows.get(f"soak {case}")
        found = [NOTHING] * 3
        if row is not None:
            files = " and ".join(map(str, row["files"]))
            found = [str(row["rounds"]), f"{row['kib_a_round']:.1f}".replace("-", "−"), files]
        body.append([case, *found])
    head = ["run", "rounds", "KiB a round (100 to 300)", "open files, first and last round"]
    return table(head, body)


TABLES: dict[str, Callable[[], str]] = {
    "robust-even": partial(_robust, "1"),
    "robust-skewed": partial(_robust, "0.1"),
    "load-digits": _load,
    "soak": _soak,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = [
    (
        DOCUMENT,
        "at Dir(1) `median` {}, `trimmed` {}, `clip` {}",
        partial(_costs, "1"),
    ),
    (DOCUMENT, "at Dir(0.1) `median` {}, `trimmed` {}, `clip` {}", partial(_costs, "0.1")),
]
