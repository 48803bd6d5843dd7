"""What a run looks like: a live bar where stderr is a terminal, a plain line for each round where
it is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedsynth.evaluation.generated import GENERATOR, in_words
from fedsynth.federation.loggers import Logger, make_loggers
from fedsynth.federation.observer import Observer
from fedsynth.federation.outputs.disclosed import lost_in_words
from fedsynth.federation.outputs.result import RunResult
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.formatting import format_epsilon
from fedsynth.privacy.report_pages import summary_rows

DAY = 86400.0
SURE = 30.0
"""Seconds of a phase over which its pace is taken."""


class Pace:
    """Measures a run; never told of one with differential privacy, whose times are not shown.

    Args:
        rounds: of the run.
        clock: seconds.
    """

    def __init__(self, rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rounds = rounds
        self._clock = clock
        self._round_began = clock()
        self._took: list[float] = []
        self._done = 0
        self._phase: tuple[int, str] | None = None
        self._part_began = 0.0
        self._begun_at = 0
        self._phases: dict[tuple[int, str], float] = {}
        self._said = False

    def step(self, round: int, phase: str, done: int, total: int) -> None:
        """A step of a round's phase was made."""
        now = self._clock()
        if self._phase != (round, phase):
            self._phase = (round, phase)
            self._part_began = now
            self._begun_at = done
        took = now - self._part_began
        steps = done - self._begun_at
        if took >= SURE and steps > 0:
            # the fastest part counts: first steps may compile, or make what later ones use
            seconds = took / steps * total
            self._phases[self._phase] = min(self._phases.get(self._phase, seconds), seconds)
            self._part_began = now
            self._begun_at = done

    def round_ended(self, number: int) -> None:
        """A round has ended."""
        now = self._clock()
        self._took.append(now - self._round_began)
        self._round_began = now
        self._done = number

    def left(self) -> float | None:
        """Seconds that the run still takes, by the mean of its rounds so far; None before the first
        has ended."""
        if not self._took:
            return None
        mean = sum(self._took) / len(self._took)
        gone = self._clock() - self._round_began
        return max(0.0, mean * (self._rounds - self._done) - min(gone, mean))

    def _least(self) -> float:
        """Seconds of the run, by the longest phase that a round has shown; 0: none yet."""
        return max(self._phases.values(), default=0.0) * self._rounds

    def words(self) -> str:
        """That for the progress bar; of a long first round what it takes at the least."""
        left = self.left()
        if left is not None:
            return f"about {duration(left)} left"
        least = self._least()
        return f"at least {duration(least)}" if least else ""

    def warning(self) -> str | None:
        """Once, as soon as it shows: that the run takes days."""
        left = self.left()
        least = left if left is not None else self._least()
        if self._said or least < DAY:
            return None
        self._said = True
        return (
            f"note: at this pace the run takes {'' if left is not None else 'at least '}"
            f"{duration(least)} more; it can be stopped and resumed"
        )


def duration(seconds: float) -> str:
    """Two units at most.

    >>> duration(40), duration(125), duration(7300), duration(200000)
    ('40 s', '2 min 5 s', '2 h 1 min', '2 days 7 h')
    """
    units = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = int(seconds)
    first = next((i for i, (_, size) in enumerate(units) if whole >= size), len(units) - 1)
    parts: list[str] = []
    for name, size in units[first : first + 2]:
        count, whole = divmod(whole, size)
        if count or not parts:
            parts.append(f"{count} {'day' if name == 'days' and count == 1 else name}")
    return " ".join(parts)


LONG_PHASE = 1000  # steps
NO_ACCURACY = {
    "private": "private: what is measured on them stands in simulation_only",
    "none": "none, so that there is no accuracy",
}


def accuracies(row: Mapping[str, Any], personal: bool) -> list[tuple[str, str]]:
    """What a round's row, or a run's summary, says of accuracy, as names and values.

    Args:
        personal: clients have models of their own: their own test splits' figures come first.
    """
    found = []
    if row.get("test_accuracy") is not None:
        found.append(("test accuracy", f"{100 * row['test_accuracy']:.2f} %"))
    for name, one in row.get("models", {}).items():
        if "test_accuracy" in one:
            found.append((name.upper(), f"{100 * one['test_accuracy']:.2f} %"))
    if "local" in row:  # not with differential privacy: exact functions of private data
        local = row["local"]
        splits = [
            ("AMP", f"{100 * local['amp']:.2f} %"),
            ("FM", f"{local['fm']:.4f}"),
            ("WLP", f"{100 * local['wlp']:.2f} %"),
        ]
        found = splits + found if personal else found + splits
    return found


def round_line(row: Mapping[str, Any], settings: RunSettings) -> str:
    """One round in words; its row has nothing that may not be shown."""
    each = accuracies(row, settings.method.personal)
    parts = [
        f"round {row['round']}/{settings.rounds}",
        *(f"{name} {value}" for name, value in each),
    ]
    if "epsilon" in row:
        parts.append(f"ε {format_epsilon(row['epsilon'])}")
    if GENERATOR in row:
        parts.append(f"generated: {in_words(row[GENERATOR])}")
    parts.append(f"uploads {row['upload_bytes'] / 1e6:.2f} MB")
    parts += lost_in_words(row)
    if "seconds" in row:
        parts.append(f"{row['seconds']:.1f} s")
    return " · ".join(parts)


