"""Programs and commands of the pages for users of other libraries run as printed, each page within
seconds, and the architecture's picture is that of the imports."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("from-opacus", "from-flower", "from-fluke")
START = "from fedsynth.cli.app import main; main()"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert {kind for kind, _ in blocks} <= {"python", "sh"}
    names: dict[str, object] = {}
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, page, "exec"), names)
        else:
            script = f"fedsynth() {{ '{sys.executable}' -c '{START}' \"$@\"; }}\n{block}"
            subprocess.run(["bash", "-ec", script], check=True, stdout=subprocess.DEVNULL)
    values = [float(value) for value in re.findall(r"\d+\.\d+", capsys.readouterr().out)]
    assert len(values) >= 2
    assert all(0 < value <= 8 for value in values)


def test_documents_have_at_most_30000_words() -> None:
    """Bars of tables and signs are no words. The list of error messages is for looking up."""
    texts = [path.read_text(encoding="utf-8") for path in DOCS.glob("[!_g]*/*.md")]
    texts += [
        path.read_text(encoding="utf-8") for path in DOCS.glob("*.md") if path.stem != "errors"
    ]
    count = sum(any(map(str.isalnum, word)) for text in texts for word in text.split())
    assert 20_000 < count <= 30_000


def test_picture_of_architecture_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    draw = importlib.import_module("draw_architecture")
    message = "run `python docs/draw_architecture.py`"
    assert draw.PICTURE.read_text(encoding="utf-8") == draw.drawing(), message
    order = list(draw.imports())
    for number, targets in enumerate(draw.imports().values()):
        assert targets <= set(order[number + 1 :])
