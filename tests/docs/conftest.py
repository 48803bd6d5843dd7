"""Names shared by the tests of documents: the written pages, and the generator of the others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = [
    *sorted(ROOT.glob("*.md")),
    *(
        p
        for p in sorted(DOCS.rglob("*.md"))
        if p.parts[len(DOCS.parts)] not in ("generated", "_build")
    ),
]
"""The documents of the root folder, and all pages of docs/ that are not generated."""
NAMES = [path.relative_to(ROOT).as_posix() for path in WRITTEN]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}


@pytest.fixture(scope="session")
def generate() -> ModuleType:
    """Returns the package docs/generate, as Sphinx imports it."""
    sys.path.insert(0, str(DOCS))
    try:
        import generate

        return generate  # type: ignore[no-any-return]
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="session")
def generated(generate: ModuleType) -> dict[str, str]:
    """Returns every generated page."""
    return generate.pages()  # type: ignore[no-any-return]
