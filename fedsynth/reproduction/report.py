"""Published beside reproduced: a line for each published number of the cells that are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsynth.reproduction.measures import measured
from fedsynth.reproduction.presets import Cell, Number, Preset, cell_words
from fedsynth.reproduction.rows import run_hash
from fedsynth.reproduction.runs import jobs_of
from fedsynth.reproduction.verdict import Compared
from fedsynth.reproduction.words import dataset_of

Changes = Mapping[str, Mapping[str, Any]]
DIGITS = ((1000, 0), (1, 2))
"""Decimals of numbers that are at least so large."""


@dataclass(frozen=True)
class Line:
    """A published number and what its runs gave.

    Args:
        preset: the table's.
        cell: the cell's differing columns, as one line.
        number: the published one.
        compared: beside the reproduced ones.
        seeds: of the runs that are finished.
        seconds: of each of these runs.
        commits: that made them.
        precisions: of these runs (`RunSettings.precision`).
        diverged: how many runs ended in numbers that are none.
        scale: None: whole runs.
        changes: settings that are not the preset's.
    """

    preset: str
    cell: str
    number: Number
    compared: Compared
    seeds: tuple[int, ...]
    seconds: tuple[float, ...]
    commits: tuple[str, ...]
    precisions: tuple[str, ...]
    diverged: int
    scale: float | None
    changes: Changes

    @property
    def metric(self) -> str:
        """What is measured, with the domain."""
        return (
            f"{self.number.metric} ({self.number.domain})"
            if self.number.domain
            else (self.number.metric)
        )

    @property
    def reduced(self) -> str:
        """Precisions of its runs that are not fp32, in brackets behind the cell; empty: all are."""
        words = ", ".join(name for name in self.precisions if name != "fp32")
        return f" ({words})" if words else ""

    @property
    def verdict(self) -> str:
        """Within, above or below; of scaled or changed runs none, as they are others."""
        if self.scale is not None:
            return "scaled: no verdict"
        if self.diverged:
            return f"{self.diverged} diverged"
        if not self.compared.values:
            return "not run"
        return "changed: no verdict" if self.changes else self.compared.verdict

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "preset": self.preset,
            "cell": self.cell,
            "metric": self.metric,
            "scaled": self.scale,
            "changes": {section: dict(values) for section, values in self.changes.items()},
            "published": self.number.value,
            "published_std": self.number.std,
            "reproduced": self.compared.mean,
            "reproduced_std": self.compared.std,
            "values": list(self.compared.values),
            "seeds": list(self.seeds),
            "verdict": self.verdict,
            "hours": round(sum(self.seconds) / 3600, 3),
            "commits": list(self.commits),
            "precisions": list(self.precisions),
        }


def lines(
    table: Preset,
    cells: Iterable[Cell],
    seeds: Sequence[int],
    rows: Mapping[str, Mapping[str, Any]],
    *,
    scale: float | None = None,
    changes: Changes | None = None,
) -> list[Line]:
    """A line for each published number of these cells.

    Args:
        table: the cells'.
        cells: some of it.
        seeds: whose runs count.
        rows: finished runs by their hashes (`Rows.all`).
        scale, changes: of the runs.
    """
    found = []
    for cell in cells:
        runs = _runs_of(table, cell, seeds, rows, scale, changes)
        fedavg = _fedavg_of(table, cell, seeds, rows, scale, changes)
        for number in cell.numbers:
            found.append(_line(table, cell, number, runs, fedavg, scale, changes or {}))
    return found


def _runs_of(
    table: Preset,
    cell: Cell,
    seeds: Sequence[int],
    rows: Mapping[str, Mapping[str, Any]],
    scale: float | None,
    changes: Changes | None,
) -> dict[int, Mapping[str, Any]]:
    """The finished runs of a cell, by seed."""
    jobs = jobs_of(table, [cell], seeds, scale=scale, changes=changes)
    marks = {job.seed: run_hash(job.settings) for job in jobs}
    return {seed: rows[mark] for seed, mark in marks.items() if mark in rows}


def _fedavg_of(
    table: Preset,
    cell: Cell,
    seeds: Sequence[int],
    rows: Mapping[str, Mapping[str, Any]],
    scale: float | None,
    changes: Changes | None,
) -> dict[int, Mapping[str, Any]]:
    """FedAvg's runs beside the cell's, where rounds are counted by them."""
    if all("fedavg" not in number.metric for number in cell.numbers):
        return {}
    beside = [
        one
        for one in table.cells
        if one.method == "fedavg" and (one.dataset, one.partition) == (cell.dataset, cell.partition)
    ]
    return _runs_of(table, beside[0], seeds, rows, scale, changes) if beside else {}


def _line(
    table: Preset,
    cell: Cell,
    number: Number,
    runs: Mapping[int, Mapping[str, Any]],
    fedavg: Mapping[int, Mapping[str, Any]],
    scale: float | None,
    changes: Changes,
) -> Line:
    whole = {seed: row for seed, row in runs.items() if "diverged" not in row}
    values = {
        seed: measured(
            number,
            row,
            variant=table.variant(cell),
            dataset=dataset_of(cell.dataset),
            fedavg=fedavg.get(seed),
        )
        for seed, row in whole.items()
    }
    known = {seed: value for seed, value in values.items() if value is not None}
    return Line(
        table.name,
        cell_words(cell, table),
        number,
        Compared(number.value, number.std, tuple(known.values())),
        tuple(known),
        tuple(float(runs[seed]["seconds"]) for seed in runs),
        tuple(dict.fromkeys(row["commit"] or row["version"] for row in runs.values())),
        tuple(dict.fromkeys(row["precision"] for row in runs.values())),
        len(runs) - len(whole),
        scale,
        changes,
    )


def shown(mean: float | None, std: float | None) -> str:
    """A number with its deviation, in digits that fit it."""
    if mean is None:
        return "–"
    digits = next((d for least, d in DIGITS if abs(mean) >= least), 4)
    deviation = "" if std is None else f" ± {std:,.{digits}f}"
    return f"{mean:,.{digits}f}{deviation}"
