"""Presets: the cells of each published table, and the settings with which they are run.

A later block of settings overrides an earlier one, and every block overrides the settings that the
cell's columns imply (`sections_of_words`). Settings that no block sets come from the data set's
preset (`terms.resolve`) or are the method's defaults. A cell holds the rows of
published_results.csv that one run reproduces: rows of other metrics or other domains are numbers of
the same cell.

Words with one meaning in every table are defined here ("dirichlet(0.1)"). The words of one paper
("cnn (not specified in the paper)") are defined in the table's preset.

A file of `tables/` is a table's preset. `feddm-table2.toml` is "feddm:table2":

    source, table    as in published_results.csv
    title            what the table shows
    base             a file of `tables/base/` whose blocks precede the table's own (optional)
    [[settings]]     a block: sections of settings (`method.lr = 0.01`), `source` (where the paper
                     states them, or "not given in the paper: chosen"), `why`; `when`, the cells
                     that it applies to (column = value, or a list of values); `variant`, which of
                     several final models the cell's number is of
    [[not_runnable]] `when`, and the `reason`
    [[cells]]        cells without a published number, column = value or list of values
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import SECTIONS, RunSettings
from fedsynth.errors import FedsynthError, unknown_name
from fedsynth.methods import METHODS

Sections = dict[str, dict[str, Any]]
COLUMNS = ("dataset", "partition", "clients", "model", "rounds", "method", "note")
SELECTORS: Mapping[str, tuple[str, str]] = {
    "dataset": ("data", "dataset"),
    "method": ("run", "method"),
    "alpha": ("partition", "alpha"),
    "clients": ("partition", "clients"),
    "rounds": ("run", "rounds"),
}
"""Settings that select a cell, by the corresponding filter of `Preset.select`."""
Changes = Mapping[str, Mapping[str, Any]]
When = Mapping[str, tuple[str, ...]]
DATASETS: Mapping[str, str] = {
    "fashion_mnist": "fashion-mnist",
    "emnist_letters": "emnist-letters",
    "emnist_letters_10pct": "emnist-letters",
    "office_caltech": "office-caltech-10",
    "domainnet10": "domainnet-10",
    "tiny_imagenet": "tiny-imagenet",
}
"""The file's names of data sets that have another name in this package."""
_PARTITIONS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (r"(?:NIID-1 )?dirichlet\((?P<alpha>[\d.]+)\)", {"kind": "dirichlet"}),
    (r"(?P<classes_per_client>\d+) classes per client", {"kind": "classes"}),
    (r"(?P<missing_classes>\d+) classes missing per client", {"kind": "missing"}),
    (r"NIID-2 dominant classes", {"kind": "dominant"}),
    (r"one domain per client", {"kind": "domain"}),
    (r"by (?:writer|device)", {"kind": "natural"}),
    (r"iid", {"kind": "iid"}),
    (r"any|centralised", {}),
)


class PresetError(FedsynthError):
    """Raised when a preset, table or cell does not exist or cannot be run."""


@dataclass(frozen=True)
class Number:
    """A published number that belongs to a cell.

    Args:
        metric: what is measured ("amp_pct").
        domain: the domain where the table has several, "average" for their mean; else empty.
        value: the number; None: the paper shows a figure and prints no number.
        std: the standard deviation. None: not published.
    """

    metric: str
    domain: str
    value: float | None
    std: float | None

    @property
    def label(self) -> str:
        """Returns the name of the metric, followed by the domain if there is one."""
        return f"{self.metric} ({self.domain})" if self.domain else self.metric


