"""FedKF's table, and its distillation without data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from library.pivot import COUNT, Axis, Cell, Fields, Table, cross, figure
from library.rows import NOTHING, Row, lines

GENERATOR_ROUNDS = (2, 5, 10, 25, 50)
METHODS: Axis = [
    (title, {"name": title.replace("⁻", "-")}) for title in ("FedAvg", "FedKF⁻", "FedKF")
]
MODELS = cross(
    METHODS, [(f"({final.upper()})", {"final": final}) for final in ("aca", "oca")], join=" "
)
LOCAL = "rows.-1.models.{final}.local."
FIGURES: tuple[tuple[str, Fields], ...] = (
    ("AMP", {"value": f"{LOCAL}amp"}),
    ("FM", {"value": f"{LOCAL}fm", "scale": 1000, "digits": 1}),
    ("WLP", {"value": f"{LOCAL}wlp", "digits": 1}),
)
ROWS: Fields = {"file": "fedkf_table", "key": "{name} alpha={alpha}", "seeds": range(5)}


def _figures(alpha: str, before: str = "") -> Axis:
    return [
        (f"{before if figure == 'AMP' else ''}{figure}", {**fields, "alpha": alpha})
        for figure, fields in FIGURES
    ]


def _lengths() -> Axis:
    """The models of runs that were made at both lengths."""
    made = {row["key"].split(" alpha")[0] for row in lines("fedkf_table")}
    return [(title, fields) for title, fields in MODELS if f"long {fields['name']}" in made]


def _amp(cell: Cell, of: Callable[[list[float]], float]) -> str:
    """Returns AMP of a final model over the rounds that were evaluated."""
    measured = [one for row in cell.records for one in row["rows"] if "models" in one]
    curve = [100 * one["models"][cell["final"]]["local"]["amp"] for one in measured]
    return f"{of(curve):.2f}" if curve else NOTHING


LAST: Fields = {"show": partial(_amp, of=lambda curve: curve[-1])}
BEST: Fields = {"show": partial(_amp, of=max)}


def _entropy(row: Row, number: int) -> Any:
    """Class entropy over log C of what the generators of a round make."""
    found = [one for one in row["rows"] if one["round"] == number and "generator" in one]
    return found[0]["generator"]["class_entropy_share"] if found else None


def _students(group: str) -> Axis:
    """Students of a group, by the names of their rows."""
    made: dict[str, list[Row]] = {}
    for row in lines("generator_scale"):
        where, _, rest = row["key"].partition(": ")
        if where == group:
            made.setdefault(rest.rsplit(" seed=", 1)[0], []).append(row)
    return [(name, {"records": rows}) for name, rows in made.items()]


def _data_free(group: str) -> Table:
    columns: Axis = [
        ("student", {}),
        ("behind its teacher", {"value": lambda row: row["teacher"] - row["accuracy"]}),
        ("classes", figure("classes", ".1f")),
        ("class entropy / log C", figure("class_entropy_share", ".2f")),
        ("seeds", COUNT),
    ]
    return Table(partial(_students, group), columns, {"digits": 1})


TABLES = {
    "fedkf": Table(MODELS, [*_figures("0.1", "Dir(0.1) "), *_figures("0.01", "Dir(0.01) ")], ROWS),
    "fedkf-paper": Table(
        MODELS,
        _figures("0.1"),
        {**ROWS, "key": "paper {name} alpha={alpha}", "seeds": [0]},
        corner="Dir(0.1), one seed",
        least=1,
    ),
    "fedkf-long": Table(
        _lengths,
        [
            ("50 rounds, rate 0.02: AMP, last", {**LAST, "size": ""}),
            ("best", {**BEST, "size": ""}),
            ("100 rounds, rate 0.01: AMP, last", {**LAST, "size": "long "}),
            ("best", {**BEST, "size": "long "}),
        ],
        {"file": "fedkf_table", "key": "{size}{name} alpha=0.1", "seeds": [3]},
        corner="Dir(0.1), seed 3",
    ),
    "fedkf-generators": Table(
        [
            (f"{title}, Dir({alpha})", {**fields, "alpha": alpha})
            for alpha in ("0.1", "0.01")
            for title, fields in METHODS[1:]
        ],
        [
            (f"round {number}", figure(partial(_entropy, number=number), ".2f"))
            for number in GENERATOR_ROUNDS
        ],
        ROWS,
        least=1,
    ),
    "data-free-scale": _data_free("scale"),
    "data-free-table": _data_free("table"),
}
