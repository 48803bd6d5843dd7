"""Presets, which contain the settings for reproducing published tables.

A cell contains the rows of published_results.csv that one run reproduces. Rows that differ only in
their metric or domain are different numbers of the same cell.

The settings of a cell come from blocks of settings in the preset. A later block overrides an
earlier block. Every block overrides the settings that follow from the words in the cell's columns
(`sections_of_words`). All other settings have the defaults for the data set and the method.

Words that mean the same in every table, such as "dirichlet(0.1)", are defined here. Words of one
paper, such as "cnn (not specified in the paper)", are defined in the preset of the table.

Each file in `tables/` is the preset of one table. For example, `feddm-table2.toml` is the preset
"feddm:table2". It contains:

    source, table    the paper and the table, as in published_results.csv
    title            what the table shows
    base             a file in `tables/base/` whose blocks come before those of this file (optional)
    [[settings]]     a block of settings, with sections of settings (`method.lr = 0.01`) and
      source         where the paper states the settings, or "not given in the paper: chosen"
      why            the reason for a choice (optional)
      when           the cells to which the block applies (column = value, or a list of values)
      variant        the final model to which the numbers refer, if a run has several
    [[not_runnable]] cells that cannot be run (`when`), with the `reason`
    [[cells]]        cells without a published number (column = value, or a list of values), with
                     their `metrics` and `domains` (optional)
    [[claims]]       a claim of the paper on the order of the table's methods (`Claim`)
    [editions.NAME]  a smaller edition of the table: its `title`, the number of `seeds`, the cells
                     that it has (`when`), and its own [[editions.NAME.settings]]
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import SECTIONS, RunSettings
from fedsynth.errors import FedsynthError, unknown_name
from fedsynth.methods import METHODS

Sections = dict[str, dict[str, Any]]
COLUMNS = ("dataset", "partition", "clients", "model", "rounds", "method", "note")
# The settings that can select a cell, by filter of `Preset.select`.
SELECTORS: Mapping[str, tuple[str, str]] = {
    "dataset": ("data", "dataset"),
    "method": ("run", "method"),
    "alpha": ("partition", "alpha"),
    "clients": ("partition", "clients"),
    "rounds": ("run", "rounds"),
}

Changes = Mapping[str, Mapping[str, Any]]
When = Mapping[str, tuple[str, ...]]
# fedsynth's data set names by name in published_results.csv, where they differ.
DATASETS: Mapping[str, str] = {
    "fashion_mnist": "fashion-mnist",
    "emnist_letters": "emnist-letters",
    "emnist_letters_10pct": "emnist-letters",
    "office_caltech": "office-caltech-10",
    "prostate_mri": "prostate-mri",
    "domainnet10": "domainnet-10",
    "tiny_imagenet": "tiny-imagenet",
}

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


class PresetError(FedsynthError, code="preset.invalid"):
    """Raised if a preset or a cell does not exist, is invalid or cannot be run."""


@dataclass(frozen=True)
class Number:
    """A published number in a cell of a table.

    Args:
        metric: the name of the metric, such as "amp_pct".
        domain: the domain on which the metric is measured, or "average" for the mean of all
            domains. Empty if the data set has no domains.
        value: the number. None if the paper shows only a plot.
        std: the standard deviation. None if the paper does not state it.
    """

    metric: str
    domain: str
    value: float | None
    std: float | None

    @property
    def label(self) -> str:
        """The metric's name, followed by the domain if there is one."""
        return f"{self.metric} ({self.domain})" if self.domain else self.metric


