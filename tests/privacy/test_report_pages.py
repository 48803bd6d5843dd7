"""The report's pages: what they say in plain language, that they say no more, and that whatever a
report's texts are, they stay texts."""

from __future__ import annotations

import itertools
import math
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.privacy.formatting import (
    band,
    format_epsilon,
    format_odds,
    format_percent,
    format_rounds,
    printable,
)
from fedsynth.privacy.history import History
from fedsynth.privacy.releases import USER, Release
from fedsynth.privacy.report import build_report
from fedsynth.privacy.report_figures import (
    Access,
    Audit,
    Event,
    ReportFacts,
    RunFacts,
    Unit,
    Verdict,
)
from fedsynth.privacy.report_pages import render_html, render_markdown, summary_rows

ROW = Release(1, "sums", "features", "u", 9.0, 1.0, 1.0, "full", 1, 10)
FACTS = ReportFacts(
    method="feddm",
    mechanism="features",
    delta=1e-5,
    max_records=1000,
    planned_rounds=2,
    rounds_done=2,
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


def test_the_first_page_says_who_when_what_and_whose() -> None:
    text = first_page(made())
    for words in (
        "| run | 20260102-030405-feddm-scans |",
        "| began on | 2026-01-02 |",
        "| responsible | Klinikum Mitte |",
        "| purpose | triage |",
        "scans: the operator's own",
        "| sites | 2: Mitte (client-000), Nord (client-001) |",
        "a federation by method feddm",
        f"| model.safetensors | the trained model | `{'ab' * 32}` |",
        "no ledger was kept over runs",
        "arXiv 2303.00654",
    ):
        assert words in text, words
    bare = first_page(made(run=RunFacts(), files={}))
    assert "| responsible | not stated |" in bare
    assert "| sites | 2: client-000, client-001 |" in bare
    assert "lists no file" in bare


def test_one_data_owner_is_no_federation() -> None:
    """One owner's synthetic set was reported as a federation, "over 1 clients"."""
    sites = RunFacts(sites={"client-000": "Mitte, Nord, Süd"})
    text = render_markdown(made(clients=1, run=sites))
    assert "one data owner's computation by method feddm" in text
    assert "| sites | Mitte, Nord, Süd (client-000) |" in text
    assert "a federation" not in text
    assert "One client: smallest" in text


def test_with_persons_as_units_nothing_is_said_of_examples_that_is_meant_of_persons() -> None:
    """Clips were "of each example", searches accused "1 of 100 examples", and "the user" was the
    operator in one line and the patient in the next."""
    person = Unit(kind=USER, person="patient", user_records=4)
    by_person = Release(**{**ROW.to_json(), "unit": USER, "clipped": "residual of each example"})
    report = made(by_person, unit=person)
    text = render_markdown(report)
    for words in (
        "for one patient of one client",
        "Was this patient's data used?",
        "wrongly accuses 1 of 100 patients",
        "All examples of one patient at one site count as one",
        "- 2 patients together (such as a family)",
        "residual of each example; averaged over each patient's examples, and the average is",
        "- examples of a patient: at most 4, by a public choice",
        "add or remove one patient with all examples",
        "ε is that of the worst client, for one patient held",
    ):
        assert words in text, words
    rest = re.sub(r"privacy\.unit=user", "", text)
    assert not re.search(r"\buser", rest)
    assert "is protected less" not in rest
    assert "one example" not in rest
    assert ("protects", "ONE PATIENT OF ONE CLIENT (with all examples of that patient there)") in (
        summary_rows(report)
    )


def test_epsilon_is_printed_by_one_rule() -> None:
    """ε was 8.95 in one line and 8.941 in the next."""
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


@pytest.mark.parametrize(
    ("value", "text"),
    [(8.941, "8.95"), (10.99, "11"), (0.99951, "1"), (8.0, "8"), (10602.16, "10,700"), (0.0, "0")],
)
def test_figures_are_rounded_up(value: float, text: str) -> None:
    assert format_epsilon(value) == text


@given(st.floats(1e-6, 13))
def test_no_printed_figure_is_below_what_was_computed(epsilon: float) -> None:
    assert float(format_odds(epsilon).replace(",", "")) >= math.exp(epsilon) * (1 - 1e-9)
    assert float(format_epsilon(epsilon)) >= epsilon * (1 - 1e-9)
    assert float(format_percent(epsilon / 13).strip("…")) >= min(100 * epsilon / 13, 99.99) - 1e-9


def test_bands_and_rounds() -> None:
    assert [band(1.0), band(1.001), band(10.01)] == ["strong", "reasonable", "weak, or none"]
    assert [format_rounds([0, 1, 2, 5, 7, 8]), format_rounds([3])] == ["0–2, 5, 7–8", "3"]


def test_events_and_the_audit_are_told() -> None:
    events = [
        Event(kind="absent", client="2", why="it is ill"),
        Event(kind="resumed", after=1),
        Event.ended(1, ("client-000", 3.0511, 4.6), "in words"),
        Event.ended(1, None, "its owner's cap"),
    ]
    text = render_markdown(made(events=events, epsilon_cap=4.0, abandoned=True))
    for words in (
        "client 2 took no part: it is ill",
        "resumed after 1 of 2 rounds: releases made in round 2 before that are charged; the round",
        "client client-000: ε is 3.06 now and would be 4.6 with the next round, above the cap 4",
        "ended after 1 of 2 rounds: its owner's cap",
        "abandoned after 2 of 2 rounds",
    ):
        assert words in text, words
    audit = Audit(
        command="fedsynth privacy audit",
        method="feddm",
        mechanism="features",
        canaries=1000,
        guesses=400,
        correct=260,
        confidence=0.999,
        delta=1e-5,
        epsilon_lower_bound=1.2399,
    )
    text = render_markdown({**made(), "audit": audit.to_json()})
    assert "shows ε ≥ 1.23 at δ = 1e-05 with 99.9 % confidence: 260 of 400 guesses" in text
    assert "**The audit refutes this report's ε.**" in text


def test_shared_noise_is_told_wherever_the_guarantee_is() -> None:
    """ε of shared noise holds against those who see only sums: also where this run's clients add
    all of their own noise, and those of an earlier run on the same ledger did not."""
    own = Release(**{**ROW.to_json(), "round": 2})
    secure = Release(**{**ROW.to_json(), "shares": 4})
    for shares, rows in itertools.product((1, 4), ((secure,), (secure, own), (own, secure))):
        text = render_markdown(made(*rows, shares=shares))
        assert "has as little as 1/√4 of the noise that is charged" in text
        assert "A secure aggregation reveals" in text
        if shares == 4:
            assert "see the sum over all clients of every round, but no client's own upload" in text
            assert (
                "An attacker who sees the released sums over all sites, but **no site's own" in text
            )
        else:
            assert "see every upload of every round" in text
            assert "secure aggregation: none in this run" in text
            assert "and of earlier runs only what their reports allow" in text
    masked = render_markdown(made(secure, shares=4, min_clients=6))
    assert "at most 2 clients of a sum are on its side" in masked
    assert "computed sums of at least 6 clients" in masked
    alone = render_markdown(made(own))
    assert "secure aggregation: none\n" in alone
    assert "An attacker who sees everything that was released" in alone
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
    assert text.count("<svg") == 3
    assert text.count("<title>") == 4
    broad = text.split('<section class="across">')[1].split("</section>")[0]
    assert "Ledger</h2>" in broad
    assert broad.count("<th>") == 13
    assert "@page across{size:A4 landscape}" in text
    assert "prefers-color-scheme:dark" in text
    assert '<h1 class="next">Datasheet' in text
    for heading in ("The guarantee", "Trust model", "Accountant", "Provenance"):
        assert heading in page.text
    lines = text.split("ε after each round (worst client)</h2>")[1].split("</svg>")[0]
    drawn = [one.split("/>")[0] for one in lines.split("<polyline")[1:]]
    assert 'stroke-width="6"' in drawn[-2]  # the worst client's, broad below the median's dashes
    assert "stroke-dasharray" in drawn[-1]
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
    row = Release(**{**ROW.to_json(), "quantity": text, "mechanism": text, "clipped": text})
    unaccounted = Release(**{**row.to_json(), "unaccounted": text or None})
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
            "provenance": {text: text},
            "own_code": [text],
            "run": RunFacts(
                id=text, date=text, responsible=text, purpose=text, sites={"client-000": text}
            ),
            "files": {text: "ab" * 32},
        }
    )
    rows = (unaccounted,) if len(text) % 2 else (row,)
    return build_report(about, [History("client-000", rows), History(text, rows)])


