"""A canary audit: a lower bound on ε from one run with many canaries. It can find a fault; it
cannot prove privacy.

A fair coin decides whether each of m canaries is in the data. An auditor who sees the release
guesses for r of them (the highest scores "in", the lowest "out"). If the mechanism is (ε, δ)-DP, v
or more correct guesses are improbable (Steinke, Nasr & Jagielski, "Privacy auditing with one (1)
training run", 2023, Theorem 5.2): with p = e^ε/(1 + e^ε) and W ~ Binomial(r, p),

    P[V ≥ v] ≤ P[W ≥ v] + 2·m·δ·max_{1 ≤ i ≤ m} P[v − i ≤ W < v] / i.

The largest ε that this refutes is a lower bound.
"""

from __future__ import annotations

from math import exp, floor

import numpy as np
import numpy.typing as npt

from fedsynth.privacy.releases import require

GUESSES = 400  # of 1000 canaries: gives about the highest bound for ε from 1 to 3
CAVEAT = "an audit can find a fault, but cannot prove privacy"


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Returns the bound above on the probability of `correct` or more correct guesses under (ε,
    δ)-DP."""
    from scipy.stats import binom

    rule = "must be from 0 to guesses, and these at most canaries"
    counts = (correct, guesses, canaries)
    require(0 <= correct <= guesses <= canaries, "correct", rule, counts)
    probability = 1 / (1 + exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, probability))
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    # P[v − i ≤ W < v] for i = 1 … v
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, probability))
    return min(1.0, tail + 2 * canaries * delta * float((below / np.arange(1, correct + 1)).max()))


def epsilon_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float
) -> float:
    """Returns the largest ε (to 1e-4) that `correct` correct guesses refute at this confidence, or
    0."""
    low = 0.0
    high = 1.0
    if p_value(correct, guesses, canaries, 0.0, delta) > 1 - confidence:
        return 0.0
    while p_value(correct, guesses, canaries, high, delta) <= 1 - confidence and high < 64:
        low = high
        high = 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        if p_value(correct, guesses, canaries, middle, delta) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def right_guesses(
    scores: npt.NDArray[np.float64], included: npt.NDArray[np.bool_], guesses: int
) -> int:
    """Returns the number of correct guesses among `guesses` (even): "in" for the highest half of
    the scores, "out" for the lowest."""
    order = np.argsort(scores)
    half = guesses // 2
    return int(included[order[len(order) - half :]].sum() + (~included[order[:half]]).sum())


def guesses_for(canaries: int) -> int:
    """Returns the default number of guesses for this number of canaries: even, at least 2."""
    return max(2, 2 * (GUESSES * canaries // 2000))


def down(value: float) -> str:
    """Returns `value` rounded down to 2 decimals, so that a printed lower bound is never too
    high."""
    return f"{floor(value * 100) / 100:.2f}"
