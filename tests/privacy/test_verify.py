"""`verify_report` finds every figure that does not follow from the ledger, and files that differ from the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.accounting import Release
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.report import ReportContext, build_report, write_report
from fedsynth.privacy.verify import read_report, unfolded, verify_report


def row(number: int, sigma: float = 5.0, quantity: str = "images") -> Release:
    return Release(number, quantity, "residual", "residual", sigma, 2.0, 0.1, "poisson", 20, 100)


@pytest.fixture(params=["add-remove", "replace-one"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run folder with a report and the ledgers of two clients, one of which did less."""
    ledgers = {name: Ledger(name, tmp_path / "ledger" / f"{name}.jsonl", dataset="d") for name in ("client-000", "client-001")}
    for number in (1, 2, 2):  # a round charged twice
        ledgers["client-000"].charge(row(number))
    ledgers["client-001"].charge(row(1))
    context = ReportContext("feddm", "residual", 1e-5, 1000, 20.0, 2, 2, {"classes": "10"}, adjacency=request.param)
    write_report(build_report(context, ledgers), tmp_path)
    return tmp_path


def edited(run: Path, change: Callable[[Any], None]) -> list[str]:
    report = json.loads((run / "privacy_report.json").read_text())
    change(report)
    (run / "privacy_report.json").write_text(json.dumps(report))
    return verify_report(run)


def test_a_report_as_written_holds(run: Path) -> None:
    assert verify_report(run) == []
    assert verify_report(run / "privacy_report.json") == []
    rows = unfolded(read_report(run))
    assert [r.round for r in rows["client-000"]] == [1, 2, 2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: r["guarantee"].update(epsilon=r["guarantee"]["epsilon"] * 0.999), "guarantee.epsilon says"),
        (lambda r: r["guarantee"]["epsilon_by_client"].update({"client-001": 0.1}), "guarantee.epsilon_by_client.client-001"),
        (lambda r: r["guarantee"]["epsilon_by_round"][0].update(median=0.0), "epsilon_by_round[0].median"),
        (lambda r: r["guarantee"]["attack_success"][0].update(true_positive_rate_at_most=0.01), "attack_success[0]"),
        (lambda r: r["guarantee"].update(delta=1e-3), "guarantee.epsilon says"),
        (lambda r: r["ledger"][0].update(noise_multiplier=50.0), "guarantee.epsilon says"),
        (lambda r: r["ledger"][0].update(noise_standard_deviation=1.0), "σ·sensitivity"),
        (lambda r: r["ledger"][0]["rounds"].pop(), "guarantee.epsilon says"),
        (lambda r: r["ledger"].clear(), "guarantee.epsilon says"),
        (lambda r: r["ledger"][0].update(unaccounted="start images"), "rules it out"),
        (lambda r: r["budget"].update(epsilon_cap=0.5), "exceeds the cap"),
        (lambda r: r["budget"].update(epsilon_spent=0.5), "budget.epsilon_spent"),
        (lambda r: r.update(adjacency="neighbours"), "adjacency"),
        (lambda r: r["guarantee"].pop("groups"), "guarantee.groups says nothing"),
        (lambda r: r["guarantee"].update(extra=1), "guarantee.extra says 1"),
        (lambda r: r.update(guarantee=None), "has no guarantee"),
    ],
)
def test_every_edit_is_found(run: Path, change: Callable[[Any], None], text: str) -> None:
    assert any(text in problem for problem in edited(run, change))


def test_ledger_files_are_compared(run: Path, tmp_path: Path) -> None:
    Ledger("client-001", run / "ledger" / "client-001.jsonl", dataset="d").charge(row(2, quantity="counts"))
    assert verify_report(run) == ["client-001: the report lacks counts of round 2, which the ledger file holds"]
    (run / "ledger" / "client-001.jsonl").unlink()
    assert any("has no ledger of client-001" in problem for problem in verify_report(run))
    assert verify_report(run, tmp_path / "elsewhere") == [f"there is no ledger folder {tmp_path / 'elsewhere'}"]


def test_a_damaged_ledger_or_report_is_an_error(run: Path) -> None:
    (run / "ledger" / "client-001.jsonl").write_text("{}\n")
    with pytest.raises(PrivacyError, match="not a fedsynth ledger"):
        verify_report(run)
    for text, message in (("[]", "not a privacy report"), ('{"schema_version": 1}', "schema 1"), ("{", "not a privacy report")):
        (run / "privacy_report.json").write_text(text)
        with pytest.raises(PrivacyError, match=message):
            verify_report(run)
    with pytest.raises(PrivacyError, match="cannot read"):
        verify_report(run / "nowhere")


def test_a_report_without_a_guarantee_verifies_and_states_no_epsilon(tmp_path: Path) -> None:
    ledger = Ledger("client-000")
    ledger.charge(Release(1, "images", "paper", "batch", 1.0, 5.0, 1.0, "full", 10, 10, "as printed"))
    context = ReportContext("feddm", "paper", 1e-5, 1000, None, 1, 1, {})
    write_report(build_report(context, {"client-000": ledger}), tmp_path)
    assert verify_report(tmp_path) == []
    assert edited(tmp_path, lambda r: r["verdict"].update(text="formal differential privacy, under the assumptions below")) != []
