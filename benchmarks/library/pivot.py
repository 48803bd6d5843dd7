"""The renderer of tables: a pivot of rows, each cell determined by its row's and its column's
fields.

A table declares two axes. An axis is a list of (label, fields). A cell has the fields of its table,
its column and its row, a later one replacing an earlier one:

    file, key, seeds    the rows "KEY seed=S" of results/FILE.jsonl; seeds None: all rows of KEY
    records             these rows, or a function of the cell that returns rows, in place of
                        `file`, `key` and `seeds`
    value, scale        a number of each row, and what it is multiplied by (100)
    less, same          the key of rows to subtract, in pairs of seeds; the text where both keys are
                        the same
    show                a function that makes the cell's text; default: `spread_of`
    expected, digits, sign, form, of, unit
                        how many seeds make a complete cell, and how numbers are written
    always              True in a column: its cells do not count as contents of a row

A text among the fields is a template, in which {NAME} is another field.
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
    by_seed,
    markdown,
    named,
    number,
    paired,
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

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default."""
        return self[name] if name in self._fields else default

    @property
    def records(self) -> list[Row]:
        """The rows of the cell."""
        records = self.get("records")
        if records is None:
            return list(self._rows("key").values())
        return list(records(self) if callable(records) else records)

    def _rows(self, key: str) -> Mapping[int, Row]:
        seeds = self.get("seeds")
        if seeds is None:
            return dict(enumerate(named(self["file"], self[key])))
        return by_seed(self["file"], self[key], seeds)

    @property
    def values(self) -> list[float]:
        """The numbers of the cell's rows, or their differences to those of `less`."""
        if self.get("less") is None:
            return list(self._numbers(enumerate(self.records)).values())
        minuends, subtrahends = (self._numbers(self._rows(key).items()) for key in ("key", "less"))
        return [minuends[seed] - subtrahends[seed] for seed in minuends if seed in subtrahends]

    def _numbers(self, rows: Iterable[tuple[int, Row]]) -> dict[int, float]:
        value: Value = self.get("value", "accuracy")
        scale = self.get("scale", 100)
        values = {seed: value_of(row, value) for seed, row in rows}
        return {seed: scale * number for seed, number in values.items() if number is not None}

    @property
    def expected(self) -> int:
        """The number of seeds of a complete cell."""
        return int(self.get("expected", len(self.get("seeds") or self.records)))

    @property
    def text(self) -> str:
        """The text of the cell."""
        if self.get("less") is not None and self["less"] == self["key"]:
            return str(self.get("same", ""))
        show: Callable[[Cell], str] = self.get("show", spread_of)
        return show(self)


def spread_of(cell: Cell) -> str:
    """Returns mean ± standard deviation over seeds."""
    return spread(cell.values, cell.expected, cell.get("digits", 2), cell.get("sign", ""))


def paired_of(cell: Cell) -> str:
    """Returns mean ± standard deviation of paired differences, in bold if they are clear."""
    return paired(cell.values, cell.expected)


def each_of(cell: Cell) -> str:
    """Returns every seed's number."""
    return ", ".join(number(value, cell.get("form", ".2f")) for value in cell.values)


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
        rows: the vertical axis, or a function that reads it from rows.
        columns: the horizontal axis.
        cells: fields of all cells.
        corner: the heading of the rows' labels.
        min_cells: rows with fewer cells that have contents are left out.
    """

    rows: Axis | Callable[[], Axis]
    columns: Axis
    cells: Fields = field(default_factory=dict)
    corner: Label = ""
    min_cells: int = 0

    def __call__(self) -> str:
        """Returns the table as Markdown."""
        head = [*_parts(self.corner), *(str(label) for label, _ in self.columns)]
        body = []
        for label, fields in self.rows() if callable(self.rows) else self.rows:
            texts = []
            contents = 0
            for _, column in self.columns:
                texts.append(Cell({**self.cells, **column, **fields}).text)
                contents += texts[-1] not in (NOTHING, "") and not column.get("always")
            if contents >= self.min_cells:
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
        join: separates labels, without empty ones; None: labels stay tuples.
    """
    products: list[tuple[tuple[str, ...], Fields]] = [((), {})]
    for axis_values in axes:
        products = [
            ((*labels, *_parts(label)), {**fields, **more})
            for labels, fields in products
            for label, more in axis_values
        ]
    if join is None:
        return products
    return [(join.join(filter(None, labels)), fields) for labels, fields in products]


def _parts(label: Label) -> tuple[str, ...]:
    return (label,) if isinstance(label, str) else label
