"""What verification stands on: reading a report that may come from anybody, comparing it with ledger
files, an audit's bound, and comparing values. Tampering with whole runs is in
`tests/results/test_tampering.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.build import build_report, write_report
from fedsynth.privacy.report.figures import schema_problems
from fedsynth.privacy.report.file import read_ledger_rows, read_report, sound_report
from fedsynth.privacy.report.verify import (
    differences,
    page_problems,
    report_problems,
)
from tests.privacy.support import audit, facts, release

FACTS = facts(epsilon_cap=20.0, provenance={"config": "c0", "numpy": "2.4.6"}, noise_multiplier=5.0)


def row(number: int, sigma: float = 9.0, quantity: str = "images") -> Release:
    return release(round=number, quantity=quantity, noise_multiplier=sigma, steps=20)


class Case:
    """A folder with a report and the ledgers of two clients, one of which did less."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "ledger"
        self.ledgers = [
            Ledger(name, self.files / f"{name}.jsonl", dataset="d") for name in ("one", "two")
        ]
        for number in (1, 2, 2):  # a round charged twice
            self.ledgers[0].charge(row(number))
        self.ledgers[1].charge(row(1))
        write_report(build_report(FACTS, [one.history() for one in self.ledgers]), folder)

    def problems(self, files: Path | None = None, *, exact: bool = True) -> list[str]:
        report = read_report(self.folder)
        if shape := schema_problems(report):
            return shape
        held = read_ledger_rows(report, files or self.files, exact=exact)
        return held.problems + report_problems(report, FACTS, held, {})

    def edited(self, change: Callable[[Any], Any]) -> list[str]:
        """What is found after a change of the JSON."""
        report = json.loads((self.folder / "privacy_report.json").read_text())
        change(report)
        (self.folder / "privacy_report.json").write_text(json.dumps(report))
        return self.problems()


@pytest.fixture
def run(tmp_path: Path) -> Case:
    return Case(tmp_path)


def put(path: str, value: Any) -> Callable[[Any], None]:
    def change(report: Any) -> None:
        *first, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        for key in first:
            report = report[key]
        report[last] = value

    return change


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"correct": 200}, "audit.epsilon_lower_bound"),
        ({"correct": 401}, "audit section is damaged: correct must satisfy 0 <= correct"),
        ({"canaries": 10**400}, "audit.canaries is wrong"),
        ({"command": "fedsynth privacy audit\nall is well"}, "audit.command is wrong"),
        ({"correct": 400, "confidence": 0.5}, "the audit's lower bound on ε"),
        ({"confidence": 1.0}, "audit.confidence is wrong"),
        ({"method": "fedavg"}, "audit.method is 'fedavg'"),
        ({"delta": 1e-6}, "audit.delta is"),
        ({"seal": "x"}, "audit.seal is an unknown key"),
    ],
)
def test_an_audits_bound_follows_from_its_counts(
    run: Case, values: dict[str, Any], text: str
) -> None:
    assert run.edited(put("audit", audit())) == []
    found = run.edited(put("audit", audit(**values)))
    assert any(text in problem for problem in found), found


def test_ledger_files_must_hold_these_rows_and_no_others(run: Case) -> None:
    assert run.problems() == []
    run.ledgers[1].charge(row(2, quantity="counts"))
    found = run.problems()
    assert found[0] == "client two: the ledger file has 2 rows, but the report states 1"
    assert len(found) > 1
    assert run.problems(exact=False) == []  # a kept ledger may have grown since
    (run.files / "two.jsonl").rename(run.files / "three.jsonl")
    assert any("three.jsonl contains the ledger of client 'two'" in one for one in run.problems())
    assert any("has no ledger of client two" in one for one in run.problems())
    Ledger("five", run.files / "five.jsonl", dataset="d")
    assert any("has a ledger of client five" in one for one in run.problems())
    assert not any("five" in one for one in run.problems(exact=False))
    for text in (b"{}\n", b"", b"[" * 100_000, b'{"client": 5}\n', b"\xff\n"):
        (run.files / "one.jsonl").write_bytes(text)
        assert any("one.jsonl" in problem for problem in run.problems())


