"""Checks the built site: each internal link has a target, and no page loads anything from another
server.

    python docs/check_links.py docs/_build/html

Prints a line for each problem, and exits with 1 if there is one. Links to other servers are not
followed
(`python -m sphinx -b linkcheck docs docs/_build/links` does that).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}
# Values of `rel` with which <link> names a page and loads nothing.
TITLES = {"canonical", "author", "license"}


@dataclass
class Page(HTMLParser):
    """Collects the ids, the links and the loaded resources of a page."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records the id and the links of an element."""
        values = {name: value for name, value in attrs if value is not None}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        for name in ("href", "src"):
            if name in values:
                self.links.append(values[name])
                if (tag, name) in LOADING and values.get("rel") not in TITLES:
                    self.loaded.append(values[name])


def read(path: Path) -> Page:
    """Parses a page of the site."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def problems(site: Path) -> list[str]:
    """Returns one line for each problem of the site."""
    pages = {path.resolve(): read(path) for path in sorted(site.rglob("*.html"))}
    lines = [] if pages else [f"{site} has no pages"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for link in page.loaded:
            if urlsplit(link).netloc:
                lines.append(f"{name}: loads {link}")
        for link in page.links:
            if reason := _broken(link, path, pages):
                lines.append(f"{name}: {link}: {reason}")
    return lines


def _broken(link: str, path: Path, pages: dict[Path, Page]) -> str:
    """Returns why a link is broken.

    The string is empty if the link has a target, or leads to another server.
    """
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "no such file"
    fragment = unquote(parts.fragment)
    if fragment and target in pages and fragment not in pages[target].ids:
        return "no such anchor on the page"
    return ""


def main() -> int:
    """Prints the problems and returns the exit code."""
    site = Path(sys.argv[1])
    lines = problems(site)
    for line in lines:
        print(line)
    if not lines:
        print(f"{len(list(site.rglob('*.html')))} pages: every internal link has a target")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
