"""Tests of sweeps, curves, and the page of several runs."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import resource
import shutil
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedsynth import resolve, simulate
from fedsynth.cli.app import app
from fedsynth.errors import FedsynthError, OutputError
from fedsynth.experiments import runner
from fedsynth.experiments.overview import by_seed, differing, labels
from fedsynth.experiments.page import (
    curve,
    curves,
    curves_svg,
    runs_page,
    write_png,
)
from fedsynth.experiments.runner import Shard, run_sweep
from fedsynth.experiments.sweep import FORMATS, Sweep, SweepError, read_sweep, render, sweep_rows
from fedsynth.results.file_names import LOCK
from fedsynth.results.finished import Run, RunFolderError, finished_run, finished_runs
from fedsynth.validation import to_toml
from tests.html_page import Page
from tests.quick_runs import folder_of, quick_sections
from tests.raising import raises
from tests.user_files import make_image_folder, write_declaration

GRID = """
[run]
rounds = 2
[grid]
method = ["fedavg", "fedprox"]
alpha = [0.1, 1.0]
seed = [0, 1, 2]
[grid.fedprox]
mu = [0.01, 0.1]
[grid.fedavg]
lr = [0.5]
"""
# Replaces `fedsynth train`: writes the files of a run and its times, and takes some time.
FAKE = """
import json, pathlib, sys, time, tomllib
args = dict(zip(sys.argv[2::2], sys.argv[3::2]))
resumed = "--resume" in args
place = pathlib.Path(args["--resume"]) if resumed else pathlib.Path(args["--output"]) / "20260101-000000-x"
config = (place if resumed else pathlib.Path(args["--config"]).parent) / "config.toml"
text = config.read_text()
run = tomllib.loads(text)
seed, alpha = run["run"]["seed"], run["partition"]["alpha"]
begun = time.time()
time.sleep(SECONDS)
if seed == FAILS:
    sys.exit("fedsynth: error: no place")
final = place.with_suffix("")
place.rename(final) if resumed else final.mkdir(exist_ok=True)
(final / "config.toml").write_text(text)
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
    def make(text: str, seconds: float = 0.0, fails: int = -1) -> Sweep:
        script = tmp_path / "fake.py"
        script.write_text(FAKE.replace("SECONDS", str(seconds)).replace("FAILS", str(fails)))
        monkeypatch.setattr(runner, "COMMAND", (sys.executable, str(script), "train"))
        monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
        file = tmp_path / "skew.toml"
        file.write_text(text)
        return replace(read_sweep(file), output=tmp_path / "out")

    return make


def times(sweep: Sweep) -> list[list[float]]:
    folders = [finished_run(sweep.folder(cell)) for cell in sweep.cells]
    return [json.loads((folder / "times.json").read_text()) for folder in folders if folder]


def test_grid_has_all_combinations(make_sweep: SweepFactory) -> None:
    sweep = make_sweep(GRID)
    assert len(sweep.cells) == 2 * 3 + 2 * 3 * 2
    assert sweep.axes == ("method", "alpha", "lr", "mu")
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
        ("[grid]\nalpha = 0.1\n", "alpha must be a list of numbers"),
        ("[grid]\nalpha = [[1]]\n", "numbers, strings or booleans"),
        ("[grid]\nalpah = [1]\n", "the run alpah=1 has invalid settings: .*alpah"),
        ('[grid]\n"modle.width" = [1]\n', "the section 'modle' is unknown"),
        ("[grid]\nalpha = [1]\n[grid.fedprox]\nmu = [1]\n", "because the runs only use"),
        ('[grid]\nalpha = [1.0]\n"partition.alpha" = [2.0]\n', "are the same setting"),
        ("[grid]\nalpha = [1.0, 1.0]\n", "two runs of the grid have the same settings"),
        ("[grid]\nseed = [" + "0," * 101 + "]\nalpha = [" + "1.0," * 101 + "]\n", "more than"),
        ("[sweep]\njobs = 0\n", "sweep.jobs must be between 1 and 1000"),
        *(
            (f"[sweep]\noutput = {value}\n", "sweep.output must be the path")
            for value in ("5", "inf", "true", '""', '"a\\u0000"', '"~nobody-of-that-name/x"')
        ),
    ):
        with pytest.raises(FedsynthError, match=message):
            make_sweep(text)


