"""Formats tables, code blocks and docstrings as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

_NAMES_OVER_LINES = re.compile(r"^((?:\w+, )*\w+,)\n((?:\w+, )*\w+[,:])", re.MULTILINE)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table. Line breaks in cells become spaces."""
    lines = [_row(head), _row(["---"] * len(head)), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in cells) + " |"


def fence(language: str, text: str) -> str:
    """Returns a code block."""
    return f"```{language}\n{text.rstrip()}\n```"


def code(text: str) -> str:
    """Returns `text` as inline code, or an empty string if it is empty."""
    return f"`{text}`" if text else ""


def plain(text: str) -> str:
    """Escapes Markdown's special characters, except in code between backticks."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([\\*_<>\[\]#~$])", r"\\\1", piece)
        for piece in pieces
    )


def arguments(docstring: str) -> dict[str, str]:
    """Returns the descriptions in a docstring's sections of arguments and attributes, by name."""
    descriptions: dict[str, str] = {}
    for section in re.finditer(
        r"^(?:Args|Attributes|Class attributes):\n((?:[ ]{4}.*\n?|\n(?=[ ]{4}))+)",
        docstring,
        re.MULTILINE,
    ):
        name = ""
        body = textwrap.dedent(section[1])
        while body != (joined := _NAMES_OVER_LINES.sub(r"\1 \2", body)):
            body = joined
        for line in body.splitlines():
            entry = re.match(r"(\w+(?:, \w+)*):\s*(.*)", line)
            if entry:
                name = entry[1]
                descriptions[name] = entry[2]
            elif name:
                descriptions[name] += " " + line.strip()
    return {name: text for names, text in descriptions.items() for name in names.split(", ")}


def prose(docstring: str) -> str:
    """Returns a docstring's paragraphs without its sections on arguments and its examples."""
    text = re.sub(
        r"^(?:Args|Attributes|Class attributes|Returns|Raises|Yields):\n"
        r"(?:[ ]{4}.*\n?|\n(?=[ ]{4}))+",
        "",
        docstring,
        flags=re.MULTILINE,
    )
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    return "\n\n".join(_paragraph(part) for part in paragraphs if ">>> " not in part)


def _paragraph(text: str) -> str:
    lines = text.strip("\n").splitlines()
    if all(line.startswith("    ") for line in lines):  # code or a formula
        return fence("text", textwrap.dedent("\n".join(lines)))
    if lines[0].startswith("- "):
        return "\n".join(plain(line) for line in lines)
    return plain(" ".join(line.strip() for line in lines))


def example(docstring: str) -> str:
    """Returns a docstring's examples as code blocks, or an empty string if it has none."""
    examples = [
        textwrap.dedent(part)
        for part in re.split(r"\n\s*\n", docstring)
        if part.strip().startswith(">>> ")
    ]
    return "\n\n".join(fence("pycon", part) for part in examples)
