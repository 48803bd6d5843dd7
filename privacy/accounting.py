"""What releases cost: ε, δ(ε) and what an attacker can gain, for a chosen adjacency (one example added or removed by default).

Adaptively composed Gaussian mechanisms without subsampling are exactly one Gaussian mechanism with μ² = Σ steps/σ²
(Dong, Roth & Su, "Gaussian differential privacy", 2022, Cor. 3.3), so they are folded exactly. Poisson-subsampled rows
go through dp-accounting's privacy loss distributions (PLD), rounded so that ε comes out too large, never too small.
dp_accounting and scipy are imported where they are used: they are slow to load.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import count
from typing import Any

from fedsynth.privacy.errors import PrivacySettingError

ACCOUNTANT = "privacy loss distributions (PLD), pessimistic rounding; exact where nothing is subsampled"
ADJACENCIES = {
    "add-remove": "add or remove one example (dp-accounting ADD_OR_REMOVE_ONE)",
    "zero-out": "replace one example by a null record that contributes nothing (dp-accounting REPLACE_SPECIAL): how many examples a "
    "client has is then public, how many of each class is not",
    "replace-one": "replace one example, its label too, by any other (dp-accounting REPLACE_ONE): it leaves one class's sum and enters "
    "another's or the same, so all classes together move by at most twice the clip",
}
"""Adjacency: its words for the report. Zero-out costs what add-remove costs; replace-one doubles every sensitivity."""
ADD_REMOVE = "add-remove"
SAMPLERS = ("poisson", "full")
SMALLEST_DELTA = 1e-10  # the FFT's rounding error (about 1e-13, either sign) must stay far below δ
FFT_SLACK = 1e-11  # added to every δ that an FFT gave; measured against the exact Gaussian curve
_LADDER = tuple(m * 10.0**k for k in range(-6, 0) for m in (1, 2, 5) if m * 10.0**k <= 0.1)


@dataclass(frozen=True)
class Release:
    """One ledger row: `steps` adaptively composed uses of one (subsampled) Gaussian mechanism on a client's data.

    Attributes:
        round: the round, from 0. quantity: what leaves the client. mechanism: its name. clipped: what is clipped.
        noise_multiplier: σ, the noise's standard deviation divided by `sensitivity`; 0 means no noise (ε infinite).
        sensitivity: L2 bound on one example's influence (the clip), in the units of what is released.
        sample_rate: q, the public inclusion probability of each example in each step; 1 with the sampler "full".
        sampler: "poisson" | "full"; fixed-size batches have no valid accounting under add/remove and are refused.
        steps: number of uses. dimension: coordinates released at each step.
        unaccounted: the reason, where no guarantee holds for this row; it makes ε infinite.

    Raises:
        PrivacySettingError: a value outside its range.
    """

    round: int
    quantity: str
    mechanism: str
    clipped: str
    noise_multiplier: float
    sensitivity: float
    sample_rate: float
    sampler: str
    steps: int
    dimension: int
    unaccounted: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("round", 0), ("steps", 1), ("dimension", 1)):
            value = getattr(self, name)
            _require(type(value) is int and value >= least, f"{name} must be a whole number of at least {least}", value)
        for name in ("quantity", "mechanism", "clipped"):
            _require(isinstance(getattr(self, name), str), f"{name} must be text", getattr(self, name))
        _require(self.unaccounted is None or bool(self.unaccounted), "unaccounted must give a reason or be None", "")
        σ, clip, q = self.noise_multiplier, self.sensitivity, self.sample_rate
        _require(_is_real(σ) and σ >= 0, "the noise multiplier must be a finite number of at least 0", σ)
        _require(_is_real(clip) and clip > 0, "the sensitivity (clip) must be a finite number above 0", clip)
        _require(_is_real(q) and 0 < q <= 1, "the sample rate must be in (0, 1]", q)
        _require(self.sampler in SAMPLERS, "the sampler must be 'poisson' or 'full' (fixed-size batches have no "
                 "valid accounting under add/remove)", self.sampler)  # fmt: skip
        _require(self.sampler != "full" or q == 1, "the sampler 'full' uses all data, so the sample rate must be 1", q)

    def to_json(self) -> dict[str, Any]:
        """The row as a flat, JSON-able dict; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Release:
        """Rebuild a row. Raises PrivacySettingError on missing or unknown fields and on values out of range."""
        names = {f.name for f in fields(cls)}
        if not names - {"unaccounted"} <= set(row) <= names:
            raise PrivacySettingError(f"a ledger row must have exactly the fields {sorted(names)}, got {sorted(row)}")
        return cls(**row)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(ok: bool, rule: str, value: object) -> None:
    if not ok:
        raise PrivacySettingError(f"{rule}, got {value!r}")