@dataclass(frozen=True)
class Cell:
    """The part of a table that one run with one seed reproduces. The columns have the names and
    values of published_results.csv.

    Args:
        preset: the table's name.
        numbers: the published numbers of the cell.
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
        """Returns the columns that identify the cell."""
        return {name: getattr(self, name) for name in COLUMNS}

    def fits(self, when: When) -> bool:
        """Returns True if the cell has one of the listed values in each column of `when`."""
        return all(getattr(self, column) in values for column, values in when.items())


@dataclass(frozen=True)
class Block:
    """Settings that apply to some cells, with their source.

    Args:
        sections: the settings.
        source: where the paper states them, or a statement that we chose them.
        why: the reason for a choice; may be empty.
        when: the cells that the block applies to, as column: values; empty: all cells.
        variant: which of several final models is measured; empty: the run's model.
    """

    sections: Mapping[str, Mapping[str, Any]]
    source: str
    why: str
    when: When
    variant: str


@dataclass(frozen=True)
class Preset:
    """A published table that can be run.

    Args:
        name: "feddm:table2".
        source, table: as in published_results.csv.
        title: what the table shows.
        blocks: the blocks of settings, in order.
        refusals: cells that cannot be run, by their columns, and why.
        cells: the cells, in the order of the table.
    """

    name: str
    source: str
    table: str
    title: str
    blocks: tuple[Block, ...]
    refusals: tuple[tuple[When, str], ...]
    cells: tuple[Cell, ...]

    def refusal(self, cell: Cell) -> str:
        """Returns the reason why a cell cannot be run, or an empty string if it can."""
        return next((reason for when, reason in self.refusals if cell.fits(when)), "")

    def variant(self, cell: Cell) -> str:
        """Returns the final model to which the numbers refer, or "" if the run has only one."""
        variants = [block.variant for block in self.blocks if cell.fits(block.when)]
        return next(filter(None, reversed(variants)), "")

    def sections(self, cell: Cell) -> Sections:
        """Returns the settings of a cell, by section.

        Raises:
            PresetError: the cell cannot be run.
        """
        if reason := self.refusal(cell):
            raise PresetError(f"{self.name} {cell_words(cell, self)} cannot be run: {reason}")
        sections = sections_of_words(cell)
        for block in self.blocks:
            if cell.fits(block.when):
                sections = override(sections, block.sections)
        return sections

    def settings(self, cell: Cell, seed: int = 0, changes: Changes | None = None) -> RunSettings:
        """Returns the settings of one run of a cell.

        Args:
            cell: one of `cells`.
            seed: the seed of the run, including the partition.
            changes: sections that override the preset's.

        Raises:
            PresetError: the cell cannot be run.
            FedsynthError: the changes are invalid, as for `resolve`.
        """
        sections = override(self.sections(cell), {"run": {"seed": seed}})
        return resolve(override(sections, changes or {}))

    def select(self, **filters: Any) -> tuple[Cell, ...]:
        """Returns the cells that match all filters, in the order of the table.

        Args:
            filters: None does not filter. `dataset` and `method` take the table's word or the name
                in this package, `partition` the table's words, and `note` a part of the note.

        Raises:
            PresetError: no cell matches; the message lists the values that exist.
        """
        cells = self.cells
        for column, value in filters.items():
            if value is None:
                continue
            matching = tuple(cell for cell in cells if self._matches(cell, column, value))
            if not matching:
                choices = dict.fromkeys(_value(cell, column) for cell in cells)
                raise PresetError(
                    f"preset {self.name} has no cell with {column} {value}. Use "
                    f"{', '.join(filter(None, choices)) or 'no ' + column}"
                )
            cells = matching
        return cells

    def _matches(self, cell: Cell, column: str, value: Any) -> bool:
        if column == "dataset":
            return str(value) in (cell.dataset, dataset_of(cell.dataset))
        if column == "note":
            return str(value) in cell.note
        if column == "method" and all(other.method != value for other in self.cells):
            return not self.refusal(cell) and self.sections(cell)["run"].get("method") == value
        return _value(cell, column) == str(value).removesuffix(".0")


def _value(cell: Cell, column: str) -> str:
    """Returns the text of a cell in one column, or its α. No value gives an empty text."""
    if column != "alpha":
        return str(getattr(cell, column))
    alpha = partition_of(cell.partition).get("alpha")
    return "" if alpha is None else f"{alpha:g}"


def dataset_of(word: str) -> str:
    """Returns the name of the cell's data set in this package, without the domain."""
    name = word.partition(":")[0]
    return DATASETS.get(name, name)


def partition_of(word: str) -> dict[str, Any]:
    """Returns the partition settings for the partition's name in the table.

    Raises:
        PresetError: no partition has this name.
    """
    for pattern, values in _PARTITIONS:
        match = re.fullmatch(pattern, word)
        if match is None:
            continue
        settings: dict[str, Any] = dict(values)
        for name, text in match.groupdict().items():
            settings[name] = float(text) if name == "alpha" else int(text)
        return settings
    raise PresetError(f"the partition {word!r} of a published table is unknown")


