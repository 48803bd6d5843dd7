"""Compares published numbers with the results of runs, one line for each published number.

A reproduced mean m is "within" the published mean p if |m − p| ≤ 2·√(s_m² + s_p²), where s_m and
s_p are the standard deviations over runs, not of means: the authors and we draw different
partitions and initial points, and the mean of a few seeds is uncertain. An unknown deviation (a
paper that prints none, a single seed here) is replaced by the other one; without either there is no
verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsynth.reproduction.presets import Cell, Changes, Number, Preset, cell_words, dataset_of
from fedsynth.reproduction.rows import measured, run_hash
from fedsynth.reproduction.runs import Job, jobs_of
from fedsynth.results.finished import Spread

WITHIN, ABOVE, BELOW, NONE = "within", "above", "below", "no verdict"
FACTOR = 2.0
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A published number together with the results of its runs.

    Args:
        preset: the table's name.
        cell: the cell's differing columns, as one line.
        number: the published number.
        values: the reproduced number of each run that did not diverge, by seed.
        runs: the rows of all its runs.
        scale: None: whole runs.
        changes: settings that differ from the preset's.
    """

    preset: str
    cell: str
    number: Number
    values: Mapping[int, float]
    runs: Sequence[Row]
    scale: float | None
    changes: Changes

    @property
    def spread(self) -> Spread:
        """Returns the mean and the standard deviation over seeds."""
        return Spread.of(list(self.values.values()))

    @property
    def hours(self) -> float:
        """Returns the total duration of all runs in hours, including runs that diverged."""
        return sum(float(run["seconds"]) for run in self.runs) / 3600

    @property
    def commits(self) -> list[str]:
        """Returns the commits of the code with which the runs were made."""
        return list(dict.fromkeys(run["commit"] or run["version"] for run in self.runs))

    @property
    def reduced_precision(self) -> str:
        """Returns the precisions other than fp32 in parentheses, or an empty string if all runs
        used fp32."""
        names = sorted({run["precision"] for run in self.runs} - {"fp32"})
        return f" ({', '.join(names)})" if names else ""

    @property
    def verdict(self) -> str:
        """Returns whether the result is within, above or below the published value. Scaled and
        changed runs have no verdict."""
        diverged = sum("diverged" in run for run in self.runs)
        if self.scale is not None:
            return "scaled: no verdict"
        if diverged:
            return f"{diverged} diverged"
        if not self.values:
            return "not run"
        if self.changes:
            return f"changed: {NONE}"
        return verdict(self.number.value, self.number.std, list(self.values.values()))


def verdict(published: float | None, published_std: float | None, values: Sequence[float]) -> str:
    """Returns the verdict `WITHIN`, `ABOVE`, `BELOW` or `NONE`. The module's docstring states the
    rule.

    Above and below mean larger and smaller numbers, not better and worse ones.

    >>> verdict(70.0, 0.3, [69.6, 70.2]), verdict(70.0, 0.3, [60.1, 60.3])
    ('within', 'below')
    >>> verdict(70.0, None, [71.0])  # one seed, and no published deviation
    'no verdict'
    """
    mean, std = Spread.of(values)
    stds = [value for value in (published_std, std) if value is not None]
    if published is None or mean is None or not stds:
        return NONE
    if abs(mean - published) <= FACTOR * math.hypot(stds[0], stds[-1]):
        return WITHIN
    return ABOVE if mean > published else BELOW


def lines(
    table: Preset,
    cells: Iterable[Cell],
    seeds: Sequence[int],
    rows: Mapping[str, Row],
    scale: float | None = None,
    changes: Changes | None = None,
) -> list[Line]:
    """Returns one line for each published number of the cells.

    Args:
        table: the cells' table.
        cells: some of its cells.
        seeds: whose runs count.
        rows: finished runs by their hashes (`Rows.all`).
        scale, changes: the scale and the changed settings of the runs.
    """

    result = []
    for cell in cells:
        variant, dataset = table.variant(cell), dataset_of(cell.dataset)
        name = cell_words(cell, table)
        jobs = jobs_of(table, [cell], seeds, scale=scale, changes=changes)
        runs = _finished(jobs, rows)
        fedavg = _finished(_fedavg_jobs(table, cell, seeds, scale, changes), rows)
        for number in cell.numbers:
            values = {}
            for seed, row in runs.items():
                if "diverged" in row:
                    continue
                reference = fedavg.get(seed)
                value = measured(number, row, variant=variant, dataset=dataset, fedavg=reference)
                if value is not None:
                    values[seed] = value
            finished = list(runs.values())
            result.append(Line(table.name, name, number, values, finished, scale, changes or {}))
    return result


def _finished(jobs: Iterable[Job], rows: Mapping[str, Row]) -> dict[int, Row]:
    """Returns the rows of the jobs that have finished, by seed."""
    hashes = {job.seed: run_hash(job.settings) for job in jobs}
    return {seed: rows[digest] for seed, digest in hashes.items() if digest in rows}


def _fedavg_jobs(
    table: Preset, cell: Cell, seeds: Sequence[int], scale: float | None, changes: Changes | None
) -> list[Job]:
    """Returns the runs of FedAvg on the same data, if a number counts the rounds until FedAvg's
    accuracy is reached."""
    if all("fedavg" not in number.metric for number in cell.numbers):
        return []
    data = (cell.dataset, cell.partition)
    same = [c for c in table.cells if c.method == "fedavg" and (c.dataset, c.partition) == data]
    return jobs_of(table, same[:1], seeds, scale=scale, changes=changes)


def format_number(mean: float | None, std: float | None) -> str:
    """Returns a number with its standard deviation. The number of decimals depends on its size."""
    digits = 4
    if abs(mean or 0) >= 1000:
        digits = 0
    elif abs(mean or 0) >= 1:
        digits = 2
    return Spread(mean, std).format(1.0, digits)