def check_adjacency(adjacency: str) -> None:
    """Refuse what is not one of `ADJACENCIES`."""
    _require(adjacency in ADJACENCIES, f"the adjacency must be one of {', '.join(ADJACENCIES)}", adjacency)


def check_delta(delta: float, max_records: int | None) -> None:
    """Refuse a δ outside (0, 1), or above 1/max_records (it would allow publishing one record outright).

    `max_records` is a declared public bound on the federation's records, never the true number; None skips that check.
    """
    _require(_is_real(delta) and 0 < delta < 1, "delta must be in (0, 1)", delta)
    if max_records is None:
        return
    known = type(max_records) is int and max_records >= 1
    _require(known, "max-records must be a whole number of at least 1", max_records)
    _require(delta * max_records <= 1, f"delta must be at most 1/max-records = {1 / max_records:.3g}", delta)


@dataclass(frozen=True)
class _Merged:
    """Rows folded: all unsubsampled ones into one Gaussian, equal subsampled ones into (σ, q, steps)."""

    mu: float = 0.0
    sampled: tuple[tuple[float, float, int], ...] = ()
    replace: bool = False  # replace-one; μ is then doubled already, σ is not: dp-accounting's REPLACE_ONE doubles

    @property
    def nothing(self) -> bool:
        return self.mu == 0 and not self.sampled

    @property
    def interval(self) -> float | None:
        """PLD grid step; None where `without_sampling` is used: exact without subsampled rows, else a (huge) bound.

        Fine enough to resolve one step's loss (its standard deviation is about q·√(e^{1/σ²} − 1)), and coarse enough
        that one step has ≤ 6e4 and the composition ≤ 1.5e6 points (well under a second). Coarser only makes ε larger.
        """
        if not self.sampled:
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
        least = max(resolve, single / 6e4, 20 * self.mu / 5e5, (variance / 2 + 20 * math.sqrt(variance)) / 1.5e6)
        return next((step for step in _LADDER if step >= least), None)

    @property
    def without_sampling(self) -> float:
        """μ if every subsampled row used all data: an upper bound, as subsampling never increases δ(ε)."""
        influence = 2 if self.replace else 1
        return math.hypot(self.mu, *(influence * math.sqrt(steps) / σ for σ, _, steps in self.sampled))


def _merge(releases: Sequence[Release], adjacency: str) -> _Merged | None:
    """Fold the rows; None if no finite ε holds."""
    check_adjacency(adjacency)
    replace = adjacency == "replace-one"
    if any(r.unaccounted is not None or r.noise_multiplier == 0 for r in releases):
        return None
    full = sorted(math.sqrt(r.steps) / r.noise_multiplier for r in releases if r.sample_rate == 1)
    steps: dict[tuple[float, float], int] = {}
    for r in releases:
        if r.sample_rate < 1:
            key = (float(r.noise_multiplier), float(r.sample_rate))
            steps[key] = steps.get(key, 0) + r.steps
    mu = (2 if replace else 1) * math.hypot(*full)
    return _Merged(mu, tuple((σ, q, n) for (σ, q), n in sorted(steps.items())), replace)


@lru_cache(maxsize=64)
def _one_step(σ: float, q: float, interval: float, replace: bool = False) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    relation = NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
    return pld.from_gaussian_mechanism(σ, sampling_prob=q, value_discretization_interval=interval, neighboring_relation=relation)


