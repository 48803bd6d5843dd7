"""Presets: the settings of each published table, every value with its source.

A file of `tables/` is a table's preset. `feddm-table2.toml` is "feddm:table2":

    source, table    as published_results.csv names it
    title            what the table shows
    base             a file of `tables/base/` whose blocks come before its own; may be left out
    [[settings]]     a block: sections of settings (`method.lr = 0.01`), `source` (where the paper
                     says so, or "not given in the paper: chosen"), `why`; `when`, the cells that
                     it is for (column = value, or a list of values); `variant`, the one of several
                     final models that the cell's number is of
    [[not_runnable]] `when`, and the `reason`
    [[cells]]        cells that have no published number, column = value or list of values

A later block wins over an earlier one, and all of them over what the row's own words say
(`words.py`). What no block names is the data set's preset (`terms.resolve`) or the method's
default. Cells are the file's rows that one run answers: rows of other metrics, or of other domains,
are numbers of the same cell.
"""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fedsynth.errors import unknown_name
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import SECTIONS, RunSettings
from fedsynth.reproduction.published import DATA, Published, published
from fedsynth.reproduction.words import (
    PresetError,
    Sections,
    dataset_of,
    domain_of,
    partition_of,
    sections_of_words,
)

CHOSEN = "not given in the paper: chosen"
COLUMNS = ("dataset", "partition", "clients", "model", "rounds", "method", "note")
_TABLES = DATA / "tables"
_BLOCK_KEYS = {"source", "why", "when", "variant", *SECTIONS}


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


def preset_names() -> tuple[str, ...]:
    """All presets, sorted by paper and table."""
    stems = [
        one.name.removesuffix(".toml") for one in _TABLES.iterdir() if one.name[-5:] == ".toml"
    ]
    return tuple(sorted((stem.replace("-", ":", 1) for stem in stems), key=_order))


@functools.cache
def preset(name: str) -> Preset:
    """The preset of a table.

    Raises:
        UnknownNameError: there is none, with the near matches.
        PresetError: its file is not as it should be.
    """
    if name not in preset_names():
        raise unknown_name("preset", name, preset_names())
    text = (_TABLES / f"{name.replace(':', '-', 1)}.toml").read_text(encoding="utf-8")
    read = tomllib.loads(text)
    blocks = list(read.get("settings", ()))
    if base := read.get("base"):
        below = (_TABLES / "base" / f"{base}.toml").read_text(encoding="utf-8")
        blocks = [*tomllib.loads(below)["settings"], *blocks]
    refusals = read.get("not_runnable", ())
    here = Preset(
        name,
        read["source"],
        read["table"],
        read["title"],
        tuple(_block(name, one) for one in blocks),
        tuple((_when(name, one.get("when", {})), str(one["reason"])) for one in refusals),
        (),
    )
    rows = [row for row in published() if (row.source, row.table) == (here.source, here.table)]
    cells = (*_published_cells(name, rows), *_own_cells(name, read.get("cells", ())))
    return replace(here, cells=cells)


