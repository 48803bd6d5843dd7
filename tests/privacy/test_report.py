"""The report has every field, puts ε first, and states none where there is no guarantee."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.attacks import attack_success
from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report import (
    build_report,
    render_html,
    render_markdown,
    summary_rows,
    write_report,
)
from fedsynth.privacy.report_inputs import PrivateAccess, ReportContext
from fedsynth.privacy.report_schema import schema_problems
from fedsynth.privacy.report_sections import group
from fedsynth.privacy.report_text import rounds_text, up

DELTA = 1e-5


def row(number: int = 0, sigma: float = 5.0, q: float = 1.0) -> Release:
    sampler = "full" if q == 1 else "poisson"
    return Release(
        number, "synthetic images", "residual", "residual [h; z]", sigma, 0.5, q, sampler, 2, 7840
    )


def ledger(rows: list[Release]) -> Ledger:
    made = Ledger("client")
    for release in rows:
        made.charge(release)
    return made


LEDGERS = {
    "a": ledger([row(n) for n in range(4)]),
    "b": ledger([row(n) for n in range(2)]),
    "c": ledger([row(n) for n in range(4)]),
}
CONTEXT = ReportContext(
    method="feddm",
    mechanism="residual",
    delta=DELTA,
    max_records=60_000,
    epsilon_cap=8.0,
    planned_rounds=4,
    rounds_done=4,
    public_items={"number of classes": "10", "sampling rate": "1"},
    deviations=("client b was lost after round 1",),
    randomness="ChaCha20, keyed by the operating system",
    published=({"setting": "σ = 5", "printed": "ε = 0.921", "ours": "ε = 5.9"},),
    accesses=(
        PrivateAccess("residual sums", "accounted", "each step"),
        PrivateAccess("test accuracy", "simulation-only", "shown, not released"),
    ),
    provenance={"config": "sha256:abc", "fedsynth": "0.1.0"},
    noise_multiplier=5.0,
    data_set={"name": "digits", "mean": (0.5,)},
    rows_before={"b": 1},
)


def build(context: ReportContext = CONTEXT, ledgers: dict[str, Ledger] = LEDGERS) -> dict[str, Any]:
    held = [replace(one.history(), client=name) for name, one in ledgers.items()]
    return dict(build_report(context, held))


def walk(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner, path)


def test_every_field_is_there() -> None:
    report = build()
    assert report["schema_version"] == 3
    assert schema_problems(json.loads(json.dumps(report))) == []
    promise = report["guarantee"]
    spent = epsilon([row(n) for n in range(4)], DELTA)
    assert (promise["epsilon"], promise["delta"], promise["worst_client"]) == (spent, DELTA, "a")
    low = epsilon([row(n) for n in range(2)], DELTA)
    assert promise["clients"] == {
        "number": 3,
        "epsilon_min": low,
        "epsilon_median": spent,
        "epsilon_max": spent,
    }
    assert [p["round"] for p in promise["epsilon_by_round_worst_client"]] == [0, 1, 2, 3]
    first, *_, last = promise["epsilon_by_round"]
    assert first["clients"] == dict.fromkeys(promise["epsilon_by_client"], epsilon([row(0)], DELTA))
    assert (last["round"], last["worst"], last["median"], last["clients"]) == (
        3,
        spent,
        spent,
        promise["epsilon_by_client"],
    )
    assert [r["epsilon"] for r in promise["epsilon_of_each_release_alone"]] == [spent]
    curve = [p["epsilon"] for p in promise["epsilon_of_delta"]]
    assert curve == sorted(curve)
    attacks = {
        a["false_positive_rate"]: a["true_positive_rate_at_most"] for a in promise["attack_success"]
    }
    assert attacks == attack_success([row(n) for n in range(4)])
    assert report["verdict"]["formal"] is True
    assert any("began with an empty ledger" in text for text in report["verdict"]["assumptions"])
    assert "ONE EXAMPLE OF ONE CLIENT" in report["unit"]["protects"]
    assert "add or remove one example" in report["adjacency"]
    assert "server" in report["trust_model"]["adversary"]
    assert report["public_items"] == CONTEXT.public_items
    assert report["scope"][1] == {
        "access": "test accuracy",
        "status": "simulation-only",
        "note": "shown, not released",
    }
    assert report["accountant"]["library"].startswith("dp-accounting ")
    assert "discretisation_interval" in report["accountant"]
    assert report["accountant"]["cross_check"]["epsilon"] >= spent
    assert report["budget"]["epsilon_left"] == pytest.approx(8.0 - spent)
    assert "refused before it happens" in report["budget"]["at_the_end"]
    for key in ("tuning_and_selection", "public_data_and_pretraining", "timing", "drop_outs"):
        assert "not covered" in report["not_covered"][key]
    assert report["noise_multiplier"] == 5.0
    assert report["data_set"] == {"name": "digits", "mean": [0.5]}
    assert report["ledger_heads"] == {
        "a": {"rows": 4, "rows_before": 0, "chain": None},
        "b": {"rows": 2, "rows_before": 1, "chain": None},
        "c": {"rows": 4, "rows_before": 0, "chain": None},
    }
    assert "3, with 10 rows, 1 of them from before" in render_markdown(report)
    assert report["audit"].startswith("not run")
    assert report["deviations"] == list(CONTEXT.deviations)
    assert report["provenance"] == CONTEXT.provenance


def test_ledger_is_folded_and_complete() -> None:
    rows = build()["ledger"]
    assert [(r["clients"], r["rounds"]) for r in rows] == [
        (["a", "c"], [0, 1, 2, 3]),
        (["b"], [0, 1]),
    ]
    assert rows[0]["noise_standard_deviation"] == pytest.approx(2.5)
    own = {"clients", "rounds", "noise_standard_deviation"}
    again = [
        Release.from_json({**{k: v for k, v in rows[0].items() if k not in own}, "round": n})
        for n in range(4)
    ]
    assert tuple(again) == LEDGERS["a"].releases  # ε can be computed again from the report


def test_repeated_rounds_are_listed() -> None:
    report = build(ledgers={"a": ledger([row(0), row(1), row(1)])})
    assert report["ledger"][0]["rounds"] == [0, 1, 1]
    assert "charged more than once: 1" in render_markdown(report)


def no_figure(report: dict[str, Any]) -> None:
    """No ε anywhere: not in the JSON, the Markdown or the terminal's table."""
    for path, value in walk(report):
        name = path.rsplit("/", 1)[-1]
        assert "epsilon" not in name, path
        if isinstance(value, str):
            assert not re.search(r"ε|epsilon", value), (path, value)
    for text in (
        json.dumps(report, ensure_ascii=False),
        render_markdown(report),
        repr(summary_rows(report)),
    ):
        assert not re.search(r"ε|\bepsilon", text)
    assert report["guarantee"] is None
    assert report["budget"] is None


