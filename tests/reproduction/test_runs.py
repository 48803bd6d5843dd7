"""Runs of cells: single rows, time budgets, killed processes and scaling; and one cell of each paper
from the preset to the comparison."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedsynth.config.resolve import resolve
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import OutputError, SettingError
from fedsynth.federation.protocol import Observer
from fedsynth.reproduction import rows as rows_module
from fedsynth.reproduction.comparison import lines
from fedsynth.reproduction.presets import preset, preset_names
from fedsynth.reproduction.rows import Rows, claimed, run_hash, unfinished
from fedsynth.reproduction.runs import (
    Clock,
    Job,
    Runner,
    checkpointed_inside,
    jobs_of,
    round_fits,
    scaled,
)
from fedsynth.results import checkpoint
from fedsynth.results.checkpoint import LoopCheckpoints
from tests.families import by_family

FORK = multiprocessing.get_context("fork")
SCALE = 0.05
TABLE = preset("fedprox:synthetic")
CELLS = TABLE.select(dataset="synthetic(0,0)", note="50 %")[1:]  # FedProx, with mu = 0 and 1


class Recorder(Observer):
    """Records rounds and steps; calls `act` after the `at`-th round."""

    def __init__(self, at: int = 0, act: Callable[[], None] = lambda: None) -> None:
        self.rounds: list[int] = []
        self.steps: list[tuple[str, int]] = []
        self._at = at
        self._act = act

    def step(self, round: int, phase: str, done: int, total: int) -> None:
        self.steps.append((phase, done))
        if self._at == 0:
            self._act()

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.rounds.append(row["round"])
        if len(self.rounds) == self._at:
            self._act()


def end(clock: Clock) -> None:
    clock._end = time.monotonic()


def run_jobs(
    rows: Rows, jobs: list[Job], clock: Clock | None = None, observer: Observer | None = None
) -> list[str]:
    runner = Runner(
        rows,
        clock or Clock(),
        report=lambda text: None,
        watch=lambda settings: nullcontext(observer or Observer()),
    )
    outcomes = list(runner.run(jobs))
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.status for outcome in outcomes]


def curves(rows: Rows) -> dict[str, Any]:
    return {mark: row["curve"] for mark, row in rows.all().items()}


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return jobs_of(TABLE, CELLS, [0], scale=SCALE)


@pytest.fixture(scope="module")
def complete(jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Returns the rows of an uninterrupted sequence."""
    rows = Rows(tmp_path_factory.mktemp("whole"), SCALE)
    assert run_jobs(rows, jobs) == ["finished", "finished"]
    return rows


def test_rows_are_labelled_and_produced_once(complete: Rows, jobs: list[Job]) -> None:
    rows = complete.all()
    assert set(rows) == {run_hash(job.settings) for job in jobs}
    row = rows[run_hash(jobs[0].settings)]
    assert row["key"].startswith("fedprox:synthetic synthetic(0,0) fedprox (mu = 0) 50 %")
    assert (row["scale"], row["seed"], row["rounds"]) == (SCALE, 0, 10)
    assert len(row["curve"]["test_accuracy"]) == 10
    assert {"commit", "version", "date", "machine", "torch"} <= set(row)
    assert run_jobs(complete, jobs) == ["existing", "existing"]
    assert complete.folder.name == "scaled-0.05"
    assert Rows(complete.folder.parent).all() == {}  # whole runs exclude scaled rows


def test_killed_runs_resume_identically(complete: Rows, jobs: list[Job], tmp_path: Path) -> None:
    """SIGKILL in the second run's third round neither restarts the run nor loses a row."""
    rows = Rows(tmp_path, SCALE)
    killer = Recorder(13, lambda: os.kill(os.getpid(), signal.SIGKILL))
    process = FORK.Process(target=run_jobs, args=(rows, jobs), kwargs={"observer": killer})
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert len(rows.all()) == 1
    checkpoint = unfinished(rows.run_folder(jobs[1].settings))
    assert checkpoint is not None
    recorder = Recorder()
    assert run_jobs(rows, jobs, observer=recorder) == ["existing", "finished"]
    assert recorder.rounds[0] in (3, 4)
    assert recorder.rounds[-1] == 10
    assert curves(rows) == curves(complete)


def test_time_budget_stops_after_round(complete: Rows, jobs: list[Job], tmp_path: Path) -> None:
    rows = Rows(tmp_path, SCALE)
    clock = Clock()
    recorder = Recorder(3, lambda: end(clock))
    assert run_jobs(rows, jobs, clock=clock, observer=recorder) == ["stopped", "not begun"]
    assert recorder.rounds == [1, 2, 3]
    assert run_jobs(rows, jobs, clock=Clock(0)) == ["not begun", "not begun"]
    resumed = Recorder()
    assert run_jobs(rows, jobs, observer=resumed) == ["finished", "finished"]
    assert resumed.rounds[:2] == [4, 5]
    assert curves(rows) == curves(complete)


