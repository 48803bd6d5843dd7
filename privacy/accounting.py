"""The privacy accountant, which computes ε and δ(ε) for releases.

The caller chooses the adjacency. The default is to add or remove one example.

The composition of adaptively chosen Gaussian mechanisms without subsampling is exactly one Gaussian
mechanism with μ² = Σ steps/σ² (Dong, Roth & Su, "Gaussian differential privacy", 2022, Cor. 3.3),
so such releases are merged without loss. Poisson-subsampled releases are composed with
dp-accounting's privacy loss distributions (PLD). All rounding there can only increase ε.
If there is a private selection among the releases, all of them are composed by Rényi DP (RDP).
dp_accounting and scipy are slow to load, so they are imported where they are used.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial, reduce
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsynth.errors import PrivacySettingError
from fedsynth.privacy.releases import (
    ADD_REMOVE,
    Release,
    check_adjacency,
    check_delta,
    is_real,
    require,
)
from fedsynth.privacy.selection import Selection, Steps

# Selections, each with the σ of a trial's score.
Selections = tuple[tuple[Selection, float], ...]

SMALLEST_DELTA = 1e-10  # the FFT's rounding error (about 1e-13, either sign) must stay far below δ
FFT_SLACK = 1e-11  # added to every δ that an FFT gave, at least
SLACK_PER_STEP = 2e-16  # the same for each step: the FFT's error grows with its power
MAX_STEPS = 2_000_000  # of equal subsampled uses: the FFT's time and rounding error grow with them
STEPS_TOGETHER = 64
HASH_BITS = 60
_LADDER = tuple(m * 10.0**k for k in range(-6, 0) for m in (1, 2, 5) if m * 10.0**k <= 0.1)


@dataclass(frozen=True)
class Merged:
    """A short form of a list of releases, for the privacy accountant.

    All releases without subsampling are merged into one Gaussian mechanism with parameter μ.
    Subsampled releases with the same σ and q are merged into one entry (σ, q, steps). Selections
    are listed.
    """

    mu: float = 0.0
    sampled: tuple[tuple[float, float, int], ...] = ()
    influence: int = 1
    """The sensitivity divided by the clip: 2 for replace-one adjacency, otherwise 1.

    μ already contains this factor. σ does not, because dp-accounting's REPLACE_ONE applies it.
    """
    selections: tuple[tuple[Selection, tuple[Merged, ...]], ...] = ()
    """Each selection with its candidates' releases in a trial, among them the score."""

    @property
    def slack(self) -> float:
        """The margin added to each δ computed with an FFT.

        The FFT's rounding error can make δ too small. In a comparison with the exact Gaussian
        curve, δ was too small by at most 1e-12 with 1e5 steps, and by at most 2e-11 with 1e6 steps.
        """
        return max(FFT_SLACK, SLACK_PER_STEP * sum(steps for _, _, steps in self.sampled))

    @property
    def smallest_delta(self) -> float:
        """The smallest δ for which ε is computed with an FFT. It is at least ten times `slack`."""
        return max(SMALLEST_DELTA, 10 * self.slack)

    @cached_property
    def interval(self) -> float | None:
        """The discretisation interval of the privacy loss distribution (PLD).

        It is None if no PLD is computed. The accountant then uses `without_sampling`, which is
        exact if no release is subsampled, and otherwise a very loose upper bound.

        The interval is small compared with the standard deviation of one step's privacy loss, about
        q·√(e^{1/σ²} − 1). It is large enough that one step has at most 6e4 grid points and
        the composition 1.5e6, which takes well under a second. A coarser grid only increases ε.
        """
        if (
            self.selections
            or not self.sampled
            or max(steps for _, _, steps in self.sampled) > MAX_STEPS
        ):
            return None
        single = 0.0
        variance = self.mu**2
        # without connected dots (replace-one), rounding errors add up over all steps
        resolve = math.inf if self.influence == 1 else 1e-4
        for noise, q, steps in self.sampled:
            σ = noise / self.influence
            spread = 10 / σ + 0.5 / σ / σ
            growth = q * math.sqrt(math.expm1(min(1 / σ, 26.0) ** 2))
            up = spread + math.log(q)  # without overflow
            if spread <= 700:
                up = math.log1p(q * math.expm1(spread))
            single = max(single, up + min(spread, -math.log1p(-q)))
            variance += steps * min(growth, 1 / σ) ** 2
            resolve = min(resolve, 0.02 * growth)
        min_step = max(
            resolve,
            single / 6e4,
            20 * self.mu / 5e5,
            (variance / 2 + 20 * math.sqrt(variance)) / 1.5e6,
        )
        return next((step for step in _LADDER if step >= min_step), None)

    @property
    def without_sampling(self) -> float:
        """The Gaussian DP parameter μ that the releases would have without subsampling.

        It gives an upper bound on δ(ε), because subsampling never increases δ(ε). It is infinite if
        there are selections.
        """
        if self.selections:
            return math.inf
        lengths = [self.influence * math.sqrt(steps) / σ for σ, _, steps in self.sampled]
        return math.hypot(self.mu, *lengths)