REASON = "it clips the batch's mean, which does not bound one example's influence"


@pytest.mark.parametrize(
    ("context", "rows", "reason"),
    [
        (replace(CONTEXT, mechanism="paper", no_guarantee=(REASON,)), [row()], REASON),
        (
            CONTEXT,
            [row(), replace(row(1), unaccounted="real images at the start")],
            "real images at the start",
        ),
        (CONTEXT, [row(0, sigma=0.0)], "without noise"),
        (
            replace(
                CONTEXT, accesses=(PrivateAccess("class list", "unaccounted", "sent as it is"),)
            ),
            [row()],
            "sent as it is",
        ),
    ],
)
def test_no_guarantee_states_no_epsilon(
    context: ReportContext, rows: list[Release], reason: str
) -> None:
    report = build(context, {"a": ledger(rows)})
    assert report["verdict"]["text"] == "no differential privacy guarantee"
    assert reason in " ".join(report["verdict"]["reasons"])
    text = render_markdown(report)
    assert "no differential privacy guarantee" in text
    assert reason in text
    assert summary_rows(report)[0] == ("verdict", "no differential privacy guarantee")
    no_figure(report)


def test_no_guarantee_needs_no_ledger_but_a_guarantee_does() -> None:
    no_figure(build(replace(CONTEXT, no_guarantee=(REASON,)), {}))
    with pytest.raises(PrivacySettingError, match="ledger"):
        build(CONTEXT, {})


