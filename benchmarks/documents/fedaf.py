"""FedAF's table, and readings of its paper."""

from __future__ import annotations

import re
from functools import partial

from library.pivot import Axis, Fields, Table, apart_of
from library.rows import NOTHING, Row, names

NAMES = ("FedDM", "FedAF", "FedAF, τ = 4", "without CDC", "without LGKM", "γ = 0.5", "γ = 1")
METHODS = [
    (name if name != "FedAF" else "FedAF (γ = 0.9, τ = 1)", {"name": name}) for name in NAMES
]
GROUPS = {
    "rates": "(FedDM, )?image rate",
    "real": "real",
    "matching": "condensed:",
    "late": "late:",
    "skew": "skew:",
    "steps": "condensed, long:",
}
"""A group of readings: how its rows' names begin."""


def _best(row: Row) -> float:
    return float(max(row["curve"]))


BEST: Fields = {"value": _best}
AHEAD: Fields = {"show": apart_of, "less": "FedDM alpha={alpha}", "same": NOTHING}


def _readings(group: str) -> Axis:
    keys = [(key.rsplit(", Dir(", 1)[0], {"key": key}) for key in names("fedaf_readings")]
    return [(label, fields) for label, fields in keys if re.match(GROUPS[group], label)]


def _of_group(group: str) -> Table:
    seeds = range(3 if group == "skew" else 2)
    columns: Axis = [("last", {}), ("best", BEST)]
    cells = {"file": "fedaf_readings", "seeds": seeds}
    return Table(partial(_readings, group), columns, cells, least=1)


TABLES = {
    "fedaf": Table(
        METHODS,
        [
            (label, {**fields, "alpha": alpha})
            for alpha in ("0.1", "0.02")
            for label, fields in (
                (f"Dir({alpha}), last", {}),
                ("best", BEST),
                ("last − FedDM's", AHEAD),
            )
        ],
        {"file": "fedaf_table", "key": "{name} alpha={alpha}", "seeds": range(5)},
        least=1,
    ),
    "fedaf-domains": Table(
        METHODS,
        [
            ("test accuracy, last", {}),
            ("best", BEST),
            ("average over domains, last", {"value": "domain_average"}),
        ],
        {"file": "fedaf_table", "key": "{name} domains", "seeds": range(3)},
        least=1,
    ),
    **{f"fedaf-{group}": _of_group(group) for group in GROUPS},
}
