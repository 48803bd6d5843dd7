"""How many cases the fuzz suites have in CI."""

from __future__ import annotations

import re
from pathlib import Path

from tests.data.test_fuzzed_files import CASES as FILES
from tests.fuzz import (
    test_checkpoints,
    test_configs,
    test_frames,
    test_ledgers,
    test_messages,
    test_models,
    test_options,
    test_reports,
)

SURFACES = (
    test_checkpoints,
    test_configs,
    test_frames,
    test_ledgers,
    test_messages,
    test_models,
    test_options,
    test_reports,
)
"""Each counts its own cases, and fails where one was left out."""


TABLE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_the_documents_say_how_many() -> None:
    section = TABLE.read_text(encoding="utf-8").split("## Malformed input\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| (\d+) \|", section, re.MULTILINE)
    cases = [*(surface.CASES for surface in SURFACES), sum(FILES.values())]
    assert sorted(map(int, rows)) == sorted(cases)


def test_there_are_enough_cases() -> None:
    assert all(surface.CASES >= 200 for surface in SURFACES)
    assert sum(surface.CASES for surface in SURFACES) >= 2000
    assert sum(FILES.values()) >= 1000
