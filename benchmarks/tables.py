"""Every measured number of README.md and docs/**/*.md, printed from the committed rows of
results/*.jsonl.

    python benchmarks/tables.py            prints all tables and sentences
    python benchmarks/tables.py --check    compares the documents with the rows; exit code 1 if
                                           they differ
    python benchmarks/tables.py --list     each table's document, rows and the script that makes
                                           them
    python benchmarks/tables.py --write    puts the rows' numbers into the documents

In a document a table stands between `<!-- table: NAME -->` and `<!-- end -->`, and is generated as
a whole. A number in a sentence is a `Sentence`: its text with {} for each number, which must stand
in the document so, whatever its line breaks. Every other decimal number, and every whole number of
%, points or times, is an error, unless it is no measurement: in code, after a name of a setting or
a reference (`FREE`), or between `<!-- given -->` and `<!-- end -->`, as papers' figures are.

The tables are declared in `documents/*.py` and rendered by `library/pivot.py`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import documents
from library.rows import LAST_COMMIT, READ, REPRODUCTION, RowsError

ROOT = Path(__file__).resolve().parent.parent
MADE = ("generated", "_build")  # below docs/, by building the site: not documents of their own
DOCUMENTS = (
    "README.md",
    *sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if path.relative_to(ROOT / "docs").parts[0] not in MADE
    ),
)
PARTS = [
    importlib.import_module(f"documents.{part.name}")
    for part in pkgutil.iter_modules(documents.__path__)
]
TABLES: dict[str, Callable[[], str]] = {
    name: made for part in PARTS for name, made in part.TABLES.items()
}
BLOCK = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
HIDDEN = (
    re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE),
    BLOCK,
    re.compile(r"<!-- given -->.*?<!-- end -->", re.DOTALL),
    re.compile(r"`[^`]*`"),
    re.compile(r"\]\([^)]*\)"),
)
NAMES = (
    r"α|β|γ|δ|ε|λ\S*|μ|ρ|σ|τ|lr|rates?|momentum|arXiv|Python|version|confidence\s+of|Theorem|Cor\.|"
    r"Secs?\.|Table|Eqs?\."
)
FREE = re.compile(
    rf"Dir\([\d./]+\)|\{{[\d., ]+\}}|({NAMES})\s+(of\s+|is\s+|are\s+|=\s+|≥\s+)?[\d.]+(e-\d+)?"
    r"(,?\s+(and\s+|or\s+|to\s+)?\d[\d.]*\b(?!\s+%))*"
)
MEASURED = re.compile(r"(?<![\w.-])[+−]?(\d+\.\d+|\d+(?=\s+(%|points?\b|times\b)))")


@dataclass(frozen=True)
class Sentence:
    """A sentence (or part of one) of a document whose numbers come from rows.

    Args:
        text: as in the document, with {} for each number.
        values: the numbers, as they are printed.
    """

    document: str
    text: str
    values: Callable[[], Sequence[str]]

    def filled(self) -> str:
        """Returns the sentence with the rows' numbers."""
        text = self.text
        for value in self.values():
            text = text.replace("{}", value, 1)
        return text

    def pattern(self) -> re.Pattern[str]:
        """Returns a pattern that finds it across line breaks, with a group for each number."""
        pieces = [r"\s+".join(map(re.escape, piece.split(" "))) for piece in self.text.split("{}")]
        return re.compile(r"([+−-]?\d[\d.,]*)".join(pieces))

    def check(self, text: str) -> str | None:
        """Returns what is wrong in a document, if anything."""
        found = self.pattern().search(text)
        expected = list(self.values())
        if found is None:
            return f"{self.document} does not have the sentence {self.text!r}"
        said = [number.rstrip(".,") for number in found.groups()]
        if said != expected:
            return f"{self.document} has {said} and the rows {expected} in {self.text!r}"
        return None

    def put(self, text: str) -> str:
        """Returns the document with the rows' numbers."""
        found = self.pattern().search(text)
        if found is None:
            return text
        made = text[: found.start()]
        end = found.start()
        for group, value in enumerate(self.values(), start=1):
            kept = found.group(group)
            tail = kept[len(kept.rstrip(".,")) :]
            made += text[end : found.start(group)] + value + tail
            end = found.end(group)
        return made + text[end:]


SENTENCES = [Sentence(*sentence) for part in PARTS for sentence in getattr(part, "SENTENCES", ())]


def written(document: str, text: str) -> str:
    """Returns a document with every table and every sentence as the rows have them."""
    text = BLOCK.sub(
        lambda found: f"<!-- table: {found[1]} -->\n{_table(found[1])}\n<!-- end -->", text
    )
    for sentence in SENTENCES:
        if sentence.document == document:
            text = sentence.put(text)
    return text


def differences(document: str, text: str) -> list[str]:
    """Returns the differences between a document and the rows, and its numbers of no row."""
    found = []
    for name, body in BLOCK.findall(text):
        expected = _table(name)
        if body.rstrip("\n") != expected:
            found.append(f"{document}: table {name} differs from its rows")
            found += difflib.unified_diff(
                body.splitlines(), expected.splitlines(), "document", "rows", lineterm="", n=0
            )
    mine = [sentence for sentence in SENTENCES if sentence.document == document]
    found += [wrong for sentence in mine if (wrong := sentence.check(text)) is not None]
    return found + free_numbers(document, text)


def free_numbers(document: str, text: str) -> list[str]:
    """Returns numbers of a document that look measured, and are neither from rows nor given."""
    patterns = [s.pattern() for s in SENTENCES if s.document == document]
    for pattern in (*patterns, *HIDDEN, FREE):
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        free = [match[0] for match in MEASURED.finditer(line)]
        if free:
            found.append(f"{document}:{number}: from no row, and not given: {', '.join(free)}")
    return found


def _table(name: str) -> str:
    if name not in TABLES:
        raise RowsError(f"no table is called {name!r}; there are {', '.join(sorted(TABLES))}")
    return TABLES[name]()


def origins(texts: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Returns each table, its document, and its rows with their script, by file of rows."""
    found = []
    for document, text in texts.items():
        for name, _ in BLOCK.findall(text):
            READ.clear()
            _table(name)
            for rows in dict.fromkeys(READ):
                place = f"benchmarks/results/{rows}.jsonl"
                found.append((name, document, place, _maker(rows)))
    return found


def _maker(rows: str) -> str:
    """Returns the command that makes a file of rows, or shows the removed script."""
    if rows == REPRODUCTION:
        return "fedsynth reproduce"
    if (ROOT / "benchmarks" / "grids" / f"{rows}.py").exists():
        return f"benchmarks/run.py {rows}"
    script = f"benchmarks/{rows}.py"
    return script if (ROOT / script).exists() else f"git show {LAST_COMMIT}:{script}"


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns lines of text whose cells are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare the documents with the rows")
    what.add_argument("--write", action="store_true", help="put the numbers into the documents")
    what.add_argument("--list", action="store_true", help="show where each table comes from")
    options = parser.parse_args()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    try:
        if options.check:
            wrong = [line for name, text in texts.items() for line in differences(name, text)]
            print(*wrong, sep="\n") if wrong else print("the documents say what the rows say")
            return 1 if wrong else 0
        if options.write:
            for name, text in texts.items():
                (ROOT / name).write_text(written(name, text), encoding="utf-8")
            return 0
        if options.list:
            print(in_columns(origins(texts)))
            return 0
        for name in TABLES:
            print(f"{name}\n\n{_table(name)}\n")
        for sentence in SENTENCES:
            print(f"{sentence.document}: {sentence.filled()}")
    except RowsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
