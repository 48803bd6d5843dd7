"""Presets: the settings of each published table, every value with its source, and its cells.

A later block of settings wins over an earlier one, and all of them over what the row's own words
say (`words.py`). What no block names is the data set's preset (`terms.resolve`) or the method's
default. Cells are rows of published_results.csv that one run answers: rows of other metrics, or of
other domains, are numbers of the same cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.reproduction.words import (
    PresetError,
    Sections,
    dataset_of,
    partition_of,
    sections_of_words,
)

COLUMNS = ("dataset", "partition", "clients", "model", "rounds", "method", "note")


@dataclass(frozen=True)
class Number:
    """A published number of a cell.

    Args:
        metric: what is measured ("amp_pct").
        domain: whose, where the table has domains; "average" for their mean; else empty.
        value: the number; None: the paper has a figure and prints none.
        std: its standard deviation; None: not published.
    """

    metric: str
    domain: str
    value: float | None
    std: float | None


@dataclass(frozen=True)
class Cell:
    """What one run with one seed answers of a table; columns are published_results.csv's words.

    Args:
        preset: the table's.
        numbers: what is published of it.
    """

    preset: str
    dataset: str
    partition: str
    clients: str
    model: str
    rounds: str
    method: str
    note: str
    numbers: tuple[Number, ...]

    def columns(self) -> dict[str, str]:
        """The words that say which cell it is."""
        return {name: getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True)
class Block:
    """Settings of some cells, and where they come from.

    Args:
        sections: the settings.
        source: where the paper says so, or that they are chosen.
        why: the reason of a choice; may be empty.
        when: column: the values of cells that it is for; none: all cells.
        variant: the one of several final models that is measured; empty: as the run has it.
    """

    sections: Mapping[str, Mapping[str, Any]]
    source: str
    why: str
    when: Mapping[str, tuple[str, ...]]
    variant: str

    def fits(self, cell: Cell) -> bool:
        """Whether it is for this cell."""
        return _fits(self.when, cell)


@dataclass(frozen=True)
class Preset:
    """A published table, as something to run.

    Args:
        name: "feddm:table2".
        source, table: as published_results.csv names it.
        title: what it shows.
        blocks: its settings, in their order.
        refusals: cells that cannot be run, by their columns, and why.
        cells: in the table's order.
    """

    name: str
    source: str
    table: str
    title: str
    blocks: tuple[Block, ...]
    refusals: tuple[tuple[Mapping[str, tuple[str, ...]], str], ...]
    cells: tuple[Cell, ...]

    def refusal(self, cell: Cell) -> str:
        """Why a cell cannot be run; empty: it can."""
        return next((reason for when, reason in self.refusals if _fits(when, cell)), "")

    def variant(self, cell: Cell) -> str:
        """The one of several final models that the cell's numbers are of; empty: the run's."""
        found = [block.variant for block in self.blocks if block.variant and block.fits(cell)]
        return found[-1] if found else ""

    def sections(self, cell: Cell) -> Sections:
        """The cell's settings, as sections.

        Raises:
            PresetError: it cannot be run.
        """
        if reason := self.refusal(cell):
            raise PresetError(f"{self.name}, {cell_words(cell, self)}: not runnable: {reason}")
        made = sections_of_words(
            dataset=cell.dataset,
            partition=cell.partition,
            clients=cell.clients,
            rounds=cell.rounds,
            method=cell.method,
        )
        for block in self.blocks:
            if block.fits(cell):
                made = over(made, block.sections)
        return made

    def settings(
        self, cell: Cell, seed: int = 0, changes: Mapping[str, Mapping[str, Any]] | None = None
    ) -> RunSettings:
        """A run of the cell.

        Args:
            cell: one of `cells`.
            seed: of everything that is reproducible, the partition included.
            changes: sections over the preset's.

        Raises:
            PresetError: it cannot be run.
            FedsynthError: as `resolve`, of changes.
        """
        given = over(over(self.sections(cell), {"run": {"seed": seed}}), changes or {})
        return resolve(given)

    def select(
        self,
        *,
        dataset: str | None = None,
        partition: str | None = None,
        alpha: float | None = None,
        clients: int | None = None,
        rounds: int | None = None,
        method: str | None = None,
        note: str | None = None,
    ) -> tuple[Cell, ...]:
        """The cells that fit all that is given, the runnable ones first to last as in the table.

        Args:
            dataset: the table's word for it, or its name here.
            partition: the table's words.
            alpha: of a Dirichlet partition.
            clients: K.
            rounds: the table's.
            method: the table's word, or a method's name here; then all its variants.
            note: words of the cell's note ("ipc 5").

        Raises:
            PresetError: no cell fits; it names the values that there are.
        """
        wanted: dict[str, Any] = {
            "dataset": dataset,
            "partition": partition,
            "alpha": alpha,
            "clients": clients,
            "rounds": rounds,
            "method": method,
            "note": note,
        }
        found = self.cells
        for column, value in wanted.items():
            if value is None:
                continue
            left = tuple(cell for cell in found if self._is(cell, column, value))
            if not left:
                there = {self._shown(cell, column): None for cell in found}
                known = ", ".join(filter(None, there)) or "none"
                raise PresetError(f"{self.name} has no cell with {column} {value}; it has {known}")
            found = left
        return found

    def _is(self, cell: Cell, column: str, value: Any) -> bool:
        if column == "dataset":
            return str(value) in (cell.dataset, dataset_of(cell.dataset))
        if column == "alpha":
            return bool(partition_of(cell.partition).get("alpha") == value)
        if column == "method":
            if any(one.method == value for one in self.cells):
                return str(value) == cell.method
            return str(value) == self._here(cell)
        if column == "note":
            return str(value) in cell.note
        return bool(str(value) == getattr(cell, column))

    def _shown(self, cell: Cell, column: str) -> str:
        if column == "alpha":
            found = partition_of(cell.partition).get("alpha")
            return "" if found is None else f"{found:g}"
        return str(getattr(cell, column))

    def _here(self, cell: Cell) -> str:
        """The name that the cell's method has here; empty where it cannot be run."""
        if self.refusal(cell):
            return ""
        return str(self.sections(cell)["run"].get("method", ""))


def over(
    sections: Mapping[str, Mapping[str, Any]], others: Mapping[str, Mapping[str, Any]]
) -> Sections:
    """The sections with the others' values in place of their own."""
    names = [*sections, *(name for name in others if name not in sections)]
    return {name: {**sections.get(name, {}), **others.get(name, {})} for name in names}


def cell_words(cell: Cell, preset: Preset) -> str:
    """The cell's columns that differ within its table, as one line."""
    words = []
    for name in COLUMNS:
        if len({getattr(one, name) for one in preset.cells}) > 1 or name == "method":
            text = getattr(cell, name)
            unit = f" {name}" if name in ("clients", "rounds") else ""
            words.append(f"{text}{unit}" if text else "")
    return " ".join(filter(None, words))


def _fits(when: Mapping[str, tuple[str, ...]], cell: Cell) -> bool:
    def has(column: str, values: tuple[str, ...]) -> bool:
        word = getattr(cell, column)
        return word in values or (column == "dataset" and word.partition(":")[0] in values)

    return all(has(column, values) for column, values in when.items())
