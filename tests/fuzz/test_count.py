"""How many cases the fuzz suites have."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tests.data.test_fuzzed_files import ALL

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"


def test_the_documents_say_how_many() -> None:
    surfaces = [path.stem for path in HERE.glob("test_*.py") if path.stem != "test_count"]
    counts = [importlib.import_module(f"tests.fuzz.{name}").CASES for name in surfaces]
    section = PAGE.read_text(encoding="utf-8").split("## Malformed input\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| (\d+) \|", section, re.MULTILINE)
    assert sorted(map(int, rows)) == sorted([*counts, sum(ALL.values())])
