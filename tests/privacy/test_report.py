"""Tests of the report: its figures follow from the ledgers, it states no ε without a guarantee, its
pages escape all texts, and verification finds hostile reports. Tests of tampered runs are in
`tests/results/test_tampering.py`."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsynth import formatting
from fedsynth.errors import PrivacyError, PrivacySettingError
from fedsynth.formatting import format_epsilon, format_odds, format_percent
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.audit_bounds import attack_success, best_guess
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import RECORD, USER, Release
from fedsynth.privacy.report import figures
from fedsynth.privacy.report.build import build_report, group_epsilon, write_report
from fedsynth.privacy.report.file import read_ledger_rows, read_report, sound_report
from fedsynth.privacy.report.pages import render_html, render_markdown, summary_rows
from fedsynth.privacy.report.verify import differences, page_problems, report_problems
from tests.html_page import Page
from tests.privacy.support import audit, facts, release
from tests.results.test_tampering import set_at

DELTA = 1e-5
Report = dict[str, Any]
FACTS: dict[str, Any] = {
    "max_records": 60_000,
    "epsilon_cap": 8.0,
    "published": [{"setting": "σ = 5", "printed": "ε = 0.921"}],
    "provenance": {"config": "c0", "fedsynth": "0.1.0"},
    "noise_multiplier": 5.0,
}


def row(number: int = 0, sigma: float = 5.0, q: float = 1.0, **values: Any) -> Release:
    fields = {"steps": 2, **values}
    return release(round=number, noise_multiplier=sigma, sample_rate=q, **fields)


STARTS = {"b": figures.LedgerStart(rows=1, chain=None)}
ROWS = {"a": [row(n) for n in range(4)], "b": [row(0), row(1)], "c": [row(n) for n in range(4)]}


def built(rows: Mapping[str, Sequence[Release]], **values: Any) -> Report:
    histories = [History(name, tuple(releases)) for name, releases in rows.items()]
    report: Report = json.loads(json.dumps(build_report(facts(**values), histories, STARTS)))
    assert figures.schema_problems(report) == []
    return report


def build(rows: Mapping[str, Sequence[Release]] = ROWS, **values: Any) -> Report:
    return built(rows, **{**FACTS, **values})


def test_guarantee_matches_ledgers() -> None:
    report = build()
    promise = report["guarantee"]
    spent, smaller = epsilon(ROWS["a"], DELTA), epsilon(ROWS["b"], DELTA)
    assert f"ε = {format_epsilon(spent)} " in render_markdown(report)
    assert (promise["epsilon"], promise["delta"], promise["worst_client"]) == (spent, DELTA, "a")
    assert promise["epsilon_by_client"] == {"a": spent, "b": smaller, "c": spent}
    first, *_, last = promise["epsilon_by_round"]
    assert first["worst"] == epsilon([row(0)], DELTA)
    assert last == {"round": 3, "worst": spent}
    assert [entry["epsilon"] for entry in promise["epsilon_of_each_release_alone"]] == [spent]
    for entry in promise["attack_success"]:
        success = attack_success(ROWS["a"], entry["false_positive_rate"])
        assert entry["true_positive_rate_at_most"] == success
    assert promise["best_guess_at_most"] == best_guess(ROWS["a"])
    assert report["accountant"]["rdp_epsilon"] >= spent
    heads = report["ledger_heads"]
    assert [(h["rows"], h["rows_before"]) for h in heads.values()] == [(4, 0), (2, 1), (4, 0)]


def test_reported_ledger_is_folded_and_complete() -> None:
    entries = build()["ledger"]
    folded = [(entry["clients"], entry["rounds"]) for entry in entries]
    assert folded == [(["a", "c"], [0, 1, 2, 3]), (["b"], [0, 1])]
    fields = {k: v for k, v in entries[0].items() if k not in ("clients", "rounds")}
    assert [Release.from_json({**fields, "round": n}) for n in range(4)] == ROWS["a"]
    repeated = build({"a": [row(0), row(1), row(1)]})
    assert repeated["ledger"][0]["rounds"] == [0, 1, 1]
    assert "charged more than once: 1" in render_markdown(repeated)


def check_no_epsilon(report: Report) -> None:
    """Checks that the JSON values, the Markdown and the terminal table contain no ε."""
    assert report["guarantee"] is None
    assert report["published"] == []
    texts = (json.dumps(report, ensure_ascii=False), render_markdown(report))
    for text in (*texts, repr(summary_rows(report))):
        remaining = text.replace("No ε is stated", "").replace('"epsilon_cap"', "")
        remaining = remaining.replace('"rdp_epsilon": null', "")
        assert not re.search(r"ε|\bepsilon", remaining)


SENT = figures.Access(access="class list", status="unaccounted", note="sent as it is")


@pytest.mark.parametrize(
    ("values", "rows", "reason"),
    [
        ({"verdict": figures.Verdict(reasons=["it clips the mean"])}, [row()], "it clips the mean"),
        ({}, [row(), row(1, unaccounted="real images")], "real images"),
        ({}, [row(0, sigma=0.0)], "without noise"),
        ({"scope": [SENT]}, [row()], "sent as it is"),
        ({"test_only_randomness": True}, [row()], "A test supplied the noise"),
    ],
)
def test_no_epsilon_is_reported_without_guarantee(values: Any, rows: Any, reason: str) -> None:
    report = build({"a": rows}, **values, epsilon_cap=None)
    assert not report["verdict"]["formal"]
    text = render_markdown(report)
    assert reason in text
    assert "guarantees no protection to anyone" in text
    assert "This report protects no file" in text
    assert summary_rows(report)[0][0] == "verdict"
    check_no_epsilon(report)


def test_guarantee_requires_ledger_and_valid_settings() -> None:
    check_no_epsilon(build({}, verdict=figures.Verdict(reasons=["a reason"]), epsilon_cap=None))
    for values, rows, message in (
        ({}, {}, "ledger"),
        ({"max_records": 10**7}, ROWS, "max_records"),
        ({"adjacency": "neighbours"}, ROWS, "adjacency"),
    ):
        with pytest.raises(PrivacySettingError, match=message):
            build(rows, **values)


@pytest.mark.parametrize(
    ("values", "sigma", "message"),
    [
        ({}, 0.4, "This ε is above 10"),
        ({"max_records": None}, 5.0, "δ was not checked"),
        ({"abandoned": True, "rounds_done": 1}, 5.0, "This run did not finish"),
        ({"verdict": figures.Verdict(reasons=["a reason"], warnings=["a doubt"])}, 5.0, "a doubt"),
    ],
)
def test_report_contains_warnings(values: dict[str, Any], sigma: float, message: str) -> None:
    report = build({"a": [row(n, sigma) for n in range(4)]}, **values)
    assert message in render_markdown(report)
    assert any(message in text for name, text in summary_rows(report) if name == "warning")
    assert message not in render_markdown(build())


def test_group_epsilon_is_exact_without_sampling() -> None:
    bound, exact = group_epsilon([row(0, 5.0)], DELTA, 2, "add-remove")
    assert exact
    assert bound == pytest.approx(epsilon([row(0, 2.5)], DELTA))
    sampled = [row(0, 6.0, 0.05)]
    chained, _ = group_epsilon(sampled, DELTA, 2, "add-remove")
    assert 2 * epsilon(sampled, DELTA) <= chained
    assert chained <= group_epsilon([row(0, 6.0)], DELTA, 2, "add-remove")[0]
    unbounded = [row(n, 1.0, 0.4) for n in range(40)]
    assert group_epsilon(unbounded, DELTA, 5, "add-remove") == (math.inf, False)


def test_figures_are_those_of_worst_client() -> None:
    """The order of the two clients depends on δ."""
    rows = {"a": [row(0, 0.9, 0.01, steps=600)], "b": [row(0, 2.2, steps=1)]}
    promise = build(rows)["guarantee"]
    worst_clients = set()
    for point in promise["epsilon_of_delta"]:
        spent = {name: epsilon(log, point["delta"]) for name, log in rows.items()}
        assert point["epsilon"] == max(spent.values())
        worst_clients.add(max(spent, key=lambda name: spent[name]))
    assert worst_clients == {"a", "b"}
    for attack in promise["attack_success"]:
        rate = attack["false_positive_rate"]
        highest = max(attack_success(log, rate) for log in rows.values())
        assert attack["true_positive_rate_at_most"] == highest
    for group in promise["groups"]:
        bounds = [group_epsilon(log, DELTA, group["units"], "add-remove") for log in rows.values()]
        assert (group["epsilon"] or math.inf, group["exact"]) == max(bounds)


def test_write_report_replaces_files(tmp_path: Path) -> None:
    ledger = Ledger("a", tmp_path / "a.jsonl")
    ledger.charge(row(0))
    report = build_report(facts(**FACTS), [ledger.history()])
    line = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[-1])
    assert report["ledger_heads"]["a"]["chain"] == line["chain"]
    for _ in range(2):  # the second write replaces all and leaves no temporary file
        write_report(report, tmp_path / "run")
        _, data, text = sorted((tmp_path / "run").iterdir())
    assert json.loads(data.read_text()) == report
    assert text.read_text() == render_markdown(report)
    with pytest.raises(FileExistsError):
        write_report(report, data)


# ------------------------------------------------------------------------------------------ pages

ROW = release(mechanism="features", clipped="u", noise_multiplier=9.0, sensitivity=1.0)


def page_report(*rows: Release, clients: int = 2, **values: Any) -> Report:
    return built({f"client-{k:03d}": rows or (ROW,) for k in range(clients)}, **values)


def test_first_page_describes_run() -> None:
    run = figures.RunFacts(
        id="20260102-030405-feddm-scans",
        responsible="Klinikum Mitte",
        sites={"client-000": "Mitte", "client-001": "Nord"},
    )
    items, files = {"data set": "the operator's own"}, {"model.safetensors": "ab" * 32}
    report = page_report(run=run, public_items=items, files=files)
    text, _, datasheet = render_markdown(report).partition("# Datasheet")
    assert datasheet
    for expected in (
        "| run | 20260102-030405-feddm-scans |",
        "| responsible | Klinikum Mitte |",
        "the operator's own",
        "| sites | 2: Mitte (client-000), Nord (client-001) |",
        "a federation with method feddm",
        f"| model.safetensors | the trained model | `{'ab' * 32}` |",
    ):
        assert expected in text, expected
    assert "| responsible | not stated |" in render_markdown(page_report())
    site = figures.RunFacts(sites={"client-000": "Mitte, Nord"})
    solo = render_markdown(page_report(clients=1, run=site))
    assert "a computation of one data owner with method feddm" in solo
    assert "| sites | Mitte, Nord |" in solo
    assert "a federation" not in solo


@pytest.mark.parametrize("unit", [USER, RECORD])
def test_report_of_one_owner_has_no_words_of_federations(unit: str) -> None:
    values = {"unit": figures.Unit(kind=unit, person="patient"), "max_records": 9}
    report = page_report(replace(ROW, unit=unit), clients=1, abandoned=True, **values)
    page, _, datasheet = render_markdown(report).partition("# Datasheet")
    summary = str(summary_rows(report))
    words = r"client(?!-000|s \|)|operator|federation|at (?:one|that|each) site|a site responds"
    for text in (page, datasheet, summary):
        assert not re.findall(rf".*(?:{words}).*", text, re.IGNORECASE)
    assert "client" not in page
    assert "examples at several sites: all examples count together" in page
    federated = page_report(replace(ROW, unit=unit), clients=1, simulated=False, **values)
    assert "the values hold for each site separately" in render_markdown(federated)
    assert "of one client" in render_markdown(federated)  # an owner's report of a federation


def test_user_level_reports_name_persons() -> None:
    person = figures.Unit(kind=USER, person="patient", user_records=4)
    by_person = replace(ROW, unit=USER, clipped="residual of each example")
    report = page_report(by_person, unit=person)
    text = render_markdown(report)
    for expected in (
        "for one patient of one client",
        "averaged over each patient's examples",
        "- examples of a patient: at most 4, by a public choice",
    ):
        assert expected in text, expected
    assert not re.search(r"\buser", text.replace("privacy.unit=user", ""))
    assert "one example" not in text
    assert "ONE PATIENT OF ONE CLIENT" in dict(summary_rows(report))["protects"]


@given(st.floats(1e-6, 13))
def test_printed_figures_are_rounded_up(epsilon: float) -> None:
    assert float(format_odds(epsilon).replace(",", "")) >= math.exp(epsilon) * (1 - 1e-9)
    assert float(format_epsilon(epsilon)) >= epsilon * (1 - 1e-9)
    assert float(format_percent(epsilon / 13).strip("…")) >= min(100 * epsilon / 13, 99.99) - 1e-9
    assert [format_epsilon(value) for value in (8.941, 8.0, 10602.16)] == ["8.95", "8", "10,700"]


def test_events_and_audit_are_reported() -> None:
    events = [
        figures.Event(kind="absent", client="2", why="it is ill"),
        figures.Event(kind="resumed", rounds_done=1),
        figures.Event.ended(1, ("client-000", 3.0511, 4.6), "in words"),
        figures.Event.ended(1, None, "its owner's cap"),
    ]
    text = render_markdown(page_report(events=events, epsilon_cap=4.0, abandoned=True))
    for expected in (
        "client 2 did not take part: it is ill",
        "client client-000: ε is 3.06 now and would be 4.6 with the next round, above the cap 4",
        "ended after 1 of 2 rounds: its owner's cap",
        "abandoned after 2 of 2 rounds",
    ):
        assert expected in text, expected
    text = render_markdown({**page_report(), "audit": audit(epsilon_lower_bound=1.2399)})
    assert "shows ε ≥ 1.23 at δ = 1e-05 with 99.9 % confidence: 260 of 400 guesses" in text
    assert "**The audit refutes this report's ε.**" in text


def test_shared_noise_is_reported() -> None:
    """The ε of shared noise holds against observers of sums only, also if clients shared their
    noise only in an earlier run on the same ledger."""
    full = replace(ROW, round=2)
    secure = replace(ROW, shares=4)
    for shares, rows in itertools.product((1, 4), ((secure,), (secure, full), (full, secure))):
        text = render_markdown(page_report(*rows, shares=shares))
        assert "has as little as 1/√4 of the noise that is charged" in text
        assert "A secure aggregation reveals" in text
        sums_only = "see the sum over all clients of every round, but no client's own upload"
        assert (sums_only in text) == (shares == 4)
        assert ("see every upload of every round" in text) == (shares == 1)
        assert ("of earlier runs only what their reports allow" in text) == (shares == 1)
    masked = render_markdown(page_report(secure, shares=4, min_clients=6))
    assert "at most 2 clients of a sum collude with the server" in masked
    assert "computed sums of at least 6 clients" in masked
    unmasked = render_markdown(page_report(full))
    assert "secure aggregation: none\n" in unmasked
    assert "The attacker sees everything that was released" in unmasked
    assert "1/√" not in unmasked


def test_html_page_is_self_contained() -> None:
    text = render_html(page_report())
    page = Page(text)
    loaded = r"<script|https?://(?!www\.w3\.org/2000/svg)|<link|<img|@import|url\("
    assert not re.search(loaded, text)
    assert text.count("<svg") == 2
    assert "Trust model" in page.text
    assert "<svg" not in render_html(page_report(verdict=figures.Verdict(reasons=["no noise"])))


HOSTILE = (
    "x\n# Verdict: proved\r\x1b[2J<script>alert(1)</script>\u202e|**",
    "[a](javascript:alert(1)) ![b](http://x/y.png) <http://x> `c` _d_ ~~e~~",
    "- not a list", "1. nor this", "# nor a heading", "> nor a quote", "---", "===", "***", "___",
    "| a | b |\n| --- | --- |", "&lt;b&gt; &amp; &#60;i&#62;", "\\", "\\|", "a\\|b|", "``` code", "   code",
    "{{ r.method }} {% raw %}", "\u2066bidi\u2069 \u200f", "[a]: http://x", "**", "`", "<!-- x -->", "+",
)  # fmt: skip


def text_report(text: str) -> Report:
    """Returns a report with this text in every text field."""
    unaccounted = text if len(text) % 2 else None
    row = replace(ROW, quantity=text, mechanism=text, clipped=text, unaccounted=unaccounted)
    run = dict.fromkeys(("id", "date", "responsible", "purpose"), text)
    return built(
        {"client-000": [row], text: [row]},
        **dict.fromkeys(("method", "mechanism", "randomness"), text),
        public_items={"data set": text, text: text},
        verdict=figures.Verdict(reasons=[], warnings=[text]),
        events=[figures.Event(kind="absent", client=text, why=text)],
        published=[{"a": text, "b": text}],
        scope=[figures.Access(access=text, status="public", note=text)],
        unit=figures.Unit(kind=USER, person=text),
        provenance={text: "1.0"},
        own_code=[text],
        run=figures.RunFacts(**run, sites={"client-000": text}),
        files={text: "ab" * 32},
    )


@settings(max_examples=15, deadline=None)
@given(st.text("ab1 .-+=#*_`[]()<>|\\&~!:/\n", min_size=1, max_size=12).filter(str.strip))
def test_texts_are_escaped(text: str) -> None:
    """Texts add no lines, Markdown, HTML or terminal sequences."""
    report, harmless = (text_report(text), text_report("plain" if len(text) % 2 else "even"))
    markdown, html = render_markdown(report), render_html(report)
    assert markdown.replace("\n", "").isprintable()
    assert html.replace("\n", "").isprintable()
    assert markdown.count("\n") == render_markdown(harmless).count("\n")
    page = Page(html)
    assert page.tags == Page(render_html(harmless)).tags  # no text became a tag, a list or a link
    printed = " ".join(formatting.printable(text).split())
    assert not printed or " ".join(page.text.split()).count(printed) >= 20
    assert dict(summary_rows(report))["mechanism"] == text


for hostile_text in HOSTILE:
    test_texts_are_escaped = example(hostile_text)(test_texts_are_escaped)


# ----------------------------------------------------------------------------------- verification


def problems(report: Any) -> list[str]:
    if shape := figures.schema_problems(report):
        return shape
    ledger_rows = read_ledger_rows(report, None, exact=False)
    differing = report_problems(report, facts(**FACTS), ledger_rows, STARTS)
    return [problem.text for problem in ledger_rows.problems + differing]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"correct": 200}, "audit.epsilon_lower_bound"),
        ({"correct": 401}, "audit section is damaged: correct must satisfy 0 <= correct"),
        ({"canaries": 10**400}, "audit.canaries is invalid"),
        ({"command": "fedsynth privacy audit\nall is well"}, "audit.command is invalid"),
        ({"correct": 400, "confidence": 0.5}, "the audit's lower bound on ε"),
        ({"confidence": 1.0}, "audit.confidence is invalid"),
        ({"method": "fedavg"}, "audit.method is 'fedavg'"),
        ({"delta": 1e-6}, "audit.delta is"),
        ({"seal": "x"}, "audit.seal is an unknown key"),
    ],
)
def test_audit_bound_matches_counts(values: dict[str, Any], text: str) -> None:
    report = build()
    assert problems({**report, "audit": audit()}) == []
    reported = problems({**report, "audit": audit(**values)})
    assert any(text in problem for problem in reported), reported


def test_unordered_rounds_fold_to_same_report() -> None:
    """A ledger of several runs has round 3 of a run before round 1 of the next."""
    rows = {
        "a": (row(3), row(1, 7.0), row(1, 7.0, quantity="counts"), row(2, 7.0), row(2, 7.0)),
        "b": (row(1, 7.0, quantity="counts"), row(3)),
    }
    assert problems(build(rows)) == []


DEEP = '{"schema_version": 4, "unit": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "not a valid privacy report") for text in ("[]", "", DEEP)),
        ('{"schema_version": 4, "x": NaN}', "NaN is not valid JSON"),
        ('{"schema_version": 4, "x": 1e999}', "above the largest float"),
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
        ("ledger_heads/a/rows", -1),
        ("ledger_heads/a/rows_before", 10**30),
        ("published", [{"\x1b[2J": "x"}, {}]),
        ("unit", {"x" * 100_000: "<script>"}),
    ],
)
def test_hostile_reports_are_reported_as_problems(path: str, value: Any, tmp_path: Path) -> None:
    report = build()
    set_at(report, path, value)
    try:
        reported = problems(report)
    except PrivacyError as error:
        reported = [str(error)]
    assert reported
    assert all(len(problem) < 2000 for problem in reported)
    if not figures.schema_problems(report):
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
