"""Counts, per 1,000 sentences of docstrings and error messages, what has to be read twice.

    python .ci/language.py [NAME=FOLDER ...]     # this project, and other projects' packages

Each line of the output is a row: chains of "of", sentences over 30 words, "this" or "these" with a
noun that the text has not named, and three one-sentence paragraphs in a row.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG = 30  # words
CHAIN = re.compile(
    r"\bof (?:(?:the|an?|its|each|all|every|their|one|two|this|these) )?(?:[\w’'-]+ ){1,2}of\b"
)
DEMONSTRATIVE = re.compile(r"\b([Tt]hese|[Tt]hose|[Tt]his) (?:\w+ )??([a-z]{4,})\b")
# What follows "this" and "these" without being a noun, and nouns that name the text itself.
NO_NOUNS = re.compile(
    "also|does|must|should|would|could|cannot|will|that|which|with|were|have|from|means|gives|adds|"
    "makes|uses|only|always|never|needs|requires|happens|holds|ensures|returns|applies|allows|"
    "function|method|class|module|file|page|section|option|setting|test|example|error|case|script|"
    "values?|package|table|command|way"
)
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def message(call: ast.Call) -> str:
    """Returns an exception's text, with "{…}" in place of the values of f-strings."""
    parts = []
    for argument in call.args:
        joined = [node for node in ast.walk(argument) if isinstance(node, ast.JoinedStr)]
        inside = {id(value) for node in joined for value in node.values}
        for node in ast.walk(argument):
            if isinstance(node, ast.JoinedStr):
                values = (v.value if isinstance(v, ast.Constant) else "{…}" for v in node.values)
                parts.append("".join(map(str, values)))
                continue
            text = getattr(node, "value", None)
            if isinstance(text, str) and " " in text and id(node) not in inside:
                parts.append(text)
    return " ".join(parts)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring and of each raised message."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEFINITIONS) and (doc := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), doc
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.lineno, message(node.exc)


def prose(text: str) -> list[str]:
    """Returns the paragraphs of sentences: without examples, sections of arguments and lists."""
    text = re.split(r"\n\s*(?:Args|Arguments|Attributes|Returns|Raises|Yields|Example\w*):", text)[
        0
    ]
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.strip()
        if lines and not re.match(r"(>>>|[-*|:#.]|\d+\.|\w+ *= )", lines):
            found.append(" ".join(lines.split()))
    return found


def sentences(paragraph: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?:;])\s+(?=[A-Z(`{])", paragraph) if part]


def unnamed(paragraphs: list[str]) -> Iterator[str]:
    text = " ".join(paragraphs)
    for match in DEMONSTRATIVE.finditer(text):
        stem = match[2][:5]
        named = re.search(rf"\b{stem}", text[: match.start()], re.IGNORECASE)
        if not (named or NO_NOUNS.fullmatch(match[2]) or match[2].endswith("ly")):
            yield match[0]


def hits(text: str) -> Iterator[tuple[str, str]]:
    """Yields (kind, words) for all that counts in one docstring or message."""
    paragraphs = prose(text)
    for paragraph in paragraphs:
        for match in CHAIN.finditer(paragraph):
            yield "chain", match[0]
        for sentence in sentences(paragraph):
            if len(sentence.split()) > LONG:
                yield "long", sentence
    for words in unnamed(paragraphs):
        yield "unnamed", words
    single = [len(sentences(paragraph)) == 1 for paragraph in paragraphs[1:]]
    if any(all(single[i : i + 3]) for i in range(len(single) - 2)):
        yield "single sentences", paragraphs[1]


def files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not any(p.is_symlink() for p in (path, *path.parents)) and "test" not in path.name:
            yield path


def measure(name: str, folders: list[Path]) -> dict[str, object]:
    """Counts the hits of each kind per 1,000 sentences of the packages in `folders`."""
    counts = dict.fromkeys(("chain", "long", "unnamed", "single sentences"), 0)
    total = 0
    for path in (path for folder in folders for path in files(folder)):
        for _, text in texts(path.read_text("utf-8")):
            total += sum(len(sentences(paragraph)) for paragraph in prose(text))
            for kind, _ in hits(text):
                counts[kind] += 1
    rates = {kind: round(1000 * count / total, 1) for kind, count in counts.items()}
    return {"key": name, "sentences": total, **rates}


def main() -> None:
    ours = [ROOT / package for package in ("fedsynth", "privacy", "cli")]
    others = (argument.split("=") for argument in sys.argv[1:])
    for name, folders in [("fedsynth", ours), *((name, [Path(f)]) for name, f in others)]:
        print(json.dumps(measure(name, folders)))


if __name__ == "__main__":
    main()
