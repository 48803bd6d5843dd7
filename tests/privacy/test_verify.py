"""Tests of the parts of verification: reading untrusted reports, comparing them with ledger files,
an audit's bound, and comparing values. Tests of tampered runs are in
`tests/results/test_tampering.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.build import build_report
from fedsynth.privacy.report.figures import schema_problems
from fedsynth.privacy.report.file import read_ledger_rows, read_report, sound_report
from fedsynth.privacy.report.verify import (
    differences,
    page_problems,
    report_problems,
)
from tests.privacy.support import audit, facts, release
from tests.results.test_tampering import set_at

FACTS = facts(epsilon_cap=20.0, provenance={"config": "c0", "numpy": "2.4.6"}, noise_multiplier=5.0)


def row(number: int, sigma: float = 9.0, quantity: str = "images") -> Release:
    return release(round=number, quantity=quantity, noise_multiplier=sigma, steps=20)


ROWS = {"one": (row(1), row(2), row(2)), "two": (row(1),)}  # a round charged twice


def json_report(rows: dict[str, tuple[Release, ...]] = ROWS) -> Any:
    report = build_report(FACTS, [History(name, releases) for name, releases in rows.items()])
    return json.loads(json.dumps(report))


def problems(report: Any) -> list[str]:
    if shape := schema_problems(report):
        return shape
    ledger_rows = read_ledger_rows(report, None, exact=False)
    return ledger_rows.problems + report_problems(report, FACTS, ledger_rows, {})


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
def test_audit_bound_matches_counts(values: dict[str, Any], text: str) -> None:
    report = json_report()
    assert problems({**report, "audit": audit()}) == []
    reported = problems({**report, "audit": audit(**values)})
    assert any(text in problem for problem in reported), reported


def test_unordered_rounds_fold_to_same_report() -> None:
    """A ledger of several runs has round 3 of a run before round 1 of the next."""
    rows = {
        "a": (row(3), row(1, 7.0), row(1, 7.0, "counts"), row(2, 7.0)),
        "b": (row(1, 7.0, "counts"), row(3)),
    }
    assert problems(json_report(rows)) == []


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
def test_invalid_reports_raise_short_errors(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "privacy_report.json").write_text(text)
    with pytest.raises(PrivacyError, match=message) as error:
        read_report(tmp_path)
    assert len(str(error.value)) < 1000
    (tmp_path / "privacy_report.json").write_text('{"schema_version": 4}')
    with pytest.raises(PrivacyError, match="damaged: method is missing"):
        sound_report(tmp_path)  # cannot be rendered


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
def test_hostile_reports_are_reported_as_problems(path: str, value: Any, tmp_path: Path) -> None:
    report = json_report()
    set_at(report, path, value)
    try:
        reported = problems(report)
    except PrivacyError as error:
        reported = [str(error)]
    assert reported
    assert all(len(problem) < 2000 for problem in reported)
    if not schema_problems(report):
        page_problems(report, tmp_path)


@pytest.mark.parametrize(
    ("expected", "stated", "same"),
    [
        (1.0, 1.0 + 1e-9, True),
        (1.0, 1.001, False),
        (1.0, 10**400, False),
        (1, True, False),
        (0.0, 1e-15, True),
        ({"delta": 5e-13}, {"delta": 1e-15}, False),
        ({}, {"a": 1}, False),
    ],
)
def test_differences_tolerate_rounding(expected: Any, stated: Any, same: bool) -> None:
    assert (differences("x", expected, stated) == []) == same
