"""What a run looks like: a live bar where stderr is a terminal, a plain line for each round where
it is not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedsynth.cli.pace import Pace
from fedsynth.evaluation.generated import GENERATOR, in_words
from fedsynth.federation.loggers import Logger, make_loggers
from fedsynth.federation.observer import Observer
from fedsynth.federation.outputs.lost_clients import lost_in_words
from fedsynth.federation.outputs.result import RunResult
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.formatting import format_epsilon
from fedsynth.privacy.report_pages import summary_rows

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
        self,
        settings: RunSettings,
        first: str,
        progress: Progress,
        mark: str = "",
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
