"""What releases cost: ε and δ(ε), for a chosen adjacency (one example added or removed by default).

Adaptively composed Gaussian mechanisms without subsampling are exactly one Gaussian mechanism with
μ² = Σ steps/σ² (Dong, Roth & Su, "Gaussian differential privacy", 2022, Cor. 3.3), so they are
folded exactly. Poisson-subsampled rows go through dp-accounting's privacy loss distributions (PLD),
rounded so that ε comes out too large, never too small. dp_accounting and scipy are imported where
they are used: they are slow to load.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedsynth.privacy.releases import (
    ADD_REMOVE,
    Release,
    check_adjacency,
    check_delta,
    is_real,
    require,
)

ACCOUNTANT = (
    "privacy loss distributions (PLD), pessimistic rounding; exact where nothing is subsampled"
)
SMALLEST_DELTA = 1e-10  # the FFT's rounding error (about 1e-13, either sign) must stay far below δ
FFT_SLACK = 1e-11  # added to every δ that an FFT gave, at least
SLACK_PER_STEP = (
    2e-16  # the same for each step: the FFT's error grows with the power it is taken to
)
MOST_STEPS = 2_000_000  # of equal subsampled uses: the FFT's time and rounding error grow with them
_LADDER = tuple(m * 10.0**k for k in range(-6, 0) for m in (1, 2, 5) if m * 10.0**k <= 0.1)


@dataclass(frozen=True)
class Merged:
    """Rows folded: all unsubsampled ones into one Gaussian, equal subsampled ones into (σ, q,
    steps)."""

    mu: float = 0.0
    sampled: tuple[tuple[float, float, int], ...] = ()
    replace: bool = False
    """Replace-one; μ is then doubled already, σ is not: dp-accounting's REPLACE_ONE doubles."""

    @property
    def nothing(self) -> bool:
        return self.mu == 0 and not self.sampled

    @property
    def slack(self) -> float:
        """What is added to every δ of an FFT, whose rounding has either sign. Measured against the
        exact Gaussian curve: at most 1e-12 below it with 1e5 steps, 2e-11 with 1e6."""
        return max(FFT_SLACK, SLACK_PER_STEP * sum(steps for _, _, steps in self.sampled))

    @property
    def smallest_delta(self) -> float:
        """Below it the slack is no longer small beside δ."""
        return max(SMALLEST_DELTA, 10 * self.slack)

    @property
    def interval(self) -> float | None:
        """PLD grid step; None where `without_sampling` is used: exact without subsampled rows, else
        a (huge) bound.

        Fine enough to resolve one step's loss (its standard deviation is about q·√(e^{1/σ²} − 1)),
        and coarse enough that one step has ≤ 6e4 and the composition ≤ 1.5e6 points (well under a
        second). Coarser only makes ε larger.
        """
        if not self.sampled or any(steps > MOST_STEPS for _, _, steps in self.sampled):
            return None
        single = 0.0
        variance = self.mu**2
        resolve = 1e-4
        for noise, q, steps in self.sampled:
            σ = noise / 2 if self.replace else noise
            spread = 10 / σ + 0.5 / σ / σ
            growth = q * math.sqrt(math.expm1(min(1 / σ, 26.0) ** 2))
            up = spread + math.log(q) if spread > 700 else math.log1p(q * math.expm1(spread))
            single = max(single, up + min(spread, -math.log1p(-q)))
            variance += steps * min(growth, 1 / σ) ** 2
            resolve = min(resolve, 0.02 * growth)
        least = max(
            resolve,
            single / 6e4,
            20 * self.mu / 5e5,
            (variance / 2 + 20 * math.sqrt(variance)) / 1.5e6,
        )
        return next((step for step in _LADDER if step >= least), None)

    @property
    def without_sampling(self) -> float:
        """μ if every subsampled row used all data: an upper bound, as subsampling never increases
        δ(ε)."""
        influence = 2 if self.replace else 1
        return math.hypot(
            self.mu, *(influence * math.sqrt(steps) / σ for σ, _, steps in self.sampled)
        )


