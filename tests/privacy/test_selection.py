"""Tests of the accounting of private selection, against exact computations and dp-accounting."""

from __future__ import annotations

import json
import math

import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from scipy.stats import nbinom, poisson

from fedsynth.errors import LedgerError, PrivacySettingError
from fedsynth.privacy.accounting import Totals, epsilon, epsilon_rdp, merge, rdp_curve, totals
from fedsynth.privacy.audit_bounds import attack_success, best_guess
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.trial import TrialLedger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.selection import Selection
from tests.raising import raises

Law = npt.NDArray[np.float64]
ORDERS = np.array([1.1, 1.5, 2, 3, 5, 8, 16, 32, 64.0])
RUN = (((2.8, 1.0, 1),),)
LAWS = [("poisson", 0.0), *(("negative-binomial", eta) for eta in (-0.5, 0.0, 1.0, 3.0))]


def probabilities(law: Selection, most: int = 3000) -> Law:
    """P[K = k] for k = 0, 1, ..., by the paper's formulas, and not by `number_of_trials`."""
    k = np.arange(1, most)
    if law.poisson_mean is not None:
        return poisson.pmf(np.arange(most), law.poisson_mean)
    η, γ = law.eta, law.gamma
    assert η is not None
    assert γ is not None
    if η == 0:
        tail = (1 - γ) ** k / (k * math.log(1 / γ))
    elif η > 0:
        tail = nbinom.pmf(k, η, γ) / (1 - nbinom.pmf(0, η, γ))
    else:
        factors = np.concatenate([[η], (k[:-1] + η) / (k[:-1] + 1)])
        tail = (1 - γ) ** k * np.cumprod(factors) / (γ**-η - 1)
    return np.concatenate([[0.0], tail])


def best_of(trial: Law, numbers: Law) -> Law:
    """The exact law of the best of K outcomes, which are ordered; the first entry is K = 0."""
    below = np.concatenate([[0.0], np.cumsum(trial)])
    powers = np.power.outer(np.minimum(below, 1.0), np.arange(len(numbers)))
    return np.concatenate([numbers[:1], np.diff(powers @ numbers)])


def divergence(p: Law, q: Law) -> Law:
    kept = (p > 0) | (q > 0)
    p, q = p[kept], q[kept]
    logs = np.log(p) - np.log(q)
    return np.array([np.log(np.sum(p * np.exp((a - 1) * logs))) / (a - 1) for a in ORDERS])


def curve(p: Law, q: Law) -> Law:
    return np.maximum(divergence(p, q), divergence(q, p))


def exceeds(law: Selection, numbers: Law) -> bool:
    """True if selections with this law of K have an exact RDP above what the selection states."""
    generator = np.random.default_rng(0)
    for _ in range(60):
        size = int(generator.integers(2, 7))
        p = generator.dirichlet(np.full(size, generator.choice([0.3, 1.0])))
        shift = generator.uniform(-1, 1, size) * generator.choice([0.05, 0.3, 1.0])
        q = p * np.exp(shift) / np.sum(p * np.exp(shift))

        def delta(ε: float, p: Law = p, q: Law = q) -> float:
            pairs = ((p, q), (q, p))
            return max(float(np.maximum(a - math.exp(ε) * b, 0).sum()) for a, b in pairs)

        stated = law.rdp(list(ORDERS), curve(p, q), delta)
        if (curve(best_of(p, numbers), best_of(q, numbers)) > stated + 1e-6).any():
            return True
    return False


@pytest.mark.parametrize(("law", "eta"), LAWS)
def test_no_exact_selection_costs_more_than_stated(law: str, eta: float) -> None:
    selection = Selection.of_mean(RUN, law, 5.0, eta)
    assert not exceeds(selection, probabilities(selection))


@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize(("law", "eta"), LAWS)
def test_a_fixed_number_of_trials_costs_more(law: str, eta: float, count: int) -> None:
    selection = Selection.of_mean(RUN, law, float(count), eta)
    fixed = np.zeros(count + 1)
    fixed[count] = 1.0
    assert exceeds(selection, fixed)


