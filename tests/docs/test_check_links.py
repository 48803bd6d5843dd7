"""The built site's links: what docs/check_links.py finds."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.written import DOCS


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("check_links")


def site(tmp_path: Path, body: str) -> Path:
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>')
    (tmp_path / "index.html").write_text(f"<html><body>{body}</body></html>")
    return tmp_path


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="nowhere.html">a</a>', "no such file"),
        ('<a href="other.html#where">a</a>', "no such anchor"),
        ('<a href="#here">a</a>', "no such anchor"),
        ('<img src="picture.png">', "no such file"),
        ('<script src="https://cdn.example.org/x.js"></script>', "loads https://cdn"),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', "loads //fonts"),
    ],
)
def test_what_does_not_hold_is_found(
    links: ModuleType, tmp_path: Path, body: str, said: str
) -> None:
    assert [line for line in links.problems(site(tmp_path, body)) if said in line]


def test_what_holds_is_not(links: ModuleType, tmp_path: Path) -> None:
    body = '<a href="other.html#there">a</a><a href="https://example.org">b</a>'
    assert links.problems(site(tmp_path, body)) == []
    assert links.problems(tmp_path / "empty") != []
