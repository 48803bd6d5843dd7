"""A sweep's results as a table: mean ± standard deviation over seeds, as plain text, CSV, LaTeX and
Markdown."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsynth.results.finished import NONE, aligned, is_share, read_summary, value_at, words_of
from fedsynth.results.sweep import finished
from fedsynth.results.sweep_file import SEED, Sweep

FORMATS = ("table", "csv", "latex", "markdown")


@dataclass(frozen=True)
class Spread:
    """Values over seeds; `std` is the sample standard deviation, None for fewer than two."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Line:
    """A table row: the axes' values, how many of the planned seeds have finished, and the
    results."""

    values: Mapping[str, Any]
    finished: int
    planned: int
    results: Mapping[str, Spread]


def sweep_lines(sweep: Sweep) -> list[Line]:
    """Returns a line for each point of the grid, over all its seeds."""
    groups: dict[tuple[tuple[str, Any], ...], list[Mapping[str, Any] | None]] = {}
    for cell in sweep.cells:
        values = tuple((name, value) for name, value in cell.values.items() if name != SEED)
        folder = finished(sweep, cell)
        groups.setdefault(values, []).append(None if folder is None else read_summary(folder))
    return [_line(sweep, dict(values), summaries) for values, summaries in groups.items()]


def _line(
    sweep: Sweep, values: Mapping[str, Any], summaries: Sequence[Mapping[str, Any] | None]
) -> Line:
    finished = [summary for summary in summaries if summary is not None]
    paths = {
        **{metric: metric for metric in sweep.metrics},
        "epsilon": "differential_privacy.epsilon",
        "upload_bytes": "upload_bytes",
        "seconds": "seconds",
    }
    results = {
        name: Spread(tuple(v for summary in finished if (v := value_at(summary, path)) is not None))
        for name, path in paths.items()
    }
    return Line(values, len(finished), len(summaries), results)


def render(sweep: Sweep, lines: Sequence[Line], form: str) -> str:
    """Returns the lines in one of `FORMATS`."""
    if form == "csv":
        return _csv(sweep, lines)
    rows = _cells(sweep, lines, r" \pm " if form == "latex" else " ± ")
    if form == "latex":
        return _latex(sweep, rows)
    return _markdown(rows) if form == "markdown" else aligned(rows)


def _cells(sweep: Sweep, lines: Sequence[Line], between: str) -> list[list[str]]:
    """Returns head and rows as texts, without columns in which no line has a value."""
    axes = [name for name in sweep.axes if name != SEED]
    columns: list[list[str]] = [
        [name, *(str(line.values.get(name, NONE)) for line in lines)] for name in axes
    ]
    counts = []
    for line in lines:
        complete = line.finished == line.planned
        counts.append(f"{line.finished}" if complete else f"{line.finished}/{line.planned}")
    columns.append(["runs", *counts])
    for name in (*sweep.metrics, "epsilon", "upload_bytes", "seconds"):
        values = [line.results[name] for line in lines]
        if any(entry.values for entry in values) or name in sweep.metrics:
            head, scale, digits = _shown_as(name)
            columns.append([head, *(_spread(entry, scale, digits, between) for entry in values)])
    return [list(row) for row in zip(*columns, strict=True)]


def _shown_as(name: str) -> tuple[str, float, int]:
    """Returns the heading, factor and digits of a column."""
    formats = {
        "epsilon": ("ε", 1.0, 2),
        "upload_bytes": ("MB up", 1e-6, 2),
        "seconds": ("s", 1.0, 1),
    }
    if name in formats:
        return formats[name]
    text = words_of(name)
    return (f"{text} (%)", 100.0, 2) if is_share(name) else (text, 1.0, 4)


def _spread(spread: Spread, scale: float, digits: int, between: str) -> str:
    if spread.mean is None:
        return NONE
    text = f"{scale * spread.mean:.{digits}f}"
    return text if spread.std is None else f"{text}{between}{scale * spread.std:.{digits}f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [escaped[0], ["---"] * len(rows[0]), *escaped[1:]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


_TEX = {"\\": r"\textbackslash{}", "ε": r"$\varepsilon$", "–": "--"}
_TEX |= {sign: "\\" + sign for sign in "&%$#_{}"}
_TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def _latex(sweep: Sweep, rows: Sequence[Sequence[str]]) -> str:
    """Returns a LaTeX table with booktabs' rules."""
    texts = sum(name != SEED for name in sweep.axes)
    head, *body = [" & ".join(map(_tex, row)) + r" \\" for row in rows]
    columns = "l" * texts + "r" * (len(rows[0]) - texts)
    begin = rf"\begin{{tabular}}{{{columns}}}"
    lines = [begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _tex(cell: str) -> str:
    mean, plus_minus, std = cell.partition(r" \pm ")
    if plus_minus:
        return f"${mean} \\pm {std}$"
    return "".join(_TEX.get(sign, sign) for sign in cell)


def _csv(sweep: Sweep, lines: Sequence[Line]) -> str:
    """Returns CSV with mean and standard deviation in separate columns, unrounded and unscaled."""
    axes = [name for name in sweep.axes if name != SEED]
    names = list(dict.fromkeys((*sweep.metrics, "epsilon", "upload_bytes", "seconds")))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    parts = [f"{name}_{part}" for name in names for part in ("mean", "std")]
    writer.writerow([*axes, "finished", "planned", *parts])
    for line in lines:
        row = [line.values.get(name, "") for name in axes] + [line.finished, line.planned]
        for name in names:
            for value in (line.results[name].mean, line.results[name].std):
                row.append("" if value is None else repr(value))
        writer.writerow(row)
    return text.getvalue()
