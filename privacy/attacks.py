"""Bounds on what an attacker can learn: the power of any membership inference test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from fedsynth.privacy.accounting import delta_of, epsilon_of, merge
from fedsynth.privacy.releases import ADD_REMOVE, Release, is_real, require


def attack_success(
    releases: Sequence[Release],
    false_positive_rates: Sequence[float] = (0.001, 0.01),
    adjacency: str = ADD_REMOVE,
) -> dict[float, float]:
    """Returns an upper bound on the true-positive rate of *any* membership test at each
    false-positive rate α.

    If (ε, δ(ε)) holds for the pair (without, with) and for its reverse, a test's rates obey, for
    every ε ≥ 0, TPR ≤ e^ε·α + δ(ε), and, with the complements' rates, 1 − α ≤ e^ε·(1 − TPR) + δ(ε),
    that is TPR ≤ 1 − e^{−ε}·(1 − α − δ(ε)). The smallest of these over ε is 1 − f(α), f the
    trade-off function (f-DP: Dong, Roth & Su 2022, Prop. 2.12). Each bound is convex, the first in
    e^ε and the second in e^{−ε}, so a golden-section search finds the minimum; the bound is valid
    wherever the search stops. For Gaussians, the closed form Φ(Φ⁻¹(α) + μ) is used.
    """
    from scipy.special import ndtr, ndtri

    for rate in false_positive_rates:
        require(is_real(rate) and 0 < rate < 1, "false_positive_rates", "must be in (0, 1)", rate)
    merged = merge(releases, adjacency)
    if merged is None:
        return dict.fromkeys(false_positive_rates, 1.0)
    if merged.interval is None:
        return {a: float(ndtr(ndtri(a) + merged.without_sampling)) for a in false_positive_rates}
    curve = lru_cache(maxsize=None)(lambda e: delta_of(merged, e))
    furthest = epsilon_of(merged, 1e-8)
    return {a: _largest_power(curve, a, furthest) for a in false_positive_rates}


def best_guess(releases: Sequence[Release], adjacency: str = ADD_REMOVE) -> float:
    """Returns an upper bound on the accuracy of guessing membership when both cases are equally
    likely.

    A test's accuracy is (1 + TPR − FPR)/2. TPR − FPR is at most the total variation distance
    between the releases with and without the example, which is δ at ε = 0. The bound is therefore
    (1 + δ(0))/2, for Gaussians Φ(μ/2).
    """
    merged = merge(releases, adjacency)
    if merged is None:
        return 1.0
    return (1.0 + delta_of(merged, 0.0)) / 2


def _largest_power(curve: Callable[[float], float], alpha: float, furthest: float) -> float:
    first = _golden(lambda e: math.exp(min(e, 700.0)) * alpha + curve(e), furthest)
    second = _golden(lambda e: 1 - math.exp(-e) * (1 - alpha - curve(e)), furthest)
    return min(1.0, first, second)


def _golden(bound: Callable[[float], float], high: float, iterations: int = 16) -> float:
    """Returns the smallest value found by a golden-section search of a unimodal function on [0,
    high]."""
    ratio = (math.sqrt(5) - 1) / 2
    low = 0.0
    lower, upper = high - ratio * high, ratio * high
    at_lower, at_upper = bound(lower), bound(upper)
    best = min(bound(0.0), at_lower, at_upper)
    for _ in range(iterations):
        if at_lower <= at_upper:
            high, upper, at_upper = upper, lower, at_lower
            lower = high - ratio * (high - low)
            at_lower = bound(lower)
        else:
            low, lower, at_lower = lower, upper, at_upper
            upper = low + ratio * (high - low)
            at_upper = bound(upper)
        best = min(best, at_lower, at_upper)
    return best