@dataclass(frozen=True)
class Cell:
    """Numbers of a published table that the same run reproduces.

    The other attributes are the columns of published_results.csv.

    Args:
        numbers: the published numbers of the cell.
    """

    dataset: str
    partition: str
    clients: str
    model: str
    rounds: str
    method: str
    note: str
    numbers: tuple[Number, ...]

    def columns(self) -> dict[str, str]:
        """Returns the cell's identifying columns by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    def fits(self, when: When) -> bool:
        """Returns True if the cell has one of the allowed values in each column of `when`."""
        return all(getattr(self, column) in values for column, values in when.items())


@dataclass(frozen=True)
class Block:
    """Settings that apply to some cells of a table, and where they come from.

    Args:
        source: where the paper states the settings, or a statement that we chose them.
        sections: the sections of settings.
        why: the reason for our choice, which may be empty.
        when: the values by column that select the block's cells. If it is empty, the block applies
            to all cells.
        variant: the numbers' final model, if a run has several. Otherwise empty.
    """

    source: str
    sections: Mapping[str, Mapping[str, Any]]
    why: str = ""
    when: When = field(default_factory=dict)
    variant: str = ""


@dataclass(frozen=True)
class Claim:
    """A paper's claim that one method is better than others in a table.

    Args:
        text: the claim in words.
        source: where the paper makes it.
        ahead: the method claimed to be ahead.
        of: the methods claimed to be behind.
        metric: the metric's name.
        lower: whether smaller values of the metric are better.
    """

    text: str
    source: str
    ahead: str
    of: tuple[str, ...]
    metric: str
    lower: bool = False


@dataclass(frozen=True)
class Edition:
    """A smaller, faster edition of a table, with some of its cells and reduced sizes.

    Args:
        title: what is smaller.
        seeds: the number of seeds per cell.
        when: the values by column that select the cells.
        blocks: the blocks of settings that follow the table's.
    """

    title: str
    seeds: int
    when: When
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Preset:
    """A published table, with its runs' settings.

    Args:
        name: the name of the preset, such as "feddm:table2".
        source, table: the paper and the table, as in published_results.csv.
        title: what the table shows.
        blocks: the blocks of settings. A later block overrides an earlier block.
        refusals: pairs of a selection of cells and the reason why they cannot be run.
        cells: the cells in table order.
        claims: the paper's claims about the order of the methods.
        editions: the table's smaller editions by name.
        seeds: the number of seeds per cell.
        reduced: whether the preset is a smaller edition, whose numbers are not comparable.
    """

    name: str
    source: str
    table: str
    title: str
    blocks: tuple[Block, ...]
    refusals: tuple[tuple[When, str], ...]
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...] = ()
    editions: Mapping[str, Edition] = field(default_factory=dict)
    seeds: int = 1
    reduced: bool = False

    @property
    def heading(self) -> str:
        """The title of the table with its source."""
        return f"{self.title} ({self.source}, {self.table})"

    def edition(self, name: str) -> Preset:
        """Returns a smaller edition of the table.

        Raises:
            PresetError: the table has no editions.
            UnknownNameError: the table has no edition with this name.
        """
        if not self.editions:
            raise PresetError(f"the table {self.name} has no smaller editions. Remove --edition")
        if name not in self.editions:
            raise unknown_name("edition", name, self.editions)
        edition = self.editions[name]
        return replace(
            self,
            name=f"{self.name}-{name}",
            title=f"{self.title}: {edition.title}",
            blocks=(*self.blocks, *edition.blocks),
            cells=tuple(cell for cell in self.cells if cell.fits(edition.when)),
            seeds=edition.seeds,
            reduced=True,
        )

    def refusal(self, cell: Cell) -> str:
        """Returns the reason why a cell cannot be run, or an empty string."""
        return next((reason for when, reason in self.refusals if cell.fits(when)), "")

    def variant(self, cell: Cell) -> str:
        """Returns the name of the final model that a cell's numbers describe.

        The name is empty if runs have only one final model.
        """
        variants = [block.variant for block in self.blocks if cell.fits(block.when)]
        return next(filter(None, reversed(variants)), "")

    def sections(self, cell: Cell) -> Sections:
        """Returns the settings of a cell, by section.

        Raises:
            PresetError: the cell cannot be run.
        """
        if reason := self.refusal(cell):
            raise PresetError(
                f"the table cell {cell_words(cell, self)} of {self.name} cannot be run: {reason}. "
                "Choose another cell"
            )
        sections = sections_of_words(cell)
        for block in self.blocks:
            if cell.fits(block.when):
                sections = override(sections, block.sections)
        return sections

    def settings(self, cell: Cell, seed: int = 0, changes: Changes | None = None) -> RunSettings:
        """Returns the settings of a cell's run.

        Args:
            cell: one of `cells`.
            seed: the seed of the run and its partition.
            changes: sections of settings that override the preset's.

        Raises:
            PresetError: the cell cannot be run.
            FedsynthError: the changes are invalid, as for `resolve`.
        """
        sections = override(self.sections(cell), {"run": {"seed": seed}})
        return resolve(override(sections, changes or {}))

    def select(self, **filters: Any) -> tuple[Cell, ...]:
        """Returns the cells that match all filters, in table order.

        Args:
            filters: the required value of each column. None allows every value. `dataset` and
                `method` may be the table's word or fedsynth's name. `partition` must be the table's
                words. `note` may be a part of the note.

        Raises:
            PresetError: no cell matches all filters. The message lists the possible values.
        """
        cells = self.cells
        for column, value in filters.items():
            if value is None:
                continue
            matching = tuple(cell for cell in cells if self._matches(cell, column, value))
            if not matching:
                choices = dict.fromkeys(_value(cell, column) for cell in cells)
                raise PresetError(
                    f"preset {self.name} contains no experiment with {column} {value}. Use "
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
    """Returns a cell's value in a column, as text.

    The text may be empty. The column "alpha" contains the partition's α.
    """
    if column != "alpha":
        return str(getattr(cell, column))
    alpha = partition_of(cell.partition).get("alpha")
    return "" if alpha is None else f"{alpha:g}"


def dataset_of(word: str) -> str:
    """Converts a data set's name in a table to fedsynth's name.

    A domain after a colon is removed.
    """
    name = word.partition(":")[0]
    return DATASETS.get(name, name)


def partition_of(word: str) -> dict[str, Any]:
    """Returns the partition settings for a table's description of a partition.

    Raises:
        PresetError: the words are unknown.
    """
    for pattern, values in _PARTITIONS:
        match = re.fullmatch(pattern, word)
        if match is None:
            continue
        settings: dict[str, Any] = dict(values)
        for name, text in match.groupdict().items():
            settings[name] = float(text) if name == "alpha" else int(text)
        return settings
    raise PresetError(
        f"published_results.csv contains the unknown partition {word!r}. Correct the spelling"
    )


def sections_of_words(cell: Cell) -> Sections:
    """Returns the settings that a cell's columns determine."""
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
    """Merges sections of settings. Values in `changes` take precedence."""
    merged = {name: dict(values) for name, values in sections.items()}
    for name, values in changes.items():
        merged.setdefault(name, {}).update(values)
    return merged


