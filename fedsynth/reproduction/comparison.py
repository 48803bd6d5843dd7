"""Compares published with reproduced numbers: a line for each published number.

A reproduced mean m is "within" the published mean p if |m − p| ≤ 2·√(s_m² + s_p²), where s_m and
s_p are the standard deviations over runs, not of means: the authors and we draw different
partitions and initial points, and the mean of a few seeds is uncertain. An unknown deviation (a
paper that prints none, a single seed here) is replaced by the other one; without either there is no
verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsynth.reproduction.measures import measured
from fedsynth.reproduction.presets import Cell, Changes, Number, Preset, cell_words, dataset_of
from fedsynth.reproduction.rows import run_hash
from fedsynth.reproduction.runs import jobs_of

WITHIN, ABOVE, BELOW, NONE = "within", "above", "below", "no verdict"
FACTOR = 2.0


@dataclass(frozen=True)
class Line:
    """A published number and the results of its runs.

    Args:
        preset: the table's name.
        cell: the cell's differing columns, as one line.
        number: the published number.
        values: the reproduced number of each finished run.
        seeds: of these runs.
        seconds: of each run, also of one that diverged.
        commits: of the code that made the runs.
        precisions: of the runs (`RunSettings.precision`).
        diverged: number of runs that ended in non-finite numbers.
        scale: None: whole runs.
        changes: settings that differ from the preset's.
    """

    preset: str
    cell: str
    number: Number
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    seconds: tuple[float, ...]
    commits: tuple[str, ...]
    precisions: tuple[str, ...]
    diverged: int
    scale: float | None
    changes: Changes

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None without any."""
        return statistics.mean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation over seeds; None: fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def reduced(self) -> str:
        """The runs' precisions other than fp32, in parentheses; empty: all are fp32."""
        names = ", ".join(name for name in self.precisions if name != "fp32")
        return f" ({names})" if names else ""

    @property
    def verdict(self) -> str:
        """Within, above or below; scaled and changed runs are not comparable and have none."""
        if self.scale is not None:
            return "scaled: no verdict"
        if self.diverged:
            return f"{self.diverged} diverged"
        if not self.values:
            return "not run"
        if self.changes:
            return f"changed: {NONE}"
        return verdict(self.number.value, self.number.std, self.values)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "preset": self.preset,
            "cell": self.cell,
            "metric": self.number.label,
            "scaled": self.scale,
            "changes": {section: dict(values) for section, values in self.changes.items()},
            "published": self.number.value,
            "published_std": self.number.std,
            "reproduced": self.mean,
            "reproduced_std": self.std,
            "values": list(self.values),
            "seeds": list(self.seeds),
            "verdict": self.verdict,
            "hours": round(sum(self.seconds) / 3600, 3),
            "commits": list(self.commits),
            "precisions": list(self.precisions),
        }


def verdict(published: float | None, published_std: float | None, values: Sequence[float]) -> str:
    """Returns `WITHIN`, `ABOVE`, `BELOW` or `NONE`, by the rule of the module.

    Above and below mean larger and smaller numbers, not better and worse ones.

    >>> verdict(70.0, 0.3, [69.6, 70.2]), verdict(70.0, 0.3, [60.1, 60.3])
    ('within', 'below')
    >>> verdict(70.0, None, [71.0])  # one seed, and no published deviation
    'no verdict'
    """
    std = statistics.stdev(values) if len(values) > 1 else published_std
    other = std if published_std is None else published_std
    if published is None or not values or std is None or other is None:
        return NONE
    difference = statistics.mean(values) - published
    if abs(difference) <= FACTOR * math.hypot(other, std):
        return WITHIN
    return ABOVE if difference > 0 else BELOW


def lines(
    table: Preset,
    cells: Iterable[Cell],
    seeds: Sequence[int],
    rows: Mapping[str, Mapping[str, Any]],
    *,
    scale: float | None = None,
    changes: Changes | None = None,
) -> list[Line]:
    """Returns a line for each published number of the cells.

    Args:
        table: the cells' table.
        cells: some of its cells.
        seeds: whose runs count.
        rows: finished runs by their hashes (`Rows.all`).
        scale, changes: of the runs.
    """

    def finished(cell: Cell | None) -> dict[int, Mapping[str, Any]]:
        jobs = jobs_of(table, [cell] if cell else [], seeds, scale=scale, changes=changes)
        hashes = {job.seed: run_hash(job.settings) for job in jobs}
        return {seed: rows[mark] for seed, mark in hashes.items() if mark in rows}

    result = []
    for cell in cells:
        runs = finished(cell)
        fedavg = finished(_fedavg_cell(table, cell))
        for number in cell.numbers:
            values = _values(number, table, cell, runs, fedavg)
            line = Line(
                table.name,
                cell_words(cell, table),
                number,
                tuple(values.values()),
                tuple(values),
                tuple(float(row["seconds"]) for row in runs.values()),
                tuple(dict.fromkeys(row["commit"] or row["version"] for row in runs.values())),
                tuple(dict.fromkeys(row["precision"] for row in runs.values())),
                sum("diverged" in row for row in runs.values()),
                scale,
                changes or {},
            )
            result.append(line)
    return result


def _values(
    number: Number,
    table: Preset,
    cell: Cell,
    runs: Mapping[int, Mapping[str, Any]],
    fedavg: Mapping[int, Mapping[str, Any]],
) -> dict[int, float]:
    """Returns the value of a published number in each seed's run, except for diverged runs."""
    variant, dataset = table.variant(cell), dataset_of(cell.dataset)
    values_by_seed = {}
    for seed, row in runs.items():
        if "diverged" not in row:
            other = fedavg.get(seed)
            value = measured(number, row, variant=variant, dataset=dataset, fedavg=other)
            if value is not None:
                values_by_seed[seed] = value
    return values_by_seed


def _fedavg_cell(table: Preset, cell: Cell) -> Cell | None:
    """Returns FedAvg's cell on the same data, if a number counts rounds to its accuracy."""
    if all("fedavg" not in number.metric for number in cell.numbers):
        return None
    place = (cell.dataset, cell.partition)
    same = (c for c in table.cells if c.method == "fedavg" and (c.dataset, c.partition) == place)
    return next(same, None)


def format_number(mean: float | None, std: float | None) -> str:
    """Returns a number with its deviation, with as many decimals as suit its size."""
    if mean is None:
        return "–"
    digits = 4
    if abs(mean) >= 1000:
        digits = 0
    elif abs(mean) >= 1:
        digits = 2
    deviation = "" if std is None else f" ± {std:,.{digits}f}"
    return f"{mean:,.{digits}f}{deviation}"