def test_output_is_read_as_path_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[sweep]\noutput = "~/x"\n')
    assert read_sweep(file).output == Path.home() / "x"
    for output in (file, file / "below"):
        line = ["sweep", str(file), "--dry-run", "--output", str(output)]
        refused = CliRunner().invoke(app, line)
        assert refused.stderr == f"fedsynth: error: cannot use {file}: Not a directory\n"


def test_sweeps_of_one_folder_exclude_each_other(make_sweep: SweepFactory) -> None:
    """Also a run that outlives its killed sweep excludes others, and is not repeated."""
    sweep = make_sweep(SEED, seconds=3)
    refused: list[str] = []

    def run_another(text: str) -> None:
        if text.startswith("begins"):
            with raises(OutputError, "sweep.lock") as error:
                run_sweep(sweep, print)
            assert f"(process id {os.getpid()}, " in str(error.value)
            refused.append(text)

    assert run_sweep(sweep, run_another) == []
    assert len(refused) == len(times(sweep)) == 1
    sweep = replace(sweep, output=sweep.output.with_name("killed"))
    if (child := os.fork()) == 0:
        run_sweep(sweep, lambda text: text.startswith("begins") and os.kill(os.getpid(), 9))
    os.waitpid(child, 0)
    with raises(OutputError, "sweep.lock") as error:
        run_sweep(sweep, print)
    _, active = map(int, (sweep.output / LOCK).read_text().split())  # the sweep, and its run
    assert f"(process id {active})" in str(error.value)
    messages: list[str] = []
    until = time.monotonic() + 60
    while not messages:  # the run has not ended
        with nullcontext() if time.monotonic() > until else suppress(OutputError):
            assert run_sweep(sweep, messages.append) == []
        time.sleep(0.05)
    assert messages == [f"1 runs in {sweep.output}, 1 finished"]


def test_shards_share_out_runs_and_none_is_lost(make_sweep: SweepFactory, tmp_path: Path) -> None:
    """Two processes of three shards run at the same time, one of them twice; then one call runs
    the rest. Runs on the same ledgers are in one shard."""
    sweep = make_sweep("[grid]\nseed = [0, 1, 2, 3, 4, 5, 6]\n", seconds=0.3)
    parts = [Shard(number, 3).cells(sweep) for number in (1, 2, 3)]
    assert sorted(map(len, parts)) == [2, 2, 3]
    assert {cell for part in parts for cell in part} == set(sweep.cells)
    lines: list[str] = []
    with ThreadPoolExecutor() as pool:
        shards = [Shard(1, 3), Shard(1, 3), Shard(3, 3)]
        results = pool.map(lambda shard: run_sweep(sweep, lines.append, shard), shards)
        failed = [{cell.label for cell in cells} for cells in results]
    left_out = {line.split(": ")[1].split(", which")[0] for line in lines if "left out" in line}
    assert failed[2] == set()
    assert failed[0] | failed[1] <= left_out
    assert sum(line.startswith("begins") for line in lines) == 5 == len(times(sweep))
    assert any(line.startswith("left out") for line in lines)
    lines.clear()
    assert run_sweep(sweep, lines.append) == []
    assert sum(line.startswith("begins") for line in lines) == 2
    assert len(times(sweep)) == 7
    ledger = f'[privacy]\nnoise_multiplier = 3.0\nledger = "{tmp_path}/ledgers"\n'
    private = make_sweep(f"{ledger}[grid]\nseed = [0, 1]\n")
    assert list(map(len, (Shard(1, 2).cells(private), Shard(2, 2).cells(private)))) == [2, 0]


