"""Compares published numbers with the results of runs.

A reproduced mean m is "within" the published mean p if |m − p| ≤ 2·√(s_m² + s_p²). Here s_m and s_p
are the standard deviations over runs, and not those of the means, because the authors and we draw
different partitions and initial weights, and because the mean of a few seeds is uncertain. If s_p
is unknown because the paper does not state it, s_m is used for both. If s_m is unknown because
there is only one seed, s_p is used for both. If both are unknown, there is no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsynth.reproduction.presets import Cell, Changes, Number, Preset, cell_words, dataset_of
from fedsynth.reproduction.rows import Row, measured, run_hash
from fedsynth.reproduction.runs import Job, jobs_of
from fedsynth.results.finished import Spread

WITHIN, ABOVE, BELOW, NONE = "within", "above", "below", "no verdict"
FACTOR = 2.0


@dataclass(frozen=True)
class Line:
    """A published number, with the results of the runs that reproduce it.

    Args:
        cell: a line of text that identifies the cell in the table.
        number: the published number.
        values: a mapping from seeds to reproduced numbers. Runs that diverged are left out.
        runs: the rows of all runs of the cell.
        changes: the settings of the runs that differ from the preset.
    """

    cell: str
    number: Number
    values: Mapping[int, float]
    runs: Sequence[Row]
    changes: Changes

    @property
    def spread(self) -> Spread:
        """The mean and the standard deviation of the reproduced numbers."""
        return Spread.of(list(self.values.values()))

    @property
    def hours(self) -> float:
        """The total duration of all runs in hours, including runs that diverged."""
        return sum(float(run["seconds"]) for run in self.runs) / 3600

    @property
    def commits(self) -> list[str]:
        """The commits of the code with which the runs were made, or versions if unknown."""
        return list(dict.fromkeys(run["commit"] or run["version"] for run in self.runs))

    @property
    def reduced_precision(self) -> str:
        """The precisions other than fp32 that the runs used, in parentheses.

        It is an empty string if all runs used fp32.
        """
        names = sorted({run["precision"] for run in self.runs} - {"fp32"})
        return f" ({', '.join(names)})" if names else ""

    @property
    def verdict(self) -> str:
        """The verdict on the reproduced numbers, such as "within", or why there is no verdict.

        There is no verdict if the runs diverged, used changed settings or are missing.
        """
        diverged = sum("diverged" in run for run in self.runs)
        if diverged:
            return f"{diverged} diverged"
        if not self.values:
            return "not run"
        if self.changes:
            return f"changed: {NONE}"
        return verdict(self.number.value, self.number.std, list(self.values.values()))


def verdict(published: float | None, published_std: float | None, values: Sequence[float]) -> str:
    """Compares reproduced values with a published mean, and returns the verdict.

    The verdict is `WITHIN`, `ABOVE`, `BELOW` or `NONE`. The text of this module states the rule.
    `ABOVE` means that the reproduced mean is larger, which need not be better.

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
    changes: Changes | None = None,
) -> list[Line]:
    """Returns one line for each published number of the cells.

    Args:
        table: the preset of the table.
        cells: some cells of the table.
        seeds: the seeds of the runs that count.
        rows: a mapping from run hashes to the rows of finished runs (`Rows.all`).
        changes: the changed settings of the runs.
    """

    result = []
    for cell in cells:
        variant, dataset = table.variant(cell), dataset_of(cell.dataset)
        name = cell_words(cell, table)
        jobs = jobs_of(table, [cell], seeds, changes=changes)
        runs = _finished(jobs, rows)
        fedavg = _finished(_fedavg_jobs(table, cell, seeds, changes), rows)
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
            result.append(Line(name, number, values, finished, changes or {}))
    return result


def _finished(jobs: Iterable[Job], rows: Mapping[str, Row]) -> dict[int, Row]:
    """Returns a mapping from the seed of each finished job to its row."""
    hashes = {job.seed: run_hash(job.settings) for job in jobs}
    return {seed: rows[digest] for seed, digest in hashes.items() if digest in rows}


def _fedavg_jobs(
    table: Preset, cell: Cell, seeds: Sequence[int], changes: Changes | None
) -> list[Job]:
    """Returns the runs of FedAvg that are needed to compute the numbers of a cell.

    They are needed if a number counts the rounds until FedAvg's accuracy is reached. They use the
    data set and partition of the cell. Otherwise the list is empty.
    """
    if all("fedavg" not in number.metric for number in cell.numbers):
        return []
    data = (cell.dataset, cell.partition)
    same = [c for c in table.cells if c.method == "fedavg" and (c.dataset, c.partition) == data]
    return jobs_of(table, same[:1], seeds, changes=changes)


def format_number(mean: float | None, std: float | None) -> str:
    """Formats a mean and its standard deviation. Larger means get fewer decimals."""
    digits = 4
    if abs(mean or 0) >= 1000:
        digits = 0
    elif abs(mean or 0) >= 1:
        digits = 2
    return Spread(mean, std).format(1.0, digits)
