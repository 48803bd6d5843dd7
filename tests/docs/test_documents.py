"""Documents: links lead somewhere, tutorials are plain text, the README is short, and every page
has its place in the site."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.conftest import DOCS, NAMES, ROOT, TEXTS

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^(```+|:::+).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    found = set()
    for line in re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", line).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def broken_links(text: str, place: Path) -> list[str]:
    wrong = []
    for link in LINK.findall(re.sub(r"`[^`]*`", "", without_code(text))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (place.parent / name).resolve() if name else place
        if DOCS / "generated" in target.parents:
            continue  # the site's; building it checks it
        if not target.exists():
            wrong.append(f"{place.name}: {link}: no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            wrong.append(f"{place.name}: {link}: no such heading")
    return wrong


def test_links_lead_somewhere() -> None:
    for name, text in TEXTS.items():
        assert broken_links(text, ROOT / name) == []
        if not name.startswith("docs/tutorials") and name != "docs/index.md":
            assert "generated/" not in "".join(LINK.findall(text)), "GitHub has no generated pages"


def long_lines(text: str) -> list[str]:
    """Lines of prose over 100 characters: not code, tables, headings, quotes, HTML, or a link
    that has its line to itself."""
    lines = without_code(text).split("\n")
    prose = [
        line for line in lines if not re.match(r"\s*([|#>]|<\w|!?\[[^\]]*\]\(\S+\)\W*$)", line)
    ]
    return [line for line in prose if len(line) > 100 and " " in line.strip()[:100]]


def test_prose_is_wrapped_at_100_columns() -> None:
    assert {name: lines for name in NAMES if (lines := long_lines(TEXTS[name]))} == {}


def test_a_link_that_leads_nowhere_is_found() -> None:
    place = DOCS / "index.md"
    assert broken_links("[a](nothing.md)", place)
    assert broken_links("[a](privacy.md#nothing)", place)
    assert not broken_links("[a](privacy.md#definitions) `[b](c)` [d](https://example.org)", place)


def test_every_page_has_its_place_in_the_site() -> None:
    listed = set(re.findall(r"^([\w/-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    pages = {name.removeprefix("docs/").removesuffix(".md") for name in NAMES if "docs/" in name}
    elsewhere = {"index", "images/README"}
    assert {p for p in pages if not p.startswith("decisions/")} - elsewhere <= listed
    decisions = (DOCS / "decisions" / "README.md").read_text()
    for path in (DOCS / "decisions").glob("[a-z]*.md"):
        assert f"]({path.name})" in decisions


@pytest.mark.parametrize("name", [name for name in NAMES if "/tutorials/" in name])
def test_tutorials_are_text_that_runs_anywhere(name: str) -> None:
    text = TEXTS[name]
    assert text.startswith("---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n")
    cells = re.findall(r"^```\{code-cell\} ipython3\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(cells) >= 6
    assert "{code-cell-output}" not in text
    for cell in cells:
        own = re.search(r"(?<![\w.$}*~])/(home|root|work|tmp|Users|mnt)/", cell)
        assert own is None, f"a path of somebody's machine: {cell}"
        assert not re.search(r"https?://|--download|FEDSYNTH_DATA", cell), "needs a network or data"


def test_the_dockerfile_names_files_that_exist() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    lines = re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE)
    copied = [word for line in lines for word in line.split()[:-1]]
    assert len(copied) >= 6
    assert ignored.count("*") == 1
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored, "the build would not see it"
    [chosen] = re.findall(r"^ARG EXTRAS=(\S+)$", dockerfile, re.MULTILINE)
    assert set(chosen.split(",")) <= set(project["optional-dependencies"])


# -------------------------------------------------------------------------- the built site's links


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("check_links")


def site(tmp_path: Path, body: str) -> Path:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    (folder / "other.html").write_text('<h1 id="there">x</h1>')
    (folder / "index.html").write_text(f"<html><body>{body}</body></html>")
    return folder


def test_what_does_not_hold_is_found(links: ModuleType, tmp_path: Path) -> None:
    for body, said in {
        '<a href="nowhere.html">a</a>': "no such file",
        '<a href="other.html#where">a</a>': "no such anchor",
        '<a href="#here">a</a>': "no such anchor",
        '<img src="picture.png">': "no such file",
        '<script src="https://cdn.example.org/x.js"></script>': "loads https://cdn",
        '<link rel="stylesheet" href="//fonts.example.org/a.css">': "loads //fonts",
    }.items():
        assert [line for line in links.problems(site(tmp_path, body)) if said in line]
    body = '<a href="other.html#there">a</a><a href="https://example.org">b</a>'
    assert links.problems(site(tmp_path, body)) == []
