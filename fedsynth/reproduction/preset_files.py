"""Reads presets from their files.

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

Which of several values wins says `presets.py`.
"""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from fedsynth.errors import unknown_name
from fedsynth.federation.terms.settings import SECTIONS
from fedsynth.reproduction.presets import COLUMNS, Block, Cell, Number, Preset
from fedsynth.reproduction.published import DATA, Published, published
from fedsynth.reproduction.words import PresetError, domain_of

_TABLES = DATA / "tables"
_BLOCK_KEYS = {"source", "why", "when", "variant", *SECTIONS}


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
