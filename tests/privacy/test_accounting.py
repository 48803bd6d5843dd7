"""Tests of the accountant against a table of references, closed forms, dp-accounting and Opacus."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from scipy.stats import norm

from fedsynth.errors import PrivacySettingError
from fedsynth.privacy import accounting
from fedsynth.privacy import audit_bounds as audit
from fedsynth.privacy.accounting import Merged, Totals, delta_of, epsilon, epsilon_rdp, totals
from fedsynth.privacy.releases import Release, check_delta
from tests.privacy.support import release
from tests.raising import raises

DELTA = 1e-5
# Noise multipliers, sample rates and steps.
KINDS = st.tuples(st.floats(0.5, 50), st.sampled_from([1.0, 0.3, 0.01]), st.integers(1, 50))


def row(sigma: float, q: float = 1.0, steps: int = 1, number: int = 0) -> Release:
    return release(round=number, noise_multiplier=sigma, sample_rate=q, steps=steps)


def merged(rows: list[Release] | Totals, adjacency: str = "add-remove") -> Any:
    return accounting.merge(rows, adjacency)


# ε as printed after 1 and 20 rounds of 1000 steps, for each σ, with q = 0.05, 0.512 and 1.
TABLE = {
    1: ("11.0 78.1", "226 3255", "634 10600"),
    3: ("2.22 12.7", "37.7 399", "99.7 1312"),
    5: ("1.23 6.67", "18.6 167", "46.2 520"),
}


@pytest.mark.parametrize("q", [0.05, 0.512, 1])
@pytest.mark.parametrize("sigma", TABLE)
def test_epsilon_matches_reference_table(sigma: float, q: float) -> None:
    cell = TABLE[sigma][(0.05, 0.512, 1).index(q)]
    for rounds, printed in zip((1, 20), cell.split(), strict=True):
        computed = epsilon([row(sigma, q, 1000, n) for n in range(rounds)], DELTA)
        half_digit = 50.0 if printed == "10600" else 0.5 * 10.0 ** -len(printed.partition(".")[2])
        # 0.06 %: the largest entries carry the coarse grid and underflow of the run that made them
        assert abs(computed - float(printed)) <= half_digit + 6e-4 * computed


def test_epsilon_of_large_mu_matches_closed_form() -> None:
    # by mpmath; dp-accounting's own PLD gives 2801.57 and 10603.15, where e^{−ε} underflows
    for steps, exact in ((1000, 633.9298513), (5000, 2800.6023743), (20000, 10602.1614378)):
        assert epsilon([row(1, 1, steps)], DELTA) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("mu", [0.05, 1.0, 30.0])
def test_delta_matches_analytic_gaussian(mu: float) -> None:
    e = np.array([0.0, 0.1 * mu, mu, mu**2 / 2 + 2 * mu])
    expected = norm.cdf(mu / 2 - e / mu) - np.exp(e) * norm.cdf(-mu / 2 - e / mu)
    deltas = [delta_of(merged([row(1 / mu)]), point) for point in e.tolist()]
    assert deltas == pytest.approx(expected, rel=1e-6, abs=1e-15)
    spent = epsilon([row(1 / mu)], DELTA)
    assert accounting.gaussian_delta(mu, spent) <= DELTA * (1 + 1e-9)
    assert accounting.gaussian_delta(mu, spent * 0.999) > DELTA


def test_sample_rate_one_equals_full_participation() -> None:
    sampled = replace(row(1.5, steps=40), sampler="poisson")
    assert epsilon([sampled], DELTA) == epsilon([row(1.5, steps=40)], DELTA)
    nearly = epsilon([row(1.5, 1 - 1e-9, 40)], DELTA)  # this one goes through the PLD
    assert nearly == pytest.approx(epsilon([row(1.5, steps=40)], DELTA), rel=1e-3)


def test_mixed_releases_agree_with_dp_accounting() -> None:
    gaussian = dp.GaussianDpEvent
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp.PoissonSampledDpEvent(0.05, gaussian(2.0)), 100)
    accountant.compose(dp.PoissonSampledDpEvent(0.01, gaussian(1.0)), 50)
    accountant.compose(gaussian(4.0), 2)
    rows = [row(2.0, 0.05, 60), row(1.0, 0.01, 50), row(4.0, 1, 2), row(2.0, 0.05, 40, number=1)]
    assert epsilon(rows, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)
    for e in (1.0, 2.0):
        assert delta_of(merged(rows), e) == pytest.approx(accountant.get_delta(e), rel=1e-2)


def test_epsilon_at_small_delta_is_an_upper_bound() -> None:
    # Without a slack for the FFT's rounding error the PLD gives 1.9091 where the truth is 1.9093.
    almost_full = [row(1000.0, 1 - 1e-9, 100_000)]
    assert epsilon(almost_full, 2e-10) >= epsilon([row(1000.0, 1, 100_000)], 2e-10) * (1 - 1e-7)
    with raises(PrivacySettingError, "privacy.delta"):
        epsilon(almost_full, 1e-10)
    assert math.isfinite(epsilon([row(3.0)], 1e-30))  # closed form: no such limit


def test_empty_and_unaccounted_ledgers_have_extreme_epsilons() -> None:
    leak = replace(row(3.0), unaccounted="real images were sent")
    assert epsilon([], DELTA) == epsilon_rdp([], DELTA) == 0.0
    assert [delta_of(merged([]), e) for e in (0.0, 1.0)] == [0.0, 0.0]
    assert audit.attack_success([], 0.01) == pytest.approx(0.01)
    for unprotected in (leak, row(0.0)):
        assert math.isinf(epsilon([row(3.0), unprotected], DELTA))
        assert math.isinf(epsilon_rdp([unprotected], DELTA))
        assert audit.attack_success([unprotected], 0.01) == 1.0
        assert audit.best_guess([unprotected]) == 1.0
        assert math.isinf(epsilon(totals([row(3.0)]) + totals([unprotected]).times(3), DELTA))
        unspent = totals([row(3.0)]) + totals([unprotected]).times(0)
        assert epsilon(unspent, DELTA) == epsilon([row(3.0)], DELTA)


def test_grid_interval_shrinks_with_privacy_loss() -> None:
    for entry, interval in ((row(1.0), None), (row(2.0, 0.05, 100), 1e-3), (row(5, 0.001), 5e-6)):
        assert merged([entry]).interval == pytest.approx(interval)
    # at 1e-4 the last would be 2 % too large after 100,000 steps (0.2139); at 1e-5 it is 0.2094
    assert epsilon([row(5.0, 0.001, 100_000)], DELTA) == pytest.approx(0.2093, rel=2e-3)


def test_epsilon_after_many_charges_equals_single_composition() -> None:
    """Cached parts must be those of the same σ, q and steps."""
    kwargs = {"sampling_prob": 0.02, "value_discretization_interval": 2e-4}
    rows: list[Release] = []
    expected = pld.identity(2e-4)
    for index in range(5):
        sigma, steps = 1.5 - index / 7, 60 + index
        rows.append(row(sigma, 0.02, steps))
        step = pld.from_gaussian_mechanism(sigma, **kwargs)
        expected = expected.compose(step.self_compose(steps))
        exact = expected.get_epsilon_for_delta(DELTA)
        assert epsilon(rows, DELTA) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(("sigma", "q", "steps"), [(1.1, 0.01, 1000), (2.0, 0.05, 300)])
def test_renyi_epsilon_matches_opacus(sigma: float, q: float, steps: int) -> None:
    rdp = RDPAccountant()
    rdp.history = [(sigma, q, steps)]
    renyi_epsilon = epsilon_rdp([row(sigma, q, steps)], DELTA)
    assert renyi_epsilon == pytest.approx(rdp.get_epsilon(DELTA), rel=0.01)
    once, twice = row(sigma, steps=steps), row(2 * sigma, steps=steps)
    assert epsilon_rdp([twice], DELTA, "replace-one") == pytest.approx(epsilon_rdp([once], DELTA))


def test_attack_success_of_gaussian_is_tight() -> None:
    for rate in (0.001, 0.01):
        exact = norm.cdf(norm.ppf(rate) + 1.0)
        assert audit.attack_success([row(1.0)], rate) == pytest.approx(exact)
        # through the PLD and the search over ε: an upper bound, and a close one
        assert exact <= audit.attack_success([row(1.0, 1 - 1e-9)], rate) <= exact * 1.01


def test_best_guess_matches_optimal_test() -> None:
    """It is (1 + total variation distance) / 2: for Gaussians and for one sampled step."""
    for sigma, steps in ((1.0, 1), (5.0, 40)):
        mu = math.sqrt(steps) / sigma
        exact = norm.cdf(mu / 2)  # the likelihood ratio's test at even odds
        assert audit.best_guess([row(sigma, 1.0, steps)]) == pytest.approx(exact)
    for q in (0.01, 0.4):
        exact = (1 + q * (2 * norm.cdf(0.5) - 1)) / 2
        assert exact <= audit.best_guess([row(1.0, q)]) <= exact + 1e-4
    assert audit.best_guess([]) == 0.5
    assert audit.best_guess([row(1.0)], "replace-one") == pytest.approx(norm.cdf(1.0))


@pytest.mark.parametrize(
    ("target", "q", "steps", "adjacency", "expected"),
    [
        (1.0, 0.05, 250, "add-remove", None),
        (2.0, 0.2, 50, "replace-one", None),
        *((ε, 1.0, 1, "add-remove", σ) for ε, σ in ((1.0, 3.73), (3.0, 1.39), (10.0, 0.50))),
    ],
)
def test_calibrated_noise_is_tight_upper_bound(
    target: float, q: float, steps: int, adjacency: str, expected: float | None
) -> None:
    sigma = accounting.calibrate_noise_multiplier(
        target, DELTA, lambda s: [row(s, q, steps)], adjacency
    )
    spent, more = (epsilon([row(s, q, steps)], DELTA, adjacency) for s in (sigma, sigma / 1.0011))
    assert spent <= target < more
    assert expected is None or sigma == pytest.approx(expected, abs=0.005)


def test_impossible_calibration_targets_are_rejected() -> None:
    for target in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(PrivacySettingError, match=r"privacy\.epsilon must"):
            accounting.calibrate_noise_multiplier(target, DELTA, lambda s: [row(s)])
    with pytest.raises(PrivacySettingError, match=r"epsilon=.* is too small"):
        accounting.calibrate_noise_multiplier(1.0, DELTA, lambda s: [row(s), row(0.5)])
    with raises(PrivacySettingError, "privacy.delta"):
        accounting.calibrate_noise_multiplier(1.0, 1.0, lambda s: [row(s)])
    # nothing is released: any σ will do
    assert accounting.calibrate_noise_multiplier(1.0, DELTA, lambda s: []) <= 1e-3
    counts = row(10.0)  # a release whose noise is fixed
    sigma = accounting.calibrate_noise_multiplier(1.0, DELTA, lambda s: [row(s), counts])
    assert 3.73 < sigma < 4.2


def test_invalid_delta_and_adjacency_are_rejected() -> None:
    for delta in (0.0, 1.0, math.nan):
        with raises(PrivacySettingError, "privacy.delta"):
            epsilon([row(1.0)], delta)
    with raises(PrivacySettingError, "privacy.adjacency"):
        epsilon([row(1.0)], DELTA, "swap")
    check_delta(1e-5, 100_000)
    check_delta(1e-5, None)
    for records in (100_001, 0, -3):
        with pytest.raises(PrivacySettingError, match="max_records"):
            check_delta(1e-5, records)


@pytest.mark.parametrize(
    ("field", "value"),
    [("noise_multiplier", -1.0), ("noise_multiplier", math.nan), ("sensitivity", 0.0), ("sensitivity", math.inf),
     ("sample_rate", 0.0), ("sample_rate", 0.5), ("sampler", "fixed"), ("steps", 0), ("steps", 2.0), ("round", -1),
     ("dimension", 0), ("unaccounted", ""), ("quantity", 3), ("unit", "household")],
)  # fmt: skip
def test_invalid_release_fields_are_rejected(field: str, value: object) -> None:
    with pytest.raises(PrivacySettingError):
        replace(row(1.0), **{field: value})  # type: ignore[arg-type]


def test_release_json_round_trip() -> None:
    for entry in (row(1.5, 0.1, 7, 3), replace(row(1.0), unaccounted="because")):
        assert Release.from_json(entry.to_json()) == entry
    for broken in ({"round": 1}, {**row(1.0).to_json(), "extra": 1}):
        with raises(PrivacySettingError, "row"):
            Release.from_json(broken)


def test_report_import_loads_no_heavy_packages() -> None:
    heavy = {"torch", "scipy", "dp_accounting"}
    code = f"import sys, fedsynth.privacy.report.build; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("sigma", "q", "steps"), [(1.0, 0.05, 100), (0.7, 0.01, 1000)])
def test_sampled_replace_one_matches_dp_accounting(sigma: float, q: float, steps: int) -> None:
    rows = [row(sigma, q, steps)]
    relation = dp.NeighboringRelation.REPLACE_ONE
    accountant = PLDAccountant(relation, value_discretization_interval=1e-4)
    accountant.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), steps)
    computed = epsilon(rows, 1e-5, "replace-one")
    assert computed == pytest.approx(accountant.get_epsilon(1e-5), rel=5e-3)
    doubled = epsilon([row(sigma / 2, q, steps)], 1e-5)
    assert epsilon(rows, 1e-5) < computed < doubled * 1.001
    assert epsilon_rdp(rows, 1e-5, "replace-one") is None
    assert delta_of(merged(rows, "replace-one"), computed) == pytest.approx(1e-5, rel=1e-3)
    assert audit.attack_success(rows, 0.01, "replace-one") > audit.attack_success(rows, 0.01)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(KINDS, min_size=1, max_size=4), st.integers(0, 40))
def test_totals_equal_merged_single_rows(kinds: Any, rounds: int) -> None:
    round_rows = [row(*kind) for kind in kinds]
    first_rows = [row(2.0, 1.0, 3), round_rows[0]]
    folded = totals(first_rows) + totals(round_rows).times(rounds)
    all_rows = [*first_rows, *round_rows * rounds]
    assert folded == totals(all_rows)
    counts = Counter[tuple[float, float]]()
    for r in all_rows:
        counts[r.noise_multiplier, r.sample_rate] += r.steps
    sampled = {key: n for key, n in counts.items() if key[1] < 1}
    squares = math.fsum(n / σ**2 for (σ, q), n in counts.items() if q == 1)
    for adjacency, influence in (("add-remove", 1), ("zero-out", 1), ("replace-one", 2)):
        composed = merged(folded, adjacency)
        assert composed.mu == pytest.approx(influence * math.sqrt(squares), rel=1e-12)
        assert {(σ, q): n for σ, q, n in composed.sampled} == sampled


def test_many_subsampled_steps_use_unsampled_bound() -> None:
    """The bound ignores the sampling, also for tiny noise multipliers."""
    for sigma, q, number in ((0.01, 0.1, 1000), (1e-200, 0.5, 3)):
        assert epsilon([row(sigma, q, number)], DELTA) == epsilon([row(sigma, 1, number)], DELTA)
    steps, σ = 10**8, 2e4
    bound = epsilon(Totals(((σ, 1.0, steps),)), DELTA)
    assert epsilon(Totals(((σ, 0.05, steps),)), DELTA) == pytest.approx(bound, rel=1e-9)
    assert Merged(sampled=((σ, 0.05, steps),)).interval is None


def test_slack_covers_fft_rounding_error() -> None:
    """Composed in a million steps, a Gaussian's δ comes out up to 2e-11 below its exact curve."""
    μ, steps = 1.0, 1_000_000
    σ = math.sqrt(steps) / μ
    million = Merged(sampled=((σ, 0.5, steps),))
    composed = accounting._one_step(σ, 1.0, 1e-5).self_compose(steps)
    for ε in (5.4, 5.7, 6.0):
        exact = accounting.gaussian_delta(μ, ε)
        assert 1e-10 < exact < 1e-7
        assert composed.get_delta_for_epsilon(ε) + million.slack >= exact
    assert million.slack == pytest.approx(2e-10)
    assert Merged(sampled=((σ, 0.5, 1000),)).slack == accounting.FFT_SLACK
    with raises(PrivacySettingError, "privacy.delta"):
        epsilon([row(2000.0, 0.1, steps)], 1e-9)


