"""Runs the cells of tables one after another within a time budget, and resumes interrupted runs.

A call that is stopped by its budget, a signal or a kill leaves run folders with checkpoints
(docs/decisions/resuming.md). The next call resumes them and yields the same numbers as an
uninterrupted one. Several processes may share a folder: each skips the runs that another one has
claimed.

The budget stops a run at the end of a round: a round begins only if there is time for one as long
as the last. Condensation without privacy, plain local training of one client after another and a
server's distillation are also checkpointed inside a round, every minute, so the budget can stop
them there.

A cell may be scaled to a fraction s in (0, 1) of its work, to check that it runs; this is never a
result. Rounds, and every length of a method (settings that count epochs, steps or iterations), are
multiplied by s, with minimum 1 and 2, as is the round in which a part of a method starts. A
fraction s of each class's examples is used, but at least 50 per client on average, relative to the
published size; the minimum numbers of examples of a client, and of a class to be condensed, shrink
by the same factor. Networks, batches, rates, images per class, clients and the test set are
unchanged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.errors import DivergedError, FedsynthError, SettingError
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

EXAMPLES = 50
"""Average number of examples per client that scaling keeps at least."""
LENGTHS = ("epochs", "steps", "iterations")
CHECKPOINTED = ("condense", "local training", "distillation")
"""The phases that are checkpointed inside a round."""
Watch = Callable[[RunSettings], AbstractContextManager[Observer]]


class OutOfTimeError(KeyboardInterrupt):
    """Raised when the time budget is exhausted. The run stops cleanly, as after Ctrl-C."""


@dataclass(frozen=True)
class Job:
    """One run of a cell.

    Args:
        table: the cell's table.
        cell: one of its cells.
        seed: the seed of the run.
        settings: the settings of the run, after scaling.
        changes: sections of settings that differ from the preset's.
    """

    table: Preset
    cell: Cell
    seed: int
    settings: RunSettings
    changes: Changes = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Returns a one-line description of the run."""
        return f"{self.table.name} {cell_words(self.cell, self.table)} seed={self.seed}"


def changed_settings(changes: Changes) -> str:
    """Returns the changed settings as text, such as `section.key=value, ...`."""
    texts = []
    for section, values in changes.items():
        texts += [f"{section}.{key}={value}" for key, value in values.items()]
    return ", ".join(texts)


def jobs_of(
    table: Preset,
    cells: Iterable[Cell],
    seeds: Iterable[int],
    *,
    scale: float | None = None,
    changes: Changes | None = None,
    speed: Changes | None = None,
) -> list[Job]:
    """Returns the runs of all cells that can be run. The first seed of every cell comes before the
    second.

    Args:
        table: the cells' table.
        cells: some of its cells.
        seeds: the seeds of the runs.
        scale: None: whole runs.
        changes: sections of settings that override the preset's.
        speed: sections of settings that do not change results (device, compile, the data folder).

    Raises:
        FedsynthError: the changes are invalid, as for `resolve`.
    """
    changes = changes or {}
    runnable = [cell for cell in cells if not table.refusal(cell)]
    jobs = []
    for seed in seeds:
        for cell in runnable:
            shorter = scaled(table.settings(cell, seed), scale)
            sections = override(override(shorter, speed or {}), changes)
            jobs.append(Job(table, cell, seed, table.settings(cell, seed, sections), changes))
    return jobs


def scaled(settings: RunSettings, scale: float | None) -> dict[str, dict[str, Any]]:
    """Returns the settings that a scaled run changes, by section. They are empty if the scale is
    None.

    Args:
        settings: the settings of the whole run.
        scale: s.

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
    """Returns True if the long loops of a round are checkpointed, so that an interruption loses
    little work.

    Private rounds and clients that train in one pass are not checkpointed inside a round.
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
        seconds: the time after which no round begins.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Returns the remaining seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())