@lru_cache(maxsize=4)  # up to about 60 MB each
def _composed(merged: _Merged) -> Any:
    interval = merged.interval
    parts = [_one_step(σ, q, interval, merged.replace).self_compose(steps) for σ, q, steps in merged.sampled]
    if merged.mu > 0:
        parts.append(_one_step(1 / merged.mu, 1.0, interval))
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return total


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), exact for a Gaussian with sensitivity/noise μ (Balle & Wang 2018)."""
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
    return max(0.0, first - math.exp(min(0.0, epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))))


def _delta(merged: _Merged, epsilon: float) -> float:
    if merged.interval is None:
        return gaussian_delta(merged.without_sampling, epsilon)
    return min(1.0, float(_composed(merged).get_delta_for_epsilon(epsilon)) + FFT_SLACK)


@lru_cache(maxsize=4096)
def _epsilon(merged: _Merged, delta: float) -> float:
    if merged.interval is not None:
        _require(delta >= SMALLEST_DELTA, f"with subsampling, delta must be at least {SMALLEST_DELTA:g} (the "
                 "accountant's numerical accuracy)", delta)  # fmt: skip
        return float(_composed(merged).get_epsilon_for_delta(delta - FFT_SLACK))
    mu, low, high = merged.without_sampling, 0.0, 1.0
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_delta(mu, middle) <= delta else (middle, high)
    return high


def epsilon(releases: Sequence[Release], delta: float, adjacency: str = ADD_REMOVE) -> float:
    """The ε that holds with δ = `delta` for all `releases` on one data set, adaptively composed.

    Rows hold sensitivities under add-remove; `adjacency` is one of `ADJACENCIES`.

    No release: 0. An unaccounted row or one without noise: infinity.

    Raises:
        PrivacySettingError: δ outside (0, 1), or below 1e-10 with subsampled rows (beyond the accountant's accuracy).
    """
    check_delta(delta, None)
    merged = _merge(releases, adjacency)
    return math.inf if merged is None else _epsilon(merged, delta)


def epsilon_rdp(releases: Sequence[Release], delta: float, adjacency: str = ADD_REMOVE) -> float | None:
    """The looser ε by Rényi DP: an independent cross-check of `epsilon`, same conventions.

    None where the library has none: replace-one with subsampling.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    check_delta(delta, None)
    merged = _merge(releases, adjacency)
    if merged is None:
        return math.inf
    if merged.nothing:
        return 0.0
    if merged.replace and merged.sampled:
        return None
    best = 1 + math.sqrt(2 * math.log(1 / delta)) / merged.without_sampling
    accountant = rdp.RdpAccountant(sorted({*rdp.DEFAULT_RDP_ORDERS, *(1 + (best - 1) * f for f in (0.7, 1.0, 1.4))}))
    with _quiet_absl():
        if merged.mu > 0:
            accountant.compose(GaussianDpEvent(1 / merged.mu))
        for σ, q, steps in merged.sampled:
            accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(σ)), steps)
        return float(accountant.get_epsilon(delta))


@contextmanager
def _quiet_absl() -> Iterator[None]:
    """dp-accounting logs every Rényi order whose series does not converge; it leaves that order out, which is safe."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def deltas_at(releases: Sequence[Release], epsilons: Sequence[float], adjacency: str = ADD_REMOVE) -> list[float]:
    """δ(ε) at each of `epsilons` (≥ 0), from one composition; all 1 where no guarantee holds."""
    _require(all(_is_real(e) and e >= 0 for e in epsilons), "epsilons must be finite and at least 0", list(epsilons))
    merged = _merge(releases, adjacency)
    return [1.0 if merged is None else 0.0 if merged.nothing else _delta(merged, e) for e in epsilons]


def attack_success(
    releases: Sequence[Release], false_positive_rates: Sequence[float] = (0.001, 0.01), adjacency: str = ADD_REMOVE
) -> dict[float, float]:
    """Upper bound on the true-positive rate of *any* membership test at each false-positive rate α.

    If (ε, δ(ε)) holds for the pair (without, with) and for its reverse, a test's rates obey, for every ε ≥ 0,
    TPR ≤ e^ε·α + δ(ε), and, with the complements' rates, 1 − α ≤ e^ε·(1 − TPR) + δ(ε), that is
    TPR ≤ 1 − e^{−ε}·(1 − α − δ(ε)). The smallest of these over ε is 1 − f(α), f the trade-off function (f-DP: Dong,
    Roth & Su 2022, Prop. 2.12). Each bound is convex, the first in e^ε and the second in e^{−ε}, hence the golden-
    section search; wherever it stops the bound is valid. For Gaussians it is Φ(Φ⁻¹(α) + μ), used directly.
    """
    from scipy.special import ndtr, ndtri

    possible = all(_is_real(a) and 0 < a < 1 for a in false_positive_rates)
    _require(possible, "false-positive rates must be in (0, 1)", false_positive_rates)
    merged = _merge(releases, adjacency)
    if merged is None:
        return dict.fromkeys(false_positive_rates, 1.0)
    if merged.interval is None:
        return {a: float(ndtr(ndtri(a) + merged.without_sampling)) for a in false_positive_rates}
    curve, furthest = lru_cache(maxsize=None)(lambda e: _delta(merged, e)), _epsilon(merged, 1e-8)
    return {a: _largest_power(curve, a, furthest) for a in false_positive_rates}


def _largest_power(curve: Callable[[float], float], alpha: float, furthest: float) -> float:
    first = _golden(lambda e: math.exp(min(e, 700.0)) * alpha + curve(e), furthest)
    second = _golden(lambda e: 1 - math.exp(-e) * (1 - alpha - curve(e)), furthest)
    return min(1.0, first, second)


def _golden(bound: Callable[[float], float], high: float, iterations: int = 16) -> float:
    """Smallest value met in a golden-section search of a unimodal function on [0, high]."""
    ratio, low = (math.sqrt(5) - 1) / 2, 0.0
    left, right = high - ratio * high, ratio * high
    at_left, at_right = bound(left), bound(right)
    best = min(bound(0.0), at_left, at_right)
    for _ in range(iterations):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = bound(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = bound(right)
        best = min(best, at_left, at_right)
    return best


def epsilon_by_round(releases: Sequence[Release], delta: float, adjacency: str = ADD_REMOVE) -> dict[int, float]:
    """Cumulative ε after each round that has a release, in order of the round's number."""
    return {n: epsilon([r for r in releases if r.round <= n], delta, adjacency) for n in sorted({r.round for r in releases})}