@dataclass(frozen=True)
class Totals:
    """The number of steps for each pair of noise multiplier σ and sampling rate q.

    Attributes:
        steps: the number of steps for each (σ, q), as (σ, q, number), ascending. σ = 0 means
            releases without a finite ε.
        selections: the private selections, whose releases are not among the steps.
    """

    steps: Steps = ()
    selections: Selections = ()

    @classmethod
    def of(cls, rows: Iterable[tuple[float, float, int]], selections: Selections = ()) -> Totals:
        """Creates totals from rows (σ, q, steps). Rows with equal σ and q are merged."""
        counts: Counter[tuple[float, float]] = Counter()
        for σ, q, steps in rows:
            counts[σ, q] += steps
        return cls(tuple((*key, counts[key]) for key in sorted(+counts)), selections)

    def __add__(self, other: Totals) -> Totals:
        """Returns the totals of the releases in `self` and `other` together."""
        return Totals.of(self.steps + other.steps, self.selections + other.selections)

    def times(self, number: int) -> Totals:
        """Returns the totals of `number` rounds, each with the releases in `self`."""
        rows = [(σ, q, number * steps) for σ, q, steps in self.steps]
        return Totals.of(rows, number * self.selections)

    def covers(self, other: Totals) -> bool:
        """Returns True if `self` contains all steps of `other`."""
        counts = {(σ, q): steps for σ, q, steps in self.steps}
        within = (steps <= counts.get((σ, q), 0) for σ, q, steps in other.steps)
        return all(within) and not other.selections


def totals(releases: Iterable[Release]) -> Totals:
    """Counts the releases' steps for each pair of noise multiplier σ and sampling rate q."""
    rows = []
    selections: Selections = ()
    for release in releases:
        σ = float(release.noise_multiplier)
        if release.unaccounted is not None:
            σ = 0.0
        if release.selection is not None and σ > 0:
            selections += ((release.selection, σ),)
        else:
            rows.append((σ, float(release.sample_rate), release.steps))
    return Totals.of(rows, selections)


def merge(releases: Sequence[Release] | Totals, adjacency: str) -> Merged | None:
    """Summarises releases for the accountant.

    Returns None if the releases have no finite ε.
    """
    check_adjacency(adjacency)
    if not isinstance(releases, Totals):
        releases = totals(releases)
    if releases.steps and releases.steps[0][0] == 0:
        return None
    influence = 1 + (adjacency == "replace-one")
    selections = []
    for selection, σ in releases.selections:
        trials = [Totals.of([*steps, (σ, 1.0, 1)]).steps for steps in selection.candidates]
        selections.append((selection, tuple(_merged(steps, influence) for steps in trials)))
    return replace(_merged(releases.steps, influence), selections=tuple(selections))


def _merged(steps: Steps, influence: int) -> Merged:
    full = sorted(math.sqrt(number) / σ for σ, q, number in steps if q == 1)
    sampled = tuple(row for row in steps if row[1] < 1)
    return Merged(influence * math.hypot(*full), sampled, influence)


@lru_cache(maxsize=16)
def _one_step(σ: float, q: float, interval: float, influence: int = 1) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if influence == 2:
        relation = NeighboringRelation.REPLACE_ONE
    return pld.from_gaussian_mechanism(
        σ, sampling_prob=q, value_discretization_interval=interval, neighboring_relation=relation
    )


@lru_cache(maxsize=2 * STEPS_TOGETHER)  # at most 1 MB each
def _few_steps(σ: float, q: float, interval: float, influence: int, steps: int) -> Any:
    return _one_step(σ, q, interval, influence).self_compose(steps)


@lru_cache(maxsize=2)  # at most 24 MB each
def _many_steps(σ: float, q: float, interval: float, influence: int, steps: int) -> Any:
    return _one_step(σ, q, interval, influence).self_compose(steps)


