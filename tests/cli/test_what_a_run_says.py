"""What a run tells its user, beyond the one accuracy: presets, fairness, variants, stragglers,
settings that go nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.cli.progress import round_line
from fedsynth.cli.settings_options import from_preset, merged
from fedsynth.federation.terms.resolve import resolve


def metrics(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_what_the_preset_decides_is_said(train: Callable[..., Any]) -> None:
    run = train("scaffold")
    # tiny runs give all else
    assert "preset of digits, where nothing else is given: model.depth=2\n" in run.stderr
    said = from_preset({"data": {}, "run": {"method": "MOON"}, "partition": {"clients": 3}})
    assert said == "rounds=3, model.width=32, model.depth=2, batch=32"
    assert from_preset({"data": {"dataset": "mnist"}, "run": {}}) == ""
    assert from_preset({"data": {"dataset": "synthetic(1,1)"}, "run": {}}).startswith(
        "partition.kind=natural"
    )


def test_another_methods_config_is_not_dropped_in_silence(
    tmp_path: Path, train: Callable[..., Any]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[run]\nmethod = "fedprox"\n[method]\nstragglers = 0.9\n')
    run = train("fedavg", "--config", str(config))
    assert (
        "note: the config's method settings are fedprox's and are left out; fedavg has its defaults"
        in run.stderr
    )
    notes: list[str] = []
    merged(
        {"run": {"method": "fedprox"}, "method": {"mu": 1.0}},
        {"run": {"method": "fedprox"}},
        notes.append,
    )
    merged({"run": {"method": "fedprox"}}, {"run": {"method": "fedavg"}}, notes.append)
    assert notes == []


def test_clients_own_models_come_first_and_untested_ones_are_warned_of(
    train: Callable[..., Any],
) -> None:
    untested = train("solo")
    assert (
        "warning: solo's clients keep models of their own, which nothing tests here (--local-test "
        "0.2)" in untested.stderr
    )
    assert "warning" not in train("fedavg").stderr
    row = {
        "round": 1,
        "common_model_accuracy": 0.1,
        "local": {"amp": 0.9, "fm": 0.01, "wlp": 0.8},
        "upload_bytes": 0,
        "seconds": 1,
    }
    line = round_line(row, resolve({"run": {"method": "solo", "rounds": 2}}))
    assert line == ("round 1/2 · AMP 90.00 % · FM 0.0100 · WLP 80.00 % · uploads 0.00 MB · 1.0 s")


def test_fairness_and_variants_are_in_lines_table_and_summary(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    run = train("fedkf", "--local-test", "0.2")
    last = metrics(run)[-1]
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["local"] == {name: last["local"][name] for name in ("amp", "fm", "wlp")}
    assert set(summary["models"]) == {"aca", "oca"}
    for text in (run.stderr, run.stdout):
        for name in ("ACA", "OCA", "AMP", "FM", "WLP"):
            assert name in text
    assert summary["settings"]["generator_width"] == 4


def test_with_differential_privacy_nothing_exact_of_clients_is_shown(
    train: Callable[..., Any],
) -> None:
    """Catches: AMP, which is an exact function of private data, on the screen or in the summary."""
    for number, (method, *options) in enumerate(
        (("fedavg", "--dp-epsilon", "8"), ("feddm", "--dp-sigma", "3", "--dp-mechanism", "paper"))
    ):
        run = train(method, "--local-test", "0.2", *options)
        assert "WLP" not in run.stderr + run.stdout
        folder = sorted(run.output.iterdir())[number]
        assert "local" not in json.loads((folder / "summary.json").read_text())
        assert '"local"' not in (folder / "metrics.jsonl").read_text()


def test_stragglers_and_the_adapted_mu_leave_a_trace(train: Callable[..., Any]) -> None:
    options = (
        "--clients",
        "4",
        "--rounds",
        "2",
        "--set",
        "stragglers=0.5",
        "--set",
        "adaptive=true",
        "--set",
        "mu=0.25",
    )
    for row in metrics(train("fedprox", *options)):
        assert len(row["stragglers"]) == 2
        assert not row["stragglers_dropped"]
        assert row["mu"] in (0.25, 0.35)


def test_a_setting_of_another_section_is_named(fedsynth: Callable[..., Any]) -> None:
    for given, there in (
        ("participation=0.5", "--participation"),
        ("projection=8", "--set model.projection"),
        ("missing_classes=1", "--set partition.missing_classes"),
        ("delta=1", "--dp-delta"),
    ):
        wrong = fedsynth("train", "--method", "fedavg", "--set", given)
        assert wrong.code == 2
        key = given.partition("=")[0]
        said = f"--set method.{key} is no setting of fedavg, but {there} is one"
        assert said in wrong.stderr


def test_fedfms_weight_with_noisy_anchors_is_warned_of(train: Callable[..., Any]) -> None:
    assert (
        "weight = 50 pulls features to anchors that carry privacy's noise"
        in train("fedfm", "--dp-epsilon", "8").stderr
    )


@pytest.mark.parametrize("weight", ["0.5", "50"])
def test_no_such_warning_elsewhere(train: Callable[..., Any], weight: str) -> None:
    private = ("--dp-epsilon", "8") if weight == "0.5" else ()
    assert "warning" not in train("fedfm", "--set", f"weight={weight}", *private).stderr


def test_a_plan_has_a_row_for_everything_that_is_released(fedsynth: Callable[..., Any]) -> None:
    words = ("privacy", "plan", "--method", "fedfm", "--sigma", "2", "--rounds", "2", "--n", "6000")
    (plan,) = json.loads(fedsynth(*words, "--json").stdout)
    assert [row["quantity"] for row in plan["rows"]] == [
        "model update",
        "class sums of features (anchors)",
        "class counts",
    ]
    assert [row["noise_multiplier"] for row in plan["rows"]] == [2, 10, 10]
    assert [row["sample_rate"] < 1 for row in plan["rows"]] == [True, False, False]
    assert sum(row["releases"] for row in plan["rows"]) == plan["releases"]
    shown = fedsynth(*words).stdout
    assert "anchors" in shown
    assert "counts" in shown


def test_lost_clients_and_rounds_that_do_not_count_are_said(train: Callable[..., Any]) -> None:
    run = train("fedavg", "--client-failures", "1", "--seed", "1")
    row = metrics(run)[0]
    needed = -(-len(row["lost"]) // 2)
    assert row["not_counted"] == {"exchange": "main", "uploads": 0, "needed": needed}
    assert "lost 0 (" in run.stderr
    assert "does not count: 0 uploads, and " in run.stderr
    assert "client_failures = 1.0" in (run.folder / "config.toml").read_text()
    line = round_line({**row, "rejected": {"2": "weight is -1"}}, resolve({}))
    assert "rejected 2 (weight is -1)" in line


def test_a_quorum_is_a_share(train: Callable[..., Any]) -> None:
    refused = train("fedavg", "--quorum", "1.5")
    assert refused.code == 2
    assert refused.stderr.strip() == "fedsynth: error: --quorum must be between 0 and 1, got 1.5"
