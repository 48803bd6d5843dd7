"""The pages that people write."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = {"generated", "_build"}


def written() -> list[Path]:
    """README, CHANGELOG and so on, and all of docs/ that is not generated."""
    inside = [p for p in sorted(DOCS.rglob("*.md")) if p.relative_to(DOCS).parts[0] not in MADE]
    return [*sorted(ROOT.glob("*.md")), *inside]


NAMES = [path.relative_to(ROOT).as_posix() for path in written()]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
