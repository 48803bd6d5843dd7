"""Whether the built site holds together: each link within it leads somewhere, and nothing is loaded
from elsewhere.

    python docs/check_links.py docs/_build/html

Exit code 1, and a line for each link that does not. Links to other servers are not followed
(`python -m sphinx -b linkcheck docs docs/_build/links` does that).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}
TITLES = {"canonical", "author", "license"}
"""Of <link>: names a page and loads nothing."""


@dataclass
class Page(HTMLParser):
    """The ids of a page, where it leads, and what it loads."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what an element has."""
        given = {name: value for name, value in attrs if value is not None}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        for name in ("href", "src"):
            if name in given:
                self.links.append(given[name])
                if (tag, name) in LOADING and given.get("rel") not in TITLES:
                    self.loaded.append(given[name])


def read(path: Path) -> Page:
    """A page of the site."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def problems(site: Path) -> list[str]:
    """What is wrong, a line each."""
    pages = {path.resolve(): read(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: there is no page"]
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        for link in page.loaded:
            if urlsplit(link).netloc:
                found.append(f"{here}: loads {link}")
        for link in page.links:
            if reason := _broken(link, path, pages):
                found.append(f"{here}: {link}: {reason}")
    return found


def _broken(link: str, path: Path, pages: dict[Path, Page]) -> str:
    """Why a link leads nowhere; empty: it leads somewhere, or to another server."""
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
        return "no such place on the page"
    return ""


def main() -> int:
    """Prints what is wrong."""
    site = Path(sys.argv[1])
    found = problems(site)
    for line in found:
        print(line)
    if not found:
        print(f"{len(list(site.rglob('*.html')))} pages: every link within the site holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
