"""The documents' numbers are those of the committed rows, and a number that is not is found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

TITLE = "# Results\n"
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tables

    return tables


def _text(tables: Any, document: str) -> str:
    return (tables.ROOT / document).read_text(encoding="utf-8")  # type: ignore[no-any-return]


def test_the_documents_say_what_the_rows_say(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0


def test_every_table_and_sentence_is_in_a_document(tables: Any) -> None:
    texts = "\n".join(_text(tables, document) for document in tables.DOCUMENTS)
    assert {name for name, _ in tables.BLOCK.findall(texts)} == set(tables.TABLES)
    assert {sentence.document for sentence in tables.SENTENCES} <= set(tables.DOCUMENTS)


def test_every_table_has_a_document_and_a_script_that_makes_its_rows(
    tables: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", "--list"])
    assert tables.main() == 0
    listed = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert {name for name, *_ in listed} == set(tables.TABLES)
    for name, document, rows, script in listed:
        assert f"<!-- table: {name} -->" in _text(tables, document)
        if script.startswith("benchmarks/") and "run.py" not in script:
            assert f'"{Path(rows).stem}' in _text(tables, script), name


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("| 81.57 ± 0.69 |", "| 81.58 ± 0.69 |", "table fashion differs"),
        ("within 0.25 points", "within 0.26 points", "['0.26'] and the rows ['0.25']"),
        ("on one seed it comes within", "once it comes within", "does not have the sentence"),
        (TITLE, f"{TITLE}\nIt is 1.75 times as fast.\n", "docs/results.md:3: from no row"),
    ],
)
def test_a_number_that_no_row_has_is_found_and_put_right(
    tables: Any, old: str, new: str, said: str
) -> None:
    text = _text(tables, "docs/results.md")
    source = text if old in text else " ".join(text.split())
    assert old in source
    changed = source.replace(old, new, 1)
    assert any(said in line for line in tables.differences("docs/results.md", changed))
    if said[0] in "t[":  # numbers alone
        assert tables.written("docs/results.md", text.replace(old, new)) == text


def test_what_may_stand_freely(tables: Any) -> None:
    for text in (
        "ipc 10, 5 rounds and 64 images",
        "`lr=0.25`",
        "```\n0.25\n```",
        "<!-- given -->The paper has 86.65 ± 0.31.<!-- end -->",
        "Dir(0.1) at rates of 0.01, 0.03 and 0.1, λ_glob = 2.0",
        "grid {0.003, 0.01}",
        "Apache-2.0",
    ):
        assert tables.free_numbers("README.md", text) == []
    for text in ("it reaches 71.4", "0.5 points", "rates of 0.01 reach 71.4 %", "−1.8"):
        assert len(tables.free_numbers("README.md", text)) == 1


def test_stale_rows_are_refused(
    tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from library import rows

    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    kept = [
        {"key": "fedavg seed=0 aa", "accuracy": 0.5},
        {"key": "fedavg seed=0 bb", "accuracy": 0.6},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, kept)) + "\n")
    with pytest.raises(rows.RowsError, match="two rows of other settings for 'fedavg seed=0'"):
        rows.by_key("x")
    (tmp_path / "x.jsonl").write_text(json.dumps(kept[0]) + "\n")
    assert rows.percents("x", "fedavg", range(3)) == [50.0]


def test_a_difference_is_bold_where_its_mean_is_beyond_the_deviation(tables: Any) -> None:
    from library import rows

    assert rows.paired([2.0, 2.0, 3.0], 3) == "**+2.3 ± 0.6**"
    assert rows.paired([2.0, 2.0], 3) == "+2.0 ± 0.0 (2)"  # two seeds do not show it
    assert rows.paired([2.0, -2.0, 3.0], 3) == "+1.0 ± 2.6"
