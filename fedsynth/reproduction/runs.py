"""Runs the cells of published tables within a time budget, and resumes interrupted runs.

A call that is stopped by its budget or by a signal leaves run folders with checkpoints
(docs/decisions/resuming.md). The next call resumes these runs and gives the same numbers as an
uninterrupted call. Several processes may share a folder. Each process skips the runs that another
process has claimed.

The time budget stops a run at the end of a round. A round begins only if the remaining time is at
least as long as the last round. Some loops are also checkpointed every minute during a round, so
that the budget can stop them there. These are condensation without privacy, local training of one
client after another, and the distillation on the server.

A cell may be scaled to a fraction s in (0, 1) of its work, to check that it can be run. The numbers
of such a run are not results. The following settings are multiplied by s:

- the number of rounds, with minimum 1, and the round in which a part of a method starts.
- the settings of a method that count epochs, steps or iterations, with minimum 2.
- the fraction of each class's examples that is used. On average, at least 50 examples per client
  remain, relative to the published size of the data set.
- the minimum numbers of examples of a client, and of a class that is condensed.

Networks, batches, learning rates, images per class, clients and the test set are not changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from itertools import filterfalse
from pathlib import Path
from typing import Any

from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.errors import DivergedError, FedsynthError, SettingError
from fedsynth.federation.context import choose_speed, resolve_device
from fedsynth.federation.protocol import Observer
from fedsynth.methods.shared.condensing import CondensingMethod
from fedsynth.methods.shared.ensemble import EnsembleDistillation
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.registry import build_network
from fedsynth.reproduction.presets import Cell, Changes, Preset, cell_words, override
from fedsynth.reproduction.rows import (
    Rows,
    claimed,
    environment,
    finished,
    metrics_of,
    round_summary,
    run_hash,
    unfinished,
)
from fedsynth.simulation.simulate import simulate
from fedsynth.training.many_clients import trains_together
from fedsynth.validation import flattened

EXAMPLES = 50
"""The average number of examples per client that a scaled run keeps at least."""
LENGTHS = ("epochs", "steps", "iterations")
CHECKPOINTED = ("condense", "local training", "distillation")
"""The names of the loops that write checkpoints during a round."""
Watch = Callable[[RunSettings], AbstractContextManager[Observer]]


class OutOfTimeError(KeyboardInterrupt):
    """Raised if the time budget is exhausted. The run then stops as after Ctrl-C."""


@dataclass(frozen=True)
class Job:
    """One run of a cell.

    Args:
        table: the preset of the table.
        cell: a cell of the table.
        seed: the seed of the run.
        settings: the settings of the run, after scaling.
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
    scale: float | None = None,
    changes: Changes | None = None,
    speed: Changes | None = None,
) -> list[Job]:
    """Returns one run for each seed and each cell that can be run.

    The runs with the first seed come first.

    Args:
        table: the preset of the table.
        cells: some cells of the table.
        seeds: the seeds of the runs.
        scale: the fraction of the work that the runs do. None for whole runs.
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
            shorter = scaled(table.settings(cell, seed), scale)
            sections = override(override(shorter, speed or {}), changes)
            settings = table.settings(cell, seed, sections)
            settings = choose_speed(settings, resolve_device(settings.device))
            jobs.append(Job(table, cell, seed, settings, changes))
    return jobs


def scaled(settings: RunSettings, scale: float | None) -> dict[str, dict[str, Any]]:
    """Returns the sections of settings in which a scaled run differs from a whole run.

    The result is empty for a whole run.

    Args:
        settings: the settings of the whole run.
        scale: s, the fraction of the work. None for a whole run.

    Raises:
        SettingError: s is not in (0, 1).
    """
    if scale is None:
        return {}
    if not 0 < scale < 1:
        raise SettingError(None, "scale", f"must be above 0 and below 1, got {scale}")

    def part(number: int, minimum: int) -> int:
        return min(number, max(minimum, round(scale * number)))

    partition = settings.partition
    size = dataset_spec(settings.dataset).train_size
    minimum = min(1.0, EXAMPLES * partition.clients / size)
    lengths = {}
    for name, value in settings.method.to_dict().items():
        if type(value) is int and name.endswith(LENGTHS):
            lengths[name] = part(value, 2)
        elif type(value) is int and name in ("min_examples", "start_round"):
            lengths[name] = part(value, 1)
    return {
        "run": {"rounds": part(settings.rounds, 1)},
        "partition": {
            "subset": min(partition.subset, max(scale * partition.subset, minimum)),
            "min_size": part(partition.min_size, 1),
        },
        "method": lengths,
    }


def checkpointed_inside(settings: RunSettings, spec: DatasetSpec) -> bool:
    """Returns True if a run also writes checkpoints during a round, and not only between rounds.

    Private runs and runs whose clients are trained together do not write such checkpoints.
    """
    method = settings.method
    if settings.privacy is not None:
        return False
    if isinstance(method, TrainsLocally) and method.one_pass:
        return not trains_together(build_network(settings.model, spec, 0))
    return isinstance(method, CondensingMethod | EnsembleDistillation)


class Clock:
    """A clock that counts down a time budget.

    Args:
        seconds: the time budget. After this time no round begins.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """The number of seconds that remain. It is never negative."""
        return max(0.0, self._end - time.monotonic())


