"""Generates pages of the site from the program: methods, commands, the library's names, examples,
and the documents at the top of the repository.

Building the site writes them to docs/generated/, which is not committed. This needs no package
besides fedsynth.
"""

from __future__ import annotations

from pathlib import Path

from generate import api, commands, examples, methods, project

DOCS = Path(__file__).resolve().parents[1]
GENERATED = DOCS / "generated"


def pages() -> dict[str, str]:
    """Returns the text of each generated page by its path relative to docs/generated."""
    return {
        **methods.pages(),
        **commands.pages(),
        **api.pages(),
        **examples.pages(DOCS.parent),
        **project.pages(DOCS.parent),
    }


def write_all(folder: Path = GENERATED) -> list[Path]:
    """Writes all pages, and deletes files of earlier ones.

    Files with the right content are not written again, so Sphinx does not read them again.
    """
    texts = pages()
    paths = {folder / name for name in texts}
    for stale in set(folder.rglob("*.md")) - paths:
        stale.unlink()
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return sorted(paths)
