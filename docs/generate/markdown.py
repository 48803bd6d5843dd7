"""Pieces of Markdown: tables, fences, and texts of docstrings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

_NAMES_OVER_LINES = re.compile(r"^((?:\w+, )*\w+,)\n((?:\w+, )*\w+[,:])", re.MULTILINE)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may have anything but line breaks, which become spaces."""
    lines = [_row(head), _row(["---"] * len(head)), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in cells) + " |"


def fence(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.rstrip()}\n```"


def code(text: str) -> str:
    """Code within a sentence; nothing where there is no text."""
    return f"`{text}`" if text else ""


def plain(text: str) -> str:
    """A sentence whose characters mean nothing in Markdown, but for code in backticks."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([\\*_<>\[\]#~$])", r"\\\1", piece)
        for piece in pieces
    )


def arguments(docstring: str) -> dict[str, str]:
    """What a docstring says under `Args:` (or `Attributes:`, `Class attributes:`), by name."""
    found: dict[str, str] = {}
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
            begun = re.match(r"(\w+(?:, \w+)*):\s*(.*)", line)
            if begun:
                name = begun[1]
                found[name] = begun[2]
            elif name:
                found[name] += " " + line.strip()
    return {each: text for names, text in found.items() for each in names.split(", ")}


def prose(docstring: str) -> str:
    """A docstring's paragraphs, without the sections on arguments and without examples."""
    text = re.sub(
        r"^(?:Args|Attributes|Class attributes|Returns|Raises|Yields):\n"
        r"(?:[ ]{4}.*\n?|\n(?=[ ]{4}))+",
        "",
        docstring,
        flags=re.MULTILINE,
    )
    paragraphs = [each for each in re.split(r"\n\s*\n", text) if each.strip()]
    return "\n\n".join(_paragraph(each) for each in paragraphs if ">>> " not in each)


def _paragraph(text: str) -> str:
    lines = text.strip("\n").splitlines()
    if all(line.startswith("    ") for line in lines):  # code, or a formula, set off
        return fence("text", textwrap.dedent("\n".join(lines)))
    if lines[0].startswith("- "):
        return "\n".join(plain(line) for line in lines)
    return plain(" ".join(line.strip() for line in lines))


def example(docstring: str) -> str:
    """A docstring's examples; empty: it has none."""
    found = [
        textwrap.dedent(each)
        for each in re.split(r"\n\s*\n", docstring)
        if each.strip().startswith(">>> ")
    ]
    return "\n\n".join(fence("pycon", each) for each in found)
