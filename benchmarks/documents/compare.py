"""All methods at one budget."""

from __future__ import annotations

import statistics
from functools import partial

from library.compared import PERSONAL, TAKE_FEDAVGS_RATE
from library.pivot import COUNT, Axis, Cell, Fields, Table, figure
from library.rows import NOTHING, Value, by_key, by_seed, names, number, percents

SEEDS = range(5)


def _accuracy(personal: bool) -> Value:
    return "local.amp" if personal else "accuracy"


def _methods(personal: bool) -> Axis:
    """Returns the methods that have finished rows, the best first."""
    of = [name for name in names("compare") if (name in PERSONAL) == personal]
    made = {name: list(by_seed("compare", name, SEEDS).values()) for name in of}
    figures = {name: percents("compare", name, SEEDS, _accuracy(personal)) for name in of}
    there = sorted(filter(made.get, of), key=lambda name: -statistics.mean(figures[name]))
    return [(name, {"name": name, "records": made[name]}) for name in there]


def _ahead(cell: Cell) -> str:
    """Returns the means' difference to FedAvg."""
    reference = percents("compare", "fedavg", SEEDS)
    if not reference:
        return NOTHING
    return number(statistics.mean(cell.values) - statistics.mean(reference), "+.1f")


def _best_rate(cell: Cell) -> str:
    """Returns the tuned rate of a method, or of the method whose rate it takes."""
    name = cell["name"]
    prefix = f"rate {'fedavg' if name in TAKE_FEDAVGS_RATE else name} "
    rows = by_key("compare")
    tried = [key for key in rows if key.startswith(prefix)]
    best = max(tried, key=lambda key: rows[key]["accuracy"], default=NOTHING)
    return best.removeprefix(prefix)


AHEAD: Axis = [("− FedAvg", {"show": _ahead})]


def _compared(personal: bool) -> Table:
    accuracy: Fields = {"value": _accuracy(personal)}
    columns: Axis = [
        ("AMP" if personal else "accuracy", accuracy),
        ("seeds", COUNT),
        *([] if personal else AHEAD),
        ("MB up", figure("bytes", ".2f", 1e-6)),
        ("seconds", figure("seconds", ".0f")),
        ("rate", {"show": _best_rate}),
    ]
    return Table(partial(_methods, personal), columns, corner="method")


TABLES = {"compare": _compared(False), "compare-personal": _compared(True)}