def load_preset(
    name: str,
    *,
    dataset: str | None = None,
    partition: str | None = None,
    alpha: float | None = None,
    clients: int | None = None,
    rounds: int | None = None,
    method: str | None = None,
    note: str | None = None,
    seed: int = 0,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunSettings:
    """The settings of a published table's run, as `fedsynth train --preset` has them.

    Args:
        name: the table's preset ("feddm:table2"; `fedsynth reproduce --list` names them).
        dataset, partition, alpha, clients, rounds, method, note: which cell of the table, see
            `Preset.select`; of several that fit, the first of the paper's own method, or else the
            first.
        seed: of everything that is reproducible.
        changes: sections of settings over the preset's, as `resolve` takes them.

    Raises:
        UnknownNameError: no such preset.
        PresetError: no cell fits, or the cell cannot be run here.

    >>> settings = load_preset("feddm:table2", dataset="cifar10", alpha=0.1)
    >>> settings.method.name, settings.method.ipc, settings.rounds, settings.partition.alpha
    ('feddm', 10, 20, 0.1)
    >>> load_preset("feddm:table2", method="scaffold", changes={"run": {"rounds": 5}}).rounds
    5
    """
    table = preset(name)
    cell = chosen_cell(
        table,
        dataset=dataset,
        partition=partition,
        alpha=alpha,
        clients=clients,
        rounds=rounds,
        method=method,
        note=note,
    )
    return table.settings(cell, seed, changes)


def chosen_cell(table: Preset, **filters: Any) -> Cell:
    """The first of the table's cells that fit: of the paper's own method, if it is among them."""
    fitting = table.select(**filters)
    own = table.name.partition(":")[0]
    runnable = [cell for cell in fitting if not table.refusal(cell)] or list(fitting)
    named = [cell for cell in runnable if cell.method == own]
    variants = [cell for cell in runnable if cell.method.startswith(own)]
    return (named or variants or runnable)[0]


def sections_over(
    name: str, given: Mapping[str, Mapping[str, Any]]
) -> tuple[Sections, Preset, Cell]:
    """A preset's settings under those that are given, and which cell they are of.

    What is given selects the cell as far as it can: the data set and the method have to be the
    table's, and are its words or names here; alpha, the number of clients and that of rounds
    select if a cell has them. Whatever is given wins over the cell's own.

    Args:
        name: the table's preset.
        given: sections of settings, without None.

    Raises:
        UnknownNameError: no such preset.
        PresetError: the table has no such data set or method, or the cell cannot be run.
    """
    table = preset(name)
    places = {
        "dataset": ("data", "dataset"),
        "method": ("run", "method"),
        "alpha": ("partition", "alpha"),
        "clients": ("partition", "clients"),
        "rounds": ("run", "rounds"),
    }
    filters: dict[str, Any] = {}
    for column, (section, key) in places.items():
        value = given.get(section, {}).get(key)
        if value is None:
            continue
        try:
            table.select(**{**filters, column: value})
        except PresetError:
            if column in ("dataset", "method"):
                raise
        else:
            filters[column] = value
    cell = chosen_cell(table, **filters)
    words = {("data", "dataset"), ("run", "method")}  # the cell's own, by their names here
    rest = {
        section: {k: v for k, v in values.items() if (section, k) not in words}
        for section, values in given.items()
    }
    return over(table.sections(cell), rest), table, cell


@functools.cache
def not_covered() -> tuple[tuple[str, str, str], ...]:
    """(paper, where, what) of published experiments whose numbers the package does not hold."""
    read = tomllib.loads((DATA / "not_covered.toml").read_text(encoding="utf-8"))
    return tuple(
        (paper["paper"], where, what)
        for paper in read["papers"]
        for where, what in paper["experiments"].items()
    )


def _order(name: str) -> tuple[str, int, str]:
    paper, _, table = name.partition(":")
    digits = "".join(filter(str.isdigit, table))
    return paper, int(digits or 0), table


def _fits(when: Mapping[str, tuple[str, ...]], cell: Cell) -> bool:
    def has(column: str, values: tuple[str, ...]) -> bool:
        word = getattr(cell, column)
        return word in values or (column == "dataset" and word.partition(":")[0] in values)

    return all(has(column, values) for column, values in when.items())


def _when(name: str, given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    if strange := set(given) - set(COLUMNS):
        raise PresetError(f"preset {name}: `when` knows no column {min(strange)}")
    return {
        column: tuple(values) if isinstance(values, list) else (values,)
        for column, values in given.items()
    }


def _block(name: str, given: Mapping[str, Any]) -> Block:
    if strange := set(given) - _BLOCK_KEYS:
        raise PresetError(f"preset {name}: a block of settings has no {min(strange)}")
    if not given.get("source"):
        raise PresetError(f"preset {name}: a block of settings without its source")
    return Block(
        {section: given[section] for section in SECTIONS if section in given},
        given["source"],
        given.get("why", ""),
        _when(name, given.get("when", {})),
        given.get("variant", ""),
    )


def _published_cells(name: str, rows: list[Published]) -> Iterator[Cell]:
    """Rows with the same columns but for the metric and the domain are one cell."""
    groups: dict[tuple[str, ...], list[Number]] = {}
    for row in rows:
        key = tuple(
            row.dataset.partition(":")[0] if column == "dataset" else getattr(row, column)
            for column in COLUMNS
        )
        number = Number(row.metric, domain_of(row.dataset), row.value, row.std)
        groups.setdefault(key, []).append(number)
    for key, numbers in groups.items():
        yield _cell(name, dict(zip(COLUMNS, key, strict=True)), tuple(numbers))


def _cell(name: str, words: Mapping[str, str], numbers: tuple[Number, ...]) -> Cell:
    return Cell(
        name,
        words["dataset"],
        words["partition"],
        words["clients"],
        words["model"],
        words["rounds"],
        words["method"],
        words["note"],
        numbers,
    )


def _own_cells(name: str, given: list[Mapping[str, Any]]) -> Iterator[Cell]:
    """The cells that a preset's file names, which have no published number."""
    known = {field.name for field in fields(Cell)}
    for one in given:
        lists = {
            column: value if isinstance(value, list) else [value]
            for column, value in one.items()
            if column != "metrics"
        }
        if strange := set(lists) - known:
            raise PresetError(f"preset {name}: a cell has no {min(strange)}")
        numbers = tuple(Number(metric, "", None, None) for metric in one["metrics"])
        for values in itertools.product(*lists.values()):
            words = {**dict.fromkeys(COLUMNS, ""), **dict(zip(lists, values, strict=True))}
            yield _cell(name, words, numbers)
