"""An HTML page as a test reads it."""

from __future__ import annotations

from html.parser import HTMLParser

EMPTY = ("meta", "wbr", "img")


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps tags, text, images and the scopes of tables' heads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.images: list[dict[str, str | None]] = []
        self.tables: list[list[str | None]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "th" and self.tables:
            self.tables[-1].append(dict(attrs).get("scope"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
