"""Declared grids of runs, and the loop that makes their missing rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, TypeVar

from fedsynth.config.settings import RunSettings
from fedsynth.experiments.rows import Rows as FileRows
from fedsynth.experiments.rows import settings_hash
from library.machine import append, machine
from library.runs import Data, dataset, one_run

# A value of each axis, `device`, `quick`, `cache`, what `Grid.choose` found as `chosen`, and the
# cell's `settings`.
Cell = SimpleNamespace
Row = dict[str, Any]
Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Grid:
    """The runs that make the rows of a results file.

    Args:
        axes: what varies, the last axis fastest; each is an option of the command line.
        key: template of a row's key, or returns the key of a cell. A hash of the settings follows.
        settings: returns a cell's settings; None: a row is of no run, and its key has no hash.
        work: returns a row's measurements; None: simulates the settings.
        choose: returns what is tuned beforehand, from rows that it asks for; None leaves the cell
            to another call.
        include: returns False for cells of the product that are left out.
        repeats: rows of one key.
        threads: of the processor, where seconds are measured; None: as many as there are.
    """

    axes: Mapping[str, Sequence[Any]]
    key: str | Callable[[Cell], str]
    settings: Callable[[Cell], RunSettings] | None = None
    work: Callable[[Cell], Row] | None = None
    choose: Callable[[Cell, Rows], Any] | None = None
    include: Callable[[Cell], bool] = bool
    repeats: int = 1
    threads: int | None = None

    def cells(self, axes: Mapping[str, Sequence[Any]], **same: Any) -> Iterator[Cell]:
        """Yields the cells of the product of axes that are included."""
        for values in product(*axes.values()):
            cell = Cell(**dict(zip(axes, values, strict=True)), **same)
            if self.include(cell):
                yield cell

    def make(self, cell: Cell, rows: Rows, repeats: int = 1) -> Row | None:
        """Returns the row of a cell, and makes it if it is missing and may be made."""
        if self.choose is not None:
            cell.chosen = self.choose(cell, rows)
            if cell.chosen is None:
                return None
        name = self.key(cell) if callable(self.key) else self.key.format(**vars(cell))
        cell.settings = self.settings(cell) if self.settings else None
        work = self.work
        if work is None:
            return rows.run(name, cell.settings)
        return rows.make(name, cell.settings, lambda: work(cell), repeats)


class Rows(FileRows):
    """A results file, which grows by the rows that are missing."""

    def append(self, row: Mapping[str, Any]) -> None:
        append(self.path, row)

    def make(
        self,
        name: str,
        settings: RunSettings | None,
        work: Callable[[], Row],
        repeats: int = 1,
    ) -> Row | None:
        """Returns the last row of a key, and makes those that are missing.

        Args:
            name: the key, to which a hash of the settings is added.
            settings: of the row's run; None: the key has no hash.
            work: returns the measurements of a row.
            repeats: how many rows the key has.

        Returns:
            The row; None if `only` or the deadline leaves it to another call.
        """
        key = name if settings is None else f"{name} {settings_hash(settings)}"
        return self.get(key, lambda: {**work(), **machine()}, repeats)

    def run(
        self, name: str, settings: RunSettings, data: Callable[[], Data] | None = None
    ) -> Row | None:
        """Returns the row of a simulation, and makes it if it is missing.

        Args:
            name: of the row, with the seed ("feddm seed=0").
            settings: of the run.
            data: returns training and test images; None: the data set of the settings.
        """

        def work() -> Row:
            return one_run(settings, data() if data else dataset(settings.dataset))

        return self.make(name, settings, work)


def best(rows: Mapping[Choice, Row | None]) -> Choice | None:
    """Returns the key of the most accurate row; None if a row is missing."""
    accuracies = {key: row["accuracy"] for key, row in rows.items() if row is not None}
    if len(accuracies) < len(rows):
        return None
    return max(accuracies, key=lambda key: accuracies[key])