class PlainObserver(Observer):
    """Lines on stderr: each round, and in long rounds a sign of life.

    It comes every 30 seconds. With differential privacy time may tell of the data, and a tenth of a
    long phase brings it.
    """

    def __init__(self, settings: RunSettings, first: str, mark: str = "") -> None:
        self._settings = settings
        self._first = first
        self._mark = mark
        self._last = time.monotonic()
        self._tenth = 0
        self._pace = _pace(settings)

    def step(self, round: int, phase: str, done: int, total: int) -> None:
        _tell_pace(self, self._pace, round, phase, done, total)
        before = self._tenth
        self._tenth = 10 * done // max(1, total)
        due = time.monotonic() - self._last > 30
        if self._settings.privacy is not None:
            due = total >= LONG_PHASE and 0 < self._tenth != before
        if due:
            left = "" if self._pace is None else self._pace.words()
            words = f"round {round}/{self._settings.rounds} {phase} {done}/{total}"
            self.note(f"{words}, {left}" if left else words)

    def note(self, text: str) -> None:
        self._last = time.monotonic()
        first = self._first
        self._first = ""
        lines = [first, text] if first else [text]
        with suppress(OSError):  # a closed pipe does not end a run
            print(*(f"{self._mark}{line}" for line in lines), sep="\n", file=sys.stderr, flush=True)

    def round_ended(self, row: Mapping[str, Any]) -> None:
        if self._pace is not None:
            self._pace.round_ended(row["round"])
        self.note(round_line(row, self._settings))


class LiveObserver(Observer):
    """A progress bar on stderr; finished rounds stay above it as lines."""

    def __init__(
        self, settings: RunSettings, first: str, progress: Progress, mark: str = ""
    ) -> None:
        self._settings = settings
        self._first = first
        self._mark = mark
        self._progress = progress
        self._task = progress.add_task("starting", total=None, left="")
        self._pace = _pace(settings)

    def note(self, text: str) -> None:
        first = self._first
        self._first = ""
        lines = [first, text] if first else [text]
        marked = [f"{self._mark}{line}" for line in lines]
        with suppress(OSError):
            self._progress.console.print(*marked, sep="\n", markup=False, highlight=False)

    def step(self, round: int, phase: str, done: int, total: int) -> None:
        _tell_pace(self, self._pace, round, phase, done, total)
        self._progress.update(
            self._task,
            description=f"{self._mark}round {round}/{self._settings.rounds} {phase}",
            completed=done,
            total=total,
            left="" if self._pace is None else self._pace.words(),
        )

    def round_ended(self, row: Mapping[str, Any]) -> None:
        if self._pace is not None:
            self._pace.round_ended(row["round"])
        self.note(round_line(row, self._settings))


def _pace(settings: RunSettings) -> Pace | None:
    """None with differential privacy: time may tell of the data."""
    return None if settings.privacy is not None else Pace(settings.rounds)


def _tell_pace(
    observer: Observer, pace: Pace | None, round: int, phase: str, done: int, total: int
) -> None:
    if pace is None:
        return
    pace.step(round, phase, done, total)
    if warning := pace.warning():
        observer.note(warning)


@contextmanager
def make_observer(settings: RunSettings, first: str = "", mark: str = "") -> Iterator[Observer]:
    """The observer that fits stderr.

    Args:
        settings: of the run.
        first: is said when there is something to say, so that an error before stays one line.
        mark: what every line begins with.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PlainObserver(settings, first, mark)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *(
            ()
            if settings.privacy is not None
            else (TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
        ),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield LiveObserver(settings, first, progress, mark)


def loggers_of(names: Sequence[str], base: Path, settings: RunSettings) -> list[Logger]:
    """The loggers that the user asked for; what has to be said of them is said."""
    found: list[Logger] = []
    for one in make_loggers(names, base, private=settings.privacy is not None):
        if isinstance(one, str):
            print(one, file=sys.stderr)
        else:
            found.append(one)
    return found


def print_summary(result: RunResult) -> None:
    """The result, and the privacy budget with ε first, as tables on stdout."""
    console = Console()
    summary = result.summary
    table = Table(title=f"{summary['method']} on {summary['dataset']}", show_header=False)
    for name, value in accuracies(summary, result.settings.method.personal):
        table.add_row(name, value)
    if "test_data" in summary:
        table.add_row("test data", NO_ACCURACY[summary["test_data"]])
    if GENERATOR in summary:
        table.add_row("generated", in_words(summary[GENERATOR]))
    table.add_row("rounds", str(summary["rounds"]))
    table.add_row(
        "uploaded",
        f"{summary['upload_bytes'] / 1e6:.2f} MB, {summary['upload_floats_per_round']:,} floats a "
        "round",
    )
    if result.privacy is not None:
        table.add_row("device", summary["device"])
    else:
        table.add_row("time", f"{summary['seconds']:.1f} s on {summary['device']}")
    console.print(table)
    if result.privacy is not None:
        budget = Table(title="privacy budget", show_header=False)
        for name, value in summary_rows(result.privacy):
            budget.add_row(escape(name), escape(value))
        console.print(budget)
    console.print(f"run folder: {result.folder}", soft_wrap=True, highlight=False, markup=False)
