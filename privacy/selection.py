"""Private selection of the best among a random number of private runs (Papernot and Steinke 2022).

One trial draws a candidate uniformly, runs it, and releases a noisy score. A selection draws the
number K of trials from a public law, and releases only the outputs of the trial with the highest
score. It costs less than all trials together, because K and the other trials stay secret. Let one
trial be (λ, ε(λ))-RDP for every order λ > 1 ("Hyperparameter Tuning with Rényi Differential
Privacy", ICLR 2022). The selection is then (λ, ε'(λ))-RDP:

    truncated negative binomial (Theorem 2), for every λ̂ ≥ 1:
        ε'(λ) = ε(λ) + (1 + η)·(1 − 1/λ̂)·ε(λ̂) + (1 + η)·log(1/γ)/λ̂ + log E[K]/(λ − 1)
    Poisson (Theorem 6), if one trial is (log(1 + 1/(λ − 1)), δ̂)-DP:
        ε'(λ) = ε(λ) + E[K]·δ̂ + log E[K]/(λ − 1)

A fixed or published number of trials has no such bound. docs/privacy-proofs.md has the proof that
`fedsynth sweep` meets the conditions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fedsynth.privacy.ranges import is_real, require

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

POISSON_LAW, NEGATIVE_BINOMIAL = LAWS = ("poisson", "negative-binomial")
MAX_TRIALS = 500.0
MIN_ETA, MAX_ETA = -0.5, 100.0
NEGLIGIBLE = 1e-17  # the probability at which the tail of a law ends
Steps = tuple[tuple[float, float, int], ...]


@dataclass(frozen=True)
class Selection:
    """The public description of a selection, from which the privacy cost is computed.

    Attributes:
        candidates: each candidate's releases in one run, as (σ, q, steps), without the score.
        poisson_mean: E[K] of a Poisson law, above 1. None with the other law.
        eta, gamma: η and γ of a truncated negative binomial law, from −0.5 to 100 and in (0, 1).
            None with a Poisson law. η = 0 is the logarithmic law, η = 1 the geometric one.

    Raises:
        PrivacySettingError: a value is out of range, or not exactly one law is given.

    >>> Selection((((5.0, 1.0, 10),),), poisson_mean=10.0).mean
    10.0
    """

    candidates: tuple[Steps, ...]
    poisson_mean: float | None = None
    eta: float | None = None
    gamma: float | None = None

    def __post_init__(self) -> None:
        η, γ, mean = self.eta, self.gamma, self.poisson_mean
        steps = [step for candidate in self.candidates for step in candidate]
        valid = all(is_real(σ) and σ > 0 and is_real(q) and 0 < q <= 1 for σ, q, _ in steps)
        counted = all(type(number) is int and number >= 1 for _, _, number in steps)
        complete = bool(self.candidates) and all(self.candidates)
        rule = "must list the (σ, q, steps) of each candidate"
        require(complete and valid and counted, "candidates", rule, self.candidates)
        if mean is not None:
            for name, value in (("eta", η), ("gamma", γ)):
                require(value is None, name, "must be None with poisson_mean", value)
            rule = f"must be a number above 1, at most {MAX_TRIALS:g}"
            require(is_real(mean) and 1 < mean <= MAX_TRIALS, "poisson_mean", rule, mean)
            return
        _check_eta(η)
        require(γ is not None and is_real(γ) and 0 < γ < 1, "gamma", "must be in (0, 1)", γ)

    @classmethod
    def of_mean(
        cls, candidates: Sequence[Steps], law: str, trials: float, eta: float = 0.0
    ) -> Selection:
        """Creates a selection from the expected number of trials, E[K].

        >>> round(Selection.of_mean([((5.0, 1.0, 10),)], "negative-binomial", 10, eta=1).gamma, 6)
        0.1
        """
        from scipy.optimize import brentq

        require(law in LAWS, "law", f"must be one of {', '.join(LAWS)}", law, "selection")
        rule = f"must be a number above 1, at most {MAX_TRIALS:g}"
        require(is_real(trials) and 1 < trials <= MAX_TRIALS, "trials", rule, trials, "selection")
        _check_eta(eta)
        if law == POISSON_LAW:
            return cls(tuple(candidates), poisson_mean=float(trials))
        log_γ = brentq(lambda log: _mean(eta, math.exp(log)) - trials, -200.0, -1e-12)
        return cls(tuple(candidates), eta=float(eta), gamma=math.exp(log_γ))

    @property
    def mean(self) -> float:
        """E[K], the expected number of trials."""
        if self.eta is None or self.gamma is None:
            return self.poisson_mean or math.nan
        return _mean(self.eta, self.gamma)

    def number_of_trials(self, uniform: float) -> int:
        """Computes the number of trials K from a uniform random number.

        If `uniform` is secret and uniform in [0, 1), K has the law. With a Poisson law K may be 0.

        >>> law = Selection((((5.0, 1.0, 10),),), eta=1.0, gamma=0.5)  # P[K = k] = 2⁻ᵏ
        >>> [law.number_of_trials(u) for u in (0.0, 0.49, 0.51, 0.76)]
        [1, 1, 2, 3]
        """
        η, γ, mean = self.eta, self.gamma, self.mean
        count, probability = 0, math.exp(-mean)
        if η is not None and γ is not None:
            count, probability = 1, mean * γ ** (1 + η)
        total = probability
        while total <= uniform and (probability > NEGLIGIBLE or count < mean):
            factor = mean
            if η is not None and γ is not None:
                factor = (1 - γ) * (count + η)
            count += 1
            probability *= factor / count
            total += probability
        return count

    def rdp(
        self,
        orders: Sequence[float],
        trial: npt.NDArray[np.float64],
        delta: Callable[[float], float],
    ) -> npt.NDArray[np.float64]:
        """Returns the Rényi DP ε'(λ) of the selection at each order λ.

        Args:
            orders: the orders, ascending, all above 1.
            trial: one trial's RDP ε(λ) at each order.
            delta: a function that returns, for an ε, a δ for which one trial is (ε, δ)-DP.
        """
        import numpy as np

        λ = np.asarray(orders)
        extra: Any
        if self.eta is None or self.gamma is None:
            δ = np.array([delta(math.log1p(1 / (order - 1))) for order in orders])
            extra = self.mean * δ
        else:
            log = -math.log(self.gamma)
            # the first λ̂ is 1, where the trial's RDP has no weight
            extra = (1 + self.eta) * min(log, np.min((1 - 1 / λ) * trial + log / λ))
        curve = trial + extra + math.log(self.mean) / (λ - 1)
        # a Rényi divergence does not decrease with its order
        return np.minimum.accumulate(curve[::-1])[::-1]

    def to_json(self) -> dict[str, Any]:
        """Returns the selection as a JSON-serialisable dict. `from_json` is the inverse."""
        listed = [list(map(list, candidate)) for candidate in self.candidates]
        return {**asdict(self), "candidates": listed}

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> Selection:
        """Creates a selection from the dict that `to_json` returned.

        Raises:
            PrivacySettingError: a field is missing or unknown, or a value is out of range.
        """
        names = sorted(cls.__dataclass_fields__)
        is_mapping = isinstance(stated, Mapping) and sorted(stated) == names
        require(is_mapping, "selection", f"must have exactly the fields {names}", stated)
        listed = stated["candidates"]
        try:
            candidates = tuple(tuple((σ, q, n) for σ, q, n in steps) for steps in listed)
        except (TypeError, ValueError):
            candidates = ()  # which is refused
        return cls(**{**stated, "candidates": candidates})


def _check_eta(η: float | None) -> None:
    rule = f"must be a number from {MIN_ETA:g} to {MAX_ETA:g}"
    valid = η is not None and is_real(η) and MIN_ETA <= η <= MAX_ETA
    require(valid, "eta", rule, η, "selection")


def _mean(η: float, γ: float) -> float:
    exponent = η * math.log(γ)
    factor = exponent / math.expm1(exponent) if exponent else 1.0
    return (1 - γ) / (-γ * math.log(γ)) * factor
