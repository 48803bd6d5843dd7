"""Lower bounds on ε from canary scores, under stronger assumptions than Steinke et al.'s bound.

`audit_bounds` has the bound that holds for any (ε, δ)-DP mechanism. The bounds here refute a
Gaussian mechanism with the parameter μ (μ-GDP; for one full sum, μ is the sensitivity divided by
the standard deviation of the noise). The largest refuted μ gives the lower bound on ε.

- *f-DP* (Mahloujifar, Melis & Chaudhuri, "Auditing f-differential privacy in one run", 2025,
  Algorithm 3) holds for any μ-GDP mechanism, whatever the dependence of the scores.
- *Order statistics* (Xiang et al., "Tight privacy audit in one run", arXiv 2509.08704) assumes that
  the scores are independent given the coins, and that each score alone is μ-GDP.
- The *Gaussian pair* (Agrawal et al., "Let's ask Gauss", arXiv 2606.12733) assumes that the scores
  of the present canaries, and those of the absent ones, are independent and Gaussian. Nothing is
  assumed about the two means and variances.

Independence. Let u_1 … u_m be orthonormal, let b_i be the fair coins, and let canary i contribute
C·u_i (m is at most the dimension). A release is y = r + C·Σ_i b_i·u_i + s·ξ, where the auditor
knows the contribution r of the other records and ξ ~ N(0, I). The score of canary i is

    x_i = ⟨u_i, y − r⟩/s = b_i·C/s + ⟨u_i, ξ⟩.

The ⟨u_i, ξ⟩ are jointly Gaussian with the covariances ⟨u_i, u_j⟩, so they are independent with the
law N(0, 1). Therefore the pairs (b_i, x_i) are independent, and x_i ~ N(b_i·C/s, 1). A later
release may depend on earlier ones only through r, which the auditor subtracts, and its noise is
new. Hence the weighted sums of a canary's scores over several releases, Σ_t w_t·x_it, are
independent and Gaussian too. With w_t = C/s_t they are the sufficient statistic, and their μ is the
composed √Σ_t (C/s_t)². With Poisson sampling, C/s is multiplied by a bit that is independent for
each canary and step. The sums are then independent, but only asymptotically Gaussian. Groups with
noise of their own, and repeated audits, add canaries that are independent of the others. A release
is rounded after the noise is added, which changes x_i by less than its 24th bit.

Unused directions. Let u_{m+1}, u_{m+2} … be further unit vectors, so that all are orthonormal. No
contribution of a canary has a part in them, and that of the other records is subtracted. So their
scores ⟨u_i, ξ⟩, summed over the same releases with the same weights, are independent of all others
and have the law of absent canaries. The Gaussian pair counts them as such, which makes its interval
smaller: the mean of the absent scores has less error.

Order statistics assume no more than this independence. Given the releases, the coins of the
canaries are independent, and a guess about canary i is wrong with a probability of at least
γ_i = 1/(1 + e^|L_i|), where L_i is the log-likelihood ratio. The number of wrong guesses among r is
therefore stochastically at least that of a guesser who takes the r largest |L_i|. For this guesser,
let W be the quantile of the largest |L| that is left out. The r guesses are independent above it,
so that

    P[wrong ≤ k] = E_W P[Binomial(r, γ̄(W)) ≤ k],   W ~ Beta(m − r, r + 1),

where γ̄(w) is the mean of γ above the quantile w. A mechanism that reveals less than μ-GDP is a
randomised function of it, and a guesser can apply the function too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsynth.privacy.accounting import Merged, Totals, epsilon, epsilon_of
from fedsynth.privacy.audit_bounds import LARGEST_EPSILON, epsilon_lower_bound, largest

Scores = npt.NDArray[np.float64]
LARGEST_MU = 16.0
# The share of the error probability that the interval of the ratio of variances uses.
RATIO_SHARE = 0.1
RATIOS = 33  # evaluated ratios of variances
LARGE_T = 50.0  # from here on, noncentral t is replaced by a simpler bound


@dataclass(frozen=True)
class Bound:
    """A lower bound on ε.

    Attributes:
        name: the name of the bound.
        assumes: what the bound assumes about the mechanism.
        epsilon: the lower bound.
    """

    name: str
    assumes: str
    epsilon: float


def count_bounds(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float
) -> list[Bound]:
    """Computes the lower bounds on ε that need only the number of correct guesses.

    The arguments are those of `epsilon_lower_bound`. The bound by order statistics also needs
    independent scores.
    """
    counts = (guesses, canaries)
    significance = 1 - confidence
    steinke = epsilon_lower_bound(correct, *counts, delta, confidence)
    f_dp = largest(lambda μ: f_dp_refutes(μ, correct, *counts, significance), LARGEST_MU)
    order = largest(lambda μ: error_tail(μ, guesses - correct, *counts) <= significance, LARGEST_MU)
    curve = "a Gaussian trade-off curve"
    return [
        steinke_bound(steinke),
        Bound("f-DP", curve, epsilon_of(Merged(f_dp), delta)),
        Bound("order statistics", f"{curve}, independent scores", epsilon_of(Merged(order), delta)),
    ]


def steinke_bound(epsilon: float) -> Bound:
    """Creates the `Bound` for an ε from `epsilon_lower_bound` (Steinke et al.)."""
    return Bound("Steinke et al.", "nothing but (ε, δ)-DP", epsilon)


def f_dp_refutes(mu: float, correct: int, guesses: int, canaries: int, significance: float) -> bool:
    """Returns True if the correct guesses refute μ-GDP (Mahloujifar et al., Algorithm 3).

    The recursion bounds h_i (r_i), the probability that at least i guesses are correct and that a
    random guess is wrong (correct). If both together exceed the share of guesses, the probability of
    `correct` or more correct guesses is below `significance`.
    """
    from scipy.special import ndtr, ndtri

    right = significance * correct / canaries
    wrong = significance * (guesses - correct) / canaries
    for number in range(correct - 1, -1, -1):
        next_wrong = max(wrong, float(ndtr(ndtri(min(right, 1.0)) - mu)))
        if next_wrong == wrong:
            break  # neither changes from here on
        right += number / (guesses - number) * (next_wrong - wrong)
        wrong = next_wrong
    return right + wrong > guesses / canaries


def error_tail(mu: float, wrong: int, guesses: int, canaries: int) -> float:
    """Bounds the probability of at most `wrong` errors among an auditor's guesses under μ-GDP.

    The scores are assumed to be independent. The formula is in the docstring of this module. For
    μ-GDP, |L| is above μ·x with the probability Φ(μ/2 − x) + Φ(−μ/2 − x), of which Φ(−μ/2 − x) is
    wrong.
    """
    from scipy.special import ndtr
    from scipy.stats import beta, binom

    if guesses == canaries:
        return float(binom.cdf(wrong, guesses, ndtr(-mu / 2)))
    x = np.linspace(0, mu / 2 + 8, 4001)
    errors = ndtr(-mu / 2 - x)
    above = ndtr(mu / 2 - x) + errors
    cut = beta(canaries - guesses, guesses + 1)
    middle, width = cut.mean(), 12 * cut.std()
    w = np.linspace(max(0.0, middle - width), min(1.0, middle + width), 2003)[1:-1]
    mean_error = np.interp(1 - w, above[::-1], (errors / above)[::-1])
    weights = cut.pdf(w)
    return float(weights @ binom.cdf(wrong, guesses, mean_error) / weights.sum())


def shift_lower_bounds(
    present: Scores, absent: Scores, ratios: Scores, significance: float
) -> Scores:
    """Computes lower bounds on the mean difference of two Gaussians.

    The difference is in units of the standard deviation of `absent`.

    If the variance of `present` is ρ times that of `absent`, then both together estimate the
    variance, and the difference of the means divided by its estimated error has a noncentral t
    distribution. The bound is exact.

    Args:
        present, absent: the scores.
        ratios: the values of ρ for which the bound is computed.
        significance: the probability that the bound is too high.
    """
    from scipy.stats import chi2, nct, norm

    freedom = len(present) + len(absent) - 2
    squares = np.var(absent) * len(absent) + np.var(present) * len(present) / ratios
    error = np.sqrt(1 / len(absent) + ratios / len(present))
    with np.errstate(divide="ignore", invalid="ignore"):  # scores without noise
        t = np.nan_to_num((present.mean() - absent.mean()) / np.sqrt(squares / freedom) / error)
    smallest = math.sqrt(chi2.ppf(significance / 2, freedom) / freedom)
    simple = t * smallest - norm.isf(significance / 2)
    usual = np.clip(t, -LARGE_T / 2, LARGE_T)
    low, high = np.full_like(t, -LARGE_T), np.full_like(t, LARGE_T)
    for _ in range(40):
        middle = (low + high) / 2
        refuted = nct.sf(usual, freedom, middle) <= significance
        low, high = np.where(refuted, middle, low), np.where(refuted, high, middle)
    return np.where(t < LARGE_T, low, simple) * error


def gaussian_pair(present: Scores, absent: Scores, delta: float, confidence: float) -> float:
    """Computes a lower bound on ε from scores with two different Gaussian distributions.

    The hockey-stick divergence of two Gaussians depends only on the difference μ of the means, in
    deviations of the absent scores, and on the ratio ρ of the variances. The smallest ε in a
    confidence region of (μ, ρ) is a lower bound. The paper takes a rectangle of four intervals
    (Bonferroni) for the means and variances. The region here is exact and smaller: an F interval
    for ρ, and for each ρ the lower bound of μ.

    Args:
        present, absent: the scores.
        delta: δ.
        confidence: 1 − β.
    """
    from scipy.stats import f

    if min(len(present), len(absent)) < 2:
        return 0.0
    tail = RATIO_SHARE * (1 - confidence) / 2
    freedom = (len(present) - 1, len(absent) - 1)
    variances = np.var(present, ddof=1), np.var(absent, ddof=1)
    if min(variances) == 0:
        return LARGEST_EPSILON if present.mean() != absent.mean() else 0.0
    low, high = variances[0] / variances[1] / f.ppf([1 - tail, tail], *freedom)
    ratios = np.append(np.geomspace(low, high, RATIOS), np.clip(1.0, low, high))
    significance = (1 - RATIO_SHARE) * (1 - confidence)
    shifts = shift_lower_bounds(present, absent, ratios, significance)
    pairs = zip(np.maximum(shifts, 0.0), ratios, strict=True)
    return min(pair_epsilon(float(shift), float(ratio), delta) for shift, ratio in pairs)


def pair_epsilon(shift: float, ratio: float, delta: float) -> float:
    """Computes a lower bound on the ε, at δ, between N(shift, ratio) and N(0, 1).

    It is the larger ε of the two directions, rounded down.
    """
    root = math.sqrt(ratio)

    def exceeds(ε: float) -> bool:
        forward = hockey_stick(shift, ratio, ε)
        return max(forward, hockey_stick(shift / root, 1 / ratio, ε)) > delta

    return largest(exceeds, LARGEST_EPSILON)


def hockey_stick(shift: float, ratio: float, epsilon: float) -> float:
    """Computes the hockey-stick divergence of p = N(shift, ratio) from q = N(0, 1).

    The divergence is ∫ max(p − e^ε·q, 0). The integrand is positive where the quadratic polynomial
    a·x² + b·x + c = log(p/q) − ε is.
    """
    a = (1 - 1 / ratio) / 2
    b = shift / ratio
    c = -shift * shift / ratio / 2 - math.log(ratio) / 2 - epsilon
    if abs(a) < 1e-12:
        if b == 0:
            return 0.0
        ends = [(-c / b, math.inf)] if b > 0 else [(-math.inf, -c / b)]
    elif b * b <= 4 * a * c:
        return 0.0  # positive nowhere, or everywhere, and then e^ε·q is above p in total
    else:
        q = -(b + math.copysign(math.sqrt(b * b - 4 * a * c), b)) / 2
        first, second = sorted((q / a, c / q))
        ends = [(first, second)]
        if a > 0:
            ends = [(-math.inf, first), (second, math.inf)]
    root = math.sqrt(ratio)
    p = sum(_mass((low - shift) / root, (high - shift) / root) for low, high in ends)
    return max(0.0, p - math.exp(epsilon) * sum(_mass(low, high) for low, high in ends))


def _mass(low: float, high: float) -> float:
    """Returns P[low < X < high] for X ~ N(0, 1), accurately even far above 0."""
    if low > 0:
        low, high = -high, -low
    return (math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2))) / 2


def step_bound(
    present: Scores,
    absent: Scores,
    steps: Sequence[tuple[float, float, int]],
    delta: float,
    confidence: float,
) -> float:
    """Computes a lower bound on ε from canary scores at single steps with subsampling.

    The auditor knows which canaries a step sampled. The bound refutes the noise and the clip, but
    not the sampling, which it composes as it was charged.

    Args:
        present: the scores of canaries at the steps that sampled them.
        absent: the scores of canaries that are not in the data, at all steps.
        steps: the charged (σ, q, steps). All steps with q < 1 have the same σ.
        delta: δ.
        confidence: the confidence of the bound.
    """
    if min(len(present), len(absent)) < 2:
        return 0.0
    (shift,) = shift_lower_bounds(present, absent, np.ones(1), 1 - confidence)
    (charged,) = {σ for σ, q, _ in steps if q < 1}
    if shift <= 0:
        return 0.0
    factor = 1 / (shift * charged)
    return epsilon(Totals.of((σ * factor, q, count) for σ, q, count in steps), delta)
