"""Documents: valid links, wrapped prose, plain-text tutorials, and a list of every page in the site."""

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
    """Returns the anchors that GitHub derives from headings."""
    names = set()
    for line in re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE):
        heading = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", line).lower())
        names.add(heading.strip().replace(" ", "-"))
    return names


def broken_links(text: str, place: Path) -> list[str]:
    problems = []
    for link in LINK.findall(re.sub(r"`[^`]*`", "", without_code(text))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (place.parent / name).resolve() if name else place
        if DOCS / "generated" in target.parents:
            continue  # the build of the site checks these
        if not target.exists():
            problems.append(f"{place.name}: {link}: no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            problems.append(f"{place.name}: {link}: no such heading")
    return problems


def test_document_links_are_valid() -> None:
    for name, text in TEXTS.items():
        assert broken_links(text, ROOT / name) == []
        if not name.startswith("docs/tutorials") and name != "docs/index.md":
            assert "generated/" not in "".join(LINK.findall(text)), "GitHub has no generated pages"


def long_lines(text: str) -> list[str]:
    """Returns lines of prose over 100 characters: not code, tables, headings, quotes, HTML, or a
    single link."""
    lines = without_code(text).split("\n")
    prose = [
        line for line in lines if not re.match(r"\s*([|#>]|<\w|!?\[[^\]]*\]\(\S+\)\W*$)", line)
    ]
    return [line for line in prose if len(line) > 100 and " " in line.strip()[:100]]


def test_prose_is_wrapped_at_100_columns() -> None:
    assert {name: lines for name in NAMES if (lines := long_lines(TEXTS[name]))} == {}


def test_broken_links_are_detected() -> None:
    place = DOCS / "index.md"
    assert broken_links("[a](nothing.md)", place)
    assert broken_links("[a](privacy.md#nothing)", place)
    assert not broken_links("[a](privacy.md#definitions) `[b](c)` [d](https://example.org)", place)


def test_every_page_is_listed_in_site() -> None:
    listed = set(re.findall(r"^([\w/-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    pages = {name.removeprefix("docs/").removesuffix(".md") for name in NAMES if "docs/" in name}
    unlisted = {"index", "images/README"}
    assert {p for p in pages if not p.startswith("decisions/")} - unlisted <= listed
    decisions = (DOCS / "decisions" / "README.md").read_text()
    for path in (DOCS / "decisions").glob("[a-z]*.md"):
        assert f"]({path.name})" in decisions


@pytest.mark.parametrize("name", [name for name in NAMES if "/tutorials/" in name])
def test_tutorials_are_portable_text(name: str) -> None:
    text = TEXTS[name]
    assert text.startswith("---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n")
    cells = re.findall(r"^```\{code-cell\} ipython3\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(cells) >= 6
    assert "{code-cell-output}" not in text
    for cell in cells:
        local = re.search(r"(?<![\w.$}*~])/(home|root|work|tmp|Users|mnt)/", cell)
        assert local is None, f"a path of somebody's machine: {cell}"
        assert not re.search(r"https?://|--download|FEDSYNTH_DATA", cell), "needs a network or data"


def test_dockerfile_copies_existing_files() -> None:
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


# ------------------------------------------------------------------------- links of the built site


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


def test_problems_of_site_links_are_detected(links: ModuleType, tmp_path: Path) -> None:
    for body, message in {
        '<a href="nowhere.html">a</a>': "no such file",
        '<a href="other.html#where">a</a>': "no such anchor",
        '<a href="#here">a</a>': "no such anchor",
        '<img src="picture.png">': "no such file",
        '<script src="https://cdn.example.org/x.js"></script>': "loads https://cdn",
        '<link rel="stylesheet" href="//fonts.example.org/a.css">': "loads //fonts",
    }.items():
        assert [line for line in links.problems(site(tmp_path, body)) if message in line]
    body = '<a href="other.html#there">a</a><a href="https://example.org">b</a>'
    assert links.problems(site(tmp_path, body)) == []
