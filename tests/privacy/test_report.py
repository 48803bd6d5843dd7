"""The report: every figure follows from the ledgers, without a guarantee there is no ε, and on its
pages whatever a report's texts are, they stay texts."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.audit import attack_success, best_guess
from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import USER, Release
from fedsynth.privacy.report.build import build_report, group_epsilon, write_report
from fedsynth.privacy.report.figures import (
    Access,
    Event,
    LedgerStart,
    ReportFacts,
    RunFacts,
    Unit,
    Verdict,
    schema_problems,
)
from fedsynth.privacy.report.formatting import (
    format_epsilon,
    format_odds,
    format_percent,
    printable,
)
from fedsynth.privacy.report.pages import render_html, render_markdown, summary_rows
from tests.html_page import Page
from tests.privacy.support import audit, facts, release

DELTA = 1e-5
Report = dict[str, Any]
FACTS = facts(
    max_records=60_000,
    epsilon_cap=8.0,
    published=[{"setting": "σ = 5", "printed": "ε = 0.921"}],
    provenance={"config": "c0", "fedsynth": "0.1.0"},
    noise_multiplier=5.0,
)
UNACCOUNTED = Access(access="class list", status="unaccounted", note="sent as it is")


def row(number: int = 0, sigma: float = 5.0, q: float = 1.0, **values: Any) -> Release:
    fields = {"steps": 2, **values}
    return release(round=number, noise_multiplier=sigma, sample_rate=q, **fields)


def about(**values: Any) -> ReportFacts:
    return FACTS.model_copy(update=values)


ROWS = {"a": [row(n) for n in range(4)], "b": [row(0), row(1)], "c": [row(n) for n in range(4)]}


def build(stated: ReportFacts = FACTS, rows: dict[str, list[Release]] = ROWS) -> Report:
    histories = [History(name, tuple(each)) for name, each in rows.items()]
    report = build_report(stated, histories, {"b": LedgerStart(rows=1, chain=None)})
    assert schema_problems(json.loads(json.dumps(report))) == []
    return report


def test_the_guarantee_follows_from_the_ledgers() -> None:
    report = build()
    promise = report["guarantee"]
    spent, less = epsilon(ROWS["a"], DELTA), epsilon(ROWS["b"], DELTA)
    assert f"ε = {format_epsilon(spent)} " in render_markdown(report)
    assert (promise["epsilon"], promise["delta"], promise["worst_client"]) == (spent, DELTA, "a")
    assert promise["epsilon_by_client"] == {"a": spent, "b": less, "c": spent}
    first, *_, last = promise["epsilon_by_round"]
    assert first["worst"] == epsilon([row(0)], DELTA)
    assert last == {"round": 3, "worst": spent}
    assert [one["epsilon"] for one in promise["epsilon_of_each_release_alone"]] == [spent]
    attacks = [tuple(one.values()) for one in promise["attack_success"]]
    assert attacks == list(attack_success(ROWS["a"]).items())
    assert promise["best_guess_at_most"] == best_guess(ROWS["a"])
    assert report["accountant"]["rdp_epsilon"] >= spent
    heads = report["ledger_heads"]
    assert [(one["rows"], one["rows_before"]) for one in heads.values()] == [(4, 0), (2, 1), (4, 0)]


def test_the_ledger_is_folded_and_complete() -> None:
    entries = build()["ledger"]
    found = [(one["clients"], one["rounds"]) for one in entries]
    assert found == [(["a", "c"], [0, 1, 2, 3]), (["b"], [0, 1])]
    fields = {k: v for k, v in entries[0].items() if k not in ("clients", "rounds")}
    assert [Release.from_json({**fields, "round": n}) for n in range(4)] == ROWS["a"]
    repeated = build(rows={"a": [row(0), row(1), row(1)]})
    assert repeated["ledger"][0]["rounds"] == [0, 1, 1]
    assert "charged more than once: 1" in render_markdown(repeated)


def no_epsilon(report: Report) -> None:
    """No ε anywhere: not in the JSON's values, the Markdown or the terminal's table."""
    assert report["guarantee"] is None
    assert report["published"] == []
    texts = (json.dumps(report, ensure_ascii=False), render_markdown(report))
    for text in (*texts, repr(summary_rows(report))):
        shown = text.replace("No ε is stated", "").replace('"epsilon_cap"', "")
        shown = shown.replace('"rdp_epsilon": null', "")
        assert not re.search(r"ε|\bepsilon", shown)


@pytest.mark.parametrize(
    ("values", "rows", "reason"),
    [
        ({"verdict": Verdict(reasons=["it clips the mean"])}, [row()], "it clips the mean"),
        ({}, [row(), row(1, unaccounted="real images")], "real images"),
        ({}, [row(0, sigma=0.0)], "without noise"),
        ({"scope": [UNACCOUNTED]}, [row()], "sent as it is"),
        ({"test_only_randomness": True}, [row()], "A test supplied the noise"),
    ],
)
def test_without_a_guarantee_no_epsilon_is_stated(
    values: dict[str, Any], rows: list[Release], reason: str
) -> None:
    report = build(about(**values, epsilon_cap=None), {"a": rows})
    assert not report["verdict"]["formal"]
    text = render_markdown(report)
    assert reason in text
    assert "guarantees no protection to anyone" in text
    assert "This report protects no file" in text
    assert summary_rows(report)[0][0] == "verdict"
    no_epsilon(report)


def test_a_guarantee_needs_a_ledger_and_a_delta_in_range() -> None:
    no_epsilon(build(about(verdict=Verdict(reasons=["a reason"]), epsilon_cap=None), {}))
    for values, rows, words in (
        ({}, {}, "ledger"),
        ({"max_records": 10**7}, ROWS, "max_records"),
        ({"adjacency": "neighbours"}, ROWS, "adjacency"),
    ):
        with pytest.raises(PrivacySettingError, match=words):
            build(about(**values), rows)


@pytest.mark.parametrize(
    ("values", "sigma", "words"),
    [
        ({}, 0.4, "This ε is above 10"),
        ({"max_records": None}, 5.0, "δ was not checked"),
        ({"abandoned": True, "rounds_done": 1}, 5.0, "This run did not finish"),
        ({"verdict": Verdict(reasons=["a reason"], warnings=["a doubt"])}, 5.0, "a doubt"),
    ],
)
def test_warnings_of_the_run_and_of_the_figures(
    values: dict[str, Any], sigma: float, words: str
) -> None:
    report = build(about(**values), {"a": [row(n, sigma) for n in range(4)]})
    assert words in render_markdown(report)
    assert any(words in text for name, text in summary_rows(report) if name == "warning")
    assert words not in render_markdown(build())


def test_groups_are_exact_without_sampling_and_honest_with() -> None:
    bound, exact = group_epsilon([row(0, 5.0)], DELTA, 2, "add-remove")
    assert exact
    assert bound == pytest.approx(epsilon([row(0, 2.5)], DELTA))
    few = [row(0, 6.0, 0.05)]
    chained, _ = group_epsilon(few, DELTA, 2, "add-remove")
    assert 2 * epsilon(few, DELTA) <= chained
    assert chained <= group_epsilon([row(0, 6.0)], DELTA, 2, "add-remove")[0]
    far = [row(n, 1.0, 0.4) for n in range(40)]
    assert group_epsilon(far, DELTA, 5, "add-remove") == (math.inf, False)


def test_every_figure_is_that_of_the_client_that_is_worst_there() -> None:
    """Two clients whose order depends on δ."""
    rows = {"a": [row(0, 0.9, 0.01, steps=600)], "b": [row(0, 2.2, steps=1)]}
    promise = build(rows=rows)["guarantee"]
    leaders = set()
    for point in promise["epsilon_of_delta"]:
        spent = {name: epsilon(some, point["delta"]) for name, some in rows.items()}
        assert point["epsilon"] == max(spent.values())
        leaders.add(max(spent, key=lambda name: spent[name]))
    assert leaders == {"a", "b"}
    for attack in promise["attack_success"]:
        rate = attack["false_positive_rate"]
        highest = max(attack_success(some)[rate] for some in rows.values())
        assert attack["true_positive_rate_at_most"] == highest
    for one in promise["groups"]:
        each = [group_epsilon(some, DELTA, one["units"], "add-remove") for some in rows.values()]
        assert (one["epsilon"] or math.inf, one["exact"]) == max(each)


def test_written_files(tmp_path: Path) -> None:
    kept = Ledger("a", tmp_path / "a.jsonl")
    kept.charge(row(0))
    report = build_report(FACTS, [kept.history()])
    line = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[-1])
    assert report["ledger_heads"]["a"]["chain"] == line["chain"]
    for _ in range(2):  # again: replaced, and no temporary file is left
        write_report(report, tmp_path / "run")
        _, data, text = sorted((tmp_path / "run").iterdir())
    assert json.loads(data.read_text()) == report
    assert text.read_text() == render_markdown(report)
    with pytest.raises(PrivacyError, match="cannot write"):
        write_report(report, data)


# ------------------------------------------------------------------------------------------ pages

ROW = release(mechanism="features", clipped="u", noise_multiplier=9.0, sensitivity=1.0)
PAGE_FACTS = facts(
    mechanism="features",
    public_items={"data set": "scans: the operator's own"},
    run=RunFacts(
        id="20260102-030405-feddm-scans",
        date="2026-01-02",
        responsible="Klinikum Mitte",
        purpose="triage",
        sites={"client-000": "Mitte", "client-001": "Nord"},
    ),
    files={"model.safetensors": "ab" * 32},
)


def made(*rows: Release, clients: int = 2, **values: Any) -> dict[str, Any]:
    about = PAGE_FACTS.model_copy(update=values)
    histories = [History(f"client-{k:03d}", rows or (ROW,)) for k in range(clients)]
    return build_report(about, histories)


def test_the_first_page_states_run_date_purpose_and_data() -> None:
    text, _, datasheet = render_markdown(made()).partition("# Datasheet")
    assert datasheet
    for words in (
        "| run | 20260102-030405-feddm-scans |",
        "| responsible | Klinikum Mitte |",
        "scans: the operator's own",
        "| sites | 2: Mitte (client-000), Nord (client-001) |",
        "a federation with method feddm",
        f"| model.safetensors | the trained model | `{'ab' * 32}` |",
    ):
        assert words in text, words
    assert "| responsible | not stated |" in render_markdown(made(run=RunFacts(), files={}))
    one = render_markdown(made(clients=1, run=RunFacts(sites={"client-000": "Mitte, Nord"})))
    assert "a computation of one data owner with method feddm" in one
    assert "a federation" not in one


def test_with_persons_as_units_nothing_is_said_of_examples_that_is_meant_of_persons() -> None:
    person = Unit(kind=USER, person="patient", user_records=4)
    by_person = replace(ROW, unit=USER, clipped="residual of each example")
    report = made(by_person, unit=person)
    text = render_markdown(report)
    for words in (
        "for one patient of one client",
        "averaged over each patient's examples",
        "- examples of a patient: at most 4, by a public choice",
    ):
        assert words in text, words
    assert not re.search(r"\buser", text.replace("privacy.unit=user", ""))
    assert "one example" not in text
    assert "ONE PATIENT OF ONE CLIENT" in dict(summary_rows(report))["protects"]


@given(st.floats(1e-6, 13))
def test_no_printed_figure_is_below_what_was_computed(epsilon: float) -> None:
    assert float(format_odds(epsilon).replace(",", "")) >= math.exp(epsilon) * (1 - 1e-9)
    assert float(format_epsilon(epsilon)) >= epsilon * (1 - 1e-9)
    assert float(format_percent(epsilon / 13).strip("…")) >= min(100 * epsilon / 13, 99.99) - 1e-9
    assert [format_epsilon(value) for value in (8.941, 8.0, 10602.16)] == ["8.95", "8", "10,700"]


def test_events_and_the_audit_are_reported() -> None:
    events = [
        Event(kind="absent", client="2", why="it is ill"),
        Event(kind="resumed", rounds_done=1),
        Event.ended(1, ("client-000", 3.0511, 4.6), "in words"),
        Event.ended(1, None, "its owner's cap"),
    ]
    text = render_markdown(made(events=events, epsilon_cap=4.0, abandoned=True))
    for words in (
        "client 2 did not take part: it is ill",
        "client client-000: ε is 3.06 now and would be 4.6 with the next round, above the cap 4",
        "ended after 1 of 2 rounds: its owner's cap",
        "abandoned after 2 of 2 rounds",
    ):
        assert words in text, words
    text = render_markdown({**made(), "audit": audit(epsilon_lower_bound=1.2399)})
    assert "shows ε ≥ 1.23 at δ = 1e-05 with 99.9 % confidence: 260 of 400 guesses" in text
    assert "**The audit refutes this report's ε.**" in text


def test_shared_noise_is_stated_with_every_guarantee() -> None:
    """ε of shared noise holds against those who see only sums: also where this run's clients add
    all of their own noise, and those of an earlier run on the same ledger did not."""
    own = replace(ROW, round=2)
    secure = replace(ROW, shares=4)
    for shares, rows in itertools.product((1, 4), ((secure,), (secure, own), (own, secure))):
        text = render_markdown(made(*rows, shares=shares))
        assert "has as little as 1/√4 of the noise that is charged" in text
        assert "A secure aggregation reveals" in text
        sees = "see the sum over all clients of every round, but no client's own upload"
        assert (sees in text) == (shares == 4)
        assert ("see every upload of every round" in text) == (shares == 1)
        assert ("of earlier runs only what their reports allow" in text) == (shares == 1)
    masked = render_markdown(made(secure, shares=4, min_clients=6))
    assert "at most 2 clients of a sum collude with the server" in masked
    assert "computed sums of at least 6 clients" in masked
    alone = render_markdown(made(own))
    assert "secure aggregation: none\n" in alone
    assert "The attacker sees everything that was released" in alone
    assert "1/√" not in alone


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = render_html(made())
    page = Page(text)
    loaded = r"<script|https?://(?!www\.w3\.org/2000/svg)|<link|<img|@import|url\("
    assert not re.search(loaded, text)
    assert text.count("<svg") == 2
    assert "Trust model" in page.text
    assert "<svg" not in render_html(made(verdict=Verdict(reasons=["no noise"])))


HOSTILE = (
    "x\n# Verdict: proved\r\x1b[2J<script>alert(1)</script>\u202e|**",
    "[a](javascript:alert(1)) ![b](http://x/y.png) <http://x> `c` _d_ ~~e~~",
    "- not a list", "1. nor this", "# nor a heading", "> nor a quote", "---", "===", "***", "___",
    "| a | b |\n| --- | --- |", "&lt;b&gt; &amp; &#60;i&#62;", "\\", "\\|", "a\\|b|", "``` code", "   code",
    "{{ r.method }} {% raw %}", "\u2066bidi\u2069 \u200f", "[a]: http://x", "**", "`", "<!-- x -->", "+",
)  # fmt: skip


def with_text(text: str) -> dict[str, Any]:
    """A report with a text in every place for one."""
    row = replace(ROW, quantity=text, mechanism=text, clipped=text)
    unaccounted = replace(row, unaccounted=text)
    run = dict.fromkeys(("id", "date", "responsible", "purpose"), text)
    places = {
        **dict.fromkeys(("method", "mechanism", "randomness"), text),
        "public_items": {"data set": text, text: text},
        "verdict": Verdict(reasons=[], warnings=[text]),
        "events": [Event(kind="absent", client=text, why=text)],
        "published": [{"a": text, "b": text}],
        "scope": [Access(access=text, status="public", note=text)],
        "unit": Unit(kind=USER, person=text),
        "provenance": {text: "1.0"},
        "own_code": [text],
        "run": RunFacts(**run, sites={"client-000": text}),
        "files": {text: "ab" * 32},
    }
    about = PAGE_FACTS.model_copy(update=places)
    rows = (unaccounted,) if len(text) % 2 else (row,)
    return build_report(about, [History("client-000", rows), History(text, rows)])


def stays_text(text: str) -> None:
    report, harmless = with_text(text), with_text("plain" if len(text) % 2 else "even")
    markdown, html = render_markdown(report), render_html(report)
    assert markdown.replace("\n", "").isprintable()
    assert html.replace("\n", "").isprintable()
    assert markdown.count("\n") == render_markdown(harmless).count("\n")
    page = Page(html)
    assert page.tags == Page(render_html(harmless)).tags  # nothing became a tag, a list, a link
    shown = " ".join(printable(text).split())
    assert not shown or " ".join(page.text.split()).count(shown) >= 20
    assert dict(summary_rows(report))["mechanism"] == text


def test_hostile_texts_stay_texts() -> None:
    """Texts make no line, no Markdown and no HTML of their own, and steer no terminal."""
    for text in HOSTILE:
        stays_text(text)


@settings(max_examples=15, deadline=None)
@given(st.text("ab1 .-+=#*_`[]()<>|\\&~!:/\n", min_size=1, max_size=12).filter(str.strip))
def test_random_texts_stay_texts(text: str) -> None:
    stays_text(text)