def cell_words(cell: Cell, preset: Preset) -> str:
    """Describes a cell in one line: its method and the columns that vary within the table."""
    parts = []
    for name, text in cell.columns().items():
        varies = name == "method" or len({getattr(c, name) for c in preset.cells}) > 1
        if text and varies:
            parts.append(text)
        if text and varies and name in ("clients", "rounds"):
            parts.append(name)
    return " ".join(parts)


def main_cell(table: Preset, **filters: Any) -> Cell:
    """Returns the cell that is used if several cells match the filters.

    It is the first runnable cell with the paper's own method, or else the first runnable cell, or
    else the first cell.

    Raises:
        PresetError: no cell matches the filters.
    """
    matching = table.select(**filters)
    runnable = list(itertools.filterfalse(table.refusal, matching)) or list(matching)
    paper = table.name.partition(":")[0]
    return min(runnable, key=lambda cell: (cell.method != paper, not cell.method.startswith(paper)))


def preset_sections(table: Preset, changes: Changes) -> tuple[Sections, Cell]:
    """Applies changes to a preset, and returns the settings and the selected cell.

    The table must have a cell with a changed data set or method. A changed α, number of clients or
    number of rounds selects a cell only if the table has one.

    Args:
        table: the preset.
        changes: sections of settings that override the preset's. No value may be None.

    Raises:
        PresetError: the table has no cell with the data set or method, or the cell cannot be run.
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


DATA = files("fedsynth.experiments")
_TABLES = DATA / "tables"


@functools.cache
def published() -> tuple[Mapping[str, str], ...]:
    """Returns the rows of published_results.csv. Values that a paper does not state are empty."""
    text = (DATA / "published_results.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def load_preset(
    name: str, *, seed: int = 0, changes: Changes | None = None, **filters: str | float | None
) -> RunSettings:
    """Returns a published table's run settings, as `fedsynth train --preset` uses them.

    Args:
        name: the preset's name, such as "feddm:table2". `fedsynth reproduce` prints all names.
        seed: the run's seed.
        changes: sections of settings that override the preset's, as for `resolve`.
        filters: values of dataset, partition, alpha, clients, rounds, method and note, which select
            a cell of the table. If several cells match, the first one with the paper's method is
            used.

    Raises:
        UnknownNameError: there is no preset with this name.
        PresetError: no cell matches, or the cell cannot be run.

    >>> settings = load_preset("feddm:table2", dataset="cifar10", alpha=0.1)
    >>> settings.method.name, settings.method.ipc, settings.rounds, settings.partition.alpha
    ('feddm', 10, 20, 0.1)
    """
    table = preset(name)
    return table.settings(main_cell(table, **filters), seed, changes)


def preset_names() -> tuple[str, ...]:
    """Returns the names of all presets, sorted by paper and table."""
    names = []
    for file in _TABLES.iterdir():
        if file.is_file():
            names.append(file.name.removesuffix(".toml").replace("-", ":", 1))
    return tuple(sorted(names))


@functools.cache
def preset(name: str) -> Preset:
    """Loads a published table's preset by name.

    Raises:
        UnknownNameError: there is no preset with this name.
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
        tuple(map(_block, blocks)),
        tuple((_when(entry.get("when", {})), str(entry["reason"])) for entry in refusals),
        (*_published_cells(rows), *_cells_without_number(file.get("cells", []))),
        tuple(Claim(**{**entry, "of": tuple(entry["of"])}) for entry in file.get("claims", [])),
        {key: _edition(entry) for key, entry in file.get("editions", {}).items()},
    )


