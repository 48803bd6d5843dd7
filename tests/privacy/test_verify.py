"""A report is compared, whole, with the one that follows from its context and its ledger's rows;
ledger files, row for row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.audit import audit_text, epsilon_lower_bound
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.held_rows import held_rows
from fedsynth.privacy.ledger import Ledger, chain_hashes, read_ledger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report import build_report, render_html, render_markdown, write_report
from fedsynth.privacy.report_file import read_report, sound_report
from fedsynth.privacy.report_inputs import PrivateAccess, ReportContext
from fedsynth.privacy.report_schema import schema_problems
from fedsynth.privacy.verify import differences, report_problems, taken_as_stated
from tests.unfolded import unfolded

CONTEXT = ReportContext(
    method="feddm",
    mechanism="residual",
    delta=1e-5,
    max_records=1000,
    epsilon_cap=20.0,
    planned_rounds=2,
    rounds_done=2,
    public_items={"classes": "10"},
    provenance={"config": "c0", "numpy": "2.4.6"},
    accesses=(PrivateAccess("sums", "accounted", "each step"),),
    published=({"source": "a paper", "published": "ε = 1"},),
    noise_multiplier=5.0,
    data_set={"name": "digits", "train_size": 1438},
)


def row(number: int, sigma: float = 9.0, quantity: str = "images", q: float = 1.0) -> Release:
    sampler = "poisson" if q < 1 else "full"
    return Release(number, quantity, "residual", "residual", sigma, 2.0, q, sampler, 20, 100)


class Case:
    """A folder with a report and the ledgers of two clients, one of which did less; `context` is
    the report's."""

    def __init__(self, folder: Path, context: ReportContext, q: float = 1.0) -> None:
        self.folder, self.context = folder, context
        self.ledgers = {
            name: Ledger(name, folder / "ledger" / f"{name}.jsonl", dataset="d")
            for name in ("client-000", "client-001")
        }
        for number in (1, 2, 2):  # a round charged twice
            self.ledgers["client-000"].charge(row(number, q=q))
        self.ledgers["client-001"].charge(row(1, q=q))
        write_report(
            build_report(context, [one.history() for one in self.ledgers.values()]), folder
        )

    def problems(self, ledger: Path | None = None, *, exact: bool = True) -> list[str]:
        report = read_report(self.folder)
        shape = schema_problems(report)
        if shape:
            return shape
        held = held_rows(report, ledger or self.folder / "ledger", exact=exact)
        return held.problems + report_problems(report, self.context, held, self.folder)

    def edited(self, change: Callable[[Any], None]) -> list[str]:
        """What is found after a change of the JSON, with pages made of it."""
        report = json.loads((self.folder / "privacy_report.json").read_text())
        change(report)
        (self.folder / "privacy_report.json").write_text(json.dumps(report))
        for ending, render in (("md", render_markdown), ("html", render_html)):
            if not schema_problems(report):
                (self.folder / f"privacy_report.{ending}").write_text(render(report))
        return self.problems()


@pytest.fixture
def run(tmp_path: Path) -> Case:
    return Case(tmp_path, CONTEXT)


@pytest.mark.parametrize("q", [1.0, 0.1])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_a_report_as_written_holds(tmp_path: Path, adjacency: str, q: float) -> None:
    run = Case(tmp_path, replace(CONTEXT, adjacency=adjacency), q)
    assert run.problems() == []
    report = read_report(run.folder / "privacy_report.json")
    assert schema_problems(report) == []
    assert [r.round for r in unfolded(report)["client-000"]] == [1, 2, 2]
    assert taken_as_stated(report) == ["versions (numpy)"]


def at(content: Any, path: str) -> tuple[Any, Any]:
    """What holds the last key of a path such as `scope/0/status`, and that key."""
    *first, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in first:
        content = content[key]
    return content, last


def put(path: str, value: Any) -> Callable[[Any], None]:
    def change(report: Any) -> None:
        where, key = at(report, path)
        where[key] = value

    return change


