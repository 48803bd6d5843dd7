"""Every measured number of README.md and docs/**/*.md, printed from the committed rows of
results/*.jsonl.

    python benchmarks/tables.py            prints all tables and sentences
    python benchmarks/tables.py --check    compares the documents with the rows; exit code 1 if
                                           they differ
    python benchmarks/tables.py --list     each table's document, rows and their script
    python benchmarks/tables.py --write    puts the rows' numbers into the documents

In a document a table is between `<!-- table: NAME -->` and `<!-- end -->`, and is generated as a
whole. A number in a sentence is a `Sentence`: its text with a format for each number. Every other
decimal number, and every whole number of %, points or times, is an error, unless it is no
measurement: in code, after a name of a setting or a reference (`FREE`), or between
`<!-- given -->` and `<!-- end -->`, as papers' numbers are.

The tables and sentences are declared in `documents/*.py`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import documents
from fedsynth.results.finished import aligned
from library.machine import plain_options
from library.pages import SENTENCES, TABLES, Sentence
from library.rows import LAST_COMMIT, READ, REMOVED_GRIDS, REPRODUCTION, RowsError

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
GENERATED = ("docs/errors.md", "docs/generated/", "docs/_build/")
DOCUMENTS = ("README.md", *(page for page in PAGES if not page.startswith(GENERATED)))
for part in pkgutil.iter_modules(documents.__path__):
    importlib.import_module(f"documents.{part.name}")
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


def sentences_of(document: str) -> list[Sentence]:
    """Returns the sentences of a document."""
    return [sentence for sentence in SENTENCES if sentence.document == document]


def written(document: str, text: str) -> str:
    """Returns a document with every table and every sentence as the rows have them."""
    text = BLOCK.sub(
        lambda match: f"<!-- table: {match[1]} -->\n{_table(match[1])}\n<!-- end -->", text
    )
    for sentence in sentences_of(document):
        text = sentence.put(text)
    return text


def differences(document: str, text: str) -> list[str]:
    """Returns the differences between a document and the rows, and its numbers of no row."""
    missing = [
        f"{document} does not have the sentence {sentence.text!r}"
        for sentence in sentences_of(document)
        if sentence.pattern().search(text) is None
    ]
    expected = written(document, text).splitlines()
    changes = difflib.unified_diff(text.splitlines(), expected, document, "rows", lineterm="", n=0)
    return [*missing, *changes, *free_numbers(document, text)]


def free_numbers(document: str, text: str) -> list[str]:
    """Returns numbers of a document that look measured, and are neither from rows nor given."""
    patterns = [sentence.pattern() for sentence in sentences_of(document)]
    for pattern in (*patterns, *HIDDEN, FREE):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    messages = []
    for number, line in enumerate(text.splitlines(), start=1):
        free = ", ".join(match[0] for match in MEASURED.finditer(line))
        if free:
            messages.append(f"{document}:{number}: from no row, and not given: {free}")
    return messages


def _table(name: str) -> str:
    if name not in TABLES:
        raise RowsError(f"no table is called {name!r}; there are {', '.join(sorted(TABLES))}")
    return TABLES[name]()


def origins(texts: Mapping[str, str]) -> list[list[str]]:
    """Returns each table, its document, and its rows with their script, by file of rows."""
    lines = []
    for document, text in texts.items():
        for name, _ in BLOCK.findall(text):
            READ.clear()
            _table(name)
            for rows in dict.fromkeys(READ):
                lines.append([name, document, f"benchmarks/results/{rows}.jsonl", _command(rows)])
    return lines


def _command(rows: str) -> str:
    """Returns the command that makes a file of rows, or shows the removed script."""
    if rows == REPRODUCTION:
        return "fedsynth reproduce"
    if (ROOT / "benchmarks" / "grids" / f"{rows}.py").exists():
        return f"benchmarks/run.py {rows}"
    script = f"benchmarks/{rows}.py"
    if (ROOT / script).exists():
        return script
    return f"git show {REMOVED_GRIDS.get(rows, f'{LAST_COMMIT}:{script}')}"


def main() -> int:
    parser = plain_options(__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare the documents with the rows")
    action.add_argument("--write", action="store_true", help="put the numbers into the documents")
    action.add_argument("--list", action="store_true", help="show where each table comes from")
    options = parser.parse_args()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    if options.check:
        messages = [line for name, text in texts.items() for line in differences(name, text)]
        print(*messages or ["the documents have the rows' numbers"], sep="\n")
        return bool(messages)
    if options.write:
        for name, text in texts.items():
            (ROOT / name).write_text(written(name, text), encoding="utf-8")
    elif options.list:
        print(aligned(origins(texts)), end="")
    else:
        for name in TABLES:
            print(f"{name}\n\n{_table(name)}\n")
        for sentence in SENTENCES:
            print(f"{sentence.document}: {sentence.text}: {', '.join(sentence.numbers())}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RowsError as error:
        sys.exit(f"error: {error}")