def test_other_rows_than_the_stated_ones_are_noticed(run: Case) -> None:
    report = read_report(run.folder)
    head = report["ledger_heads"]["one"]
    head["rows"] = 2
    problems = read_ledger_rows(report, None, exact=False).problems
    assert problems == ["client one: the ledger section has 3 rows, but ledger_heads states 2"]
    head["chain"] = "0"
    (problem,) = read_ledger_rows(report, run.files, exact=False).problems
    assert "chain hash" in problem


def test_rows_out_of_the_rounds_order_fold_to_the_same_report() -> None:
    """A kept ledger holds several runs: round 3 of one before round 1 of the next."""
    rows = {
        "a": (row(3), row(1, 7.0), row(1, 7.0, "counts"), row(2, 7.0)),
        "b": (row(1, 7.0, "counts"), row(3)),
    }
    report = build_report(FACTS, [History(name, some) for name, some in rows.items()])
    held = read_ledger_rows(report, None, exact=False)
    assert report_problems(report, FACTS, held, {}) == []


DEEP = '{"schema_version": 4, "unit": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "not a valid privacy report") for text in ("[]", "", DEEP)),
        ('{"schema_version": 3}', "schema 3"),
        ('{"schema_version": true}', "schema True"),
        ('{"schema_version": 4, "x": NaN}', "NaN is not a valid number"),
        ('{"schema_version": 4, "x": 1e999}', "too large"),
        ('{"schema_version": 4, "x": {"a": 1, "a": 2}}', "twice"),
        ('{"schema_version": 4, "x": "\\ud800"}', "not a valid privacy report"),
    ],
)
def test_an_invalid_report_is_one_line(run: Case, text: str, message: str) -> None:
    (run.folder / "privacy_report.json").write_text(text)
    with pytest.raises(PrivacyError, match=message) as error:
        read_report(run.folder)
    assert len(str(error.value)) < 1000
    (run.folder / "privacy_report.json").write_text('{"schema_version": 4}')
    with pytest.raises(PrivacyError, match="damaged: method is missing"):
        sound_report(run.folder)  # cannot be rendered


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("guarantee", [1]),
        ("guarantee/epsilon", 1e-320),
        ("guarantee/epsilon_of_delta/0/delta", 0.0),
        ("guarantee/epsilon_by_client", {}),
        ("guarantee/epsilon_by_round/0/round", -1),
        ("ledger/0/rounds", []),
        ("ledger/0/sampler", "shuffle"),
        ("ledger/0/steps", 10**400),
        ("ledger_heads/one/rows", -1),
        ("ledger_heads/one/rows_before", 10**30),
        ("published", [{"\x1b[2J": "x"}, {}]),
        ("unit", {"x" * 100_000: "<script>"}),
    ],
)
def test_hostile_reports_are_a_mismatch_or_an_error_and_no_traceback(
    run: Case, path: str, value: Any
) -> None:
    try:
        found = run.edited(put(path, value))
    except PrivacyError as error:
        found = [str(error)]
    assert found
    assert all(len(problem) < 2000 for problem in found)
    report = read_report(run.folder)
    if not schema_problems(report):
        page_problems(report, run.folder)


def test_ledgers_that_may_only_be_read_can_be_verified(
    run: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening for writing would fail for an auditor; root may write, so flags are watched."""
    opened: list[int] = []
    original = os.open

    def watched(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        opened.append(flags)
        return original(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", watched)
    assert run.problems() == []
    assert not any(flags & (os.O_RDWR | os.O_WRONLY) for flags in opened)


@pytest.mark.parametrize(
    ("expected", "stated", "same"),
    [
        (1.0, 1.0 + 1e-9, True),
        (1.0, 1.001, False),
        (1.0, 1, True),
        (1.0, 10**400, False),
        (1, True, False),
        (0.0, False, False),
        (None, None, True),
        ([1], [1, 2], False),
        (0.0, 1e-15, True),
        ({"delta": 5e-13}, {"delta": 1e-15}, False),
        ({"a": 1}, {}, False),
        ({}, {"a": 1}, False),
        ("a", "b", False),
    ],
)
def test_differences(expected: Any, stated: Any, same: bool) -> None:
    assert (differences("x", expected, stated) == []) == same