def calibrate_noise_multiplier(
    target_epsilon: float, delta: float, plan: Callable[[float], Sequence[Release]], adjacency: str = ADD_REMOVE
) -> float:
    """Smallest σ (to 0.1 %, on the safe side) with epsilon(plan(σ), delta) ≤ `target_epsilon`.

    `plan` must give the releases of the *whole* run for a σ, with an ε that does not grow with σ.

    Raises:
        PrivacySettingError: target not finite and positive, bad δ, or no σ up to 1e6 reaches the target.
    """
    possible = _is_real(target_epsilon) and target_epsilon > 0
    _require(possible, "the target epsilon must be finite and above 0", target_epsilon)
    check_delta(delta, None)

    def excess(σ: float) -> float:
        spent = epsilon(plan(σ), delta, adjacency)
        return math.inf if math.isinf(spent) else math.log(max(spent, 1e-12) / target_epsilon)

    high, at_high = 1.0, excess(1.0)
    low, at_low = high, at_high
    while at_high > 0:
        if high > 1e6:
            raise PrivacySettingError(
                f"no noise multiplier up to 1e6 reaches epsilon {target_epsilon:g}: a release that does not depend on "
                "it costs more, or has no guarantee"
            )
        low, at_low, high = high, at_high, 4 * high
        at_high = excess(high)
    while at_low <= 0:
        if low < 1e-3:
            return low  # any noise at all is enough
        high, at_high, low = low, at_low, low / 4
        at_low = excess(low)
    for turn in count():
        if high <= 1.001 * low:
            break
        # log ε is nearly linear in log σ: interpolate, a little to the safe side so that both ends close in; every
        # third turn halves the bracket, in case it is not
        share = 0.5 if turn % 3 == 2 or math.isinf(at_low) else at_low / (at_low - at_high)
        aim = math.exp(math.log(low) + share * math.log(high / low)) * 1.0004
        σ = min(max(aim, low * 1.0009), high / 1.0009)
        value = excess(σ)
        (low, at_low, high, at_high) = (low, at_low, σ, value) if value <= 0 else (σ, value, high, at_high)
    return high


def describe_accountant(releases: Sequence[Release], adjacency: str = ADD_REMOVE) -> dict[str, Any]:
    """Name, library version, discretisation interval (None: exact) and neighbouring relation, for the report."""
    from importlib.metadata import version

    merged = _merge(releases, adjacency)
    interval = merged.interval if merged else None
    if interval is not None:
        how = "discretised PLD, connect-the-dots"
    elif merged and merged.sampled:
        how = "upper bound that ignores the subsampling (the tight composition is too large to compute)"
    else:
        how = "exact Gaussian composition (nothing is subsampled)"
    return {"name": ACCOUNTANT, "library": f"dp-accounting {version('dp-accounting')}", "computation": how,
            "discretisation_interval": interval, "neighbouring_relation": ADJACENCIES[adjacency]}  # fmt: skip
