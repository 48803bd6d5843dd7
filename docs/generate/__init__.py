"""Pages of the site that are made from the program: methods, commands, the library's names,
examples, and the documents at the top of the repository.

    python docs/generate

writes them to docs/generated/, which is not committed; building the site does it first. What makes
them needs nothing but fedsynth itself.
"""

from __future__ import annotations

from pathlib import Path

from generate import api, commands, examples, methods, project

DOCS = Path(__file__).resolve().parents[1]
GENERATED = DOCS / "generated"


def pages() -> dict[str, str]:
    """Every generated page's text, by its name below docs/generated."""
    return {
        **methods.pages(),
        **commands.pages(),
        **api.pages(),
        **examples.pages(DOCS.parent),
        **project.pages(DOCS.parent),
    }


def write_all(folder: Path = GENERATED) -> list[Path]:
    """Writes all pages; leaves alone what is as it should be, so that Sphinx reads less anew."""
    made = pages()
    wanted = {folder / name for name in made}
    for old in sorted(folder.rglob("*.md")):
        if old not in wanted:
            old.unlink()
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return sorted(wanted)