def drop(path: str) -> Callable[[Any], None]:
    def change(report: Any) -> None:
        where, key = at(report, path)
        del where[key]

    return change


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("guarantee", None, "guarantee says None"),
        ("guarantee/epsilon", 1.0, "guarantee.epsilon says 1"),
        ("guarantee/epsilon_by_client/client-001", 0.1, "epsilon_by_client.client-001 says"),
        ("guarantee/epsilon_by_round/0/median", 0.0, "epsilon_by_round[0].median says 0"),
        ("guarantee/attack_success/0/true_positive_rate_at_most", 0.01, "attack_success[0]"),
        ("guarantee/best_guess_at_most", 0.5, "best_guess_at_most says 0.5"),
        ("guarantee/delta", 1e-4, "guarantee.delta says"),
        ("guarantee/worst_client", "client-001", "'client-001' has not spent the most"),
        ("guarantee/worst_client", "client-007", "'client-007' has not spent the most"),
        ("guarantee/extra", 1, "guarantee.extra is no key"),
        ("scope", [], "scope has 0 entries, and should have 1"),
        ("scope/0/status", "public", "scope[0].status says 'public'"),
        ("verdict/text", "proved", "verdict.text says 'proved'"),
        ("verdict/formal", 1, "verdict.formal is wrong"),
        ("verdict/reasons", ["a clean count was logged"], "verdict.reasons has 1 entries"),
        ("verdict/assumptions/2", "", "verdict.assumptions[2] says ''"),
        ("mechanism", "paper", "mechanism says 'paper'"),
        ("noise_multiplier", 9.0, "noise_multiplier says 9"),
        ("unit/protects", "a whole client", "unit.protects says"),
        ("trust_model/secure_aggregation", "yes", "trust_model.secure_aggregation says"),
        ("public_items/classes", "3", "public_items.classes says '3'"),
        ("published", [], "published has 0 entries"),
        ("randomness", "true random numbers", "randomness says"),
        ("max_records", 10, "max_records says 10"),
        ("data_set/train_size", 10, "data_set.train_size says 10"),
        ("audit", "passed: proves epsilon <= 0.1", "audit says 'passed"),
        ("budget/epsilon_left", 19.0, "budget.epsilon_left says 19"),
        ("budget/epsilon_cap", 50.0, "budget.epsilon_cap says 50"),
        ("budget/rounds_done", 1, "budget.rounds_done says 1"),
        ("budget/planned_rounds", 2.0, "budget.planned_rounds is wrong"),
        ("accountant/cross_check/epsilon", 0.1, "accountant.cross_check.epsilon says 0.1"),
        ("accountant/computation", "by hand", "accountant.computation says"),
        ("provenance/config", "c1", "provenance.config says 'c1'"),
        ("provenance/numpy", "certified by the authority", "provenance.numpy is no version"),
        ("provenance/seal", "1.0", "provenance.seal says '1.0'"),
        ("ledger/0/noise_multiplier", 50.0, "the ledger file lacks images of round"),
        ("ledger/0/noise_standard_deviation", 1.0, "ledger[0].noise_standard_deviation says 1"),
        ("ledger/0/rounds", [1, 2], "the report lacks images of round 2"),
        ("ledger/0/unaccounted", "start images", "verdict.formal says True"),
        ("ledger_heads/client-000/rows", 2, "has 3 rows, the report speaks of 2"),
        ("ledger_heads/client-000/chain", "0" * 32, "they are other rows"),
        ("ledger_heads/client-000/rows_before", 1, "client-000.rows_before says 1"),
        ("ledger_kept", True, "ledger_kept says True"),
        ("adjacency", "neighbours", "adjacency says"),
        ("deviations", ["none whatsoever"], "deviations has 1 entries"),
    ],
)
def test_every_edit_is_found(run: Case, path: str, value: Any, text: str) -> None:
    found = run.edited(put(path, value))
    assert any(text in problem for problem in found), found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("guarantee/worst_client", "guarantee.worst_client is missing"),
        ("guarantee/groups", "guarantee.groups is missing"),
        ("guarantee/groups/0", "guarantee.groups has 1 entries"),
        ("not_covered/timing", "not_covered.timing is missing"),
        ("ledger/1", "the report lacks images of round"),
        ("ledger_heads/client-001", "a ledger of client-001, whom the report does not name"),
        ("provenance/numpy", "provenance.numpy says nothing"),
    ],
)
def test_everything_that_is_left_out_is_found(run: Case, path: str, text: str) -> None:
    found = run.edited(drop(path))
    assert any(text in problem for problem in found), found