def _composition(entries: Steps, interval: float | None, influence: int, level: int = 0) -> Any:
    """Composes the releases with the given noise multipliers, sampling rates and steps.

    Most parts are computed only once if ε is computed after each of many rounds: multiples of
    `STEPS_TOGETHER` steps of one entry, and, of many entries, halves of halves. A bit of a hash of
    σ and q decides on the half, so that a new entry changes one half only.
    """
    if len(entries) > 1:
        halves: tuple[list[Any], list[Any]] = ([], [])
        for position, entry in enumerate(entries):
            bit = hash(entry[:2]) >> level if level < HASH_BITS else position
            halves[bit & 1].append(entry)
        parts = [
            _cached_composition(tuple(half), interval, influence, level + 1)
            for half in halves
            if half
        ]
        return reduce(lambda total, part: total.compose(part), parts)
    σ, q, steps = entries[0]
    many, few = divmod(steps, STEPS_TOGETHER)
    parts = []
    if many:
        parts.append(_many_steps(σ, q, interval, influence, many * STEPS_TOGETHER))
    if few:
        parts.append(_few_steps(σ, q, interval, influence, few))
    return reduce(lambda total, part: total.compose(part, tail_mass_truncation=0), parts)


_cached_composition = lru_cache(maxsize=256)(_composition)  # mostly below 1 MB each


@lru_cache(maxsize=2)  # at most 24 MB each
def _composed(merged: Merged) -> Any:
    interval = merged.interval
    composition = _composition(merged.sampled, interval, merged.influence)
    if merged.mu > 0:
        composition = composition.compose(_one_step(1 / merged.mu, 1.0, interval))
    return composition


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Returns a Gaussian mechanism's exact δ(ε) (Balle & Wang 2018).

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), where μ is the sensitivity divided by the standard
    deviation of the noise.
    """
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
    return max(0.0, first - math.exp(min(0.0, epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))))


def delta_of(merged: Merged, epsilon: float) -> float:
    """Computes an upper bound on δ at a given ε for several releases together."""
    if merged.selections:
        from dp_accounting.rdp import rdp_privacy_accountant as rdp

        return float(rdp.compute_delta(rdp.DEFAULT_RDP_ORDERS, rdp_curve(merged), epsilon)[0])
    if merged.interval is None:
        return gaussian_delta(merged.without_sampling, epsilon)
    return min(1.0, float(_composed(merged).get_delta_for_epsilon(epsilon)) + merged.slack)


@lru_cache(maxsize=256)  # at most 1 kB each
def rdp_curve(merged: Merged) -> npt.NDArray[np.float64]:
    """Computes the total Rényi DP of all releases at dp-accounting's default orders.

    A trial's candidate is drawn independently of the data, so the RDP of a trial is at most the
    largest of all candidates.
    """
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    orders = rdp.DEFAULT_RDP_ORDERS
    plain = replace(merged, selections=())
    if plain.influence == 2:  # dp-accounting has no RDP for replace-one with subsampling
        plain = Merged(plain.without_sampling, influence=2)
    curve = np.array(_rdp_accountant(plain, orders)._rdp)  # no public attribute has it
    for selection, trials in merged.selections:
        worst = np.max([rdp_curve(trial) for trial in trials], axis=0)
        delta = partial(_largest_delta, trials)
        curve = curve + selection.rdp(orders, worst, delta)
    return curve


def _largest_delta(trials: Sequence[Merged], epsilon: float) -> float:
    return max(delta_of(trial, epsilon) for trial in trials)


@lru_cache(maxsize=4096)
def epsilon_of(merged: Merged, delta: float) -> float:
    """Computes an upper bound on ε at a given δ for several releases together.

    Raises:
        PrivacySettingError: δ is too small for the accuracy of the FFT.
    """
    from scipy.optimize import brentq

    if merged.interval is not None:
        require(
            delta >= merged.smallest_delta,
            "delta",
            f"must be at least {merged.smallest_delta:g} for this number of subsampled steps",
            delta,
            "privacy",
        )

    @cache  # brentq computes both ends again
    def excess(ε: float) -> float:
        return math.log(max(delta_of(merged, ε), sys.float_info.min) / delta)

    low, high = 0.0, 1.0
    if excess(low) <= 0:
        return low
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > 1e300:
            return math.inf
    tolerance = 1e-10 * high
    high = min(high, brentq(excess, low, high, xtol=tolerance, rtol=1e-12))
    while excess(high) > 0:  # brentq's result may be on either side
        high += tolerance
    return high


def epsilon(
    releases: Sequence[Release] | Totals, delta: float, adjacency: str = ADD_REMOVE
) -> float:
    """Computes the total ε of all releases from one data set, at the given δ.

    Later releases may depend on earlier ones (adaptive composition). ε is 0 if there are no
    releases. It is infinite if a release has no noise or no guarantee.

    Args:
        releases: the rows of a ledger, or their `totals`. The rows state sensitivities for
            add/remove adjacency.
        delta: δ.
        adjacency: one of `ADJACENCIES`.

    Raises:
        PrivacySettingError: δ is outside (0, 1), or too small for the accuracy of the accountant
            with subsampled rows (below 1e-10, or more if there are many steps).
    """
    check_delta(delta, None)
    merged = merge(releases, adjacency)
    if merged is None:
        return math.inf
    return epsilon_of(merged, delta)


def epsilon_rdp(
    releases: Sequence[Release], delta: float, adjacency: str = ADD_REMOVE
) -> float | None:
    """Computes ε with Rényi DP, as an independent check of `epsilon`.

    The arguments are those of `epsilon`, and the result is usually larger. Returns None for
    replace-one adjacency with subsampling, which dp-accounting's Rényi accountant does not support,
    and for selections, whose `epsilon` is computed with Rényi DP, too.
    """
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    check_delta(delta, None)
    merged = merge(releases, adjacency)
    if merged is None:
        return math.inf
    if merged == Merged(influence=merged.influence):
        return 0.0
    if merged.selections or (merged.influence == 2 and merged.sampled):
        return None
    best = 1 + math.sqrt(2 * math.log(1 / delta)) / merged.without_sampling
    orders = set(rdp.DEFAULT_RDP_ORDERS)
    for factor in (0.7, 1.0, 1.4):
        orders.add(1 + (best - 1) * factor)
    return float(_rdp_accountant(merged, sorted(orders)).get_epsilon(delta))


def _rdp_accountant(merged: Merged, orders: Sequence[float]) -> Any:
    """Composes all releases, except selections, in dp-accounting's Rényi accountant."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    accountant = rdp.RdpAccountant(orders)
    logger = logging.getLogger("absl")
    level = logger.level
    # The library logs and skips every order whose mechanism does not converge; skipping it is safe.
    logger.setLevel(logging.ERROR)
    try:
        if merged.mu > 0:
            accountant.compose(GaussianDpEvent(1 / merged.mu))
        for σ, q, steps in merged.sampled:
            accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(σ)), steps)
    finally:
        logger.setLevel(level)
    return accountant