def test_run_of_a_killed_shard_is_not_repeated(make_sweep: SweepFactory) -> None:
    sweep = make_sweep(SEED, seconds=4)
    if (child := os.fork()) == 0:
        killed = lambda text: text.startswith("begins") and os.kill(os.getpid(), 9)  # noqa: E731
        run_sweep(sweep, killed, Shard(1, 2))
    os.waitpid(child, 0)
    lines: list[str] = []
    assert run_sweep(sweep, lines.append) == list(sweep.cells)  # no result yet
    assert lines[-1].startswith("left out")


@pytest.mark.parametrize(
    ("first", "last", "step", "task", "expected"),
    [(0, 3, 1, 0, (1, 4)), (1, 4, 1, 4, (4, 4)), (10, 30, 10, 20, (2, 3)), (1, 8, 7, 8, (2, 2))],
)
def test_shard_is_the_task_of_a_slurm_array(
    first: int, last: int, step: int, task: int, expected: tuple[int, int]
) -> None:
    count = (last - first) // step + 1
    facts = {"ID": task, "COUNT": count, "MIN": first, "STEP": step}
    names = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in facts.items()}
    assert Shard.of(None, names) == Shard(*expected)
    assert Shard.of("3/5", names) == Shard(3, 5)
    assert Shard.of(None, {}) == Shard()


def test_invalid_shards_are_rejected() -> None:
    odd = {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "2"}
    gaps = {f"SLURM_ARRAY_TASK_{n}": v for n, v in {"ID": "3", "MIN": "1", "MAX": "7"}.items()}
    gaps["SLURM_ARRAY_TASK_COUNT"] = "3"
    letter = {**odd, "SLURM_ARRAY_TASK_ID": "a"}
    step = {**odd, "SLURM_ARRAY_TASK_STEP": "0"}
    wrong = [(None, names) for names in (odd, gaps, letter, step)]
    for text, names in (("0/4", {}), ("5/4", {}), ("1", {}), ("a/b", {}), *wrong):
        with raises(SweepError, "sweep.shard"):
            Shard.of(text, names)


def test_last_shard_prints_the_table(make_sweep: SweepFactory, tmp_path: Path) -> None:
    make_sweep(SEEDS)
    common = ["sweep", str(tmp_path / "skew.toml"), "--output", str(tmp_path / "out")]
    first = CliRunner().invoke(app, [*common, "--shard", "1/2"])
    assert (first.exit_code, first.stdout) == (0, "")
    assert "1 runs of the sweep have no result" in first.stderr
    task = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "1"}
    last = CliRunner().invoke(app, common, env=task)
    assert last.exit_code == 0
    assert last.stdout.startswith("method")


def test_one_unwritable_folder_does_not_stop_the_others(make_sweep: SweepFactory) -> None:
    sweep = make_sweep(SEEDS)
    sweep.output.mkdir()
    sweep.folder(sweep.cells[0]).write_text("a file")
    lines: list[str] = []
    assert run_sweep(sweep, lines.append) == [sweep.cells[0]]
    assert sum(line.endswith("done") for line in lines) == 1


def test_an_outdated_run_with_a_later_time_does_not_hide_the_current_one(
    make_sweep: SweepFactory,
) -> None:
    """Such as one of a machine whose clock was wrong."""
    sweep = make_sweep(SEED)
    outdated = sweep.folder(sweep.cells[0]) / "20270101-000000-x"
    assert run_sweep(sweep, print) == []
    shutil.copytree(outdated.with_name("20260101-000000-x"), outdated)
    config = outdated / "config.toml"
    config.write_text(config.read_text().replace("momentum = 0.9", "momentum = 0.8"))
    assert sweep.finished(sweep.cells[0]) == outdated.with_name("20260101-000000-x")