@dataclass(frozen=True)
class Totals:
    """What of some rows decides their ε: for each (σ, q) the steps. Equal rows are one entry,
    however many they are.

    Attributes:
        steps: (σ, q, number of steps), ascending.
        unbounded: whether a row has no finite ε.
    """

    steps: tuple[tuple[float, float, int], ...] = ()
    unbounded: bool = False

    def __add__(self, other: Totals) -> Totals:
        """Of the rows of both."""
        steps: dict[tuple[float, float], int] = {}
        for noise, q, count in (*self.steps, *other.steps):
            steps[noise, q] = steps.get((noise, q), 0) + count
        folded = tuple((noise, q, count) for (noise, q), count in sorted(steps.items()))
        return Totals(folded, self.unbounded or other.unbounded)

    def times(self, number: int) -> Totals:
        """Of the same rows in each of `number` rounds."""
        if number == 0:
            return Totals()
        return Totals(tuple((σ, q, number * count) for σ, q, count in self.steps), self.unbounded)


def totals(releases: Iterable[Release]) -> Totals:
    """The rows folded: σ, q and steps are all that ε depends on."""
    steps: dict[tuple[float, float], int] = {}
    unbounded = False
    for r in releases:
        if r.unaccounted is not None or r.noise_multiplier == 0:
            unbounded = True
            continue
        key = (float(r.noise_multiplier), float(r.sample_rate))
        steps[key] = steps.get(key, 0) + r.steps
    return Totals(tuple((σ, q, count) for (σ, q), count in sorted(steps.items())), unbounded)


def merge(releases: Sequence[Release] | Totals, adjacency: str) -> Merged | None:
    """Fold the rows; None if no finite ε holds."""
    check_adjacency(adjacency)
    replace = adjacency == "replace-one"
    rows = releases if isinstance(releases, Totals) else totals(releases)
    if rows.unbounded:
        return None
    full = sorted(math.sqrt(steps) / σ for σ, q, steps in rows.steps if q == 1)
    mu = (2 if replace else 1) * math.hypot(*full)
    return Merged(mu, tuple(row for row in rows.steps if row[1] < 1), replace)


@lru_cache(maxsize=64)
def _one_step(σ: float, q: float, interval: float, replace: bool = False) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    relation = NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
    return pld.from_gaussian_mechanism(
        σ, sampling_prob=q, value_discretization_interval=interval, neighboring_relation=relation
    )


def _dense(one: Any, steps: int) -> Any:
    """What dp-accounting makes of one step before it composes many; it decides that by points to
    the power of steps, a number of a million digits and more."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    if steps < 10_000:  # then the number is small
        return one
    add = None if one._symmetric else one._pmf_add.to_dense_pmf()
    return pld.PrivacyLossDistribution(one._pmf_remove.to_dense_pmf(), add)


@lru_cache(maxsize=4)  # up to about 60 MB each
def _composed(merged: Merged) -> Any:
    interval = merged.interval
    parts = [
        _dense(_one_step(σ, q, interval, merged.replace), steps).self_compose(steps)
        for σ, q, steps in merged.sampled
    ]
    if merged.mu > 0:
        parts.append(_one_step(1 / merged.mu, 1.0, interval))
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return total


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), exact for a Gaussian with sensitivity/noise μ (Balle
    & Wang 2018)."""
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
    return max(0.0, first - math.exp(min(0.0, epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))))


def delta_of(merged: Merged, epsilon: float) -> float:
    """δ(ε) of folded rows."""
    if merged.interval is None:
        return gaussian_delta(merged.without_sampling, epsilon)
    return min(1.0, float(_composed(merged).get_delta_for_epsilon(epsilon)) + merged.slack)


@lru_cache(maxsize=4096)
def epsilon_of(merged: Merged, delta: float) -> float:
    """ε(δ) of folded rows."""
    if merged.interval is not None:
        require(
            delta >= merged.smallest_delta,
            "delta",
            f"must be at least {merged.smallest_delta:g} with so many subsampled steps (the "
            "accountant's numerical accuracy)",
            delta,
            "privacy",
        )
        return float(_composed(merged).get_epsilon_for_delta(delta - merged.slack))
    mu = merged.without_sampling
    low = 0.0
    high = 1.0
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    while gaussian_delta(mu, high) > delta:
        low = high
        high = 2 * high
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_delta(mu, middle) <= delta else (middle, high)
    return high


def epsilon(
    releases: Sequence[Release] | Totals, delta: float, adjacency: str = ADD_REMOVE
) -> float:
    """The ε that holds with δ = `delta` for all `releases` (or their `totals`) on one data set,
    adaptively composed.

    Rows hold sensitivities under add-remove; `adjacency` is one of `ADJACENCIES`.

    No release: 0. An unaccounted row or one without noise: infinity.

    Raises:
        PrivacySettingError: δ outside (0, 1), or below 1e-10 with subsampled rows (beyond the
            accountant's accuracy).
    """
    check_delta(delta, None)
    merged = merge(releases, adjacency)
    return math.inf if merged is None else epsilon_of(merged, delta)


def epsilon_rdp(
    releases: Sequence[Release], delta: float, adjacency: str = ADD_REMOVE
) -> float | None:
    """The looser ε by Rényi DP: an independent cross-check of `epsilon`, same conventions.

    None where the library has none: replace-one with subsampling.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    check_delta(delta, None)
    merged = merge(releases, adjacency)
    if merged is None:
        return math.inf
    if merged.nothing:
        return 0.0
    if merged.replace and merged.sampled:
        return None
    best = 1 + math.sqrt(2 * math.log(1 / delta)) / merged.without_sampling
    accountant = rdp.RdpAccountant(
        sorted({*rdp.DEFAULT_RDP_ORDERS, *(1 + (best - 1) * f for f in (0.7, 1.0, 1.4))})
    )
    with _quiet_absl():
        if merged.mu > 0:
            accountant.compose(GaussianDpEvent(1 / merged.mu))
        for σ, q, steps in merged.sampled:
            accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(σ)), steps)
        return float(accountant.get_epsilon(delta))


@contextmanager
def _quiet_absl() -> Iterator[None]:
    """dp-accounting logs every Rényi order whose series does not converge; it leaves that order
    out, which is safe."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def deltas_at(
    releases: Sequence[Release], epsilons: Sequence[float], adjacency: str = ADD_REMOVE
) -> list[float]:
    """δ(ε) at each of `epsilons` (≥ 0), from one composition; all 1 where no guarantee holds."""
    require(
        all(is_real(e) and e >= 0 for e in epsilons),
        "epsilons",
        "must be finite and at least 0",
        list(epsilons),
    )
    merged = merge(releases, adjacency)
    if merged is None:
        return [1.0 for _ in epsilons]
    if merged.nothing:
        return [0.0 for _ in epsilons]
    return [delta_of(merged, epsilon) for epsilon in epsilons]


def epsilon_by_round(
    releases: Sequence[Release], delta: float, adjacency: str = ADD_REMOVE
) -> dict[int, float]:
    """Cumulative ε after each round that has a release, in order of the round's number."""
    rounds: dict[int, list[Release]] = {}
    for r in releases:
        rounds.setdefault(r.round, []).append(r)
    table = {}
    so_far = Totals()
    for n in sorted(rounds):
        so_far = so_far + totals(rounds[n])
        table[n] = epsilon(so_far, delta, adjacency)
    return table


def describe_accountant(releases: Sequence[Release], adjacency: str = ADD_REMOVE) -> dict[str, Any]:
    """Returns name, library version, computation and discretisation interval (None: exact), for
    the report."""
    from importlib.metadata import version

    merged = merge(releases, adjacency)
    interval = merged.interval if merged else None
    if interval is not None:
        how = "discretised PLD, connect-the-dots"
    elif merged and merged.sampled:
        how = (
            "upper bound that ignores the subsampling (the tight composition is too large to "
            "compute)"
        )
    else:
        how = "exact Gaussian composition (nothing is subsampled)"
    return {
        "name": ACCOUNTANT,
        "library": f"dp-accounting {version('dp-accounting')}",
        "computation": how,
        "discretisation_interval": interval,
    }
