"""The progress of a run on stderr: a line for each note and each round, and the time taken."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fedsynth.config.settings import RunSettings
from fedsynth.evaluation.generated import GENERATOR, in_words
from fedsynth.federation.observer import Observer
from fedsynth.privacy.report.formatting import format_epsilon
from fedsynth.results.disclosed import lost_in_words

LONG_PHASE = 1000  # steps
DAY = 86400.0
SURE = 30.0
"""Seconds of a phase over which its pace is taken."""


class Pace:
    """Measures the speed of a run. It is not used for private runs, whose times are hidden.

    Args:
        rounds: the number of rounds.
        clock: returns the time in seconds.
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

    def step(self, round: int, phase: str, completed: int, total: int) -> None:
        """A step of a round's phase was made."""
        current = self._clock()
        if self._phase != (round, phase):
            self._phase = (round, phase)
            self._part_began = current
            self._begun_at = completed
        took = current - self._part_began
        steps = completed - self._begun_at
        if took >= SURE and steps > 0:
            # the fastest part counts: first steps may compile, or make what later ones use
            seconds = took / steps * total
            self._phases[self._phase] = min(self._phases.get(self._phase, seconds), seconds)
            self._part_began = current
            self._begun_at = completed

    def round_ended(self, number: int) -> None:
        """A round has ended."""
        current = self._clock()
        self._took.append(current - self._round_began)
        self._round_began = current
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
        """Returns the remaining time for the progress bar; in a long first round, a lower bound."""
        remaining = self.left()
        if remaining is not None:
            return f"about {duration(remaining)} left"
        bound = self._least()
        return f"at least {duration(bound)}" if bound else ""

    def warning(self) -> str | None:
        """Once, as soon as it shows: that the run takes days."""
        remaining = self.left()
        bound = remaining if remaining is not None else self._least()
        if self._said or bound < DAY:
            return None
        self._said = True
        return (
            "note: at this speed, the run takes "
            f"{'' if remaining is not None else 'at least '}{duration(bound)} more; it can "
            "be stopped and resumed"
        )


def duration(seconds: float) -> str:
    """Two units at most.

    >>> duration(40), duration(125), duration(7300), duration(200000)
    ('40 s', '2 min 5 s', '2 h 1 min', '2 days 7 h')
    """
    units = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))
    remainder = int(seconds)
    first = next((i for i, (_, size) in enumerate(units) if remainder >= size), len(units) - 1)
    parts: list[str] = []
    for name, size in units[first : first + 2]:
        count, remainder = divmod(remainder, size)
        if count or not parts:
            parts.append(f"{count} {'day' if name == 'days' and count == 1 else name}")
    return " ".join(parts)


def accuracies(row: Mapping[str, Any], personal: bool) -> list[tuple[str, str]]:
    """Returns the accuracies in a metrics record or a summary, as names and values.

    Args:
        personal: clients have personal models, so the accuracy on their test splits comes first.
    """
    pairs = []
    if row.get("test_accuracy") is not None:
        pairs.append(("test accuracy", f"{100 * row['test_accuracy']:.2f} %"))
    for name, model in row.get("models", {}).items():
        if "test_accuracy" in model:
            pairs.append((name.upper(), f"{100 * model['test_accuracy']:.2f} %"))
    if "local" in row:  # not with differential privacy: exact functions of private data
        local = row["local"]
        splits = [
            ("AMP", f"{100 * local['amp']:.2f} %"),
            ("FM", f"{local['fm']:.4f}"),
            ("WLP", f"{100 * local['wlp']:.2f} %"),
        ]
        pairs = splits + pairs if personal else pairs + splits
    return pairs


def round_line(row: Mapping[str, Any], settings: RunSettings) -> str:
    """One round in words; its row has nothing that may not be shown."""
    pairs = accuracies(row, settings.method.personal)
    parts = [
        f"round {row['round']}/{settings.rounds}",
        *(f"{name} {value}" for name, value in pairs),
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


class StderrObserver(Observer):
    """Prints a line on stderr for each note and each round, and in long rounds a sign of life.

    The sign of life comes every 30 seconds. With differential privacy the time may depend on
    private data: then each tenth of a long phase brings it, and no pace is shown.

    Args:
        settings: the run's.
        first: printed before the first line, so that an error before it stays one line.
    """

    def __init__(self, settings: RunSettings, first: str = "") -> None:
        self._settings = settings
        self._first = first
        self._last = time.monotonic()
        self._tenth = 0
        self._pace = None if settings.privacy is not None else Pace(settings.rounds)

    def note(self, text: str) -> None:
        self._last = time.monotonic()
        lines = [self._first, text] if self._first else [text]
        self._first = ""
        with suppress(OSError):  # a closed pipe does not end a run
            self._print("\n".join(lines))

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, round: int, phase: str, completed: int, total: int) -> None:
        remaining = ""
        if self._pace is not None:
            self._pace.step(round, phase, completed, total)
            if warning := self._pace.warning():
                self.note(warning)
            remaining = self._pace.words()
        self._show_step(
            f"round {round}/{self._settings.rounds} {phase}", completed, total, remaining
        )

    def _show_step(self, phase: str, completed: int, total: int, remaining: str) -> None:
        previous = self._tenth
        self._tenth = 10 * completed // max(1, total)
        due = time.monotonic() - self._last > 30
        if self._settings.privacy is not None:
            due = total >= LONG_PHASE and 0 < self._tenth != previous
        if due:
            text = f"{phase} {completed}/{total}"
            self.note(f"{text}, {remaining}" if remaining else text)

    def round_ended(self, row: Mapping[str, Any]) -> None:
        if self._pace is not None:
            self._pace.round_ended(row["round"])
        self.note(round_line(row, self._settings))