def audit(**values: Any) -> dict[str, Any]:
    facts = {
        "command": "fedsynth privacy audit --method feddm --canaries 1000",
        "method": "feddm",
        "mechanism": "residual",
        "canaries": 1000,
        "guesses": 400,
        "correct": 260,
        "confidence": 0.999,
        "delta": 1e-5,
        "epsilon_lower_bound": epsilon_lower_bound(260, 400, 1000, 1e-5, 0.999),
    }
    return {"text": audit_text(facts), **facts, **values}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"epsilon_lower_bound": 0.01}, "audit.epsilon_lower_bound says 0.01, its counts give"),
        ({"correct": 200}, "audit.epsilon_lower_bound"),
        ({"correct": 401}, "audit: correct must be from 0 to guesses"),
        ({"canaries": 10**400}, "audit.Audit.canaries is wrong"),
        ({"text": "proves privacy"}, "audit.text says 'proves privacy'"),
        ({"command": "rm -rf /"}, "audit.command is no audit's command"),
        ({"command": "fedsynth privacy audit\nall is well"}, "audit.command is no"),
        ({"correct": 400, "confidence": 0.5}, "audit: ε is at least"),
        ({"confidence": 1.0}, "audit: confidence and delta must be in (0, 1)"),
        ({"confidence": 0.5}, "audit.epsilon_lower_bound"),
        ({"method": "fedavg"}, "audit.method says 'fedavg'"),
        ({"mechanism": "gradient"}, "audit.mechanism says"),
        ({"delta": 1e-6}, "audit.delta says"),
        ({"seal": "x"}, "audit.Audit.seal is no key"),
    ],
)
def test_an_audits_bound_follows_from_its_counts(
    run: Case, values: dict[str, Any], text: str
) -> None:
    assert run.edited(lambda r: r.update(audit=audit())) == []
    found = run.edited(lambda r: r.update(audit=audit(**values)))
    assert any(text in problem for problem in found), found


def test_ledger_files_must_hold_these_rows_and_no_others(run: Case) -> None:
    files = run.folder / "ledger"
    run.ledgers["client-001"].charge(row(2, quantity="counts"))
    assert run.problems() == [
        "client-001: the ledger file has 2 rows, the report speaks of 1",
        "client-001: the report lacks counts of round 2, which the ledger file holds",
    ]
    assert run.problems(exact=False) == []  # a kept ledger may have grown since
    (files / "client-001.jsonl").rename(files / "client-002.jsonl")
    found = " ".join(run.problems())
    assert "client-002.jsonl is the ledger of 'client-001'" in found
    assert "has no ledger of client-001" in found
    (files / "client-002.jsonl").unlink()
    assert any("has no ledger of client-001" in problem for problem in run.problems())
    Ledger("client-005", files / "client-005.jsonl", dataset="d")
    assert any("has a ledger of client-005" in problem for problem in run.problems())
    assert not any("client-005" in problem for problem in run.problems(exact=False))