def sections_of_words(cell: Cell) -> Sections:
    """Returns the settings that follow from a cell's columns in every table."""
    sections: Sections = {
        "run": {},
        "data": {"dataset": dataset_of(cell.dataset)},
        "partition": partition_of(cell.partition),
    }
    if cell.method in METHODS:
        sections["run"]["method"] = cell.method
    if cell.rounds:
        sections["run"]["rounds"] = int(cell.rounds)
    if cell.clients:
        sections["partition"]["clients"] = int(cell.clients)
    if cell.dataset.endswith("_10pct"):
        sections["partition"]["subset"] = 0.1
    return sections


def override(sections: Changes, changes: Changes) -> Sections:
    """Returns the sections of settings with the values of `changes` inserted."""
    merged = {name: dict(values) for name, values in sections.items()}
    for name, values in changes.items():
        merged.setdefault(name, {}).update(values)
    return merged


def cell_words(cell: Cell, preset: Preset) -> str:
    """Returns one line with the cell's method and the columns that differ within the table."""
    parts = []
    for name, text in cell.columns().items():
        varies = name == "method" or len({getattr(c, name) for c in preset.cells}) > 1
        if text and varies:
            parts.append(text)
        if text and varies and name in ("clients", "rounds"):
            parts.append(name)
    return " ".join(parts)


def main_cell(table: Preset, **filters: Any) -> Cell:
    """Returns the first matching cell. Cells of the paper's own method and cells that can be run
    come first.

    Raises:
        PresetError: no cell matches.
    """
    matching = table.select(**filters)
    runnable = [cell for cell in matching if not table.refusal(cell)] or list(matching)
    paper = table.name.partition(":")[0]
    return min(runnable, key=lambda cell: (cell.method != paper, not cell.method.startswith(paper)))


def preset_sections(table: Preset, changes: Changes) -> tuple[Sections, Cell]:
    """Returns the settings of a preset after the given changes, and the cell that they select.

    Data set and method must be in the table. Alpha and the numbers of clients and rounds select a
    cell only if the table has such a cell.

    Args:
        table: the preset.
        changes: sections of settings, without None.

    Raises:
        PresetError: the table has no such data set or method, or the cell cannot be run.
    """
    filters: dict[str, Any] = {}
    for column, (section, key) in SELECTORS.items():
        value = changes.get(section, {}).get(key)
        try:
            table.select(**filters, **{column: value})
        except PresetError:
            if column in ("dataset", "method"):
                raise
        else:
            filters[column] = value
    cell = main_cell(table, **filters)
    sections = table.sections(cell)
    # the changes' words for the data set and the method may be the table's
    names = {"data": {"dataset": sections["data"]["dataset"]}, "run": {}}
    if "method" in sections["run"]:
        names["run"] = {"method": sections["run"]["method"]}
    return override(override(sections, changes), names), cell


DATA = files("fedsynth.reproduction")
_TABLES = DATA / "tables"
_BLOCK_KEYS = {"source", "why", "when", "variant", *SECTIONS}


