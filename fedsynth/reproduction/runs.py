"""Runs cells of tables one after another, within a time budget, and goes on where a call ended.

A call that is stopped, by its budget, a signal or a kill, leaves run folders with checkpoints
(docs/decisions/resuming.md); the next one goes on with them, and ends with the numbers of a call
that was not stopped. Several processes may share a folder: a run that one has claimed is left out
by the others.

The budget ends a run at a round's end: no round is begun that, by the last one's time, or by the
estimate, would end too late. Open condensation, plain local training of one client after another
and a server's distillation are kept also inside a round, every minute, so methods that do nothing
else for long are stopped there too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DivergedError, FedsynthError
from fedsynth.federation.observer import Observer
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.methods.shared.condensing import Condenses
from fedsynth.methods.shared.ensemble import DistilsEnsemble
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.registry import build_network
from fedsynth.reproduction.estimate import Estimate, duration, estimate
from fedsynth.reproduction.presets import Cell, Preset, cell_words, over
from fedsynth.reproduction.rows import (
    Rows,
    claimed,
    facts_of,
    finished,
    made_with,
    metrics_of,
    run_hash,
    unfinished,
)
from fedsynth.reproduction.scaling import scale_words, scaled
from fedsynth.training.many_clients import trains_together

KEPT = ("condense", "local training", "distillation")
"""The phases that are kept inside a round."""
Watch = Callable[[RunSettings], AbstractContextManager[Observer]]


class OutOfTimeError(KeyboardInterrupt):
    """The time budget is spent: the run ends in order, as after Ctrl-C."""


@dataclass(frozen=True)
class Job:
    """One run of a cell.

    Args:
        table: the cell's.
        cell: what of it.
        seed: of the run.
        settings: the run's, scaled if it is.
        changes: sections of settings that are not the preset's.
    """

    table: Preset
    cell: Cell
    seed: int
    settings: RunSettings
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Which run it is, in one line."""
        changed = ", ".join(
            f"{section}.{key}={value}"
            for section, values in self.changes.items()
            for key, value in values.items()
        )
        name = f"{self.table.name} {cell_words(self.cell, self.table)} seed {self.seed}"
        return f"{name}, changed: {changed}" if changed else name


def jobs_of(
    table: Preset,
    cells: Iterable[Cell],
    seeds: Iterable[int],
    *,
    scale: float | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    speed: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Job]:
    """The runs of cells, one seed of all before the next; cells that cannot be run are left out.

    Args:
        table: the cells'.
        cells: some of it.
        seeds: of the runs.
        scale: None: whole runs.
        changes: sections of settings over the preset's.
        speed: sections of settings that change no result (device, compile, the data folder).

    Raises:
        FedsynthError: of changes, as `resolve`.
    """
    given = changes or {}
    runnable = [cell for cell in cells if not table.refusal(cell)]
    found = []
    for seed in seeds:
        for cell in runnable:
            whole = table.settings(cell, seed)
            smaller = over(over(scaled(whole, scale), speed or {}), given)
            found.append(Job(table, cell, seed, table.settings(cell, seed, smaller), given))
    return found


def kept_inside(settings: RunSettings, spec: DatasetSpec) -> bool:
    """Whether a round loses little when it is cut off: its long loops are kept.

    Nothing of a private one is, nor of clients that are trained in one pass.
    """
    method = settings.method
    if settings.privacy is not None:
        return False
    if isinstance(method, TrainsLocally) and method.one_pass:
        return not trains_together(build_network(settings.model, spec, 0))
    return isinstance(method, Condenses | DistilsEnsemble)


class Clock:
    """A time budget.

    Args:
        seconds: after which no round is begun.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())


class Watched(Observer):
    """Another observer that also ends the run when the time is over.

    Args:
        inner: is told all.
        clock: the budget.
        rounds: of the run.
        kept: whether what a round has done is kept inside it.
    """

    def __init__(self, inner: Observer, clock: Clock, rounds: int, kept: bool) -> None:
        self._inner = inner
        self._clock = clock
        self._rounds = rounds
        self._kept = kept
        self._stopped = False

    def note(self, text: str) -> None:
        if not self._stopped:  # what else an ended run says is for who ran it alone
            self._inner.note(text)

    def step(self, round: int, phase: str, done: int, total: int) -> None:
        self._inner.step(round, phase, done, total)
        if self._kept and phase in KEPT and not self._clock.left:
            self._stop()

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self._inner.round_ended(row)
        if row["round"] < self._rounds and not fits(self._clock, float(row["seconds"]), self._kept):
            self._stop()

    def _stop(self) -> None:
        self._stopped = True
        raise OutOfTimeError


def fits(clock: Clock, round_seconds: float, kept: bool) -> bool:
    """Whether a round may begin: it would end in time, or is kept inside as far as it comes."""
    return clock.left > 0 and (kept or round_seconds <= clock.left)


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Args:
        job: the run.
        what: "made", "there" (of an earlier call), "stopped" or "not begun" (by the budget),
            "elsewhere" (another process makes it), or "failed".
        text: more of it, in words.
        error: why it failed.
    """

    job: Job
    what: str
    text: str = ""
    error: FedsynthError | None = None


class Runner:
    """Makes the rows of jobs.

    Args:
        rows: where they go.
        clock: the budget.
        tell: is told what happens, a line at a time; each begins with the scale, if there is one.
        watch: an observer for a run.
        download: let torchvision fetch data sets.
        estimates: whether to say beforehand how long a run takes.
    """

    def __init__(
        self,
        rows: Rows,
        clock: Clock,
        *,
        tell: Callable[[str], None],
        watch: Watch,
        download: bool = False,
        estimates: bool = True,
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._prefix = scale_words(rows.scale)
        self._told = tell
        self._watch = watch
        self._download = download
        self._estimates = estimates
        self._data: tuple[str, tuple[ImageData, ImageData]] | None = None
        self._known: dict[str, Estimate] = {}

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Each job in turn; after the budget's end the others are not begun."""
        for job in jobs:
            try:
                outcome = self._one(job)
            except FedsynthError as error:
                outcome = Outcome(job, "failed", str(error), error)
            said = f": {outcome.text}" if outcome.text else ""
            self._tell(f"{job.words}: {outcome.what}{said}")
            yield outcome

    def estimate(self, job: Job) -> Estimate:
        """How long the job takes from its beginning; runs that differ in seed or partition alone
        are timed once.

        Raises:
            FedsynthError: its data are not there, or the run would not begin.
        """
        settings = job.settings
        known = run_hash(replace(settings, seed=0, rounds=1))
        if known not in self._known:
            self._known[known] = estimate(settings, self._loaded(settings))
        return replace(
            self._known[known],
            rounds=settings.rounds,
            evaluations=-(-settings.rounds // settings.evaluate_every),
        )

    def _tell(self, text: str) -> None:
        self._told(f"{self._prefix}{text}")

    def _one(self, job: Job) -> Outcome:
        if run_hash(job.settings) in self._rows.all():
            return Outcome(job, "there")
        if not self._clock.left:
            return Outcome(job, "not begun", "the time budget is spent")
        with claimed(self._rows.run_folder(job.settings)) as mine:
            if not mine:
                return Outcome(job, "elsewhere", "another process makes it")
            if run_hash(job.settings) in self._rows.all():  # it ended meanwhile
                return Outcome(job, "there")
            return self._make(job)

    def _make(self, job: Job) -> Outcome:
        folder = self._rows.run_folder(job.settings)
        done = finished(folder)
        if done is not None:  # a call was killed after the run and before its row
            return self._append(job, metrics_of(done), None)
        going_on = unfinished(folder)
        rows = [] if going_on is None else metrics_of(going_on)
        guess = self.estimate(job) if self._estimates and not rows else None
        if guess is not None:
            self._tell(f"{job.words}: {guess.words}")
        expected = 0.0 if guess is None else guess.round_seconds / guess.share
        if rows:
            expected = rows[-1]["seconds"]
        kept = kept_inside(job.settings, self._loaded(job.settings)[0].spec)
        if not fits(self._clock, expected, kept):
            text = f"a round takes {duration(expected)}, {duration(self._clock.left)} are left"
            return Outcome(job, "not begun", text)
        return self._simulate(job, folder, going_on, guess, kept)

    def _simulate(
        self,
        job: Job,
        folder: Path,
        going_on: Path | None,
        guess: Estimate | None,
        kept: bool,
    ) -> Outcome:
        settings = job.settings
        data = self._loaded(settings)
        with self._watch(settings) as inner:
            observer = Watched(inner, self._clock, settings.rounds, kept)
            try:
                result = simulate(
                    settings,
                    data=data,
                    output=None if going_on else folder,
                    observer=observer,
                    resume=going_on,
                    trained=self._rows.trained,
                )
            except OutOfTimeError:
                left = unfinished(folder)
                rounds = 0 if left is None else len(metrics_of(left))
                text = f"after {rounds} of {settings.rounds} rounds, by the time budget; a later "
                return Outcome(job, "stopped", text + "call goes on")
            except DivergedError as error:
                left = unfinished(folder)
                rows = [] if left is None else metrics_of(left)
                return self._append(job, rows, guess, {"diverged": str(error)})
        return self._append(job, result.metrics, guess)

    def _append(
        self,
        job: Job,
        rows: list[dict[str, Any]],
        guess: Estimate | None,
        more: Mapping[str, Any] | None = None,
    ) -> Outcome:
        settings = job.settings
        mark = run_hash(settings)
        name = f"{job.table.name} {cell_words(job.cell, job.table)} seed={job.seed}"
        row = {
            "key": f"{name} {mark}",
            "preset": job.table.name,
            "cell": job.cell.columns(),
            "seed": job.seed,
            "settings": mark,
            "scale": self._rows.scale,
            "changes": {k: dict(v) for k, v in job.changes.items()},
            "precision": settings.precision,
            "compile": settings.compile,
            "estimated_seconds": None if guess is None else round(guess.seconds, 1),
            **facts_of(rows, settings.partition.kind == "domain"),
            **(more or {}),
            **made_with(),
        }
        self._rows.append(job.table.name, row)
        return Outcome(job, "made", f"{duration(row['seconds'])}, {settings.rounds} rounds")

    def _loaded(self, settings: RunSettings) -> tuple[ImageData, ImageData]:
        """The run's data; the last data set stays in memory."""
        if self._data is None or self._data[0] != settings.dataset:
            self._data = None
            loaded = load_dataset(settings.dataset, settings.data_root, download=self._download)
            self._data = settings.dataset, loaded
        return self._data[1]