def test_a_kept_ledger_is_compared_as_far_as_the_chain_says_that_it_is_the_same(
    run: Case, tmp_path: Path
) -> None:
    """Catches: a report that hides a ledger's last rows by calling it kept; a ledger that was
    begun anew with other rows."""
    hide: Callable[[Any], None] = lambda r: r["ledger"][0]["rounds"].pop()  # noqa: E731
    assert any("the report lacks" in problem for problem in run.edited(hide))
    assert any("the report lacks" in problem for problem in run.problems(exact=False))
    other = tmp_path / "other"
    for name in run.ledgers:
        begun = Ledger(name, other / f"{name}.jsonl", dataset="d")
        for each in run.ledgers[name].releases:
            begun.charge(replace(each, clipped="residual again"))
    assert any("they are other rows" in problem for problem in run.problems(other, exact=False))


def test_chain_hashes_name_the_rows_before_them(tmp_path: Path) -> None:
    ledger = Ledger("a", tmp_path / "a.jsonl")
    ledger.charge(row(1))
    early = chain_hashes(tmp_path / "a.jsonl")
    ledger.charge(row(2))
    hashes = chain_hashes(tmp_path / "a.jsonl")
    assert (len(hashes), hashes[:2]) == (3, early)
    assert hashes[-1] == json.loads((tmp_path / "a.jsonl").read_text().splitlines()[-1])["chain"]
    with pytest.raises(PrivacyError, match="not a fedsynth ledger"):
        chain_hashes(tmp_path / "none.jsonl")


@pytest.mark.parametrize("text", [b"{}\n", b"", b"[" * 100_000, b'{"client": 5}\n', b"\xff\n"])
def test_a_damaged_ledger_file_is_named(run: Case, text: bytes) -> None:
    file = run.folder / "ledger" / "client-001.jsonl"
    file.write_bytes(text)
    found = run.problems()
    assert any("client-001.jsonl" in problem for problem in found), found
    with pytest.raises(PrivacyError):
        read_ledger(file)


DEEP = '{"schema_version": 3, "unit": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a privacy report"),
        ("{", "not a privacy report"),
        ("", "not a privacy report"),
        ('{"schema_version": 2}', "schema 2"),
        ('{"schema_version": true}', "schema True"),
        ('{"schema_version": [3]}', "schema"),
        ("{}", "schema None"),
        ('{"schema_version": 3, "x": NaN}', "NaN is no number"),
        ('{"schema_version": 3, "x": -Infinity}', "-Infinity is no number"),
        ('{"schema_version": 3, "x": 1e999}', "too large"),
        ('{"schema_version": 3, "x": ' + "9" * 10_000 + "}", "not a privacy report"),
        ('{"schema_version": 3, "x": {"a": 1, "a": 2}}', "a key stands twice"),
        ('{"schema_version": 3, "x": "\\ud800"}', "not a privacy report"),
        (DEEP, "not a privacy report"),
    ],
)
def test_what_is_no_report_is_one_line(run: Case, text: str, message: str) -> None:
    (run.folder / "privacy_report.json").write_text(text)
    with pytest.raises(PrivacyError, match=message) as error:
        read_report(run.folder)
    assert len(str(error.value)) < 1000
    with pytest.raises(PrivacyError, match="cannot read"):
        read_report(run.folder / "nowhere")


@pytest.mark.parametrize(
    "change",
    [
        drop("verdict"),
        drop("guarantee/delta"),
        put("guarantee", [1]),
        put("guarantee/epsilon", 1e-320),
        put("guarantee/epsilon", -1.0),
        put("guarantee/delta", -1.0),
        put("guarantee/epsilon_of_delta/0/delta", 0.0),
        put("guarantee/epsilon_by_round", []),
        put("guarantee/epsilon_by_round/0/clients", {}),
        put("budget/epsilon_cap", "1"),
        put("budget/epsilon_spent", 10**400),
        put("ledger/0/rounds", []),
        put("ledger/0/rounds", [-1]),
        put("ledger/0/sampler", "shuffle"),
        put("ledger/0/steps", 10**400),
        put("ledger/0/sensitivity", 10**400),
        put("ledger/0/unaccounted", ["x"]),
        put("ledger_heads/client-000/rows", -1),
        put("ledger_heads/client-000/rows_before", 10**30),
        put("published", [{"\x1b[2J": "x"}, {}]),
        put("published", [{}, {"\x1b[2J": "x"}]),
        put("unit", {"x" * 100_000: "<script>"}),
    ],
)
def test_hostile_reports_are_a_mismatch_or_an_error_and_no_traceback(
    run: Case, change: Callable[[Any], None]
) -> None:
    report = json.loads((run.folder / "privacy_report.json").read_text())
    change(report)
    (run.folder / "privacy_report.json").write_text(json.dumps(report))
    try:
        found = run.problems()
    except PrivacyError as error:
        found = [str(error)]
    assert found
    assert all(len(problem) < 2000 for problem in found)