@functools.cache
def published() -> tuple[Mapping[str, str], ...]:
    """Returns the rows of published_results.csv. A text is empty if the paper gives no value."""
    text = (DATA / "published_results.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


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
    """Returns the settings of one run of a published table, as `fedsynth train --preset` uses them.

    Args:
        name: the table's preset ("feddm:table2"; `fedsynth reproduce --list` prints all names).
        dataset, partition, alpha, clients, rounds, method, note: select the cell of the table. If
            several match, the first cell of the paper's method is used.
        seed: the seed of the run.
        changes: sections of settings that override the preset's, as `resolve` takes them.

    Raises:
        UnknownNameError: no such preset.
        PresetError: no cell matches, or the cell cannot be run.

    >>> settings = load_preset("feddm:table2", dataset="cifar10", alpha=0.1)
    >>> settings.method.name, settings.method.ipc, settings.rounds, settings.partition.alpha
    ('feddm', 10, 20, 0.1)
    """
    table = preset(name)
    filters = {"dataset": dataset, "partition": partition, "alpha": alpha, "clients": clients}
    cell = main_cell(table, **filters, rounds=rounds, method=method, note=note)
    return table.settings(cell, seed, changes)


def preset_names() -> tuple[str, ...]:
    """Returns the names of all presets, sorted by paper and table."""
    stems = [file.name.removesuffix(".toml") for file in _TABLES.iterdir() if file.is_file()]
    return tuple(sorted((stem.replace("-", ":", 1) for stem in stems), key=_table_order))


@functools.cache
def preset(name: str) -> Preset:
    """Returns the preset of a published table.

    Raises:
        UnknownNameError: no such preset.
    """
    if name not in preset_names():
        raise unknown_name("preset", name, preset_names())
    file = _read(_TABLES / f"{name.replace(':', '-', 1)}.toml")
    blocks = file.get("settings", [])
    if "base" in file:
        blocks = _read(_TABLES / "base" / f"{file['base']}.toml")["settings"] + blocks
    refusals = file.get("not_runnable", [])
    source, table = file["source"], file["table"]
    rows = [row for row in published() if (row["source"], row["table"]) == (source, table)]
    return Preset(
        name,
        source,
        table,
        file["title"],
        tuple(_block(name, block) for block in blocks),
        tuple((_when(name, entry.get("when", {})), str(entry["reason"])) for entry in refusals),
        (*_published_cells(name, rows), *_cells_without_number(name, file.get("cells", []))),
    )


@functools.cache
def not_covered() -> tuple[tuple[str, str, str], ...]:
    """Returns paper, location and description of each published experiment without numbers here."""
    return tuple(
        (paper["paper"], table, what)
        for paper in _read(DATA / "not_covered.toml")["papers"]
        for table, what in paper["experiments"].items()
    )


def _read(file: Any) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _table_order(name: str) -> tuple[str, int, str]:
    paper, _, table = name.partition(":")
    digits = "".join(filter(str.isdigit, table))
    return paper, int(digits or 0), table


def _when(name: str, columns: Mapping[str, Any]) -> When:
    if unknown := set(columns) - set(COLUMNS):
        raise PresetError(f"preset {name}: `when` has the unknown column {min(unknown)}")
    when = {}
    for column, values in columns.items():
        when[column] = tuple(values) if isinstance(values, list) else (values,)
    return when


def _block(name: str, entry: Mapping[str, Any]) -> Block:
    if unknown := set(entry) - _BLOCK_KEYS:
        raise PresetError(f"preset {name}: a block of settings has the unknown key {min(unknown)}")
    if not entry.get("source"):
        raise PresetError(f"preset {name}: a block of settings has no source")
    return Block(
        {section: entry[section] for section in SECTIONS if section in entry},
        entry["source"],
        entry.get("why", ""),
        _when(name, entry.get("when", {})),
        entry.get("variant", ""),
    )


def _published_cells(name: str, rows: list[Mapping[str, str]]) -> Iterator[Cell]:
    """Yields the cells. Rows that differ only in metric and domain belong to the same cell."""
    groups: dict[tuple[str, ...], list[Number]] = {}
    for row in rows:
        dataset, _, domain = row["dataset"].partition(":")
        key = (dataset, *(row[column] for column in COLUMNS[1:]))
        std = float(row["std"]) if row["std"] else None
        number = Number(row["metric"], domain, float(row["value"]), std)
        groups.setdefault(key, []).append(number)
    for key, numbers in groups.items():
        yield Cell(name, **dict(zip(COLUMNS, key, strict=True)), numbers=tuple(numbers))


def _cells_without_number(name: str, entries: list[Mapping[str, Any]]) -> Iterator[Cell]:
    """Yields the cells without published numbers, one for each combination of column values."""
    for entry in entries:
        columns = _when(name, {key: value for key, value in entry.items() if key != "metrics"})
        numbers = tuple(Number(metric, "", None, None) for metric in entry["metrics"])
        for values in itertools.product(*columns.values()):
            texts = {**dict.fromkeys(COLUMNS, ""), **dict(zip(columns, values, strict=True))}
            yield Cell(name, **texts, numbers=numbers)
