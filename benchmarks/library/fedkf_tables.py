"""The tables of `fedkf_table.py`, and those of `generator_scale.py` on its distillation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from library.rows import NOTHING, Row, by_key, lines, percents, spread, table

SEEDS = range(5)
GENERATOR_ROUNDS = (2, 5, 10, 25, 50)
FEDKF_ROWS = {"FedAvg": "FedAvg", "FedKF-": "FedKF⁻", "FedKF": "FedKF"}


def _fedkf(alphas: Sequence[str]) -> str:
    rows = by_key("fedkf_table")
    head = [""]
    for alpha in alphas:
        head += [f"Dir({alpha}) AMP", "FM", "WLP"]
    body = []
    for name, title in FEDKF_ROWS.items():
        for final in ("aca", "oca"):
            cells = [f"{title} ({final.upper()})"]
            for alpha in alphas:
                for figure, scale in (("amp", 1), ("fm", 10), ("wlp", 1)):
                    value = partial(_local, final=final, figure=figure, scale=scale)
                    found = percents(rows, f"{name} alpha={alpha}", SEEDS, value)
                    cells.append(spread(found, 5, 2 if figure == "amp" else 1))
            body.append(cells)
    return table(head, body)


def _fedkf_paper() -> str:
    """The paper's size, one seed: AMP, FM and WLP, and what the last round's generators made."""
    rows = by_key("fedkf_table")
    body = []
    for name, title in FEDKF_ROWS.items():
        found = rows.get(f"paper {name} alpha=0.1 seed=0")
        if found is None:
            continue
        for final in ("aca", "oca"):
            figures = (("amp", 1, 2), ("fm", 10, 1), ("wlp", 1, 1))
            cells = [
                f"{100 * _local(found, final, figure, scale):.{digits}f}"
                for figure, scale, digits in figures
            ]
            body.append([f"{title} ({final.upper()})", *cells])
    return table(["Dir(0.1), one seed", "AMP", "FM", "WLP"], body)


def _fedkf_long(alpha: str, seed: int) -> str:
    """One seed at two lengths: AMP after the last round, and the best of those measured."""
    rows = by_key("fedkf_table")
    body = []
    for name, title in FEDKF_ROWS.items():
        runs = [rows.get(f"{size}{name} alpha={alpha} seed={seed}") for size in ("", "long ")]
        if runs[1] is None:
            continue
        for final in ("aca", "oca"):
            cells = [f"{title} ({final.upper()})"]
            for run in runs:
                measured = [row for row in ([] if run is None else run["rows"]) if "models" in row]
                curve = [100 * row["models"][final]["local"]["amp"] for row in measured]
                cells += [f"{curve[-1]:.2f}", f"{max(curve):.2f}"] if curve else [NOTHING] * 2
            body.append(cells)
    head = ["50 rounds, rate 0.02: AMP, last", "best", "100 rounds, rate 0.01: AMP, last", "best"]
    return table([f"Dir({alpha}), seed {seed}", *head], body)


def _fedkf_generators(alphas: Sequence[str]) -> str:
    """Class entropy over log C of what clients' generators make, by round."""
    rows = by_key("fedkf_table")
    body = []
    for alpha in alphas:
        for name in ("FedKF-", "FedKF"):
            keys = [f"{name} alpha={alpha} seed={seed}" for seed in SEEDS]
            made = [rows[key]["rows"] for key in keys if key in rows]
            cells = []
            for number in GENERATOR_ROUNDS:
                at = [
                    row["generator"]["class_entropy_share"]
                    for run in made
                    for row in run
                    if row["round"] == number and "generator" in row
                ]
                cells.append(f"{statistics.mean(at):.2f}" if at else NOTHING)
            if set(cells) != {NOTHING}:
                body.append([f"{FEDKF_ROWS[name]}, Dir({alpha})", *cells])
    return table(["", *(f"round {number}" for number in GENERATOR_ROUNDS)], body)


def _data_free(group: str) -> str:
    """Students without data: accuracy on held-out images, and what the generator made in the
    end.
    """
    made: dict[str, list[Row]] = {}
    for row in lines("generator_scale"):
        where, _, rest = row["key"].partition(": ")
        if where == group:
            made.setdefault(rest.rsplit(" seed=", 1)[0], []).append(row)
    body = []
    for name, rows in made.items():
        student = [100 * row["accuracy"] for row in rows]
        gap = [100 * (row["teacher"] - row["accuracy"]) for row in rows]
        classes, entropy = (
            statistics.mean(row[fact] for row in rows)
            for fact in ("classes", "class_entropy_share")
        )
        cells = [spread(student, len(rows), 1), spread(gap, len(rows), 1), f"{classes:.1f}"]
        body.append([name, *cells, f"{entropy:.2f}", str(len(rows))])
    head = ["", "student", "behind its teacher", "classes", "class entropy / log C", "seeds"]
    return table(head, body)


def _local(row: Row, final: str, figure: str, scale: float) -> float:
    """A figure of a final model on the clients' own test splits, in the last round."""
    number: float = row["rows"][-1]["models"][final]["local"][figure]
    return scale * number


TABLES: dict[str, Callable[[], str]] = {
    "fedkf": partial(_fedkf, ("0.1", "0.01")),
    "fedkf-paper": _fedkf_paper,
    "fedkf-long": partial(_fedkf_long, "0.1", 3),
    "fedkf-generators": partial(_fedkf_generators, ("0.1", "0.01")),
    "data-free-scale": partial(_data_free, "scale"),
    "data-free-table": partial(_data_free, "table"),
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = []
