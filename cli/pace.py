"""How long a run still takes, by how long its rounds and steps have taken so far."""

from __future__ import annotations

import time
from collections.abc import Callable

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
