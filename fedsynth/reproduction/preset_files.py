"""Reads published numbers and presets from their files.

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

`presets.py` defines which setting takes precedence.
"""

from __future__ import annotations

import csv
import functools
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from fedsynth.config.settings import SECTIONS, RunSettings
from fedsynth.errors import unknown_name
from fedsynth.reproduction.presets import (
    COLUMNS,
    Block,
    Cell,
    Number,
    Preset,
    PresetError,
    When,
    main_cell,
)

DATA = files("fedsynth.reproduction")
_TABLES = DATA / "tables"
_BLOCK_KEYS = {"source", "why", "when", "variant", *SECTIONS}


@functools.cache
def published() -> tuple[Mapping[str, str], ...]:
    """Returns the rows of published_results.csv as dictionaries, in the order of the file. A text
    is empty if the paper gives no value."""
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
        dataset, partition, alpha, clients, rounds, method, note: the cell of the table, see
            `Preset.select`; if several match, the first of the paper's own method, or else the
            first.
        seed: of everything that is reproducible.
        changes: sections of settings that override the preset's, as `resolve` takes them.

    Raises:
        UnknownNameError: no such preset.
        PresetError: no cell matches, or the cell cannot be run.

    >>> settings = load_preset("feddm:table2", dataset="cifar10", alpha=0.1)
    >>> settings.method.name, settings.method.ipc, settings.rounds, settings.partition.alpha
    ('feddm', 10, 20, 0.1)
    >>> load_preset("feddm:table2", method="scaffold", changes={"run": {"rounds": 5}}).rounds
    5
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
        UnknownNameError: no such preset; the message has near matches.
        PresetError: its file is malformed.
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
    """Returns the paper, the location and the description of each published experiment whose
    numbers are not included."""
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
    """Yields the cells that a preset file lists without published numbers, one for each combination
    of the columns' values."""
    for entry in entries:
        columns = _when(name, {key: value for key, value in entry.items() if key != "metrics"})
        numbers = tuple(Number(metric, "", None, None) for metric in entry["metrics"])
        for values in itertools.product(*columns.values()):
            texts = {**dict.fromkeys(COLUMNS, ""), **dict(zip(columns, values, strict=True))}
            yield Cell(name, **texts, numbers=numbers)