def test_declared_values_are_those_of_the_run(tmp_path: Path) -> None:
    """Regression: a private sweep on declared data was charged again at each call."""
    write_declaration(make_image_folder(tmp_path / "scans"))
    text = """
[run]
method = "fedavg"
[data]
folder = "FOLDER"
[model]
name = "linear"
[partition]
kind = "iid"
clients = 1
[privacy]
noise_multiplier = 5.0
[grid]
seed = [0, 1]
""".replace("FOLDER", str(tmp_path / "scans"))
    (tmp_path / "s.toml").write_text(text)
    sweep = replace(read_sweep(tmp_path / "s.toml"), output=tmp_path / "out")
    assert list(map(len, (Shard(n, 2).cells(sweep) for n in (1, 2)))) == [2, 0]  # one ledger
    cell = sweep.cells[0]
    simulate(cell.settings, output=sweep.folder(cell), quiet=True)
    assert sweep.finished(cell) is not None


def test_a_run_that_names_its_encoders_weights_is_finished(make_sweep: SweepFactory) -> None:
    sweep = make_sweep(f'[data]\nencoder = "torchvision:resnet18"\n{SEED}')
    (cell,) = sweep.cells
    assert run_sweep(sweep, print) == []
    config = sweep.folder(cell) / "20260101-000000-x" / "config.toml"
    text = config.read_text()
    for name, is_finished in (("resnet18@0a1b2c", True), ("resnet34@0a1b2c", False)):
        config.write_text(text.replace("resnet18", name))
        assert (sweep.finished(cell) is not None) == is_finished


def test_finished_runs_are_reused_and_tabulated(make_sweep: SweepFactory) -> None:
    text = '[grid]\nmethod = ["fedavg"]\nalpha = [0.1, 1.0]\nseed = [0, 1, 2]\n'
    sweep = make_sweep(text)
    assert [line.finished for line in sweep_rows(sweep)] == [0, 0]
    assert run_sweep(sweep, print) == []
    assert all(finished_run(sweep.folder(cell)) for cell in sweep.cells)
    first_times = times(sweep)
    messages: list[str] = []
    assert run_sweep(make_sweep(text), messages.append) == []
    assert messages == [f"6 runs in {sweep.output}, 6 finished"]
    assert times(sweep) == first_times
    lines = sweep_rows(sweep)
    for line, alpha in zip(lines, (0.1, 1.0), strict=True):
        expected = [0.5 + 0.1 * seed + 0.01 * alpha for seed in range(3)]
        assert line.values == {"method": "fedavg", "alpha": alpha}
        assert line.results["test_accuracy"] == pytest.approx(expected)
    texts = {form: render(sweep, lines, form) for form in FORMATS}
    assert "60.10 ± 10.00" in texts["table"]
    assert "| fedavg | 0.1 | 3 | 60.10 ± 10.00 |" in texts["markdown"]
    rows = list(csv.DictReader(io.StringIO(texts["csv"])))
    assert float(rows[1]["test_accuracy_mean"]) == pytest.approx(0.61)
    assert (rows[0]["epsilon_mean"], rows[0]["epsilon_n"]) == ("", "0")
    results = {**lines[0].results, "test_accuracy": [0.5], "epsilon": [1.0001, 1.0031]}
    table = render(sweep, [lines[0]._replace(results=results)], "markdown")
    assert "| 50.00 (1) | 1.01 (2) |" in table  # ε is the largest, rounded up


def test_runs_with_an_earlier_default_are_repeated(make_sweep: SweepFactory) -> None:
    """Regression: their folder is named by a hash that leaves defaults out."""
    sweep = make_sweep(SEED)
    assert run_sweep(sweep, print) == []
    config = next(sweep.output.glob("*/*/config.toml"))
    today = config.read_text()
    config.write_text(today.replace("lr = 0.01\n", ""))  # a setting that is newer than the run
    assert sweep_rows(sweep)[0].finished == 1
    config.write_text(today.replace("lr = 0.01\n", "lr = 0.02\n"))
    assert sweep_rows(sweep)[0].finished == 0
    messages: list[str] = []
    assert run_sweep(sweep, messages.append) == []
    assert messages[1].endswith("outdated, because method.lr was 0.02 and is 0.01 now")
    assert config.read_text() == today
    assert sweep_rows(sweep)[0].finished == 1


