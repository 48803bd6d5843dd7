"""Makes a table of a sweep's results, with the mean ± standard deviation over seeds.

The formats are plain text, CSV and Markdown.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedsynth.experiments.sweep import SEED, Sweep
from fedsynth.results import finished
from fedsynth.results.finished import Spread, value_at, words_of

FORMATS = ("table", "csv", "markdown")
Rows = Sequence[Sequence[str]]


class Column(NamedTuple):
    """A column of the results table, which shows one value of summary.json.

    Attributes:
        path: the dotted path of the value in summary.json.
        heading: the heading of the column.
        scale: the factor by which the values are multiplied.
        digits: the number of decimals.
    """

    path: str
    heading: str
    scale: float
    digits: int


# The columns that every sweep's table has after the sweep's metrics.
COLUMNS = {
    "epsilon": Column("differential_privacy.epsilon", "ε", 1.0, 2),
    "upload_bytes": Column("upload_bytes", "MB up", 1e-6, 2),
    "seconds": Column("seconds", "s", 1.0, 1),
}


class SweepRow(NamedTuple):
    """A row of the results table. It summarises the runs that differ only in their seeds.

    Attributes:
        values: the values that the grid gives to these runs, by axis.
        finished: the number of seeds whose runs have finished.
        planned: the number of seeds in the grid.
        results: the mean and standard deviation of each column.
    """

    values: Mapping[str, Any]
    finished: int
    planned: int
    results: Mapping[str, Spread]


def sweep_rows(sweep: Sweep) -> list[SweepRow]:
    """Returns the rows of a sweep's results table.

    There is a row for each combination of values in the grid, except that all seeds share one row.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[Path | None]] = {}
    for cell in sweep.cells:
        values = tuple((name, value) for name, value in cell.values.items() if name != SEED)
        groups.setdefault(values, []).append(finished.finished_run(sweep.folder(cell)))
    rows = []
    for values, folders in groups.items():
        summaries = [finished.read_summary(folder) for folder in folders if folder is not None]
        results = {}
        for name, column in _columns(sweep).items():
            numbers = [value_at(summary, column.path) for summary in summaries]
            results[name] = Spread.of([number for number in numbers if number is not None])
        rows.append(SweepRow(dict(values), len(summaries), len(folders), results))
    return rows


def _columns(sweep: Sweep) -> dict[str, Column]:
    columns = {}
    for metric in sweep.metrics:
        columns[metric] = Column(metric, words_of(metric), 1.0, 4)
        if finished.is_share(metric):
            columns[metric] = Column(metric, f"{words_of(metric)} (%)", 100.0, 2)
    return {**columns, **COLUMNS}


def render(sweep: Sweep, rows: Sequence[SweepRow], form: str) -> str:
    """Returns the results table of a sweep as text, in one of the formats in `FORMATS`."""
    if form == "csv":
        return _csv(sweep, rows)
    cells = _cells(sweep, rows)
    return _markdown(cells) if form == "markdown" else finished.aligned(cells)


def _cells(sweep: Sweep, rows: Sequence[SweepRow]) -> list[list[str]]:
    """Returns the cells of the table as strings, with the headings in the first row.

    Columns without any value are left out.
    """
    table = [[*sweep.axes, "runs"]]
    for row in rows:
        count = str(row.finished)
        if row.finished < row.planned:
            count += f"/{row.planned}"
        table.append([*(str(row.values.get(name, finished.NONE)) for name in sweep.axes), count])
    for name, column in _columns(sweep).items():
        texts = [row.results[name].format(column.scale, column.digits) for row in rows]
        if name in sweep.metrics or set(texts) != {finished.NONE}:
            for line, text in zip(table, [column.heading, *texts], strict=True):
                line.append(text)
    return table


def _markdown(rows: Rows) -> str:
    rule = ["---"] * len(rows[0])
    lines = [rows[0], rule, *rows[1:]]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join("| " + " | ".join(line) + " |\n" for line in escaped)


def _csv(sweep: Sweep, rows: Sequence[SweepRow]) -> str:
    """Returns the table as CSV. The mean and the standard deviation are separate columns, and
    values are not rounded or scaled.
    """
    names = list(_columns(sweep))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = [f"{name}_{part}" for name in names for part in ("mean", "std")]
    writer.writerow([*sweep.axes, "finished", "planned", *heads])
    for row in rows:
        values = list(map(row.values.get, sweep.axes))
        spreads = [number for name in names for number in row.results[name]]
        writer.writerow([*values, row.finished, row.planned, *spreads])  # None is an empty field
    return text.getvalue()
