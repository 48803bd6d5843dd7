"""The canary audit's bound, by hand; tests/federation audits whole runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsynth.privacy.audit import (
    epsilon_lower_bound,
    guesses_for,
    p_value,
    right_guesses,
)
from fedsynth.privacy.errors import PrivacySettingError

DELTA = 1e-5


def test_the_bound_by_hand() -> None:
    """r = 3 guesses, all right: P[W = 3] = p³; with δ the worst i is found by trying all."""
    p = math.e / (1 + math.e)
    assert p_value(3, 3, 10, 1.0, 0.0) == pytest.approx(p**3)
    pmf = [math.comb(3, k) * p**k * (1 - p) ** (3 - k) for k in range(4)]
    worst = max(sum(pmf[3 - i : 3]) / i for i in (1, 2, 3))
    assert p_value(3, 3, 10, 1.0, 1e-3) == pytest.approx(p**3 + 2 * 10 * 1e-3 * worst)
    bound = epsilon_lower_bound(100, 100, 1000, 0.0, 0.999)
    assert bound == pytest.approx(-math.log(0.001 ** (-1 / 100) - 1), abs=1e-3)  # p¹⁰⁰ = 0.001
    assert epsilon_lower_bound(50, 100, 1000, DELTA, 0.999) == 0
    with pytest.raises(PrivacySettingError):
        p_value(5, 4, 10, 1.0, 0.0)


def test_guesses_are_of_both_ends_and_their_number_is_fixed_beforehand() -> None:
    scores, included = np.array([0.3, -1.0, 2.0, 0.1, 5.0]), np.array([1, 1, 1, 0, 0], dtype=bool)
    assert right_guesses(scores, included, 2) == 0  # "in" for 5.0, "out" for −1.0
    assert right_guesses(scores, included, 4) == 2  # and "in" for 2.0, "out" for 0.1
    assert [guesses_for(m) for m in (2, 10, 1000, 1001, 5000)] == [2, 4, 400, 400, 2000]
