"""Tables and sentences of documents, made of rows: the files of `documents/` declare them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from library.rows import number

Values = Callable[[], Sequence[float]]
FIELD = re.compile(r"\{:([^}]*)\}")


@dataclass(frozen=True)
class Sentence:
    """A sentence (or part of one) of a document whose numbers come from rows.

    Args:
        text: as in the document, with {:FORMAT} for each number.
        values: returns the numbers.
    """

    document: str
    text: str
    values: Values

    def numbers(self) -> list[str]:
        """Returns the numbers as they are printed."""
        forms = FIELD.findall(self.text)
        return [number(value, form) for value, form in zip(self.values(), forms, strict=True)]

    def pattern(self) -> re.Pattern[str]:
        """Returns a pattern that finds it across line breaks, with a group for each number."""
        pieces = [
            r"\s+".join(map(re.escape, piece.split(" ")))
            for piece in re.sub(FIELD, "{}", self.text).split("{}")
        ]
        return re.compile(r"([+−-]?\d[\d.,]*)".join(pieces))

    def put(self, text: str) -> str:
        """Returns the document with the rows' numbers."""
        match = self.pattern().search(text)
        if match is None:
            return text
        values = self.numbers()
        for group in range(len(values), 0, -1):  # from the end, so that positions stay valid
            start = match.start(group)
            end = start + len(match[group].rstrip(".,"))
            text = text[:start] + values[group - 1] + text[end:]
        return text


# The functions that make tables, by name.
TABLES: dict[str, Callable[[], str]] = {}

SENTENCES: list[Sentence] = []


def table(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Declares a function that returns a table."""

    def declare(make: Callable[[], str]) -> Callable[[], str]:
        TABLES[name] = make
        return make

    return declare


def sentence(document: str, text: str) -> Callable[[Values], Values]:
    """Declares a function that returns the numbers of a sentence."""

    def declare(values: Values) -> Values:
        SENTENCES.append(Sentence(document, text, values))
        return values

    return declare


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def pivot(
    corner: str,
    rows: Mapping[str, Any],
    columns: Mapping[str, Any],
    cell: Callable[[Any, Any], str],
) -> str:
    """Returns a table whose cells depend on their row and their column.

    Args:
        corner: the heading of the rows' labels.
        rows, columns: the arguments of `cell` by label.
        cell: returns the text of a cell.
    """
    body = []
    for label, row in rows.items():
        body.append([label, *(cell(row, column) for column in columns.values())])
    return markdown([corner, *columns], body)