class BudgetObserver(Observer):
    """Forwards events to another observer, and ends the run when the time budget is exhausted.

    Args:
        inner: the observer that receives the events.
        clock: the clock with the time budget.
        rounds: the number of rounds of the run.
        checkpointed: True if the run also writes checkpoints during a round.
    """

    def __init__(self, inner: Observer, clock: Clock, rounds: int, checkpointed: bool) -> None:
        self._inner = inner
        self._clock = clock
        self._rounds = rounds
        self._checkpointed = checkpointed
        self._stopped = False

    def note(self, text: str) -> None:
        if not self._stopped:  # the run's own advice on resuming does not apply here
            self._inner.note(text)

    def step(self, round: int, phase: str, completed: int, total: int) -> None:
        self._inner.step(round, phase, completed, total)
        if self._checkpointed and phase in CHECKPOINTED and not self._clock.remaining:
            self._stop()

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self._inner.round_ended(row)
        fits = round_fits(self._clock, float(row["seconds"]), self._checkpointed)
        if row["round"] < self._rounds and not fits:
            self._stop()

    def _stop(self) -> None:
        self._stopped = True
        raise OutOfTimeError


def round_fits(clock: Clock, round_seconds: float, checkpointed: bool) -> bool:
    """Returns True if there is enough time for a round to begin.

    Some time must remain. If the run writes no checkpoints during a round, the remaining time must
    be at least `round_seconds`, the duration of the last round.
    """
    return clock.remaining > 0 and (checkpointed or round_seconds <= clock.remaining)


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    Args:
        job: the job.
        status: "finished", "existing" (an earlier call finished the run), "stopped" (the budget
            ended during the run), "not begun" (the budget was too short), "claimed" (another
            process is running the job), or "failed".
        text: details of the status in words. It may be empty.
        error: the error of a failed run. Otherwise None.
    """

    job: Job
    status: str
    text: str = ""
    error: FedsynthError | None = None

    @property
    def description(self) -> str:
        """The status and the details in one line."""
        return f"{self.status}: {self.text}" if self.text else self.status


@dataclass(eq=False)
class Runner:
    """Runs jobs within a time budget, and stores the result of each finished run.

    Args:
        rows: the store to which the results are appended.
        clock: the clock with the time budget.
        report: a function that receives one line of text on each job.
        watch: a function of a run's settings that returns a context manager with an observer.
        download: True lets torchvision download missing data sets.
    """

    rows: Rows
    clock: Clock
    _: KW_ONLY
    report: Callable[[str], None]
    watch: Watch
    download: bool = False
    _data: tuple[str, tuple[ImageData, ImageData]] | None = None

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Runs the jobs one after another, and yields the outcome of each job.

        No run begins after the time budget is exhausted.
        """
        for job in jobs:
            try:
                outcome = self._run_unless_existing(job)
            except FedsynthError as error:
                outcome = Outcome(job, "failed", str(error), error)
            self.report(f"{job.name}: {outcome.description}")
            yield outcome

    def _run_unless_existing(self, job: Job) -> Outcome:
        if run_hash(job.settings) in self.rows.all():
            return Outcome(job, "existing")
        if not self.clock.remaining:
            return Outcome(job, "not begun", "the time budget is exhausted")
        with claimed(self.rows.run_folder(job.settings)) as free:
            if not free:
                return Outcome(job, "claimed", "another process runs this cell")
            if run_hash(job.settings) in self.rows.all():  # finished in the meantime
                return Outcome(job, "existing")
            return self._resume_or_begin(job)

    def _resume_or_begin(self, job: Job) -> Outcome:
        folder = self.rows.run_folder(job.settings)
        complete = finished(folder)
        if complete is not None:  # a call was killed between the run's end and writing its row
            return self._append(job, metrics_of(complete))
        incomplete = unfinished(folder)
        rounds = metrics_of(incomplete)
        seconds = rounds[-1]["seconds"] if rounds else 0.0
        checkpointed = checkpointed_inside(job.settings, self._loaded(job.settings)[0].spec)
        if not round_fits(self.clock, seconds, checkpointed):
            text = f"a round takes {seconds:.0f} s, but {self.clock.remaining:.0f} s remain"
            return Outcome(job, "not begun", text)
        return self._simulate(job, folder, incomplete, checkpointed)

    def _simulate(self, job: Job, folder: Path, resume: Path | None, checkpointed: bool) -> Outcome:
        settings = job.settings
        with self.watch(settings) as inner:
            try:
                result = simulate(
                    settings,
                    data=self._loaded(settings),
                    output=None if resume else folder,
                    observer=BudgetObserver(inner, self.clock, settings.rounds, checkpointed),
                    resume=resume,
                    trained=self.rows.trained,
                )
            except OutOfTimeError:
                rounds = len(metrics_of(unfinished(folder)))
                text = f"after {rounds} of {settings.rounds} rounds. Repeat the command to resume"
                return Outcome(job, "stopped", text)
            except DivergedError as error:
                return self._append(job, metrics_of(unfinished(folder)), diverged=str(error))
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
            "scale": self.rows.scale,
            "changes": {section: dict(values) for section, values in job.changes.items()},
            "precision": settings.precision,
            "compile": settings.compile,
            **round_summary(rows, settings.partition.kind == "domain"),
            **more,
            **environment(),
        }
        self.rows.append(job.table.name, row)
        return Outcome(job, "finished", f"{row['seconds']:.0f} s, {settings.rounds} rounds")

    def _loaded(self, settings: RunSettings) -> tuple[ImageData, ImageData]:
        """Loads the data set of a run. The data set that was used last stays in memory."""
        if self._data is None or self._data[0] != settings.dataset:
            self._data = None
            loaded = load_dataset(settings.dataset, settings.data_root, download=self.download)
            self._data = settings.dataset, loaded
        return self._data[1]
