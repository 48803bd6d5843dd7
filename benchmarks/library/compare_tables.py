"""The tables of `compare.py`: all methods at one budget."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial

from library.compared import PERSONAL, TAKE_FEDAVGS_RATE
from library.rows import NOTHING, Row, by_key, percents, spread, table

SEEDS = range(5)


def _compare(personal: bool) -> str:
    rows = by_key("compare")
    names = {key.rsplit(" seed=", 1)[0] for key in rows if " seed=" in key}
    reference = percents(rows, "fedavg", SEEDS)
    entries = []
    for name in names:
        if (name in PERSONAL) != personal:
            continue
        made = [rows[f"{name} seed={s}"] for s in SEEDS if f"{name} seed={s}" in rows]
        found = [100 * (row["local"]["amp"] if personal else row["accuracy"]) for row in made]
        mean = statistics.mean(found)
        size = statistics.mean(row["bytes"] for row in made) / 1e6
        seconds = statistics.mean(row["seconds"] for row in made)
        ahead = (
            f"{mean - statistics.mean(reference):+.1f}".replace("-", "−") if reference else NOTHING
        )
        cells = [name, spread(found, len(made)), str(len(made)), ahead, f"{size:.2f}"]
        if personal:
            cells.pop(3)
        entries.append((mean, [*cells, f"{seconds:.0f}", _best_rate(rows, name)]))
    body = [cells for _, cells in sorted(entries, key=lambda entry: -entry[0])]
    head = ["method", "AMP" if personal else "accuracy", "seeds", "− FedAvg", "MB up", "seconds"]
    if personal:
        head.pop(3)
    return table([*head, "rate"], body)


def _best_rate(rows: Mapping[str, Row], name: str) -> str:
    """The tuned rate of a method, or of the method whose rate it takes; – if none is tuned."""
    prefix = f"rate {'fedavg' if name in TAKE_FEDAVGS_RATE else name} "
    tried = {key.removeprefix(prefix): row for key, row in rows.items() if key.startswith(prefix)}
    if not tried:
        return NOTHING
    return max(tried, key=lambda rate: tried[rate]["accuracy"])


TABLES: dict[str, Callable[[], str]] = {
    "compare": partial(_compare, personal=False),
    "compare-personal": partial(_compare, personal=True),
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = []
