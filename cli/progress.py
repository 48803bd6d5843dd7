"""Shows a run's progress on a terminal, and a run's summary as tables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TimeElapsedColumn
from rich.table import Table

from fedsynth.cli.application import say
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import PersonalModels
from fedsynth.errors import BudgetExceededError
from fedsynth.evaluation import GENERATOR, MEASURES
from fedsynth.evaluation.generated import format_facts
from fedsynth.privacy.report.pages import summary_rows
from fedsynth.results import run_messages
from fedsynth.results.finished import auroc_text, percent, words_of
from fedsynth.results.run_messages import StderrObserver, accuracies
from fedsynth.results.run_record import RunResult

NO_ACCURACY = {
    "private": "private: `fedsynth report RUN --simulation-only` shows the accuracies",
    "none": "none, so no accuracy is measured",
}


class LiveObserver(StderrObserver):
    """Shows a progress bar on stderr, with a line above it for each finished round."""

    def __init__(self, settings: RunSettings, first: str, progress: Progress) -> None:
        super().__init__(settings, first)
        self._progress = progress
        self._task = progress.add_task("starting", total=None, remaining="")

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def _show_step(self, stage: str, completed: int, total: int, remaining: str) -> None:
        self._progress.update(
            self._task, description=stage, completed=completed, total=total, remaining=remaining
        )


@contextmanager
def make_observer(settings: RunSettings, first: str = "") -> Iterator[StderrObserver]:
    """Returns a context manager for an observer that shows a run's progress on stderr.

    If stderr is a terminal, the observer shows a progress bar. Otherwise, it prints lines. The
    arguments are those of `StderrObserver`.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield StderrObserver(settings, first)
        return
    columns: list[str | ProgressColumn]
    columns = ["{task.description}", BarColumn(), MofNCompleteColumn()]
    if settings.privacy is None:
        columns += [TimeElapsedColumn(), "{task.fields[remaining]}"]
    with Progress(*columns, console=console, transient=True) as progress:
        yield LiveObserver(settings, first, progress)


@contextmanager
def show_steps() -> Iterator[Callable[[str, int, int], None]]:
    """Returns a context manager for a function that shows a long computation's progress.

    The function receives the stage, the number of finished steps and their total number. On a
    terminal, it shows a progress bar. Otherwise, it prints a line on stderr every `PRINT_SECONDS`.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("starting", total=None)
            yield lambda stage, completed, total: progress.update(
                task, description=stage, completed=completed, total=total
            )
        return
    started = printed = time.monotonic()

    def show(stage: str, completed: int, total: int) -> None:
        nonlocal started, printed
        seconds = time.monotonic()
        if seconds - printed >= run_messages.PRINT_SECONDS:
            printed = seconds
            remaining = (seconds - started) * (total - completed) / completed
            say(f"{stage} {completed}/{total}, about {run_messages.duration(remaining)} left")
        if completed == total:
            started = seconds  # of the next stage

    yield show


def show_result(result: RunResult, as_json: bool) -> None:
    """Prints a run's result.

    Raises:
        BudgetExceededError: the run had no round, because earlier runs have exhausted the budget.
    """
    if not result.metrics:
        raise BudgetExceededError(  # the observer has received the details
            "no round was completed, for the reason above. If it is the cap on ε, increase "
            "privacy.epsilon"
        )
    if as_json:
        print(json.dumps(result.summary, indent=2, allow_nan=False))
    else:
        print_summary(result)


def print_summary(result: RunResult) -> None:
    """Prints the results and the privacy budget as tables on stdout."""
    console = Console()
    summary = result.summary
    table = Table(title=f"{summary['method']} on {summary['dataset']}", show_header=False)
    for name, value in accuracies(summary, isinstance(result.settings.method, PersonalModels)):
        table.add_row(name, value)
    for key in MEASURES:
        if key in summary:
            value = auroc_text(summary) if key == "auroc" else percent(summary[key])
            table.add_row(words_of(key).replace("auroc", "AUROC").replace("f1", "F1"), value)
    if "test_data" in summary:
        table.add_row("test data", NO_ACCURACY[summary["test_data"]])
    if GENERATOR in summary:
        table.add_row("generated", format_facts(summary[GENERATOR]))
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
