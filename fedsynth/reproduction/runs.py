"""Runs the cells of published tables within a time budget, and resumes interrupted runs.

A call that is stopped by its budget or by a signal leaves run folders with checkpoints
(docs/decisions/resuming.md). The next call resumes these runs and gives the same numbers as an
uninterrupted call. Several processes may share a folder: a process does not use the folder of a run
that another process is still writing.

The time budget stops a run at the end of a round. Some loops are also checkpointed every minute
during a round, so that the budget can stop them there. These are condensation without privacy,
local training of one client after another, and the distillation on the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from itertools import filterfalse
from pathlib import Path
from typing import Any

from fedsynth.config.settings import RunSettings
from fedsynth.errors import DivergedError, FedsynthError, writing
from fedsynth.federation.context import choose_speed, resolve_device
from fedsynth.federation.protocol import Observer
from fedsynth.files import claim
from fedsynth.reproduction.presets import Cell, Changes, Preset, cell_words, override
from fedsynth.reproduction.rows import Rows, environment, round_summary, run_hash
from fedsynth.results.file_names import LOCK, METRICS
from fedsynth.results.finished import finished_run, read_rows, unfinished_run
from fedsynth.results.loggers import Several
from fedsynth.simulation.simulate import simulate
from fedsynth.validation import flattened

# The names of the loops that write checkpoints during a round.
CHECKPOINTED = ("condense", "local training", "distillation")


class OutOfTimeError(KeyboardInterrupt):
    """Raised if the time budget is exhausted. The run then stops as after Ctrl-C."""


@dataclass(frozen=True)
class Job:
    """One run of a cell.

    Args:
        table: the preset of the table.
        cell: a cell of the table.
        seed: the seed of the run.
        settings: the settings of the run.
        changes: sections of settings that override those of the preset.
    """

    table: Preset
    cell: Cell
    seed: int
    settings: RunSettings
    changes: Changes = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A description of the run in one line."""
        return f"{self.table.name} {cell_words(self.cell, self.table)} seed={self.seed}"


def changed_settings(changes: Changes) -> str:
    """Formats changed settings as one line, such as "method.lr=0.1, run.rounds=5"."""
    return ", ".join(f"{key}={value}" for key, value in flattened(changes).items())


def jobs_of(
    table: Preset,
    cells: Iterable[Cell],
    seeds: Iterable[int],
    *,
    changes: Changes | None = None,
    speed: Changes | None = None,
) -> list[Job]:
    """Returns one run for each seed and each cell that can be run.

    The runs with the first seed come first.

    Args:
        table: the preset of the table.
        cells: some cells of the table.
        seeds: the seeds of the runs.
        changes: sections of settings that override those of the preset.
        speed: sections of settings that do not change results, such as the device.

    Raises:
        FedsynthError: the changes are invalid, as for `resolve`.
    """
    changes = changes or {}
    runnable = list(filterfalse(table.refusal, cells))
    jobs = []
    for seed in seeds:
        for cell in runnable:
            settings = table.settings(cell, seed, override(speed or {}, changes))
            settings = choose_speed(settings, resolve_device(settings.device))
            jobs.append(Job(table, cell, seed, settings, changes))
    return jobs


@dataclass
class Deadline(Observer):
    """Ends a run when the time budget is exhausted.

    Args:
        time: the time at which the budget ends, as by `time.monotonic`.
        rounds: the number of rounds of the run.
    """

    time: float
    rounds: int

    def step(self, round: int, stage: str, completed: int, total: int) -> None:
        if stage in CHECKPOINTED:
            self._check()

    def round_ended(self, row: Mapping[str, Any]) -> None:
        if row["round"] < self.rounds:
            self._check()

    def _check(self) -> None:
        if time.monotonic() >= self.time:
            raise OutOfTimeError


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    Args:
        job: the job.
        status: "finished", "existing" (an earlier call finished the run), "stopped" (the budget
            ended during the run), "not begun" (the budget was exhausted before), or "failed".
        text: details of the status in words. It may be empty.
        error: the error of a failed run. Otherwise None.
    """

    job: Job
    status: str
    text: str = ""
    error: FedsynthError | None = None


@dataclass(eq=False)
class Runner:
    """Runs jobs within a time budget, and stores the result of each finished run.

    Args:
        rows: the store to which the results are appended.
        deadline: the time at which the budget ends, as by `time.monotonic`.
        report: a function that receives one line of text on each job.
        watch: a function of a run's settings that returns a context manager with an observer.
        download: True lets torchvision download missing data sets.
    """

    rows: Rows
    deadline: float
    _: KW_ONLY
    report: Callable[[str], None]
    watch: Callable[[RunSettings], AbstractContextManager[Observer]]
    download: bool = False

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Runs the jobs one after another, and yields the outcome of each job.

        No run begins after the time budget is exhausted.
        """
        for job in jobs:
            try:
                outcome = self._run_unless_existing(job)
            except FedsynthError as error:
                outcome = Outcome(job, "failed", str(error), error)
            self.report(": ".join(filter(None, (job.name, outcome.status, outcome.text))))
            yield outcome

    def _run_unless_existing(self, job: Job) -> Outcome:
        if run_hash(job.settings) in self.rows.all():
            return Outcome(job, "existing")
        folder = self.rows.run_folder(job.settings)
        if finished_run(folder) is None and time.monotonic() >= self.deadline:
            return Outcome(job, "not begun", "the time budget is exhausted")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock = claim(folder / LOCK, BlockingIOError())
            except BlockingIOError:
                return Outcome(job, "not begun", "another process is running it")
        with lock:
            complete = finished_run(folder)
            if complete is not None:  # a call was killed before it wrote the row
                return self._append(job, read_rows(complete / METRICS))
            return self._simulate(job, folder)

    def _simulate(self, job: Job, folder: Path) -> Outcome:
        settings = job.settings
        with self.watch(settings) as inner:
            try:
                result = simulate(
                    settings,
                    output=folder,
                    observer=Several([inner, Deadline(self.deadline, settings.rounds)]),
                    download=self.download,
                    resume=unfinished_run(folder),
                    trained=self.rows.trained,
                )
            except (OutOfTimeError, DivergedError) as error:
                rows = read_rows((unfinished_run(folder) or folder) / METRICS)
                if isinstance(error, DivergedError):
                    return self._append(job, rows, diverged=str(error))
                rounds = f"{len(rows)} of {settings.rounds} rounds"
                return Outcome(job, "stopped", f"after {rounds}. Repeat the command to resume")
        return self._append(job, result.metrics)

    def _append(self, job: Job, rows: list[dict[str, Any]], **more: Any) -> Outcome:
        settings = job.settings
        digest = run_hash(settings)
        row = {
            "key": f"{job.name} {digest}",
            "preset": job.table.name,
            "cell": job.cell.columns(),
            "seed": job.seed,
            "settings": digest,
            "changes": {section: dict(values) for section, values in job.changes.items()},
            "precision": settings.precision,
            "compile": settings.compile,
            **round_summary(rows, settings.partition.kind == "domain"),
            **more,
            **environment(),
        }
        self.rows.append(job.table.name, row)
        return Outcome(job, "finished", f"{row['seconds']:.0f} s, {settings.rounds} rounds")