def test_a_report_of_the_wrong_shape_cannot_be_rendered(run: Case) -> None:
    assert sound_report(run.folder)["method"] == "feddm"
    run.edited(lambda r: r.pop("unit"))
    with pytest.raises(PrivacyError, match="unit is missing"):
        sound_report(run.folder)


def test_edited_and_missing_pages_are_found(run: Case) -> None:
    page = run.folder / "privacy_report.md"
    page.write_text(page.read_text().replace("ε = ", "ε = 0."))
    (run.folder / "privacy_report.html").write_bytes(b"\xff")
    assert [problem.split()[0] for problem in run.problems()] == [
        "privacy_report.md",
        "privacy_report.html",
    ]
    page.unlink()
    assert any("privacy_report.md cannot be read" in problem for problem in run.problems())


def test_ledgers_that_may_only_be_read_can_be_verified(
    run: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening for writing would fail for an auditor (as root it does not, so the flags are
    watched)."""
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
    assert run.problems() == []
    assert not any(flags & (os.O_RDWR | os.O_WRONLY) for flags in opened)


def test_without_ledger_files_the_reports_own_rows_count(run: Case) -> None:
    report = read_report(run.folder)
    held = held_rows(report, None, exact=False)
    assert "no ledger file was compared" in held.note
    assert held.problems + report_problems(report, run.context, held) == []
    report["ledger_heads"]["client-000"]["rows"] = 2
    assert held_rows(report, None, exact=False).problems == [
        "client-000: the report has 3 rows, and its ledger head 2"
    ]


def test_rows_out_of_the_rounds_order_fold_to_the_same_report(tmp_path: Path) -> None:
    """A kept ledger holds several runs: round 3 of one before round 1 of the next."""
    ledgers = {name: Ledger(name) for name in ("a", "b")}
    for each in (row(3), row(1, 7.0), row(1, 7.0, "counts"), row(2, 7.0)):
        ledgers["a"].charge(each)
    for each in (row(1, 7.0, "counts"), row(3)):
        ledgers["b"].charge(each)
    report = json.loads(
        json.dumps(build_report(CONTEXT, [one.history() for one in ledgers.values()]))
    )
    held = held_rows(report, None, exact=False)
    assert report_problems(report, CONTEXT, held) == []


def test_a_report_without_a_guarantee_verifies_and_cannot_be_given_one(tmp_path: Path) -> None:
    context = ReportContext("feddm", "paper", 1e-5, 1000, None, 1, 1, {})
    run = Case(tmp_path, context)
    for name in run.ledgers:
        run.ledgers[name].charge(
            Release(3, "images", "paper", "batch", 1.0, 5.0, 1.0, "full", 10, 10, "as printed")
        )
    write_report(build_report(context, [one.history() for one in run.ledgers.values()]), tmp_path)
    assert run.problems() == []
    formal = "formal differential privacy, under the assumptions below"
    found = run.edited(lambda r: r["verdict"].update(text=formal, formal=True))
    assert [problem.split()[0] for problem in found] == ["verdict.text", "verdict.formal"]


@pytest.mark.parametrize(
    ("expected", "stated", "same"),
    [
        (1.0, 1.0 + 1e-9, True),
        (1.0, 1.001, False),
        (1.0, 1, True),
        (1.0, 10**400, False),
        (1, 1, True),
        (1, True, False),
        (True, 1, False),
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
