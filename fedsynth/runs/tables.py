"""A sweep's results as a table: mean ± standard deviation over seeds, for people, CSV, LaTeX and
Markdown."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsynth.runs.folders import read_summary, value_at
from fedsynth.runs.overview import NONE, aligned, is_share, words_of
from fedsynth.runs.sweep import finished
from fedsynth.runs.sweep_file import SEED, Sweep

FORMATS = ("table", "csv", "latex", "markdown")


@dataclass(frozen=True)
class Spread:
    """Values over seeds; `std` is the sample standard deviation, None of fewer than two."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Line:
    """A row: the axes' values, the seeds that have finished of all, and what came out."""

    values: Mapping[str, Any]
    finished: int
    planned: int
    results: Mapping[str, Spread]


def sweep_lines(sweep: Sweep) -> list[Line]:
    """A line for each point of the grid but for the seed."""
    groups: dict[tuple[tuple[str, Any], ...], list[Mapping[str, Any] | None]] = {}
    for cell in sweep.cells:
        values = tuple((name, value) for name, value in cell.values.items() if name != SEED)
        folder = finished(sweep, cell)
        groups.setdefault(values, []).append(None if folder is None else read_summary(folder))
    return [_line(sweep, dict(values), found) for values, found in groups.items()]


def _line(
    sweep: Sweep, values: Mapping[str, Any], found: Sequence[Mapping[str, Any] | None]
) -> Line:
    there = [one for one in found if one is not None]
    paths = {
        **{metric: metric for metric in sweep.metrics},
        "epsilon": "differential_privacy.epsilon",
        "upload_bytes": "upload_bytes",
        "seconds": "seconds",
    }
    results = {
        name: Spread(tuple(v for one in there if (v := value_at(one, path)) is not None))
        for name, path in paths.items()
    }
    return Line(values, len(there), len(found), results)


def render(sweep: Sweep, lines: Sequence[Line], form: str) -> str:
    """The lines in one of `FORMATS`."""
    forms: Mapping[str, Callable[[], str]] = {
        "table": lambda: aligned(_cells(sweep, lines, " ± ")),
        "markdown": lambda: _markdown(_cells(sweep, lines, " ± ")),
        "latex": lambda: _latex(sweep, _cells(sweep, lines, r" \pm ")),
        "csv": lambda: _csv(sweep, lines),
    }
    return forms[form]()


def _cells(sweep: Sweep, lines: Sequence[Line], between: str) -> list[list[str]]:
    """Head and rows as texts; a column in which no line has anything is left out."""
    axes = [name for name in sweep.axes if name != SEED]
    columns: list[list[str]] = [
        [name, *(str(line.values.get(name, NONE)) for line in lines)] for name in axes
    ]
    columns.append(["runs", *(_runs(line) for line in lines)])
    for name in (*sweep.metrics, "epsilon", "upload_bytes", "seconds"):
        values = [line.results[name] for line in lines]
        if any(one.values for one in values) or name in sweep.metrics:
            head, scale, digits = _shown_as(name)
            columns.append([head, *(_spread(one, scale, digits, between) for one in values)])
    return [list(row) for row in zip(*columns, strict=True)]


def _runs(line: Line) -> str:
    return (
        f"{line.finished}" if line.finished == line.planned else f"{line.finished}/{line.planned}"
    )


def _shown_as(name: str) -> tuple[str, float, int]:
    """Head, factor and digits of a column."""
    known = {"epsilon": ("ε", 1.0, 2), "upload_bytes": ("MB up", 1e-6, 2), "seconds": ("s", 1.0, 1)}
    if name in known:
        return known[name]
    words = words_of(name)
    return (f"{words} (%)", 100.0, 2) if is_share(name) else (words, 1.0, 4)


def _spread(one: Spread, scale: float, digits: int, between: str) -> str:
    if one.mean is None:
        return NONE
    text = f"{scale * one.mean:.{digits}f}"
    return text if one.std is None else f"{text}{between}{scale * one.std:.{digits}f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [escaped[0], ["---"] * len(rows[0]), *escaped[1:]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


_TEX = {"\\": r"\textbackslash{}", "ε": r"$\varepsilon$", "–": "--"}
_TEX |= {sign: "\\" + sign for sign in "&%$#_{}"}
_TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def _latex(sweep: Sweep, rows: Sequence[Sequence[str]]) -> str:
    """With booktabs' rules."""
    texts = sum(name != SEED for name in sweep.axes)
    body = [[_tex(cell) for cell in row] for row in rows]
    lines = [" & ".join(row) + r" \\" for row in body]
    columns = "l" * texts + "r" * (len(rows[0]) - texts)
    return "\n".join(
        [
            f"\\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _tex(cell: str) -> str:
    mean, plus_minus, std = cell.partition(r" \pm ")
    if plus_minus:
        return f"${mean} \\pm {std}$"
    return "".join(_TEX.get(sign, sign) for sign in cell)


def _csv(sweep: Sweep, lines: Sequence[Line]) -> str:
    """Mean and standard deviation in columns of their own, unrounded and unscaled."""
    axes = [name for name in sweep.axes if name != SEED]
    names = list(dict.fromkeys((*sweep.metrics, "epsilon", "upload_bytes", "seconds")))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [*axes, "finished", "planned", *(f"{n}_{part}" for n in names for part in ("mean", "std"))]
    )
    for line in lines:
        spreads = [value for n in names for value in (line.results[n].mean, line.results[n].std)]
        given = [line.values.get(name, "") for name in axes]
        shown = ["" if value is None else repr(value) for value in spreads]
        writer.writerow([*given, line.finished, line.planned, *shown])
    return text.getvalue()
