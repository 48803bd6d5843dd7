"""`verify_report` finds every figure that does not follow from the ledger, and files that differ from the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report import ReportContext, build_report, write_report
from fedsynth.privacy.verify import read_report, unfolded, verify_report


def row(number: int, sigma: float = 5.0, quantity: str = "images") -> Release:
    return Release(number, quantity, "residual", "residual", sigma, 2.0, 0.1, "poisson", 20, 100)


@pytest.fixture(params=["add-remove", "replace-one"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run folder with a report and the ledgers of two clients, one of which did less."""
    ledgers = {
        name: Ledger(name, tmp_path / "ledger" / f"{name}.jsonl", dataset="d")
        for name in ("client-000", "client-001")
    }
    for number in (1, 2, 2):  # a round charged twice
        ledgers["client-000"].charge(row(number))
    ledgers["client-001"].charge(row(1))
    context = ReportContext(
        "feddm", "residual", 1e-5, 1000, 20.0, 2, 2, {"classes": "10"}, adjacency=request.param
    )
    write_report(build_report(context, ledgers), tmp_path)
    return tmp_path


def edited(run: Path, change: Callable[[Any], None]) -> list[str]:
    report = json.loads((run / "privacy_report.json").read_text())
    change(report)
    (run / "privacy_report.json").write_text(json.dumps(report))
    for ending in ("md", "html"):  # what is checked here is the JSON
        (run / f"privacy_report.{ending}").unlink()
    return verify_report(run).problems


def test_a_report_as_written_holds(run: Path) -> None:
    assert verify_report(run).problems == []
    assert verify_report(run / "privacy_report.json").problems == []
    assert "were compared" in verify_report(run).files
    rows = unfolded(read_report(run))
    assert [r.round for r in rows["client-000"]] == [1, 2, 2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda r: r["guarantee"].update(epsilon=r["guarantee"]["epsilon"] * 0.999),
            "guarantee.epsilon says",
        ),
        (
            lambda r: r["guarantee"]["epsilon_by_client"].update({"client-001": 0.1}),
            "guarantee.epsilon_by_client.client-001",
        ),
        (
            lambda r: r["guarantee"]["epsilon_by_round"][0].update(median=0.0),
            "epsilon_by_round[0].median",
        ),
        (
            lambda r: r["guarantee"]["attack_success"][0].update(true_positive_rate_at_most=0.01),
            "attack_success[0]",
        ),
        (lambda r: r["guarantee"].update(delta=1e-4), "guarantee.epsilon says"),
        (lambda r: r["guarantee"].update(delta=0.3), "delta must be at most"),
        (lambda r: r["guarantee"].update(worst_client="client-001"), "worst_client"),
        (lambda r: r["guarantee"].pop("worst_client"), "worst_client"),
        (
            lambda r: r["scope"].append({"access": "x", "status": "unaccounted", "note": ""}),
            "x is unaccounted",
        ),
        (
            lambda r: r["verdict"].update(text="not private", formal=False),
            "verdict is 'not private'",
        ),
        (
            lambda r: r["verdict"].update(reasons=["a clean count was logged"]),
            "a clean count was logged",
        ),
        (lambda r: r.update(mechanism="paper"), "mechanism paper"),
        (lambda r: r["unit"].update(protects="a whole client"), "unit"),
        (lambda r: r["budget"].update(epsilon_left=19.0), "budget.epsilon_left"),
        (lambda r: r["accountant"]["cross_check"].update(epsilon=0.1), "accountant.cross_check"),
        (lambda r: r["ledger"][0].update(noise_multiplier=50.0), "guarantee.epsilon says"),
        (lambda r: r["ledger"][0].update(noise_standard_deviation=1.0), "σ·sensitivity"),
        (lambda r: r["ledger"][0]["rounds"].pop(), "guarantee.epsilon says"),
        (lambda r: r["ledger"].pop(), "the report lacks images of round"),
        (lambda r: r["ledger"][0].update(unaccounted="start images"), "rules it out"),
        (lambda r: r["budget"].update(epsilon_cap=0.5), "exceeds the cap"),
        (lambda r: r["budget"].update(epsilon_spent=0.5), "budget.epsilon_spent"),
        (lambda r: r.update(adjacency="neighbours"), "adjacency"),
        (lambda r: r["guarantee"].pop("groups"), "guarantee.groups says nothing"),
        (lambda r: r["guarantee"].update(extra=1), "guarantee.extra says 1"),
        (lambda r: r.update(guarantee=None), "without a guarantee"),
        (
            lambda r: r.update(
                guarantee=None,
                verdict={**r["verdict"], "text": "formal differential privacy with ε = 0.1"},
            ),
            "without a guarantee",
        ),
    ],
)
def test_every_edit_is_found(run: Path, change: Callable[[Any], None], text: str) -> None:
    assert any(text in problem for problem in edited(run, change))


