"""Tests of what .ci/language.py counts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / ".ci/language.py"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("The key of the node of client 3.", ["chain"]),
        ("The node's key of round 3.", []),
        ("Selects clients. These rows are final.", ["unnamed"]),
        ("Selects rows. These rows are final.", []),
        ("A sentence" + " word" * 30 + ".", ["long"]),
        ("Begins.\n\nOne.\n\nTwo.\n\nThree.", ["single sentences"]),
        ("Begins.\n\nOne. More.\n\nTwo.\n\nThree.", []),
        ("Begins.\n\nArgs:\n    key: the key of the node of client 3.", []),
    ],
)
def test_hits(text: str, kinds: list[str]) -> None:
    language = runpy.run_path(str(FILE))
    assert [kind for kind, _ in language["hits"](text)] == kinds
    first = text.splitlines()[0]
    source = f'def f():\n    raise ValueError(f"{{x}} {first}")'
    assert [*language["texts"](source)] == [(2, "{…} " + first)]
