"""Tests of sweeps: the runs of a grid, resumption, concurrency and tables."""

from __future__ import annotations

import csv
import io
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsynth.cli import runs_commands
from fedsynth.cli.app import app
from fedsynth.cli.runs_commands import train_command
from fedsynth.errors import FedsynthError
from fedsynth.results import sweep as sweeps
from fedsynth.results.sweep import Sweep, finished, read_sweep, run_sweep
from fedsynth.results.tables import FORMATS, render, sweep_rows
from fedsynth.validation import to_toml
from tests.quick_runs import quick_sections

GRID = """
[run]
rounds = 2
[grid]
method = ["fedavg", "fedprox"]
alpha = [0.1, 1.0]
seed = [0, 1, 2]
[grid.fedprox]
mu = [0.01, 0.1]
[methods.fedavg]
lr = 0.5
"""
# Replaces `fedsynth train`: writes the files of a run and its times, and takes some time.
FAKE = """
import json, pathlib, sys, time, tomllib
args = dict(zip(sys.argv[2::2], sys.argv[3::2]))
resumed = "--resume" in args
place = pathlib.Path(args["--resume"]) if resumed else pathlib.Path(args["--output"]) / "20260101-000000-x"
config = (place if resumed else pathlib.Path(args["--config"]).parent) / "config.toml"
run = tomllib.loads(config.read_text())
seed, alpha = run["run"]["seed"], run["partition"]["alpha"]
begun = time.time()
time.sleep(SECONDS)
if seed == FAILS:
    sys.exit("fedsynth: error: no place")
final = place.with_suffix("")
place.rename(final) if resumed else final.mkdir()
accuracy = 0.5 + 0.1 * seed + 0.01 * alpha
summary = {"method": run["run"]["method"], "test_accuracy": accuracy, "upload_bytes": 1000, "seconds": 1.5}
(final / "summary.json").write_text(json.dumps(summary))
(final / "times.json").write_text(json.dumps([begun, time.time(), resumed]))
"""
SEED = '[grid]\nmethod = ["fedavg"]\nseed = [0]\n'
SEEDS = '[grid]\nmethod = ["fedavg"]\nseed = [0, 1]\n'
SweepFactory = Callable[..., Sweep]


@pytest.fixture
def make_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFactory:
    """Returns a factory of sweeps whose runs are imitations: `make_sweep(text, seconds, fails)`."""

    def make(text: str, seconds: float = 0.0, fails: int = -1) -> Sweep:
        script = tmp_path / "fake.py"
        script.write_text(FAKE.replace("SECONDS", str(seconds)).replace("FAILS", str(fails)))
        monkeypatch.setattr(runs_commands, "COMMAND", (sys.executable, str(script)))
        monkeypatch.setattr(sweeps, "POLL_SECONDS", 0.01)
        file = tmp_path / "skew.toml"
        file.write_text(text)
        return replace(read_sweep(file), output=tmp_path / "out")

    return make


def times(sweep: Sweep) -> list[list[float]]:
    folders = [finished(sweep, cell) for cell in sweep.cells]
    return [json.loads((folder / "times.json").read_text()) for folder in folders if folder]


def test_grid_has_all_combinations(make_sweep: SweepFactory) -> None:
    sweep = make_sweep(GRID)
    assert len(sweep.cells) == 2 * 3 + 2 * 3 * 2
    assert sweep.axes == ("method", "alpha", "mu")
    assert len({cell.key for cell in sweep.cells}) == len(sweep.cells)
    for cell in sweep.cells:
        settings: Any = cell.settings
        assert settings.rounds == 2
        assert settings.method.name == cell.values["method"]
        assert settings.partition.alpha == cell.values["alpha"]
        assert settings.seed == cell.values["seed"]
        if settings.method.name == "fedavg":
            assert settings.method.lr == 0.5
        else:
            assert settings.method.mu == cell.values["mu"]
    assert make_sweep("[run]\nrounds = 1\n").cells[0].values == {}  # no grid: one run

    def key(text: str) -> str:
        return make_sweep(text).cells[0].key

    base_key = key(SEED)  # it depends on the settings except the device
    assert base_key != key(f"[run]\nrounds = 4\n{SEED}")
    assert base_key == key(f'[run]\ndevice = "cpu"\n{SEED}')
    assert base_key == key('[grid]\n"run.method" = ["fedavg"]\n"run.seed" = [0]\n')


def test_invalid_sweeps_are_rejected(make_sweep: SweepFactory) -> None:
    for text, message in (
        ("[grid]\nalpha = 0.1\n", "alpha must list numbers"),
        ("[grid]\nalpha = [[1]]\n", "numbers, strings or booleans"),
        ("[grid]\nalpah = [1]\n", "the run alpah=1 are invalid: .*alpah"),
        ('[grid]\n"modle.width" = [1]\n', "'modle' is not a section"),
        ("[grid]\nalpha = [1]\n[grid.fedprox]\nmu = [1]\n", "no run has the method"),
        ("[grid]\nalpha = [1]\n[methods.fedprox]\nmu = 1\n", "no run has the method"),
        ('[grid]\nalpha = [1.0]\n"partition.alpha" = [2.0]\n', "are the same setting"),
        ("[grid]\nalpha = [1.0, 1.0]\n", "two runs of the grid have the same settings"),
        ("[grid]\nseed = [" + "0," * 101 + "]\nalpha = [" + "1.0," * 101 + "]\n", "more than"),
        ("[sweep]\njobs = 0\n", "sweep.jobs must be between 1 and 1000"),
        ("[methods]\nfedavg = 1\n", "methods.fedavg must be a table, got 1"),
    ):
        with pytest.raises(FedsynthError, match=message):
            make_sweep(text)