def test_epsilon_lower_bound_matches_manual_computation() -> None:
    """For 3 guesses, all correct: P[W = 3] = p³; with δ, the worst i is searched."""
    p = math.e / (1 + math.e)
    assert audit.p_value(3, 3, 10, 1.0, 0.0) == pytest.approx(p**3)
    pmf = [math.comb(3, k) * p**k * (1 - p) ** (3 - k) for k in range(4)]
    worst = max(sum(pmf[3 - i : 3]) / i for i in (1, 2, 3))
    assert audit.p_value(3, 3, 10, 1.0, 1e-3) == pytest.approx(p**3 + 2 * 10 * 1e-3 * worst)
    bound = audit.epsilon_lower_bound(100, 100, 1000, 0.0, 0.999)
    assert bound == pytest.approx(-math.log(0.001 ** (-1 / 100) - 1), abs=1e-3)  # p¹⁰⁰ = 0.001
    assert audit.epsilon_lower_bound(50, 100, 1000, DELTA, 0.999) == 0
    with pytest.raises(PrivacySettingError):
        audit.p_value(5, 4, 10, 1.0, 0.0)


def test_guesses_use_both_extremes_of_scores() -> None:
    scores, included = np.array([0.3, -1.0, 2.0, 0.1, 5.0]), np.array([1, 1, 1, 0, 0], dtype=bool)
    assert audit.right_guesses(scores, included, 2) == 0  # "in" for 5.0, "out" for −1.0
    assert audit.right_guesses(scores, included, 4) == 2  # and "in" for 2.0, "out" for 0.1
    assert [audit.guesses_for(m) for m in (2, 10, 1000, 1001, 5000)] == [2, 4, 400, 400, 2000]


def test_large_epsilon_is_finite_and_increasing() -> None:
    """dp-accounting's own ε is infinite at 7,000 of these steps, as a mass underflows."""
    sizes = [5000, 7000, 9000]
    values = [epsilon(Totals.of([(1.0, 0.4267, steps)]), 1e-5) for steps in sizes]
    assert values == sorted(values)
    assert math.isfinite(values[-1])
    for steps, value in zip(sizes, values, strict=True):
        composed = merged(Totals.of([(1.0, 0.4267, steps)]))
        assert delta_of(composed, value) <= 1e-5 < delta_of(composed, 0.99 * value)
