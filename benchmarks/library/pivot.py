"""The one renderer of tables: a pivot of rows, each cell found by its row's and its column's fields.

A table declares two axes. An axis is a list of (label, fields). A cell has the fields of its table,
its column and its row, a later one replacing an earlier one:

    file, key, seeds    the rows "KEY seed=S" of results/FILE.jsonl; seeds None: all rows of KEY
    records             these rows, or a function of the cell that returns rows, in place of
                        `file`, `key` and `seeds`
    value, scale        a number of each row, and what it is multiplied by (100)
    less, same          the key of rows to subtract, in pairs of seeds; the text where both keys are
                        the same
    show                a function that makes the cell's text; `spread_of` if there is none
    expected, digits, sign, form, of, unit
                        how many seeds make a complete cell, and how numbers are written
    always              True in a column: its cells do not count as contents of a row

A text among the fields is a template, in which {NAME} stands for another field.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from library.rows import (
    NOTHING,
    Row,
    Value,
    apart,
    by_seed,
    markdown,
    named,
    number,
    spread,
    value_of,
)

Fields = Mapping[str, Any]
Label = str | tuple[str, ...]
Axis = Sequence[tuple[Label, Fields]]


class Cell:
    """One cell of a table: its fields, its rows and their numbers."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        value = self._fields[name]
        return value.format_map(self) if isinstance(value, str) else value

    def get(self, name: str, default: Any) -> Any:
        """Returns a field, or the default."""
        return self[name] if name in self._fields else default

    @property
    def records(self) -> list[Row]:
        """Returns the rows of the cell."""
        if "records" in self._fields:
            records = self._fields["records"]
            return list(records(self) if callable(records) else records)
        return list(self._rows("key").values())

    def _rows(self, key: str) -> Mapping[int, Row]:
        seeds = self.get("seeds", None)
        if seeds is None:
            return dict(enumerate(named(self["file"], self[key])))
        return by_seed(self["file"], self[key], seeds)

    @property
    def values(self) -> list[float]:
        """Returns the numbers of the cell's rows, or their differences to those of `less`."""
        if self.get("less", None) is None:
            return list(self._numbers(enumerate(self.records)).values())
        own, other = (self._numbers(self._rows(key).items()) for key in ("key", "less"))
        return [own[seed] - other[seed] for seed in own if seed in other]

    def _numbers(self, rows: Iterable[tuple[int, Row]]) -> dict[int, float]:
        value: Value = self.get("value", "accuracy")
        scale = self.get("scale", 100)
        found = {seed: value_of(row, value) for seed, row in rows}
        return {seed: scale * one for seed, one in found.items() if one is not None}

    @property
    def expected(self) -> int:
        """Returns how many seeds a complete cell has."""
        return int(self.get("expected", len(self.get("seeds", None) or self.records)))

    @property
    def text(self) -> str:
        """Returns the text of the cell."""
        if self.get("less", None) is not None and self["less"] == self["key"]:
            return str(self.get("same", ""))
        show: Callable[[Cell], str] = self.get("show", spread_of)
        return show(self)


def spread_of(cell: Cell) -> str:
    """Returns mean ± standard deviation over seeds."""
    return spread(cell.values, cell.expected, cell.get("digits", 2), cell.get("sign", ""))


def apart_of(cell: Cell) -> str:
    """Returns mean ± standard deviation of paired differences, in bold where they are clear."""
    return apart(cell.values, cell.expected)


def each_of(cell: Cell) -> str:
    """Returns every seed's number."""
    return ", ".join(number(one, cell.get("form", ".2f")) for one in cell.values)


def figure_of(cell: Cell) -> str:
    """Returns one statistic of the numbers, their mean unless `of` is another function."""
    of: Callable[[Sequence[float]], float] = cell.get("of", statistics.mean)
    if not cell.values:
        return NOTHING
    return number(of(cell.values), cell.get("form", ".2f")) + str(cell.get("unit", ""))


def count_of(cell: Cell) -> str:
    """Returns the number of rows."""
    return str(len(cell.records))


def text_of(cell: Cell) -> str:
    """Returns the last row's `value` as a text."""
    return str(value_of(cell.records[-1], cell["value"])) if cell.records else NOTHING


def figure(value: Value, form: str, scale: float = 1, **fields: Any) -> Fields:
    """Returns the fields of a cell with one statistic of a value."""
    return {"show": figure_of, "value": value, "form": form, "scale": scale, **fields}


def text(value: Value, **fields: Any) -> Fields:
    """Returns the fields of a cell with the text of a value."""
    return {"show": text_of, "value": value, **fields}


COUNT: Fields = {"show": count_of, "always": True}


@dataclass(frozen=True)
class Table:
    """A table of a document.

    Args:
        rows: the axis downwards; a function where it is read from rows.
        columns: the axis across.
        cells: fields of all cells.
        corner: the heading of the rows' labels.
        least: rows with fewer cells that have contents are left out.
    """

    rows: Axis | Callable[[], Axis]
    columns: Axis
    cells: Fields = field(default_factory=dict)
    corner: Label = ""
    least: int = 0

    def __call__(self) -> str:
        """Returns the table as Markdown."""
        head = [*_parts(self.corner), *(str(label) for label, _ in self.columns)]
        body = []
        for label, fields in self.rows() if callable(self.rows) else self.rows:
            cells = [Cell({**self.cells, **column, **fields}) for _, column in self.columns]
            texts = [cell.text for cell in cells]
            counted = [
                text
                for text, (_, column) in zip(texts, self.columns, strict=True)
                if text not in (NOTHING, "") and not column.get("always")
            ]
            if len(counted) >= self.least:
                body.append([*_parts(label), *texts])
        return markdown(head, body)


def axis(name: str, titles: Iterable[Any] | Mapping[Any, str], title: str = "{}") -> Axis:
    """Returns an axis along which one field varies.

    Args:
        name: of the field.
        titles: its values, or its values with their titles.
        title: a template of the labels.
    """
    pairs = titles if isinstance(titles, Mapping) else {value: value for value in titles}
    return [(title.format(label), {name: value}) for value, label in pairs.items()]


def cross(*axes: Axis, join: str | None = ", ") -> Axis:
    """Returns the product of axes, the last one varying fastest.

    Args:
        join: stands between labels, empty ones left out; None: they stay apart.
    """
    made: list[tuple[tuple[str, ...], Fields]] = [((), {})]
    for one in axes:
        made = [
            ((*labels, *_parts(label)), {**fields, **more})
            for labels, fields in made
            for label, more in one
        ]
    if join is None:
        return made
    return [(join.join(filter(None, labels)), fields) for labels, fields in made]


def _parts(label: Label) -> tuple[str, ...]:
    return (label,) if isinstance(label, str) else label