def test_rounds_start_only_within_time_budget() -> None:
    assert round_fits(Clock(100), 50, checkpointed=False)
    assert not round_fits(Clock(100), 150, checkpointed=False)
    assert round_fits(Clock(100), 150, checkpointed=True)  # checkpoints inside the round
    assert not round_fits(Clock(0), 0.0, checkpointed=True)


def test_condensation_stops_within_round(tmp_path: Path, data_root: Path) -> None:
    """A time budget must end a round of hours."""
    table = preset("feddm:table2")
    cells = table.select(dataset="mnist", alpha=0.1, method="feddm")
    changes = {
        "partition": {"subset": 1.0},
        "model": {"width": 4},
        "method": {"iterations": 3, "server_epochs": 1, "ipc": 1},
    }
    speed = {"data": {"data_root": str(data_root)}}
    short = jobs_of(table, cells, [0], scale=0.05, changes=changes, speed=speed)
    clock = Clock()
    stops = Recorder(act=lambda: end(clock))
    rows = Rows(tmp_path, 0.05)
    assert run_jobs(rows, short, clock=clock, observer=stops) == ["stopped"]
    assert [count for _, count in stops.steps] == [10]  # one step of all ten clients
    assert run_jobs(rows, short) == ["finished"]


def test_one_shot_methods_stop_within_round_and_share_training(
    tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time budget must end an hour of training, and other methods must not repeat it."""
    table = preset("fedhydra:table1")
    few = {"local_epochs": 2, "batch": 8}
    small = {"server_epochs": 1, "generator_steps": 2, "generator_batch": 4, "generator_width": 4}
    speed = {"data": {"data_root": str(data_root)}}
    jobs = []
    for method, more in (("fedavg", {}), ("dense", small)):
        cells = table.select(dataset="mnist", alpha=0.1, method=method)
        changes = {"partition": {"subset": 1.0}, "method": {**few, **more}}
        jobs += jobs_of(table, cells[:1], [0], scale=0.05, changes=changes, speed=speed)
    monkeypatch.setattr(rows_module, "commit", lambda: "abc")
    monkeypatch.setattr(checkpoint, "STEP_SECONDS", 0.0)
    clock = Clock()
    stops = Recorder(act=lambda: end(clock))
    rows = Rows(tmp_path, 0.05)
    assert run_jobs(rows, jobs, clock=clock, observer=stops) == ["stopped", "not begun"]
    assert [phase for phase, _ in stops.steps] == ["local training"]
    training: list[str] = []
    offer = LoopCheckpoints.offer

    def record(self: LoopCheckpoints, name: str, *rest: Any) -> None:
        training.append(name.split("-")[0])
        offer(self, name, *rest)

    monkeypatch.setattr(LoopCheckpoints, "offer", record)
    assert run_jobs(rows, jobs[:1]) == ["finished"]
    assert set(training) == {"trained"}
    training.clear()
    assert run_jobs(rows, jobs[1:]) == ["finished"]
    assert set(training) == {"distillation"}
    monkeypatch.setattr(rows_module, "commit", lambda: "abc+")
    assert rows.trained is None  # the code has uncommitted changes


def test_checkpoints_within_rounds_depend_on_method() -> None:
    private = {"privacy": {"noise_multiplier": 1.0}}
    for method, more, expected in (
        *(("feddm", {}, True), ("fedavg", {}, True), ("dense", {}, True)),
        ("fedavg", {"model": {"name": "mlp"}}, False),  # its clients are trained in one pass
        *(("fedkf", {}, False), ("fedavg", private, False), ("feddm", private, False)),
    ):
        settings = resolve({"run": {"method": method}, **more})
        assert checkpointed_inside(settings, dataset_spec("digits")) is expected, (method, more)


def test_runs_claimed_by_other_processes_are_skipped(jobs: list[Job], tmp_path: Path) -> None:
    rows = Rows(tmp_path, SCALE)
    with claimed(rows.run_folder(jobs[0].settings)) as claim:
        assert claim
        assert run_jobs(rows, jobs[:1]) == ["claimed"]


def test_finished_run_without_row_is_kept(complete: Rows, jobs: list[Job], tmp_path: Path) -> None:
    rows = Rows(tmp_path, SCALE)
    assert run_jobs(rows, jobs[:1]) == ["finished"]
    (rows.folder / "fedprox-synthetic.jsonl").unlink()
    recorder = Recorder()
    assert run_jobs(rows, jobs[:1], observer=recorder) == ["finished"]
    assert recorder.rounds == []
    mark = run_hash(jobs[0].settings)
    assert curves(rows)[mark] == curves(complete)[mark]


def test_run_hash_ignores_speed_settings(jobs: list[Job]) -> None:
    changed = jobs_of(TABLE, CELLS, [0], scale=SCALE, changes={"method": {"mu": 0.3}})
    fast = jobs_of(TABLE, CELLS, [0], scale=SCALE, speed={"run": {"precision": "bf16"}})
    hashes = [run_hash(sequence[1].settings) for sequence in (jobs, changed, fast)]
    assert hashes[0] == hashes[2] != hashes[1]


def test_invalid_row_lines_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "feddm-table2.jsonl").write_text('{"settings": 1}\n')
    with pytest.raises(OutputError, match="a line that is not"):
        Rows(tmp_path).all()


def test_scale_reduces_cost_settings() -> None:
    run = {"run": {"method": "feddm", "rounds": 20}, "data": {"dataset": "mnist"}}
    settings = resolve(run)
    changes = scaled(settings, 0.05)
    assert changes["run"] == {"rounds": 1}
    assert changes["method"] == {"iterations": 50, "server_epochs": 25, "min_examples": 1}
    assert changes["partition"] == {"subset": 0.05, "min_size": 1}
    assert scaled(settings, 0.001)["partition"]["subset"] == pytest.approx(50 * 10 / 60_000)
    assert scaled(settings, None) == {}
    late = resolve({"run": {"method": "fedfm", "rounds": 100}, "method": {"start_round": 21}})
    assert scaled(late, 0.1)["method"]["start_round"] == 2  # else it would never start
    for invalid in (0.0, 1.0, -1.0):
        with pytest.raises(SettingError, match="scale must be above 0"):
            scaled(settings, invalid)


# -------------------------------------------------------------------------- one cell of each paper


Changes = dict[str, dict[str, Any]]
ALL: Changes = {"partition": {"subset": 1.0}}
SMALL: dict[str, Changes] = {  # small networks
    "feddm:table2": {"model": {"width": 8}},
    "fedaf:table1": {"model": {"width": 8}, "method": {"ipc": 2}},
    "fedkf:table5": {"method": {"generator_width": 8}},
    "fedhydra:table1": {
        "method": {"generator_width": 4, "generator_batch": 8, "stratification_batch": 2}
    },
    "fedfm:missing-classes": {"model": {"name": "lenet5"}},
}
PAPERS: dict[str, dict[str, Any]] = {
    "fedprox:synthetic": {"dataset": "synthetic(1,1)", "method": "fedprox", "note": "90 %"},
    "feddm:table2": {"dataset": "mnist", "alpha": 0.1, "method": "feddm"},
    "fedaf:table1": {"dataset": "fashion_mnist", "alpha": 0.1, "method": "fedaf"},
    "fedkf:table5": {"alpha": 0.1, "method": "fedkf (oca)"},
    "fedhydra:table1": {"dataset": "mnist", "alpha": 0.5, "method": "fedhydra"},
    "moon:accuracy": {"dataset": "cifar10", "method": "moon"},
    "fedbn:real-world": {"dataset": "office_caltech", "method": "fedbn"},
    "fedfm:missing-classes": {"method": "fedfm", "partition": "2 classes missing per client"},
    "fedfa:images": {"dataset": "office_caltech", "method": "fedfa+"},
}


@pytest.mark.parametrize(
    "name", by_family(PAPERS, ("fedprox:synthetic", "feddm:table2", "fedhydra:table1"))
)
def test_scaled_cell_runs_end_to_end(name: str, tmp_path: Path, data_root: Path) -> None:
    table = preset(name)
    cells = table.select(**PAPERS[name])
    speed = {"data": {"data_root": str(data_root)}}
    changes = {} if name == "fedprox:synthetic" else {**ALL, **SMALL.get(name, {})}
    jobs = jobs_of(table, cells, [0], scale=0.002, changes=changes, speed=speed)
    assert len(jobs) == 1
    rows = Rows(tmp_path, 0.002)
    assert run_jobs(rows, jobs) == ["finished"]
    cases = lines(table, cells, [0], rows.all(), scale=0.002, changes=changes)
    assert len(cases) == len(cells[0].numbers)
    assert all(list(line.values) == [0] and line.verdict == "scaled: no verdict" for line in cases)
    assert all(0 <= value <= 100 for line in cases for value in line.values.values())
    assert lines(table, cells, [0], Rows(tmp_path).all())[0].verdict == "not run"


def test_every_paper_has_scaled_cell() -> None:
    papers = {name.partition(":")[0] for name in preset_names()}
    assert papers == {name.partition(":")[0] for name in PAPERS}