def check_texts_stay_texts(text: str) -> None:
    report, harmless = with_text(text), with_text("plain" if len(text) % 2 else "even")
    markdown, html = render_markdown(report), render_html(report)
    assert markdown.replace("\n", "").isprintable()
    assert html.replace("\n", "").isprintable()
    assert markdown.count("\n") == render_markdown(harmless).count("\n")
    page = Page(html)
    assert page.tags == Page(render_html(harmless)).tags  # nothing became a tag, a list, a link
    shown = " ".join(printable(text).split())
    assert not shown or " ".join(page.text.split()).count(shown) >= 20


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_stay_texts(text: str) -> None:
    """A report may come from anybody: its texts make no line, no Markdown and no HTML of their own,
    and steer no terminal."""
    check_texts_stay_texts(text)


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.sampled_from("ab1 .-+=#*_`[]()<>|\\&~!:/\n"), min_size=1, max_size=12).filter(
        str.strip
    )
)
def test_random_texts_stay_texts(text: str) -> None:
    check_texts_stay_texts(text)


def test_the_terminals_table_has_texts_as_they_are() -> None:
    rows = dict(summary_rows(with_text("a*b")))
    assert rows["mechanism"] == "a*b"
    assert unescape(rows["adjacency"]).startswith("add or remove one a*b")
