"""The report's figures: every one follows from the ledgers, and without a guarantee there is no
ε."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.audit import attack_success, best_guess
from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.build import build_report, group_epsilon, write_report
from fedsynth.privacy.report.figures import (
    Access,
    LedgerStart,
    ReportFacts,
    Verdict,
    schema_problems,
)
from fedsynth.privacy.report.pages import render_markdown, summary_rows
from tests.privacy.support import facts, release

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
    assert report["verdict"] == {"formal": True, "reasons": [], "warnings": []}
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
        ({"verdict": Verdict(warnings=["a doubt"])}, 5.0, "a doubt"),
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
    folder = tmp_path / "run"
    for _ in range(2):  # again: replaced, and no temporary file is left
        write_report(report, folder)
        page, data, text = sorted(folder.iterdir())
        assert page.suffix == ".html"
    assert json.loads(data.read_text()) == report
    assert text.read_text() == render_markdown(report)
    with pytest.raises(PrivacyError, match="cannot write"):
        write_report(report, data)