def test_ledger_files_are_compared(run: Path, tmp_path: Path) -> None:
    Ledger("client-001", run / "ledger" / "client-001.jsonl", dataset="d").charge(
        row(2, quantity="counts")
    )
    assert verify_report(run).problems == [
        "client-001: the report lacks counts of round 2, which the ledger file holds"
    ]
    (run / "ledger" / "client-001.jsonl").unlink()
    assert any("has no ledger of client-001" in problem for problem in verify_report(run).problems)
    assert verify_report(run, tmp_path / "elsewhere").problems == [
        f"there is no ledger folder {tmp_path / 'elsewhere'}"
    ]


def test_a_damaged_ledger_or_report_is_an_error(run: Path) -> None:
    (run / "ledger" / "client-001.jsonl").write_text("{}\n")
    with pytest.raises(PrivacyError, match="not a fedsynth ledger"):
        verify_report(run)
    for text, message in (
        ("[]", "not a privacy report"),
        ('{"schema_version": 1}', "schema 1"),
        ("{", "not a privacy report"),
    ):
        (run / "privacy_report.json").write_text(text)
        with pytest.raises(PrivacyError, match=message):
            verify_report(run)
    with pytest.raises(PrivacyError, match="cannot read"):
        verify_report(run / "nowhere")


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["guarantee"].pop("delta"),
        lambda r: r.update(guarantee=[1]),
        lambda r: r["budget"].update(epsilon_cap="1"),
        lambda r: r["ledger"][0].update(rounds=[]),
        lambda r: r["budget"].update(epsilon_cap=float("nan")),
        lambda r: r.pop("verdict"),
    ],
)
def test_malformed_reports_are_an_error_and_no_traceback(
    run: Path, change: Callable[[Any], None]
) -> None:
    with pytest.raises(PrivacyError):
        edited(run, change)


def test_a_kept_ledger_may_have_grown_and_a_fresh_one_must_be_there(
    run: Path, tmp_path: Path
) -> None:
    ledgers = {
        name: Ledger(name, run / "ledger" / f"{name}.jsonl", dataset="d")
        for name in ("client-000", "client-001")
    }
    context = ReportContext("feddm", "residual", 1e-5, 1000, None, 2, 2, {}, fresh_ledger=False)
    write_report(build_report(context, ledgers), run)
    ledgers["client-001"].charge(row(2))
    assert verify_report(run, run / "ledger").problems == []
    elsewhere = run / "kept"
    (run / "ledger").rename(elsewhere)
    found = verify_report(run)
    assert found.problems == []
    assert "no ledger file was compared" in found.files
    assert verify_report(run, elsewhere).problems == []
    second = Ledger("client-000", elsewhere / "zz.jsonl", dataset="d")
    second.charge(row(1))
    assert any(
        "two ledgers of client-000" in problem for problem in verify_report(run, elsewhere).problems
    )


def test_a_fresh_ledger_that_is_gone_and_edited_pages_are_found(run: Path) -> None:
    page = run / "privacy_report.md"
    page.write_text(page.read_text().replace("ε = ", "ε = 0."))
    assert any(
        "privacy_report.md does not say" in problem for problem in verify_report(run).problems
    )
    (run / "ledger").rename(run / "moved")
    assert any("no ledger folder" in problem for problem in verify_report(run).problems)


def test_ledgers_that_may_only_be_read_can_be_verified(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening for writing would fail for an auditor (as root it does not, so the flags are watched)."""
    import os

    opened: list[int] = []
    original = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *rest, **named: (
            opened.append(flags) or original(path, flags, *rest, **named)
        ),
    )
    assert verify_report(run).problems == []
    assert not any(flags & (os.O_RDWR | os.O_WRONLY) for flags in opened)


def test_a_report_without_a_guarantee_verifies_and_states_no_epsilon(tmp_path: Path) -> None:
    ledger = Ledger("client-000")
    ledger.charge(
        Release(1, "images", "paper", "batch", 1.0, 5.0, 1.0, "full", 10, 10, "as printed")
    )
    context = ReportContext("feddm", "paper", 1e-5, 1000, None, 1, 1, {})
    write_report(build_report(context, {"client-000": ledger}), tmp_path)
    assert verify_report(tmp_path / "privacy_report.json").problems == [
        f"there is no ledger folder {tmp_path / 'ledger'}"
    ]
    assert (
        edited(
            tmp_path,
            lambda r: r["verdict"].update(
                text="formal differential privacy, under the assumptions below"
            ),
        )
        != []
    )
