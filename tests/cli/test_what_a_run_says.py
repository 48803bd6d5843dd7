"""What a run tells its user, beyond the one accuracy: presets, fairness, variants, stragglers,
warnings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.cli.options import from_preset, merged
from fedsynth.config.resolve import resolve
from fedsynth.simulation.run_messages import round_line

Call = Callable[..., Any]


def metrics(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_what_the_preset_decides_is_said(train: Call) -> None:
    # tiny runs give all else
    run = train("scaffold")
    assert "preset of digits, for settings that you did not set: model.depth=2\n" in run.stderr
    said = from_preset({"data": {}, "run": {"method": "MOON"}, "partition": {"clients": 3}})
    assert said.endswith(": run.rounds=3, model.width=32, model.depth=2, method.batch=32")
    assert from_preset({"data": {"dataset": "mnist"}, "run": {}}) == ""
    synthetic = from_preset({"data": {"dataset": "synthetic(1,1)"}, "run": {}})
    assert ": partition.kind=natural" in synthetic


def test_another_methods_config_is_not_dropped_in_silence(tmp_path: Path, train: Call) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[run]\nmethod = "fedprox"\n[method]\nstragglers = 0.9\n')
    run = train(f"fedavg --config {config}")
    assert "stragglers = 0.9" not in (run.folder / "config.toml").read_text()
    said = run.stderr
    assert "method settings in the config are for fedprox and are ignored. fedavg uses its" in said
    notes: list[str] = []
    fedprox = {"run": {"method": "fedprox"}}
    merged({**fedprox, "method": {"mu": 1.0}}, fedprox, notes.append)
    merged(fedprox, {"run": {"method": "fedavg"}}, notes.append)
    assert notes == []


@pytest.mark.parametrize(
    "line", ["fedavg --dp-epsilon 8", "feddm --dp-sigma 3 --dp-mechanism paper"]
)
def test_with_differential_privacy_nothing_exact_of_clients_is_shown(
    train: Call, line: str
) -> None:
    """Catches: AMP, which is an exact function of private data, on the screen or in the summary."""
    run = train(f"{line} --local-test 0.2")
    assert "WLP" not in run.stderr + run.stdout
    assert "local" not in json.loads((run.folder / "summary.json").read_text())
    assert '"local"' not in (run.folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("options", "warned"),
    [("--dp-epsilon 8", True), ("--dp-epsilon 8 --set weight=0.5", False), ("", False)],
)
def test_fedfms_weight_with_noisy_anchors_is_warned_of(
    train: Call, options: str, warned: bool
) -> None:
    said = train(f"fedfm {options}").stderr
    assert ("method.weight=50 pulls features to noisy anchors" in said) == warned
    assert ("warning" in said) == warned


def test_lost_clients_and_rounds_that_do_not_count_are_said(train: Call) -> None:
    run = train("fedavg --client-failures 1 --seed 1")
    row = metrics(run)[0]
    needed = -(-len(row["lost"]) // 2)
    assert row["not_counted"] == {"exchange": "main", "uploads": 0, "needed": needed}
    assert "lost 0 (" in run.stderr
    assert "is discarded: 0 uploads, but " in run.stderr
    assert "client_failures = 1.0" in (run.folder / "config.toml").read_text()
    line = round_line({**row, "rejected": {"2": "weight is -1"}}, resolve({}))
    assert "rejected 2 (weight is -1)" in line
