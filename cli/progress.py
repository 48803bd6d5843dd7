"""What a run looks like: a live bar where stderr is a terminal, a plain line for each round where it is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedsynth.federation.observer import Observer
from fedsynth.federation.settings import RunSettings
from fedsynth.federation.simulation import RunResult
from fedsynth.privacy.report import summary_rows
from fedsynth.privacy.report_text import up


def round_line(row: Mapping[str, Any], rounds: int) -> str:
    """One round in words."""
    parts = [f"round {row['round']}/{rounds}"]
    if "test_accuracy" in row:
        parts.append(f"test accuracy {100 * row['test_accuracy']:.2f} %")
    if "epsilon" in row:
        parts.append(f"ε {up(row['epsilon'], 3)}")
    parts += [f"uploads {row['upload_bytes'] / 1e6:.2f} MB", f"{row['seconds']:.1f} s"]
    return " · ".join(parts)


class PlainObserver(Observer):
    """Lines on stderr: each round, and in long rounds a sign of life every 30 seconds."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._last = rounds, time.monotonic()

    def step(self, round: int, phase: str, done: int, total: int) -> None:
        if time.monotonic() - self._last > 30:
            self.note(f"round {round}/{self._rounds} {phase} {done}/{total}")

    def note(self, text: str) -> None:
        self._last = time.monotonic()
        print(text, file=sys.stderr, flush=True)

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.note(round_line(row, self._rounds))


class LiveObserver(Observer):
    """A progress bar on stderr; finished rounds stay above it as lines."""

    def __init__(self, rounds: int, progress: Progress) -> None:
        self._rounds, self._progress = rounds, progress
        self._task = progress.add_task("starting", total=None)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def step(self, round: int, phase: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=f"round {round}/{self._rounds} {phase}", completed=done, total=total)

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.note(round_line(row, self._rounds))


@contextmanager
def make_observer(settings: RunSettings) -> Iterator[Observer]:
    """The observer that fits stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PlainObserver(settings.rounds)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield LiveObserver(settings.rounds, progress)


def print_summary(result: RunResult) -> None:
    """The result, and the privacy budget with ε first, as tables on stdout."""
    console = Console()
    summary = result.summary
    table = Table(title=f"{summary['method']} on {summary['dataset']}", show_header=False)
    accuracy = summary["test_accuracy"]
    table.add_row("test accuracy", "-" if accuracy is None else f"{100 * accuracy:.2f} %")
    table.add_row("rounds", str(summary["rounds"]))
    table.add_row("uploaded", f"{summary['upload_bytes'] / 1e6:.2f} MB, {summary['upload_floats_per_round']:,} floats a round")
    table.add_row("time", f"{summary['seconds']:.1f} s on {summary['device']}")
    console.print(table)
    if result.privacy is not None:
        budget = Table(title="privacy budget", show_header=False)
        for name, value in summary_rows(result.privacy):
            budget.add_row(escape(name), escape(value))
        console.print(budget)
    console.print(f"run folder: {result.folder}", soft_wrap=True, highlight=False, markup=False)
