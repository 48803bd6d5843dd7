"""The first page of a privacy report: what it says in plain language, and that it says no more."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsynth.privacy.first_page import band, odds_factor
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.releases import Release, aggregated
from fedsynth.privacy.report import build_report, render_html, render_markdown
from fedsynth.privacy.report_inputs import ReportContext
from fedsynth.privacy.report_schema import RunFacts, schema_problems

RUN = RunFacts(
    id="20260102-030405-feddm-scans",
    date="2026-01-02",
    responsible="Klinikum Mitte",
    purpose="triage",
    sites={"client-000": "Mitte", "client-001": "Nord"},
)
CONTEXT = ReportContext(
    "feddm",
    "features",
    1e-5,
    1000,
    None,
    2,
    2,
    {"data set": "scans: the user's own"},
    run=RUN,
    files={"model.safetensors": "ab" * 32},
)


def made(context: ReportContext = CONTEXT, sigma: float = 9.0) -> dict[str, object]:
    ledgers = [Ledger(f"client-{k:03d}") for k in range(2)]
    for ledger in ledgers:
        ledger.charge(Release(1, "sums", "features", "1", sigma, 1.0, 1.0, "full", 1, 10, None))
    return build_report(context, [one.history() for one in ledgers])


def page(report: dict[str, object]) -> str:
    """The first page alone."""
    first, _, datasheet = render_markdown(report).partition("# Datasheet")
    assert datasheet
    return first


def test_it_says_who_when_what_and_whose() -> None:
    text = page(made())
    for words in (
        "| run | 20260102-030405-feddm-scans |",
        "| began on | 2026-01-02 |",
        "| responsible | Klinikum Mitte |",
        "| purpose | triage |",
        "scans: the user's own",
        "2: Mitte (client-000), Nord (client-001)",
        f"| model.safetensors | the trained model | `{'ab' * 32}` |",
        "no ledger was kept over runs",
        "arXiv 2303.00654",
    ):
        assert words in text, words
    assert "public" not in text.replace("what was declared public", "")  # which nobody declared


def test_what_nobody_said_is_said_to_be_missing() -> None:
    report = made(replace(CONTEXT, run=replace_run(responsible=None, sites={}), files={}))
    text = page(report)
    assert "| responsible | not stated |" in text
    assert "2: client-000, client-001" in text
    assert "names no file" in text


def replace_run(**values: object) -> RunFacts:
    return RunFacts(**{**RUN.model_dump(), **values})


def test_a_person_with_several_images_is_told_the_weaker_figure() -> None:
    report = made()
    text = page(report)
    guarantee: dict[str, list[dict[str, float]]] = report["guarantee"]  # type: ignore[assignment]
    for group in guarantee["groups"]:
        line = next(one for one in text.splitlines() if one.startswith(f"- {group['units']} "))
        stated = float(line.split("ε = ")[1].split(",")[0])
        assert group["epsilon"] <= stated <= group["epsilon"] * 1.001
    users = page(made(replace(CONTEXT, unit="user")))
    assert "All examples of one person at one site count as one" in users
    assert "is protected less" not in users


def test_without_a_guarantee_nothing_is_promised() -> None:
    text = page(made(replace(CONTEXT, no_guarantee=("it adds no noise",))))
    assert "Nothing is promised to anybody" in text
    assert "it adds no noise" in text
    assert "No file is protected" in text
    assert "ε" not in text
    assert "reasonable" not in text


@pytest.mark.parametrize(
    ("epsilon", "words"), [(1.0, "strong"), (1.001, "reasonable"), (10.01, "weak, or none")]
)
def test_bands(epsilon: float, words: str) -> None:
    assert band(epsilon) == words


@given(st.floats(0, 13))
def test_odds_are_never_below_what_holds(epsilon: float) -> None:
    assert float(odds_factor(epsilon).replace(",", "")) >= math.exp(epsilon) * (1 - 1e-9)


def test_the_page_is_made_for_paper() -> None:
    """Old form: a broad table lost its last columns on A4, and tables had no heads."""
    text = render_html(made())
    assert "@page across{size:A4 landscape}" in text
    broad = text.split('<section class="across">')[1].split("</section>")[0]
    assert "Ledger</h2>" in broad
    assert broad.count('<th scope="col">') == 12
    assert "prefers-color-scheme:dark" in text
    for svg in text.split("<svg")[1:]:
        assert "<title>" in svg.split("</svg>")[0]


def test_the_worst_clients_line_is_seen_where_the_others_are_the_same() -> None:
    """Old form: the median was drawn over it, in full."""
    text = render_html(made())
    lines = text.split("ε after each round (worst client)</h2>")[1].split("</svg>")[0]
    drawn = [one.split("/>")[0] for one in lines.split("<polyline")[1:]]
    assert 'stroke-width="6"' in drawn[-2]
    assert "stroke-dasharray" in drawn[-1]
    assert 'stroke-width="2"' in drawn[-1]


def shared_noise(*rows: Release, shares: int = 1) -> dict[str, object]:
    ledger = Ledger("client-000")
    for row in rows:
        ledger.charge(row)
    return build_report(replace(CONTEXT, shares=shares), [ledger.history()])


def test_shared_noise_is_told_wherever_the_guarantee_is() -> None:
    """ε of shared noise holds against who sees sums alone: also where this run adds all of its own,
    and an earlier one on the same ledger did not."""
    own = Release(2, "sums", "features", "1", 9.0, 1.0, 1.0, "full", 1, 10, None)
    secure = replace(own, round=1, mechanism="features" + aggregated(4))
    assert (own.shares, secure.shares) == (1, 4)
    assert Release.from_json(secure.to_json()).shares == 4
    histories = ((secure,), (secure, own), (own, secure))
    for shares, rows in itertools.product((1, 4), histories):
        report = shared_noise(*rows, shares=shares)
        assert not schema_problems(report)
        verdict = report["verdict"]
        assert any("secure aggregation" in one for one in verdict["assumptions"])  # type: ignore[index]
        assert any("1/√4" in one for one in verdict["warnings"])  # type: ignore[index]
        text = page(report)
        assert "1/√4" in text
        model: Any = report["trust_model"]
        if shares == 4:
            assert "no client's own upload" in model["adversary"]
            assert "Whoever sees the released sums over all sites, and **no site's own" in text
            assert "everything but the noise of the sites that it is counted of, may ask" in text
        else:
            assert "see every upload of every round" in model["adversary"]
            assert model["secure_aggregation"].startswith("none in this run")
            assert "and of earlier ones no more than their reports say" in text
    alone = shared_noise(own)
    assert "see every upload" in alone["trust_model"]["adversary"]  # type: ignore[index]
    assert not alone["verdict"]["warnings"]  # type: ignore[index]
    assert "Whoever sees everything that was released" in page(alone)
    assert "secure aggregation" not in page(alone)