def test_finished_runs_are_reused_and_tabulated(make_sweep: SweepFactory) -> None:
    text = '[grid]\nmethod = ["fedavg"]\nalpha = [0.1, 1.0]\nseed = [0, 1, 2]\n'
    sweep = make_sweep(text)
    assert [line.finished for line in sweep_rows(sweep)] == [0, 0]
    ended = run_sweep(sweep, train_command, print)
    assert (len(ended.completed), ended.failed) == (6, [])
    first_times = times(sweep)
    repeated = run_sweep(make_sweep(text), train_command, print)
    assert (len(repeated.existing), repeated.completed) == (6, [])
    assert times(sweep) == first_times
    lines = sweep_rows(sweep)
    for line, alpha in zip(lines, (0.1, 1.0), strict=True):
        expected = [0.5 + 0.1 * seed + 0.01 * alpha for seed in range(3)]
        assert line.values == {"method": "fedavg", "alpha": alpha}
        assert line.results["test_accuracy"].mean == pytest.approx(statistics.fmean(expected))
        assert line.results["test_accuracy"].std == pytest.approx(0.1)
    texts = {form: render(sweep, lines, form) for form in FORMATS}
    assert "60.10 ± 10.00" in texts["table"]
    assert "| fedavg | 0.1 | 3 | 60.10 ± 10.00 |" in texts["markdown"]
    rows = list(csv.DictReader(io.StringIO(texts["csv"])))
    assert float(rows[1]["test_accuracy_mean"]) == pytest.approx(0.61)
    assert rows[0]["epsilon_mean"] == ""


def test_stopped_runs_are_resumed(make_sweep: SweepFactory) -> None:
    sweep = make_sweep(SEED)
    folder = sweep.output / sweep.cells[0].key / "20260101-000000-x.incomplete"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[run]\nmethod='fedavg'\nseed=0\n[partition]\nalpha=0.5\n")
    run_sweep(sweep, train_command, lambda text: None)
    assert times(sweep)[0][2] is True


def test_failed_runs_are_reported_and_others_continue(make_sweep: SweepFactory) -> None:
    sweep = make_sweep(SEEDS, fails=1)
    messages: list[str] = []
    ended = run_sweep(sweep, train_command, messages.append)
    assert [cell.values["seed"] for cell, _ in ended.failed] == [1]
    assert any("failed (exit code 1)" in message and "no place" in message for message in messages)
    assert [(line.finished, line.planned) for line in sweep_rows(sweep)] == [(1, 2)]


def test_as_many_runs_as_jobs_are_active_but_one_on_a_ledger(
    make_sweep: SweepFactory, tmp_path: Path
) -> None:
    ledger = f'[privacy]\nnoise_multiplier = 3.0\nledger = "{tmp_path}/ledgers"\n'
    for privacy, active in (("", 3), (ledger, 1)):
        sweep = make_sweep(f"[sweep]\njobs = 3\n{privacy}[grid]\nseed = [0, 1, 2, 3]\n", 0.4)
        sweep = replace(sweep, output=tmp_path / str(active))
        run_sweep(sweep, train_command, lambda text: None)
        spans = times(sweep)
        assert max(sum(a <= begun < b for a, b, _ in spans) for begun, _, _ in spans) == active


def test_interrupted_sweeps_stop_runs(make_sweep: SweepFactory) -> None:
    sweep = make_sweep(f"[sweep]\njobs = 2\n{SEEDS}", seconds=60)

    def interrupt(text: str) -> None:
        if "seed=1" in text:
            raise KeyboardInterrupt

    threads = threading.active_count()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, train_command, interrupt)
    assert time.monotonic() - start < 30
    assert threading.active_count() == threads
    assert times(sweep) == []


def test_command_runs_and_tabulates_sweep(make_sweep: SweepFactory, tmp_path: Path) -> None:
    make_sweep(SEEDS, fails=1)
    common = ["sweep", str(tmp_path / "skew.toml"), "--output", str(tmp_path / "there")]
    listed = CliRunner().invoke(app, [*common, "--dry-run"])
    assert listed.stdout.count("to do") == 2
    table = ["--table", str(tmp_path / "t.md"), "--format", "markdown"]
    result = CliRunner().invoke(app, [*common, *table])
    assert result.exit_code == 1  # one run failed
    assert (tmp_path / "t.md").read_text().startswith("| method | runs | test accuracy (%)")
    printed = CliRunner().invoke(app, [*common, "--only-table"])
    assert printed.exit_code == 0
    assert "1/2" in printed.stdout
    invalid = CliRunner().invoke(app, [*common, "--format", "excel"])
    assert invalid.exit_code == 2
    assert "--format must be one of" in invalid.stderr


def test_sweep_trains_real_run(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text(to_toml({**quick_sections("fedavg"), "grid": {"seed": [3]}}))
    sweep = replace(read_sweep(file), output=tmp_path / "out")
    assert run_sweep(sweep, train_command, print).failed == []
    (line,) = sweep_rows(sweep)
    assert 0 < (line.results["test_accuracy"].mean or 0) <= 1
