"""The report's pages: what they say in plain language, that they say no more, and that whatever a
report's texts are, they stay texts."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import USER, Release
from fedsynth.privacy.report.build import build_report
from fedsynth.privacy.report.figures import Access, Event, RunFacts, Unit, Verdict
from fedsynth.privacy.report.formatting import (
    format_epsilon,
    format_odds,
    format_percent,
    printable,
)
from fedsynth.privacy.report.pages import render_html, render_markdown, summary_rows
from tests.privacy.support import audit, facts, release

ROW = release(mechanism="features", clipped="u", noise_multiplier=9.0, sensitivity=1.0)
FACTS = facts(
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
    about = FACTS.model_copy(update=values)
    histories = [History(f"client-{k:03d}", rows or (ROW,)) for k in range(clients)]
    return build_report(about, histories)


def first_page(report: dict[str, Any]) -> str:
    first, _, datasheet = render_markdown(report).partition("# Datasheet")
    assert datasheet
    return first


def test_the_first_page_states_run_date_purpose_and_data() -> None:
    text = first_page(made())
    for words in (
        "| run | 20260102-030405-feddm-scans |",
        "| responsible | Klinikum Mitte |",
        "scans: the operator's own",
        "| sites | 2: Mitte (client-000), Nord (client-001) |",
        "a federation with method feddm",
        f"| model.safetensors | the trained model | `{'ab' * 32}` |",
    ):
        assert words in text, words
    bare = first_page(made(run=RunFacts(), files={}))
    assert "| responsible | not stated |" in bare
    assert "lists no files" in bare
    one = render_markdown(made(clients=1, run=RunFacts(sites={"client-000": "Mitte, Nord"})))
    assert "a computation of one data owner with method feddm" in one
    assert "| sites | Mitte, Nord (client-000) |" in one
    assert "a federation" not in one


def test_with_persons_as_units_nothing_is_said_of_examples_that_is_meant_of_persons() -> None:
    person = Unit(kind=USER, person="patient", user_records=4)
    by_person = replace(ROW, unit=USER, clipped="residual of each example")
    report = made(by_person, unit=person)
    text = render_markdown(report)
    for words in (
        "for one patient of one client",
        "If it is wrong for 1 of 100 patients that were not used",
        "residual of each example; averaged over each patient's examples, and the average is",
        "- examples of a patient: at most 4, by a public choice",
        "ε is that of the worst client, for one patient held",
    ):
        assert words in text, words
    rest = re.sub(r"privacy\.unit=user", "", text)
    assert not re.search(r"\buser", rest)
    assert "has weaker protection" not in rest
    assert "one example" not in rest
    assert (
        "protects",
        "ONE PATIENT OF ONE CLIENT (with all examples of that patient at that client)",
    ) in (summary_rows(report))


def test_epsilon_is_printed_by_one_rule() -> None:
    report = made()
    promise = report["guarantee"]
    shown = format_epsilon(promise["epsilon"])
    printed = re.findall(
        r"(?:ε = |ε spent: |smallest ε |largest )([\d.]+)", render_markdown(report)
    )
    printed += [value for name, value in summary_rows(report) if name.startswith("ε (")]
    groups = [format_epsilon(one["epsilon"]) for one in promise["groups"]]
    assert set(printed) == {shown, *groups}
    assert printed.count(shown) >= 4
    for value, text in ((8.941, "8.95"), (10.99, "11"), (8.0, "8"), (10602.16, "10,700"), (0, "0")):
        assert format_epsilon(value) == text


@given(st.floats(1e-6, 13))
def test_no_printed_figure_is_below_what_was_computed(epsilon: float) -> None:
    assert float(format_odds(epsilon).replace(",", "")) >= math.exp(epsilon) * (1 - 1e-9)
    assert float(format_epsilon(epsilon)) >= epsilon * (1 - 1e-9)
    assert float(format_percent(epsilon / 13).strip("…")) >= min(100 * epsilon / 13, 99.99) - 1e-9


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


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps tags and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_loads_nothing_and_is_made_for_paper() -> None:
    text = render_html(made())
    page = Page(text)
    loaded = r"<script|https?://(?!www\.w3\.org/2000/svg)|<link|<img|@import|url\("
    assert not re.search(loaded, text)
    assert text.count("<svg") == 2
    assert text.count("<title>") == 3
    broad = text.split('<section class="across">')[1].split("</section>")[0]
    assert "Ledger</h2>" in broad
    assert broad.count("<th>") == 13
    assert "@page across{size:A4 landscape}" in text
    assert "prefers-color-scheme:dark" in text
    assert '<h1 class="next">Datasheet' in text
    assert "Trust model" in page.text
    lines = text.split("ε after each round (worst client)</h2>")[1].split("</svg>")[0]
    assert lines.count("<polyline") == 1
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
    about = FACTS.model_copy(
        update={
            "method": text,
            "mechanism": text,
            "public_items": {"data set": text, text: text},
            "verdict": Verdict(reasons=[], warnings=[text]),
            "events": [Event(kind="absent", client=text, why=text)],
            "randomness": text,
            "published": [{"a": text, "b": text}],
            "scope": [Access(access=text, status="public", note=text)],
            "unit": Unit(kind=USER, person=text),
            "provenance": {text: "1.0"},
            "own_code": [text],
            "run": RunFacts(
                id=text, date=text, responsible=text, purpose=text, sites={"client-000": text}
            ),
            "files": {text: "ab" * 32},
        }
    )
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