@pytest.mark.parametrize("limit", [1, 3, 8])
@pytest.mark.parametrize(("law", "eta"), LAWS)
def test_a_time_limit_costs_nothing(law: str, eta: float, limit: int) -> None:
    """A selection that is killed after this number of trials has no result, as with K = 0."""
    selection = Selection.of_mean(RUN, law, 5.0, eta)
    limited = probabilities(selection)
    limited[limit + 1 :] = 0
    limited[0] += 1 - limited.sum()
    assert not exceeds(selection, limited)


@pytest.mark.parametrize(("law", "eta"), LAWS)
def test_forgetting_a_term_is_found(law: str, eta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    selection = Selection.of_mean(RUN, law, 5.0, eta)
    monkeypatch.setattr(Selection, "rdp", lambda self, orders, trial, delta: trial)
    assert exceeds(selection, probabilities(selection))


@pytest.mark.parametrize(("law", "eta"), [pair for pair in LAWS if pair[1] >= 0])
@pytest.mark.parametrize("mean", [2.0, 10.0, 100.0])
def test_agrees_with_dp_accounting(law: str, eta: float, mean: float) -> None:
    orders = list(rdp.DEFAULT_RDP_ORDERS)
    trial = np.asarray(orders) * 0.3**2 / 2
    shape = math.inf if law == "poisson" else eta
    theirs = rdp._compute_rdp_repeat_and_select(orders, list(trial), mean, shape)

    def delta(ε: float) -> float:
        return float(rdp.compute_delta(orders, list(trial), ε)[0])

    ours = Selection.of_mean(RUN, law, mean, eta).rdp(orders, trial, delta)
    # theirs has no λ̂ = 1, and for the Poisson law no monotonicity
    lowest = np.minimum.accumulate(np.asarray(theirs)[::-1])[::-1]
    assert np.allclose(ours, lowest, rtol=1e-6)


@pytest.mark.parametrize(("law", "eta"), LAWS)
def test_the_number_of_trials_has_the_law(law: str, eta: float) -> None:
    selection = Selection.of_mean(RUN, law, 5.0, eta)
    assert selection.mean == pytest.approx(5.0)
    numbers = probabilities(selection)
    assert numbers @ np.arange(len(numbers)) == pytest.approx(5.0, rel=1e-3)
    for k in (1, 2, 5, 20):
        end = float(numbers[: k + 1].sum())
        assert selection.number_of_trials(end - 1e-9) == k
        assert selection.number_of_trials(end + 1e-9) == k + 1
    assert selection.number_of_trials(math.nextafter(1.0, 0.0)) < 10**6


def row(selection: Selection | None, σ: float = 9.0) -> Release:
    return Release(0, "q", "m", "c", σ, 1.0, 1.0, "full", 1, 1, selection=selection)


@pytest.mark.parametrize(("law", "eta"), LAWS)
def test_a_selection_costs_more_than_a_trial_and_less_than_all(law: str, eta: float) -> None:
    selected = row(Selection.of_mean(RUN, law, 10.0, eta))
    trial = Totals.of([(9.0, 1.0, 1), (2.8, 1.0, 1)])
    assert epsilon(trial, 1e-5) < epsilon([selected], 1e-5) < epsilon(trial.times(10), 1e-5)
    # a trial's score is part of its cost, and a second selection or release adds to it
    assert epsilon([replaced_score(selected, 3.0)], 1e-5) > epsilon([selected], 1e-5)
    assert epsilon([selected, selected], 1e-5) > epsilon([selected], 1e-5)
    assert epsilon([selected, row(None)], 1e-5) > epsilon([selected], 1e-5)
    assert attack_success([selected], 0.01) > attack_success([row(None, 2.8)], 0.01)
    assert 0.5 < best_guess([row(None, 2.8)]) < best_guess([selected]) < 1
    assert epsilon([selected], 1e-5, "replace-one") > epsilon([selected], 1e-5)


def replaced_score(release: Release, σ: float) -> Release:
    return Release.from_json({**release.to_json(), "noise_multiplier": σ})


def test_a_score_without_noise_has_no_guarantee() -> None:
    assert math.isinf(epsilon([row(Selection(RUN, poisson_mean=10.0), 0.0)], 1e-5))


def test_the_worst_candidate_counts() -> None:
    few = Selection(RUN, poisson_mean=10.0)
    more = Selection((*RUN, ((2.0, 1.0, 1),)), poisson_mean=10.0)
    merged = [merge([row(selection)], "add-remove") for selection in (few, more)]
    assert merged[0] is not None
    assert merged[1] is not None
    assert (rdp_curve(merged[0]) < rdp_curve(merged[1])).all()
    sampled = Selection((((1.0, 0.01, 500),),), poisson_mean=10.0)
    assert 0 < epsilon([row(sampled)], 1e-5) < 20


def test_rows_are_kept_in_ledgers(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("ledger") / "a.jsonl"
    rows = [row(Selection.of_mean(RUN, *pair[:1], 4.0, pair[1])) for pair in LAWS]
    ledger = Ledger("a", path)
    for release in [*rows, row(None)]:
        ledger.charge(release)
    assert Ledger("a", path).releases == (*rows, row(None))
    assert "selection" not in json.loads(path.read_text().splitlines()[-1])
    assert epsilon_rdp(rows, 1e-5) is None
    assert totals(rows).covers(totals([]))


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"candidates": []}, "candidates"),
        ({"candidates": [[]]}, "candidates"),
        ({"candidates": [[[0.0, 1.0, 1]]]}, "candidates"),
        ({"candidates": [[[1.0, 1.0, 0]]]}, "candidates"),
        ({"candidates": 3}, "candidates"),
        ({"candidates": [[[1.0, 1.0]]]}, "candidates"),
        ({"poisson_mean": 1.0}, "poisson_mean"),
        ({"poisson_mean": 10.0, "eta": 1.0}, "eta"),
        ({"poisson_mean": None, "eta": -0.6, "gamma": 0.5}, "selection.eta"),
        ({"poisson_mean": None, "eta": 1.0, "gamma": 1.0}, "gamma"),
        ({"poisson_mean": None}, "selection.eta"),
        ({"more": 1}, "selection"),
    ],
)
def test_invalid_selections(changed: dict[str, object], code: str) -> None:
    stated = Selection(RUN, poisson_mean=10.0).to_json()
    with raises(PrivacySettingError, code):
        Selection.from_json({**stated, **changed})


@pytest.mark.parametrize("trials", [1 + 1e-7, 10.0, 500.0])
@pytest.mark.parametrize("eta", [5e-324, -1e-300, 1e-9])
def test_a_tiny_eta_has_almost_the_logarithmic_law(eta: float, trials: float) -> None:
    tiny = Selection.of_mean(RUN, "negative-binomial", trials, eta)
    logarithmic = Selection.of_mean(RUN, "negative-binomial", trials)
    assert tiny.gamma == pytest.approx(logarithmic.gamma, rel=1e-6)
    assert tiny.mean == pytest.approx(trials, rel=1e-9)


def test_a_trial_releases_nothing_that_was_not_charged() -> None:
    ledger = Ledger("a")
    ledger.charge(row(Selection(RUN, poisson_mean=10.0)))
    trial = TrialLedger(ledger, ledger.lines, Totals.of([(9.0, 1.0, 1), (2.8, 1.0, 1)]))
    trial.charge(row(None))
    trial.charge(row(None, 2.8))
    for again in (row(None), row(None, 2.8), row(None, 1.0)):
        with raises(LedgerError, "ledger.uncovered"):
            trial.charge(again)
    assert trial.releases == ledger.releases
    assert len(ledger.releases) == 1
