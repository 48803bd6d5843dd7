"""How long a run must take is said before it begins; what cannot end is refused."""

from __future__ import annotations

import pytest

from fedsynth.config.checks import STEP_SECONDS, least_steps, long_run
from fedsynth.config.resolve import resolve
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError

DIGITS = dataset_spec("digits")


def settings(method: str, rounds: int, **values: int):  # type: ignore[no-untyped-def]
    return resolve(
        {
            "run": {"method": method, "rounds": rounds},
            "partition": {"clients": 10},
            "method": values,
        }
    )


def test_steps_are_those_of_all_rounds() -> None:
    """1438 digits of 10 clients in batches of 32 are four of each epoch."""
    chosen = settings("fedavg", 3, local_epochs=5, batch=32)
    assert least_steps(chosen, DIGITS) == {"local_epochs": 3 * 5 * 4, "local_steps": 0}
    assert long_run(chosen, DIGITS) is None
    one = settings("fedavg", 3, local_epochs=5, local_steps=7, batch=32)
    assert least_steps(one, DIGITS) == {"local_steps": 3 * 7}


def test_a_long_run_is_announced_and_an_endless_one_refused() -> None:
    hours = 2 * 3600 / STEP_SECONDS
    words = long_run(settings("feddm", 1, iterations=int(hours), server_epochs=1), DIGITS)
    assert words is not None
    assert "2.0 hours" in words
    assert "method.iterations" in words
    with pytest.raises(SettingError, match=r"method\.local_epochs asks.*years"):
        long_run(settings("fedavg", 1, local_epochs=10**15), DIGITS)
    with pytest.raises(SettingError, match=r"years"):
        long_run(settings("feddm", 10**9, iterations=10**6), DIGITS)
