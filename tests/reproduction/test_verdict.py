"""Comparisons of published and reproduced values: the rule, and each metric from a run's curve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedsynth.reproduction.comparison import ABOVE, NONE, WITHIN, format_number, lines, verdict
from fedsynth.reproduction.presets import Number, preset
from fedsynth.reproduction.rows import curve_of, measured


def test_verdict_compares_difference_with_deviation() -> None:
    assert verdict(70.0, 0.3, [70.5, 71.3]) == WITHIN  # 0.9 apart, 2·√(0.3² + 0.566²) = 1.28
    assert verdict(70.0, 0.3, [71.2, 71.4]) == ABOVE  # 1.3 apart, 2·√(0.3² + 0.141²) = 0.66
    assert verdict(70.0, 0.3, [70.8]) == WITHIN  # one seed: published deviation, 2·0.3·√2 = 0.85
    assert verdict(70.0, 0.3, [70.9]) == ABOVE
    assert verdict(70.0, None, [70.0, 71.0]) == WITHIN  # none published: ours for both
    assert verdict(70.0, None, [70.0]) == NONE
    assert verdict(None, None, [70.0, 71.0]) == NONE


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"round": number, "seconds": 1.0, "client_upload_bytes": [2**20, 2**21], **more}


def local(amp: float) -> dict[str, Any]:
    return {"amp": amp, "fm": 0.01, "wlp": amp / 2, "client_accuracy": [amp, amp]}


def facts(rows: list[dict[str, Any]], domains: bool = False) -> dict[str, Any]:
    curve = curve_of(rows, domains)
    return {"curve": curve, "upload_floats": 7, "client_upload_bytes": 1.5 * 2**20}


def value(metric: str, run: dict[str, Any], **more: Any) -> float | None:
    options = {"variant": "", "dataset": "mnist", **more}
    domain = options.pop("domain", "")
    return measured(Number(metric, domain, 1.0, None), run, **options)


def test_last_and_best_accuracies_are_measured() -> None:
    run = facts([row(1, test_accuracy=0.5), row(2, test_accuracy=0.7), row(3, test_accuracy=0.6)])
    assert value("test_accuracy_pct", run) == pytest.approx(60)
    assert value("best_test_accuracy_pct", run) == pytest.approx(70)
    assert value("upload_floats_per_round", run) == 7
    assert value("upload_mb_per_client_per_round", run) == pytest.approx(1.5)
    assert value("amp_pct", run) is None


def test_metrics_are_of_selected_variant() -> None:
    models = {"aca": {"local": local(0.5)}, "oca": {"local": local(0.75)}}
    run = facts([row(1, test_accuracy=0.2, models=models), row(2)])
    assert run["curve"]["models.oca.local.amp"] == [0.75, None]
    assert value("amp_pct", run, variant="oca") == pytest.approx(75)
    assert value("wlp_pct", run, variant="aca") == pytest.approx(25)
    assert value("fm", run, variant="aca") == pytest.approx(0.01)
    plain = facts([row(1, local=local(0.25))])  # a method with one model
    assert value("amp_pct", plain, variant="aca") == pytest.approx(25)


def test_rounds_to_fedavg_accuracy_are_counted() -> None:
    def rows(*amps: float) -> list[dict[str, Any]]:
        return [row(k, models={"aca": {"local": local(a)}}) for k, a in enumerate(amps, 1)]

    fedavg, other = facts(rows(0.2, 0.4, 0.5)), facts(rows(0.3, 0.5, 0.4))
    name = "rounds_to_fedavg_100_round_amp"
    assert value(name, other, variant="aca", fedavg=fedavg) == 2
    assert value(name, facts(rows(0.1, 0.2)), variant="aca", fedavg=fedavg) == 3  # never
    assert value(name, other, variant="aca") is None


def test_domain_accuracies_of_test_set_and_local_splits() -> None:
    names = ("amazon", "caltech", "dslr", "webcam")
    accuracies = dict(zip(names, (0.1, 0.2, 0.3, 0.4), strict=True))
    common = facts([row(1, test_accuracy=0.3, domain_accuracy=accuracies)])
    office = {"dataset": "office-caltech-10"}
    assert value("test_accuracy_pct", common, domain="dslr", **office) == pytest.approx(30)
    assert value("test_accuracy_pct", common, domain="average", **office) == pytest.approx(25)
    splits = {**local(0.5), "client_accuracy": [0.5, 0.6, None, 0.8]}
    personal = facts([row(1, common_model_accuracy=0.1, local=splits)], domains=True)
    assert value("test_accuracy_pct", personal, domain="webcam", **office) == pytest.approx(80)
    assert value("test_accuracy_pct", personal, domain="dslr", **office) is None


def test_numbers_have_matching_digits() -> None:
    assert format_number(70.123, 0.456) == "70.12 ± 0.46"
    assert format_number(0.00797, 0.0007) == "0.0080 ± 0.0007"
    assert format_number(635040.0, None) == "635,040"
    assert format_number(None, None) == "–"


def test_changed_runs_have_no_verdict() -> None:
    """A number of another α is not compared with the published one."""
    table = preset("feddm:table2")
    (line,) = lines(table, table.select(dataset="mnist", alpha=0.1, method="feddm"), [0], {})
    reproduced = replace(line, number=Number("", "", 90.0, 1.0), values={0: 90.0, 1: 90.1})
    assert (line.verdict, reproduced.verdict) == ("not run", WITHIN)
    changed = replace(reproduced, changes={"partition": {"alpha": 100.0}})
    assert changed.verdict == "changed: no verdict"