class BudgetObserver(Observer):
    """Forwards events to another observer, and ends the run when the time budget is exhausted.

    Args:
        inner: receives all events.
        clock: the budget.
        rounds: the number of rounds of the run.
        checkpointed: True if a round is also checkpointed while it runs.
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
    """Returns True if a round may begin: it ends in time, or writes checkpoints while it runs."""
    return clock.remaining > 0 and (checkpointed or round_seconds <= clock.remaining)


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    Args:
        job: the run.
        status: "finished", "existing" (made by an earlier call), "stopped" or "not begun" (by the
            budget), "claimed" (another process runs it), or "failed".
        text: details.
        error: the error of a failed run.
    """

    job: Job
    status: str
    text: str = ""
    error: FedsynthError | None = None

    @property
    def description(self) -> str:
        """Returns the status and details of the outcome in one line."""
        return f"{self.status}: {self.text}" if self.text else self.status


class Runner:
    """Runs jobs and appends a row for each finished run.

    Args:
        rows: where rows are stored.
        clock: the budget.
        report: receives a line for each run.
        watch: returns an observer for a run.
        download: let torchvision fetch data sets.
    """

    def __init__(
        self,
        rows: Rows,
        clock: Clock,
        *,
        report: Callable[[str], None],
        watch: Watch,
        download: bool = False,
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._report = report
        self._watch = watch
        self._download = download
        self._data: tuple[str, tuple[ImageData, ImageData]] | None = None

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Runs the jobs in turn and yields the outcome of each. No job begins after the time budget
        is exhausted."""
        for job in jobs:
            try:
                outcome = self._run_unless_existing(job)
            except FedsynthError as error:
                outcome = Outcome(job, "failed", str(error), error)
            self._report(f"{job.name}: {outcome.description}")
            yield outcome

    def _run_unless_existing(self, job: Job) -> Outcome:
        if run_hash(job.settings) in self._rows.all():
            return Outcome(job, "existing")
        if not self._clock.remaining:
            return Outcome(job, "not begun", "the time budget is exhausted")
        with claimed(self._rows.run_folder(job.settings)) as free:
            if not free:
                return Outcome(job, "claimed", "another process runs this cell")
            if run_hash(job.settings) in self._rows.all():  # finished in the meantime
                return Outcome(job, "existing")
            return self._resume_or_begin(job)

    def _resume_or_begin(self, job: Job) -> Outcome:
        folder = self._rows.run_folder(job.settings)
        complete = finished(folder)
        if complete is not None:  # a call was killed between the run's end and writing its row
            return self._append(job, metrics_of(complete))
        incomplete = unfinished(folder)
        rounds = metrics_of(incomplete)
        seconds = rounds[-1]["seconds"] if rounds else 0.0
        checkpointed = checkpointed_inside(job.settings, self._loaded(job.settings)[0].spec)
        if not round_fits(self._clock, seconds, checkpointed):
            text = f"a round takes {seconds:.0f} s, but {self._clock.remaining:.0f} s remain"
            return Outcome(job, "not begun", text)
        return self._simulate(job, folder, incomplete, checkpointed)

    def _simulate(self, job: Job, folder: Path, resume: Path | None, checkpointed: bool) -> Outcome:
        settings = job.settings
        with self._watch(settings) as inner:
            try:
                result = simulate(
                    settings,
                    data=self._loaded(settings),
                    output=None if resume else folder,
                    observer=BudgetObserver(inner, self._clock, settings.rounds, checkpointed),
                    resume=resume,
                    trained=self._rows.trained,
                )
            except OutOfTimeError:
                rounds = len(metrics_of(unfinished(folder)))
                text = f"after {rounds} of {settings.rounds} rounds. Repeat the command to resume"
                return Outcome(job, "stopped", text)
            except DivergedError as error:
                rows = metrics_of(unfinished(folder))
                return self._append(job, rows, diverged=str(error))
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
            "scale": self._rows.scale,
            "changes": {section: dict(values) for section, values in job.changes.items()},
            "precision": settings.precision,
            "compile": settings.compile,
            **round_summary(rows, settings.partition.kind == "domain"),
            **more,
            **environment(),
        }
        self._rows.append(job.table.name, row)
        return Outcome(job, "finished", f"{row['seconds']:.0f} s, {settings.rounds} rounds")

    def _loaded(self, settings: RunSettings) -> tuple[ImageData, ImageData]:
        """Returns the data of a run. The data set that was used last stays in memory."""
        if self._data is None or self._data[0] != settings.dataset:
            self._data = None
            loaded = load_dataset(settings.dataset, settings.data_root, download=self._download)
            self._data = settings.dataset, loaded
        return self._data[1]
