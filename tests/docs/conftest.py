"""What tests of the documents share: the pages that people write, and the generator of the rest."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.docs.written import DOCS


@pytest.fixture(scope="session")
def generate() -> ModuleType:
    """The package docs/generate, as Sphinx imports it."""
    sys.path.insert(0, str(DOCS))
    try:
        import generate

        return generate  # type: ignore[no-any-return]
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="session")
def generated(generate: ModuleType) -> dict[str, str]:
    """Every generated page."""
    return generate.pages()  # type: ignore[no-any-return]
