"""The pace of noisy steps: how far they go, by NumPy, and what happens at its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fedsynth.methods.statistics.class_moments import step_rate, total_weight

COUNTS = some.integers(1, 40)


@given(COUNTS, some.floats(0, 0.95))
def test_reach_is_how_often_gradients_are_taken(steps: int, momentum: float) -> None:
    """Of gradients that are all 1, step by step."""
    velocity = weight = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        weight += velocity
    assert total_weight(steps, momentum) == pytest.approx(weight, rel=1e-9)


@given(some.floats(1e-6, 1.0), COUNTS, some.floats(0.01, 10), some.floats(0, 0.9))
def test_steps_go_as_far_as_noise_allows_or_as_they_can(
    noise: float, steps: int, logit_noise: float, momentum: float
) -> None:
    rate = step_rate(noise, steps, logit_noise, 200.0, momentum)
    far = rate * total_weight(steps, momentum)
    assert rate <= 200.0
    assert far <= logit_noise / noise * (1 + 1e-9)
    short = far < logit_noise / noise * (1 - 1e-9)
    assert not short or rate == 200.0


def test_without_noise_steps_are_the_longest() -> None:
    assert step_rate(0.0, 16, 0.6, 100.0, 0.5) == 100.0 == step_rate(1e-9, 16, 0.6, 100.0, 0.5)
    assert step_rate(1e-3, 16, 0.6, 100.0, 0.5) == pytest.approx(600 / total_weight(16, 0.5))
