"""Audits of any function that adds Gaussian noise to a sum of clipped vectors.

A fair coin decides for each canary whether its vector is among the vectors that the function gets.
Two designs look for different faults:

- *together*: a call gets many canaries with orthonormal directions, so that their scores are
  independent (`score_bounds`). It needs few calls.
- *opposed*: each call has at most one canary, which points away from ten other vectors. So it also
  finds functions that are no sums, such as a mean that divides by the number of vectors. Under
  add-remove adjacency, a vector changes a mean by up to twice the clip divided by this number.

The vectors are ten times as long as the clip, so that only the function's clip bounds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedsynth.errors import PrivacyError, one_line
from fedsynth.privacy.accounting import Merged, epsilon_of
from fedsynth.privacy.audit_bounds import guesses_for, largest, right_guesses
from fedsynth.privacy.releases import check_delta, require
from fedsynth.privacy.score_bounds import LARGEST_MU, Bound, Scores, count_bounds, gaussian_pair

Function = Callable[[npt.NDArray[np.float64]], Any]
BACKGROUND = 10  # the vectors that the canary of a call opposes
ALMOST_ZERO = 1e-6  # the length of a vector that every call gets, in clips: none may be empty
DESIGNS = ("together", "opposed")


@dataclass(frozen=True)
class Design:
    """The scores and the lower bounds on ε from one of the audit's `DESIGNS`.

    Attributes:
        name: one of `DESIGNS`.
        calls: the number of calls of the function.
        present, absent: the scores of the canaries that were in the data, and of the others.
        bounds: the lower bounds on ε.
    """

    name: str
    calls: int
    present: Scores
    absent: Scores
    bounds: tuple[Bound, ...]


@dataclass(frozen=True)
class FunctionAudit:
    """A function audit's result.

    Attributes:
        name: the name of the function.
        epsilon: the claimed ε.
        sigma: the claimed noise multiplier.
        delta: δ.
        confidence: the confidence of each bound.
        designs: the results of the designs.
    """

    name: str
    epsilon: float
    sigma: float
    delta: float
    confidence: float
    designs: tuple[Design, ...]

    @property
    def epsilon_lower_bound(self) -> float:
        """The highest lower bound."""
        return max(bound.epsilon for design in self.designs for bound in design.bounds)

    @property
    def fault(self) -> bool:
        """True if a lower bound is above the claimed ε.

        With k bounds, a correct function is refuted with a probability of at most
        k·(1 − confidence).
        """
        return self.epsilon_lower_bound > self.epsilon

    def page(self) -> str:
        """Renders the result as an HTML page with plots of the scores."""
        from fedsynth.privacy.report.pages import render_audit

        return render_audit(self)


def audit(
    function: Function,
    *,
    sigma: float | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    clip: float = 1.0,
    dimension: int = 1000,
    canaries: int = 1000,
    confidence: float = 0.999,
    test_only: np.random.Generator | None = None,
) -> FunctionAudit:
    """Audits a function from vectors [n, d] to a noisy sum [d] of the clipped vectors.

    Args:
        function: the function. It gets float64 arrays, and uses noise of its own at each call.
        sigma: the claimed noise multiplier, which is the standard deviation of the noise divided by
            the clip.
        epsilon: the claimed ε at δ, in place of `sigma`.
        delta: δ.
        clip: the norm to which the function clips vectors.
        dimension: d.
        canaries: the number of canaries of each design. If a design has more than d canaries,
            several calls audit them.
        confidence: the confidence of each lower bound.
        test_only: a seeded generator for tests, from which the coins are drawn.

    Raises:
        PrivacySettingError: a value is out of range, or not exactly one of `sigma` and `epsilon`
            is set.
        PrivacyError: the function fails, or returns no vector of d finite numbers.

    >>> rng = np.random.default_rng(0)
    >>> def noisy_sum(vectors):
    ...     norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    ...     return (vectors * np.minimum(1, 1 / norms)).sum(axis=0) + 0.5 * rng.normal(size=1000)
    >>> audit(noisy_sum, sigma=1.0).fault  # half of the claimed noise
    True
    """
    check_delta(delta, None)
    require(0 < clip < math.inf, "clip", "must be finite and above 0", clip)
    require(dimension >= 1, "dimension", "must be at least 1", dimension)
    require(2 <= canaries <= 10**6, "canaries", "must be from 2 to 1e6", canaries)
    require(0.5 <= confidence < 1, "confidence", "must be in [0.5, 1)", confidence)
    claim = _claimed_mu(sigma, epsilon, delta)
    calls = _Calls(function, clip, dimension, test_only or np.random.default_rng())
    designs = []
    for name, trial in zip(
        DESIGNS, (calls.together(canaries), calls.opposed(canaries)), strict=True
    ):
        included, scores, number = trial
        scores = scores * claim / clip  # in deviations of the claimed noise
        guesses = guesses_for(canaries)
        correct = right_guesses(scores, included, guesses)
        bounds = count_bounds(correct, guesses, canaries, delta, confidence)
        pair = gaussian_pair(scores[included], scores[~included], delta, confidence)
        bounds.append(Bound("Gaussian pair", "independent Gaussian scores", pair))
        designs.append(Design(name, number, scores[included], scores[~included], tuple(bounds)))
    title = getattr(function, "__name__", type(function).__name__)
    claimed = epsilon_of(Merged(claim), delta) if epsilon is None else epsilon
    return FunctionAudit(title, claimed, 1 / claim, delta, confidence, tuple(designs))


def _claimed_mu(sigma: float | None, epsilon: float | None, delta: float) -> float:
    """Converts a claimed noise multiplier σ or a claimed ε to μ of Gaussian DP."""
    one_claim = (sigma is None) != (epsilon is None)
    require(one_claim, "sigma", "or epsilon must be set, but not both", (sigma, epsilon))
    for name, value in (("sigma", sigma), ("epsilon", epsilon)):
        valid = value is None or 0 < value < math.inf
        require(valid, name, "must be finite and above 0", value)
    if sigma is not None:
        return 1 / sigma
    target = cast(float, epsilon)
    return max(largest(lambda μ: epsilon_of(Merged(μ), delta) <= target, LARGEST_MU), 1e-4)


Trial = tuple[npt.NDArray[np.bool_], Scores, int]


@dataclass(frozen=True)
class _Calls:
    """Calls the function with canaries, and scores them."""

    function: Function
    clip: float
    dimension: int
    coins: np.random.Generator

    def together(self, canaries: int) -> Trial:
        """Scores canaries, several per call of the function.

        Returns whether each canary was included, the scores, and the number of calls.
        """
        included = self.coins.random(canaries) < 0.5
        scores = []
        for start in range(0, canaries, self.dimension):
            inside = included[start : start + self.dimension]
            basis = self._directions(len(inside))
            almost_zero = ALMOST_ZERO * self.clip * basis[:1]
            vectors = [10 * self.clip * basis[inside], almost_zero]
            scores.append(basis @ self._call(np.concatenate(vectors)))
        return included, np.concatenate(scores), len(scores)

    def opposed(self, canaries: int) -> Trial:
        """Scores canaries, one per call of the function. For the result, see `together`."""
        included = self.coins.random(canaries) < 0.5
        (direction,) = self._directions(1)
        background = np.tile(10 * self.clip * direction, (BACKGROUND, 1))
        both = np.concatenate([background, -background[:1]])
        scores = [-direction @ self._call(both if inside else background) for inside in included]
        return included, np.array(scores), canaries

    def _directions(self, count: int) -> npt.NDArray[np.float64]:
        """Draws orthonormal vectors."""
        return np.linalg.qr(self.coins.normal(size=(self.dimension, count)))[0].T

    def _call(self, vectors: npt.NDArray[np.float64]) -> Scores:
        try:
            released = np.asarray(self.function(vectors), dtype=np.float64)
        except Exception as error:
            raise PrivacyError(
                f"the audited function failed with {type(error).__name__}: {one_line(error)}. "
                f"Correct the function, which gets an array of shape {list(vectors.shape)}"
            ).with_code("audit.function") from error
        if released.shape != (self.dimension,) or not np.isfinite(released).all():
            raise PrivacyError(
                f"the audited function returned an array of shape {list(released.shape)} or values "
                f"that are not finite, but the sum has {self.dimension} numbers. Return the noisy sum"
            ).with_code("audit.function")
        return released