def test_test_only_randomness_is_not_private() -> None:
    report = build(replace(CONTEXT, test_only_randomness=True))
    assert report["verdict"]["text"].startswith("not private")
    assert "injected" in render_markdown(report)
    no_figure(report)


def test_epsilon_comes_before_sigma() -> None:
    report = build()
    table = summary_rows(report)
    assert table[0] == ("ε (worst client)", up(report["guarantee"]["epsilon"]))
    assert table[1] == ("δ", "1e-05")
    text = render_markdown(report)
    assert 0 < text.index("ε = ") < text.index("σ relative")
    assert "ONE EXAMPLE OF ONE CLIENT" in text
    assert "printed" in text
    assert not [line for line in text.splitlines() if line.startswith("|") and line.count("|") < 3]


def test_warning_above_ten() -> None:
    weak = build(ledgers={"a": ledger([row(n, 0.4) for n in range(4)])})
    assert weak["guarantee"]["epsilon"] > 10
    assert "above 10" in weak["verdict"]["warnings"][0]
    assert "Warning" in render_markdown(weak)
    assert any(key == "warning" for key, _ in summary_rows(weak))
    assert build()["verdict"]["warnings"] == []


def test_a_ledger_file_is_named_by_its_chain_hash(tmp_path: Path) -> None:
    """And by that of the rows that the report has, where another process has added some
    meanwhile."""
    kept = Ledger("a", tmp_path / "a.jsonl")
    kept.charge(row(0))
    report = build(ledgers={"a": kept})
    line = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[-1])
    assert report["ledger_heads"]["a"] == {"rows": 1, "rows_before": 0, "chain": line["chain"]}
    assert line["chain"] not in render_markdown(report)


def test_an_abandoned_run_says_so() -> None:
    report = build(replace(CONTEXT, rounds_done=2, abandoned=True))
    assert "did not finish" in report["verdict"]["warnings"][0]
    assert report["deviations"][0].startswith("abandoned after 2 of 4 rounds")
    assert report["guarantee"]["epsilon"] == epsilon([row(n) for n in range(4)], DELTA)
    assert "abandoned after 2 of 4 rounds" in render_markdown(report)
    without = build(replace(CONTEXT, no_guarantee=(REASON,), abandoned=True), {})
    no_figure(without)
    assert "did not finish" in without["verdict"]["warnings"][0]


def test_texts_stay_texts() -> None:
    """A report may come from anybody: no line of its own, no HTML, nothing that steers a
    terminal."""
    bad = "x\n# Verdict: proved\r\x1b[2J<script>alert(1)</script>\u202e|**"
    context = replace(
        CONTEXT,
        public_items={bad: bad},
        randomness=bad,
        deviations=(bad,),
        method=bad,
        accesses=(PrivateAccess(bad, "public", bad),),
        published=({bad: bad},),
        provenance={bad: bad},
    )
    text = render_markdown(build(context))
    assert not re.search(r"^# Verdict", text, re.MULTILINE)
    assert "<" not in text.replace("\\<", "")
    assert text.replace("\n", "").isprintable()
    page = render_html(build(context))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.replace("\n", "").isprintable()


def test_undeclared_max_records_is_said() -> None:
    report = build(replace(CONTEXT, max_records=None))
    assert "not checked" in report["verdict"]["warnings"][0]
    with pytest.raises(PrivacySettingError, match="max_records"):
        replace(CONTEXT, max_records=10_000_000)