@functools.cache
def not_covered() -> tuple[tuple[str, str, str], ...]:
    """Returns the published experiments that published_results.csv does not contain.

    Each entry consists of the paper, the place in the paper and a description.
    """
    return tuple(
        (paper["paper"], table, what)
        for paper in _read(DATA / "not_covered.toml")["papers"]
        for table, what in paper["experiments"].items()
    )


def _read(file: Any) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _when(columns: Mapping[str, Any]) -> When:
    when = {}
    for column, values in columns.items():
        when[column] = tuple(values) if isinstance(values, list) else (values,)
    return when


def _block(entry: Mapping[str, Any]) -> Block:
    facts = dict(entry)
    sections = {section: facts.pop(section) for section in SECTIONS if section in facts}
    return Block(sections=sections, when=_when(facts.pop("when", {})), **facts)


def _edition(entry: Mapping[str, Any]) -> Edition:
    blocks = tuple(map(_block, entry["settings"]))
    return Edition(entry["title"], entry["seeds"], _when(entry["when"]), blocks)


def _published_cells(rows: list[Mapping[str, str]]) -> Iterator[Cell]:
    """Groups rows of published_results.csv into cells, and yields the cells.

    Rows that differ only in metric and domain belong to the same cell.
    """
    groups: dict[tuple[str, ...], list[Number]] = {}
    for row in rows:
        dataset, _, domain = row["dataset"].partition(":")
        key = (dataset, *(row[column] for column in COLUMNS[1:]))
        std = float(row["std"]) if row["std"] else None
        number = Number(row["metric"], domain, float(row["value"]), std)
        groups.setdefault(key, []).append(number)
    for key, numbers in groups.items():
        yield Cell(**dict(zip(COLUMNS, key, strict=True)), numbers=tuple(numbers))


def _cells_without_number(entries: list[Mapping[str, Any]]) -> Iterator[Cell]:
    """Yields the table cells for which the paper reports no value.

    An entry may list several values of a column, and yields one cell for each combination.
    """
    for entry in entries:
        columns = _when({key: entry[key] for key in COLUMNS if key in entry})
        measured = itertools.product(entry["metrics"], entry.get("domains", [""]))
        numbers = tuple(Number(metric, domain, None, None) for metric, domain in measured)
        for values in itertools.product(*columns.values()):
            texts = {**dict.fromkeys(COLUMNS, ""), **dict(zip(columns, values, strict=True))}
            yield Cell(**texts, numbers=numbers)
