"""The tables of `fedsum_table.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from library.rows import by_key, lines, percents, spread, table

SEEDS = range(3)


def _fedsum_open() -> str:
    """Accuracy by round, and what it took."""
    titles = {
        "feddm, rate 1, Dir(0.1)": "FedDM, image rate 1, Dir(0.1)",
        "feddm, rate 10, Dir(0.1)": "FedDM, image rate 10, Dir(0.1)",
        "fedsum, Dir(0.1)": "FedSum, Dir(0.1)",
        "fedsum, Dir(100)": "FedSum, Dir(100)",
        "fedsum with 50 images, Dir(0.1)": "FedSum, ipc 50, Dir(0.1)",
    }
    rows = by_key("fedsum_table")
    body = []
    for name, title in titles.items():
        row = rows.get(f"open: {name} seed=0")
        if row is not None:
            curve = [f"{100 * one:.1f}" for one in row["curve"]]
            megabytes = f"{row['bytes'] / 1e6:.1f}"
            body.append([title, *curve, f"{row['cpu_seconds'][-1]:.0f}", megabytes])
    rounds = [f"round {number}" for number in range(1, 6)]
    return table(["method", *rounds, "CPU seconds", "MB up"], body)


def _fedsum_digits() -> str:
    """Mean over seeds, by round."""
    titles = {
        "feddm, Dir(0.05)": "FedDM, Dir(0.05)",
        "feddm, Dir(100)": "FedDM, Dir(100)",
        "fedsum, Dir(0.05)": "FedSum, Dir(0.05)",
        "fedsum, Dir(100)": "FedSum, Dir(100)",
        "fedsum with 50 images, Dir(0.05)": "FedSum, ipc 50, Dir(0.05)",
    }
    rows = by_key("fedsum_table")
    body = []
    for name, title in titles.items():
        made = [rows[key] for s in SEEDS if (key := f"digits: {name} seed={s}") in rows]
        if made:
            curves = [[100 * row["curve"][number] for row in made] for number in range(3)]
            seconds = statistics.mean(row["cpu_seconds"][-1] for row in made)
            size = statistics.mean(row["bytes"] for row in made) / 1e6
            cells = [spread(curve, 3, 1) for curve in curves]
            body.append([title, *cells, f"{seconds:.1f}", f"{size:.2f}"])
    return table(["method", "round 1", "round 2", "round 3", "CPU seconds", "MB up"], body)


def _fedsum_private() -> str:
    """Beside FedDM's `features` at the same preset."""
    rows = lines("fedsum_table")  # runs with the same seed differ by their noise
    published = by_key("dp_utility")
    body = []
    for epsilon in ("1", "10"):
        cells = [spread(percents(published, f"fashion-mnist features, ε = {epsilon}", SEEDS), 3, 1)]
        for kind in ("own", "secure"):
            name = f"private: fedsum, ε = {epsilon}, {kind} noise seed=0 "
            made = [100 * row["accuracy"] for row in rows if row["key"].startswith(name)]
            cells.append(spread(made, len(made), 1))
        body.append([epsilon, *cells])
    return table(["ε", "FedDM, `features`", "FedSum, own noise", "FedSum, aggregated"], body)


TABLES: dict[str, Callable[[], str]] = {
    "fedsum-digits": _fedsum_digits,
    "fedsum-open": _fedsum_open,
    "fedsum-private": _fedsum_private,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = []
