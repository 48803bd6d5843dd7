"""Bounds for audits with canaries, and bounds on membership inference attacks.

A canary audit computes a lower bound on ε from one run with many canaries. It can find a fault, but
it cannot prove privacy.

A fair coin decides for each of m canaries whether it is in the data. An auditor sees the release
and guesses for r of the canaries. The guess is "in the data" for the canaries with the highest
scores and "not in the data" for those with the lowest. If the mechanism is (ε, δ)-DP, many correct
guesses are improbable (Steinke, Nasr & Jagielski, "Privacy auditing with one (1) training run",
2023, Theorem 5.2). With p = e^ε/(1 + e^ε) and W ~ Binomial(r, p), the number V of correct guesses
satisfies

    P[V ≥ v] ≤ P[W ≥ v] + 2·m·δ·max_{1 ≤ i ≤ m} P[v − i ≤ W < v] / i.

If the auditor made v correct guesses, every ε for which this probability is very small is refuted.
The largest refuted ε is the lower bound.

`score_bounds` has bounds that are higher, because they assume more about the noise.

The other functions bound the power of any membership inference test. These bounds are computed from
the ledger, without an attack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import exp, floor

import numpy as np
import numpy.typing as npt

from fedsynth.privacy.accounting import delta_of, epsilon_of, merge
from fedsynth.privacy.releases import ADD_REMOVE, Release, require

GUESSES = 400  # of 1000 canaries: gives about the highest bound for ε from 1 to 3
LARGEST_EPSILON = 64.0  # the search for a bound ends here
FALSE_POSITIVE_RATES = (0.001, 0.01)
CAVEAT = "an audit can find a fault, but cannot prove privacy"


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bounds the probability that at least `correct` guesses are right under (ε, δ)-DP.

    The formula is in the docstring of this module.

    Args:
        correct: v, the number of correct guesses.
        guesses: r, the number of guesses.
        canaries: m, the number of canaries.
        epsilon, delta: ε and δ.

    Raises:
        PrivacySettingError: not 0 ≤ correct ≤ guesses ≤ canaries.
    """
    from scipy.stats import binom

    rule = "must satisfy 0 <= correct <= guesses <= canaries"
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
    """Computes a canary audit's lower bound on ε.

    The bound is the largest ε that `correct` correct guesses refute at this confidence, with an
    error of at most 1e-4. It is 0 if the guesses refute no ε. The search ends once ε = 64 is
    refuted.

    Args:
        correct: the number of correct guesses.
        guesses: the number of guesses.
        canaries: the number of canaries.
        delta: δ.
        confidence: the confidence of the bound, such as 0.95.
    """
    return largest(
        lambda ε: p_value(correct, guesses, canaries, ε, delta) <= 1 - confidence, LARGEST_EPSILON
    )


def largest(refuted: Callable[[float], bool], end: float) -> float:
    """Finds the largest parameter for which `refuted` is True, with an error of at most 1e-4.

    Args:
        refuted: a function that is True up to this parameter, and False above it.
        end: the search ends once this parameter is refuted.

    Returns:
        A parameter that is refuted. It is 0 if none is.
    """
    low = 0.0
    high = 1.0
    if not refuted(0.0):
        return 0.0
    while refuted(high) and high < end:
        low = high
        high = 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        if refuted(middle):
            low = middle
        else:
            high = middle
    return low


def right_guesses(
    scores: npt.NDArray[np.float64], included: npt.NDArray[np.bool_], guesses: int
) -> int:
    """Counts an auditor's correct guesses.

    The auditor guesses "in" for the canaries with the highest scores and "out" for those with the
    lowest, for equally many of each.

    Args:
        scores: the score of each canary.
        included: True for each canary that was in the data.
        guesses: the number of guesses, which is even.
    """
    order = np.argsort(scores)
    half = guesses // 2
    return int(included[order[len(order) - half :]].sum() + (~included[order[:half]]).sum())


def guesses_for(canaries: int) -> int:
    """Returns the default number of guesses for a number of canaries.

    It is even and at least 2.
    """
    return max(2, 2 * (GUESSES * canaries // 2000))


def down(value: float, decimals: int = 2) -> str:
    """Formats a lower bound with the given number of decimals, rounded down."""
    return f"{floor(value * 10**decimals) / 10**decimals:.{decimals}f}"


def attack_success(releases: Sequence[Release], alpha: float, adjacency: str = ADD_REMOVE) -> float:
    """Bounds the true-positive rate of *any* membership inference test.

    The releases are (ε, δ(ε))-DP for every ε ≥ 0. Hence the true-positive rate (TPR) of a test with
    false-positive rate α satisfies TPR ≤ e^ε·α + δ(ε). The same argument for the rates of the
    complementary test gives 1 − α ≤ e^ε·(1 − TPR) + δ(ε), which is TPR ≤ 1 − e^{−ε}·(1 − α − δ(ε)).
    The smallest of these bounds over all ε is 1 − f(α), where f is the trade-off function (f-DP,
    Dong, Roth & Su 2022, Prop. 2.12). The first bound is convex in e^ε and the second in e^{−ε}, so
    a bounded search finds the minimum. Wherever the search stops, the bound is valid. For
    Gaussian mechanisms without subsampling, the closed form Φ(Φ⁻¹(α) + μ) is used.

    Args:
        releases: the rows of a ledger.
        alpha: α, the false-positive rate.
        adjacency: one of `ADJACENCIES`.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import ndtr, ndtri

    merged = merge(releases, adjacency)
    if merged is None:
        return 1.0
    if merged.interval is None and not merged.selections:
        return float(ndtr(ndtri(alpha) + merged.without_sampling))

    def first(e: float) -> float:
        return math.exp(min(e, 700.0)) * alpha + delta_of(merged, e)

    def second(e: float) -> float:
        return 1 - math.exp(-e) * (1 - alpha - delta_of(merged, e))

    bounds = (0.0, epsilon_of(merged, 1e-8))
    minima = [minimize_scalar(bound, bounds=bounds, method="bounded") for bound in (first, second)]
    return min(1.0, alpha + delta_of(merged, 0.0), *(float(minimum.fun) for minimum in minima))


def best_guess(releases: Sequence[Release], adjacency: str = ADD_REMOVE) -> float:
    """Bounds the probability that a guess about membership is correct.

    An attacker guesses whether an example is in the data, and both cases are equally likely. The
    probability of a correct guess is (1 + TPR − FPR)/2, where TPR and FPR are the rates of the
    attacker's test. TPR − FPR is at most the total variation distance between the releases with and
    without the example, which is δ at ε = 0. The bound is therefore (1 + δ(0))/2. For Gaussian
    mechanisms without subsampling, it is Φ(μ/2).
    """
    merged = merge(releases, adjacency)
    if merged is None:
        return 1.0
    return (1.0 + delta_of(merged, 0.0)) / 2