def epsilon_by_round(
    releases: Sequence[Release], delta: float, adjacency: str = ADD_REMOVE
) -> dict[int, float]:
    """Computes the total ε after each round that has a release.

    The rounds are in ascending order.
    """
    table = {}
    so_far = Totals()
    by_round = attrgetter("round")
    for number, rows in groupby(sorted(releases, key=by_round), key=by_round):
        so_far = so_far + totals(rows)
        table[number] = epsilon(so_far, delta, adjacency)
    return table


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    plan: Callable[[float], Sequence[Release] | Totals],
    adjacency: str = ADD_REMOVE,
) -> float:
    """Finds the smallest noise multiplier σ with epsilon(plan(σ), delta) ≤ `target_epsilon`.

    The result exceeds the smallest σ by at most 0.1 %, so that ε never exceeds the target. A σ
    below 1e-3 that is large enough is returned without further search.

    Args:
        target_epsilon: the largest ε that is allowed.
        delta: δ.
        plan: a function that returns, for a σ, the releases of the *whole* run or their `totals`.
            Their ε must not increase with σ.
        adjacency: one of `ADJACENCIES`.

    Raises:
        PrivacySettingError: the target is not a finite number above 0, δ is out of range, or no σ
            up to 1e6 reaches the target.
    """
    valid = is_real(target_epsilon) and target_epsilon > 0
    require(valid, "epsilon", "must be finite and above 0", target_epsilon, "privacy")
    check_delta(delta, None)

    def excess(σ: float) -> float:
        return math.log(max(epsilon(plan(σ), delta, adjacency), 1e-12) / target_epsilon)

    low = high = 1.0
    at_low = at_high = excess(1.0)
    while at_high > 0:
        if high > 1e6:
            reason = (
                "is too small, because even a noise multiplier of 1e6 gives a larger ε. Raise it"
            )
            raise PrivacySettingError("privacy", "epsilon", reason, value=f"{target_epsilon:g}")
        low, at_low = high, at_high
        high = 4 * high
        at_high = excess(high)
    while at_low <= 0:
        if low < 1e-3:
            return low  # any noise at all is enough
        high, at_high = low, at_low
        low = low / 4
        at_low = excess(low)
    iteration = 0
    while high > 1.001 * low:
        iteration += 1
        # log ε is nearly linear in log σ: interpolate, a little to the safe side, so that both ends
        # of the bracket move; every third iteration bisects, in case it is not linear
        share = 0.5
        if iteration % 3 != 0 and math.isfinite(at_low):
            share = at_low / (at_low - at_high)
        aim = math.exp(math.log(low) + share * math.log(high / low)) * 1.0004
        σ = min(max(aim, low * 1.0009), high / 1.0009)
        value = excess(σ)
        if value <= 0:
            high, at_high = σ, value
        else:
            low, at_low = σ, value
    return high
