"""How long a run still takes, as it is said while it goes."""

from __future__ import annotations

from fedsynth.config.resolve import resolve
from fedsynth.simulation.stderr_observer import Pace, StderrObserver


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_by_the_mean_of_the_rounds_that_have_ended() -> None:
    clock = Clock()
    pace = Pace(10, clock)
    assert pace.left() is None
    assert pace.words() == ""
    for number, at in ((1, 100.0), (2, 300.0)):
        clock.now = at
        pace.round_ended(number)
    assert pace.left() == 8 * 150
    clock.now = 350.0
    assert pace.left() == 8 * 150 - 50
    clock.now = 1e6  # a round that takes longer than the mean is still to end
    assert pace.left() == 7 * 150
    assert Pace(3, Clock()).warning() is None


def test_slow_first_steps_are_forgotten_when_others_are_fast() -> None:
    """Catches: first steps that compile, or make the means of M networks, taken for all."""
    clock = Clock()
    pace = Pace(1, clock)
    pace.step(1, "condense", 0, 1000)
    for done in range(1, 11):
        clock.now += 60.0
        pace.step(1, "condense", done, 1000)
    assert pace.words() == "at least 16 h 40 min"
    for done in range(11, 111):
        clock.now += 1.0
        pace.step(1, "condense", done, 1000)
    assert pace.words() == "at least 16 min 40 s"
    pace.step(1, "server", 0, 10)
    clock.now += 40.0
    pace.step(1, "server", 1, 10)  # a shorter phase
    assert pace.words() == "at least 16 min 40 s"


def test_a_private_run_shows_no_times() -> None:
    assert StderrObserver(resolve({"privacy": {"noise_multiplier": 3.0}}))._pace is None
    assert StderrObserver(resolve({}))._pace is not None