def test_as_many_runs_as_jobs_are_active_but_one_on_a_ledger(
    make_sweep: SweepFactory, tmp_path: Path
) -> None:
    ledger = f'[privacy]\nnoise_multiplier = 3.0\nledger = "{tmp_path}/ledgers"\n'
    for privacy, active in (("", 3), (ledger, 1)):
        sweep = make_sweep(f"[sweep]\njobs = 3\n{privacy}[grid]\nseed = [0, 1, 2, 3]\n", 1.5)
        sweep = replace(sweep, output=tmp_path / str(active))
        run_sweep(sweep, lambda text: None)
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
        run_sweep(sweep, interrupt)
    assert time.monotonic() - start < 30
    assert threading.active_count() == threads
    assert times(sweep) == []


def test_command_runs_resumes_and_tabulates(make_sweep: SweepFactory, tmp_path: Path) -> None:
    """The second run was stopped, and is resumed although the first one fails."""
    sweep = replace(make_sweep(SEEDS, fails=0), output=tmp_path / "there")
    folder = sweep.folder(sweep.cells[1]) / "20260101-000000-x.incomplete"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(sweep.cells[1].settings.to_mapping()))
    common = ["sweep", str(tmp_path / "skew.toml"), "--output", str(tmp_path / "there")]
    listed = CliRunner().invoke(app, [*common, "--dry-run"])
    assert listed.stdout.count("to do") == 2
    result = CliRunner().invoke(app, [*common, "--format", "markdown"])
    assert result.exit_code == 1
    assert re.search(r"seed=0: failed \(exit code 1\): .*no place", result.stderr)
    assert result.stdout.startswith("| method | runs | test accuracy (%)")
    assert times(sweep)[0][2] is True
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
    assert run_sweep(sweep, print) == []
    (line,) = sweep_rows(sweep)
    assert 0 < min(line.results["test_accuracy"]) <= 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Returns runs of FedAvg with seeds 0 and 1, of FedDM, and of FedDM with privacy."""
    local: Any = {"partition": {"local_test": 0.2}}
    base = tmp_path_factory.mktemp("runs")
    kinds = (
        quick_sections("fedavg", **local),
        quick_sections("fedavg", run={"seed": 1}, **local),
        quick_sections("feddm"),
        quick_sections("feddm", privacy={"noise_multiplier": 3.0}),
    )
    return [Run.read(folder_of(simulate(resolve(kind), output=base))) for kind in kinds]


def points_of(run: Run, metric: str, axis: str) -> list[tuple[float, float]]:
    return [*curve(run, metric, axis).values()]


def test_curve_points_match_rows(runs: list[Run]) -> None:
    first, second = runs[0].rows
    points = [(1, first["test_accuracy"]), (2, second["test_accuracy"])]
    assert points_of(runs[0], "test_accuracy", "rounds") == points
    megabytes = np.cumsum([row["upload_bytes"] / 1e6 for row in (first, second)])
    assert [a for a, _ in points_of(runs[0], "test_accuracy", "bytes")] == pytest.approx(megabytes)
    seconds = first["seconds"] + second["seconds"]
    assert points_of(runs[0], "local.amp", "seconds")[1][0] == pytest.approx(seconds)
    spent = [row["epsilon"] for row in runs[3].rows]
    assert [a for a, _ in points_of(runs[3], "test_accuracy", "eps")] == spent
    for run, metric, by in (
        (runs[3], "test_accuracy", "seconds"),
        (runs[0], "test_accuracy", "eps"),
        (runs[2], "local.amp", "rounds"),
    ):
        assert points_of(run, metric, by) == []
    notes: list[str] = []
    assert len(curves(runs, "local.amp", "rounds", note=notes.append)) == 2
    reason = "has no round with both local.amp and rounds"
    omitted = [f"left out: the run {run.name} {reason}" for run in runs[2:]]
    assert [note.partition(". ")[0] for note in notes] == omitted
    with raises(RunFolderError, "files.run"):
        curves(runs[2:], "local.amp", "rounds")


def test_seeds_are_averaged_with_their_deviation(runs: list[Run]) -> None:
    assert [len(group) for group in by_seed(runs)] == [2, 1, 1]
    (line, *_) = curves(runs, "test_accuracy", "rounds", mean=True)
    a, b = (run.rows[-1]["test_accuracy"] for run in runs[:2])
    across, middle = line.points[-1]
    assert across == 2
    assert middle == pytest.approx((a + b) / 2)
    _, low, high = line.band[-1]
    assert high - low == pytest.approx(2 * abs(a - b) / 2**0.5)
    budgets = [
        replace(runs[0], settings={**runs[0].settings, "privacy.epsilon": value})
        for value in (1, 8)
    ]
    assert len(by_seed(budgets)) == 2  # a regression: they were two seeds
    incomplete = replace(runs[1], rows=runs[1].rows[1:])
    (line,) = curves([runs[0], incomplete], "test_accuracy", "rounds", mean=True)
    assert np.array(line.points) == pytest.approx(np.array([[2, (a + b) / 2]]))  # no round 1


def test_runs_are_labelled_by_differences(runs: list[Run]) -> None:
    """Regression: runs with ε and with σ had the same label."""
    private = runs[3]
    settings = {k: v for k, v in private.settings.items() if k != "privacy.noise_multiplier"}
    by_epsilon = replace(private, settings={**settings, "privacy.epsilon": 8.0})
    sigma, epsilon = {"privacy.noise_multiplier": 3.0}, {"privacy.epsilon": 8.0}
    assert differing([private, by_epsilon]) == [sigma, epsilon]
    assert not any(key.startswith("privacy.") for key in differing(runs)[3])
    starts = ("fedavg seed=0", "fedavg seed=1", "feddm", "feddm private")
    assert all(map(str.startswith, labels(runs), starts))
    assert labels([runs[0], runs[0]]) == ["fedavg #1", "fedavg #2"]
    many = []
    for seed in range(3):
        settings = {**runs[0].settings, "run.seed": seed, "partition.alpha": seed / 7}
        settings |= {"model.name": "x" * 30, "model.width": seed, "method.lr": 0.1 * seed}
        many.append(replace(runs[0], settings=settings))
    names = labels(many)
    assert len(set(names)) == 3
    assert max(map(len, names)) <= 40


def test_curves_are_drawn_as_svg_and_png(runs: list[Run], tmp_path: Path, monkeypatch: Any) -> None:
    lines = curves(runs, "test_accuracy", "rounds")
    svg = ElementTree.fromstring(curves_svg(lines, "test_accuracy", "rounds"))
    assert len([element for element in svg.iter() if element.tag.endswith("polyline")]) == 4
    legend = [element for element in svg if element.tag.endswith("}text")]
    assert len(legend) == 4
    assert min(float(element.get("y", 0)) for element in legend) >= 14  # not cut off at the top
    write_png(tmp_path / "c.png", lines, "test_accuracy", "rounds")
    with Image.open(tmp_path / "c.png") as picture:
        assert picture.size[0] > 800
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with raises(OutputError, "files.output"):
        write_png(tmp_path / "c.png", lines, "test_accuracy", "rounds")


def test_page_is_self_contained(runs: list[Run]) -> None:
    text = runs_page(runs)
    page = Page(text)
    assert not re.search(r"<script|https?://(?!www\.w3\.org/2000/svg)|<link|@import|url\(", text)
    for heading in ("Learning curves", "Who has what", "Synthetic images", "Fairness", "Privacy"):
        assert f">{heading}</h2>" in text
    assert "Generators" not in page.text  # no run has one
    assert all(run.name in page.text for run in runs)
    amp = runs[0].rows[-1]["local"]["amp"]
    assert f"{100 * amp:.2f} %" in page.text
    assert all(image["alt"] and str(image["src"]).startswith("data:") for image in page.images)
    synthetic = [image for image in page.images if "synthetic images" in str(image["alt"])]
    assert len(synthetic) == 4  # two rounds of the two runs with images
    assert all("col" in heads and "row" in heads for heads in page.tables)


def test_page_has_measures_by_domain_and_client(runs: list[Run]) -> None:
    """An AUROC that is undefined is stated in words. Damaged rows are left out."""
    run = runs[0]
    text = runs_page([run])
    last = run.rows[-1]
    shares = [last["auroc"], last["f1"], *last["local"]["client_accuracy"]]
    assert [share for share in shares if f"{100 * share:.2f} %" not in text] == []
    assert "AUROC is undefined" not in text
    matrix = run.summary["confusion_matrix"]
    assert Page(text).text.count("true classes (rows)") == 1
    assert f'<td data-head="0">{matrix[0][0]}</td>' in text
    within = {"north": {"auroc": None, "f1": 0.125}}
    for domain, shown in (({"north": 0.5}, True), ([1], False), ({"south": "x"}, False)):
        row = {**last, "domain_accuracy": domain, "domain_measures": within}
        changed = runs_page([replace(run, rows=[row])])
        assert ("AUROC is undefined" in changed, "12.50 %" in changed) == (shown, shown)
    private = Page(runs_page([runs[3]])).text
    assert ("client 0" in private, "AUROC" in private) == (False, True)


def test_pages_hide_private_partitions_and_escape_texts(runs: list[Run], tmp_path: Path) -> None:
    run, private = runs[0], runs[3]
    for shown_all in (False, True):
        page = runs_page([private], simulation_only=shown_all)
        assert ("examples of each class" in page) == shown_all
        assert ("Do not share this page" in page) == shown_all
    markup = "<script>alert(1)</script>\u202e"
    summary = {**run.summary, "method": markup, "dataset": markup}
    settings = {**run.settings, markup: markup}
    text = runs_page([replace(run, folder=tmp_path / "<b>x", summary=summary, settings=settings)])
    assert not any(part in text for part in ("<script", "<b>", "\u202e"))


def test_commands_write_pages_and_plots(runs: list[Run], tmp_path: Path) -> None:
    folders = [str(run.folder) for run in runs[:2]]
    plots = [("plot", f"c.{form}") for form in ("svg", "html", "png")]
    for command, name in [("report", "r"), *plots]:
        out = CliRunner().invoke(app, [command, *folders, "--output", str(tmp_path / name)])
        assert out.exit_code == 0, out.stderr
        assert (tmp_path / name).stat().st_size > 1000
    for options in (["--output", "c.pdf"], ["--by", "hours"], ["--metric", "speed"]):
        out = CliRunner().invoke(app, ["plot", *folders, *options])
        assert out.exit_code == 2
        assert "fedsynth: error: " in out.stderr


@pytest.mark.parametrize(
    "line",
    ["report", "plot --output FILE.svg", "plot --output FILE.html", "plot --output FILE.png"],
)
def test_full_disk_keeps_the_old_file(runs: list[Run], tmp_path: Path, line: str) -> None:
    """The limit on the size of files, which raises EFBIG, stands for a full disk."""
    name, *options = line.replace("FILE", str(tmp_path / "old")).split()
    file = Path(options[1] if options else tmp_path / "report.html")
    file.write_text("old")
    arguments = [name, str(runs[0].folder), "--output", str(file)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        out = CliRunner().invoke(app, arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out.stderr == f"fedsynth: error: cannot use {file}: File too large\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_finished_runs_are_found_through_links(runs: list[Run], tmp_path: Path) -> None:
    assert len(finished_runs([runs[0].folder.parent])) == 4
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "cell").symlink_to(runs[0].folder.parent)
    assert len(finished_runs([tmp_path / "sweep"])) == 4
    (tmp_path / "empty").mkdir()
    for name, message in (("nothing", "does not exist"), ("empty", "no finished run")):
        with pytest.raises(RunFolderError, match=message):
            finished_runs([tmp_path / name])