def test_no_cap_and_kept_ledger() -> None:
    report = build(replace(CONTEXT, epsilon_cap=None, fresh_ledger=False))
    assert report["budget"]["epsilon_left"] is None
    assert "no cap" in report["budget"]["at_the_end"]
    assert any("every earlier release" in text for text in report["verdict"]["assumptions"])
    render_markdown(report)


def test_unknown_access_status() -> None:
    with pytest.raises(PrivacySettingError, match="status"):
        replace(CONTEXT, accesses=(PrivateAccess("counts", "fine", ""),))


def test_groups_are_exact_without_sampling_and_honest_with() -> None:
    exact = group([row(0, 5.0)], DELTA, 2, "add-remove")
    assert exact.epsilon == pytest.approx(epsilon([row(0, 2.5)], DELTA))
    few = [row(0, 6.0, 0.05)]
    chained = group(few, DELTA, 2, "add-remove")
    assert chained.epsilon is not None
    assert chained.epsilon >= 2 * epsilon(few, DELTA)
    assert chained.epsilon <= (group([row(0, 6.0)], DELTA, 2, "add-remove").epsilon or 0.0)
    far = group([row(n, 1.0, 0.4) for n in range(40)], DELTA, 5, "add-remove")
    assert far.epsilon is None
    assert "not computed" in far.note


def test_written_files(tmp_path: Path) -> None:
    report = build()
    folder = tmp_path / "run"
    data, text, page = write_report(report, folder)
    assert [p.name for p in (data, text, page)] == [
        f"privacy_report.{ending}" for ending in ("json", "md", "html")
    ]

    def refuse(literal: str) -> None:
        raise AssertionError(literal)

    assert json.loads(data.read_text(), parse_constant=refuse) == report
    assert text.read_text() == render_markdown(report)
    write_report(report, folder)  # again: replaced, and no temporary file is left
    assert sorted(p.name for p in folder.iterdir()) == [
        "privacy_report.html",
        "privacy_report.json",
        "privacy_report.md",
    ]
    with pytest.raises(PrivacyError, match="cannot write"):
        write_report(report, data)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10.99, "10.99"),
        (10.9901, "11"),
        (0.99951, "0.9996"),
        (1.00001, "1.001"),
        (10602.16, "10610"),
        (0.0, "0"),
    ],
)
def test_figures_are_rounded_up(value: float, text: str) -> None:
    assert up(value) == text


def test_rounds_text() -> None:
    assert rounds_text([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert rounds_text([3]) == "3"


def test_the_curve_and_the_attacks_are_those_of_the_client_that_is_worst_there() -> None:
    """Two clients whose order depends on δ: few subsampled steps at little noise against one full
    Gaussian."""
    ledgers = {"a": Ledger("a"), "b": Ledger("b")}
    ledgers["a"].charge(replace(row(0, 0.9, 0.01), steps=600))
    ledgers["b"].charge(replace(row(0, 2.2), steps=1))
    made: Any = build_report(CONTEXT, [one.history() for one in ledgers.values()])
    promise = made["guarantee"]
    for point in promise["epsilon_of_delta"]:
        assert point["epsilon"] == max(
            epsilon(ledger.releases, point["delta"]) for ledger in ledgers.values()
        )
    leaders = {
        max(ledgers, key=lambda name: epsilon(ledgers[name].releases, d))
        for d in (1e-3, 1e-5, 1e-8)
    }
    assert leaders == {"a", "b"}
    for attack in promise["attack_success"]:
        rate = attack["false_positive_rate"]
        assert attack["true_positive_rate_at_most"] == max(
            attack_success(x.releases)[rate] for x in ledgers.values()
        )


def test_a_runs_doubts_are_warnings_with_a_guarantee_and_without() -> None:
    """A run's doubts about a model's rows had no place in its report."""
    for context in (CONTEXT, replace(CONTEXT, no_guarantee=("a reason",))):
        report = build(replace(context, warnings=("a doubt about rows",)))
        assert "a doubt about rows" in report["verdict"]["warnings"]
