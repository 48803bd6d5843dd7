"""FedAF's table in docs/results.md."""

from __future__ import annotations

from library.pivot import Fields, Table, paired_of
from library.rows import NOTHING

NAMES = ("FedDM", "FedAF", "FedAF, τ = 4", "without CDC", "without LGKM", "γ = 0.5", "γ = 1")
METHODS = [
    (name if name != "FedAF" else "FedAF (γ = 0.9, τ = 1)", {"name": name}) for name in NAMES
]


AHEAD: Fields = {"show": paired_of, "less": "FedDM alpha={alpha}", "same": NOTHING}


TABLES = {
    "fedaf": Table(
        METHODS,
        [
            (label, {**fields, "alpha": alpha})
            for alpha in ("0.1", "0.02")
            for label, fields in (
                (f"Dir({alpha})", {}),
                ("− FedDM", AHEAD),
            )
        ],
        {"file": "fedaf_table", "key": "{name} alpha={alpha}", "seeds": range(5)},
        min_cells=1,
    ),
}
