"""Tests of seeded audits of a run's settings: every mechanism, honest and faulty, and canaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth import RunSettings, resolve, simulate
from fedsynth.errors import FedsynthError
from fedsynth.federation.context import plan_of
from fedsynth.privacy import Ledger, PrivacyError, Release
from fedsynth.privacy.mechanisms import BudgetEnforcer, clip_factors
from fedsynth.privacy.products import Outer
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.simulation.audit import AuditedRun, AuditResult, audit_run
from fedsynth.simulation.canaries import (
    COLUMNS,
    AuditedSums,
    Canaries,
    draw_directions,
    log_likelihood_ratios,
)
from tests.privacy.test_ledger import file_contents
from tests.quick_runs import by_family, quick_sections
from tests.raising import raises

CONDENSE = {"iterations": 16, "ipc": 1, "server_epochs": 1}
TRAIN = {"local_steps": 4, "batch": 20}
MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "residual": ("feddm", CONDENSE),
    "gradient": ("feddm", {**CONDENSE, "iterations": 3}),
    "features": ("feddm", {**CONDENSE, "count_noise": 10.0}),
    "fedaf": ("fedaf", CONDENSE),
    "dp-sgd": ("fedavg", TRAIN),
    "fedfm": ("fedfm", {**TRAIN, "weight": 0.5}),
}

WIDTHS = {"gradient": 8, "dp-sgd": 16, "fedfm": 16}


def audit_settings(
    method: str, values: dict[str, Any], width: int = 32, rounds: int = 2, **privacy: Any
) -> RunSettings:
    """Returns settings on the digits' shape: nominally 100 records a client, and the canaries."""
    run = {"method": method, "rounds": rounds, "device": "cpu"}
    sections = {"run": run, "partition": {"clients": 1}, "model": {"width": width}}
    return resolve({**sections, "method": values, "privacy": {"nominal_size": 100, **privacy}})


def settings_with(mechanism: str, **privacy: Any) -> RunSettings:
    method, values = MECHANISMS[mechanism]
    named = {"mechanism": mechanism} if method == "feddm" else {}
    return audit_settings(method, values, WIDTHS.get(mechanism, 32), **named, **privacy)


SMALL_SHARES = {"centre_share": 0.01, "moment_share": 0.01}
# FedStats with most of the budget in one release.
EXCHANGES: dict[str, dict[str, Any]] = {
    "centre": {"centre_share": 0.9, "moment_share": 0.05},
    "moments": {"centre_share": 0.01, "moment_share": 0.97},
    "steps": SMALL_SHARES,
    "pictures": {**SMALL_SHARES, "pixel_share": 0.9, "ipc": 1, "image_steps": 1},
    "covariances": {**SMALL_SHARES, "covariance_share": 0.9, "whitening": "yes"},
}
# Features of 324 coordinates: for many canaries 64 have no room, and pixels have no
# covariances.
SCATTERED = ("centre", "covariances")


def statistics(exchange: str, sigma: float) -> RunSettings:
    features = "scattering" if exchange in SCATTERED else "pixels"
    method = {"features": features, "second_moments": "yes", **EXCHANGES[exchange]}
    return audit_settings("fedstats", method, rounds=3, noise_multiplier=sigma)


@cache
def settings_of(mechanism: str, epsilon: float, **privacy: Any) -> RunSettings:
    """Returns settings with the σ of an ε, computed once."""
    plan = plan_of(settings_with(mechanism, epsilon=epsilon, **privacy)).privacy
    return settings_with(mechanism, noise_multiplier=plan.noise_multiplier, **privacy)


def seeded_audit(settings: RunSettings, seed: int = 0, **options: Any) -> AuditResult:
    return audit_run(settings, test_only=np.random.default_rng(seed), **options)


QUICK = ("residual", "features", "dp-sgd", "moments")


@pytest.mark.parametrize("mechanism", by_family((*MECHANISMS, "moments", "covariances"), QUICK))
def test_audits_of_honest_runs_are_powerful_and_consistent(mechanism: str) -> None:
    sums = mechanism in EXCHANGES
    audit = seeded_audit(statistics(mechanism, 1.37) if sums else settings_of(mechanism, 3.0), 1)
    assert 2.97 < audit.epsilon <= (3.1 if sums else 3)
    assert 0.2 < audit.epsilon_lower_bound < audit.epsilon
    assert not audit.fault
    # gradients have 64 coordinates for the 100 canaries of a class
    assert (audit.highest > 1.2) is (mechanism != "gradient")


def test_repeated_audits_pool_their_canaries() -> None:
    audit = seeded_audit(statistics("moments", 1.37), canaries=300, repeats=3)
    assert (audit.canaries, audit.guesses) == (900, 360)
    assert 1.2 < audit.highest < audit.epsilon
    names = [bound.name for bound in audit.bounds]
    assert names == ["f-DP", "order statistics", "Gaussian pair"]


def quarter_noise(patch: pytest.MonkeyPatch) -> None:
    draw = SecretGenerator.normal
    patch.setattr(SecretGenerator, "normal", lambda *a: draw(*a[:2], a[2] / 4, *a[3:]))


def skip_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fedsynth.privacy.mechanisms.clip_factors", lambda squares, clip: squares**0)


def repeat_noise(patch: pytest.MonkeyPatch) -> None:
    drawn: dict[tuple[int, int], Tensor] = {}
    calls: Counter[int] = Counter()
    original, one_round = SecretGenerator.normal, AuditedRun.play

    def normal(self: SecretGenerator, *args: Any) -> Tensor:
        calls[id(self)] += 1
        key = id(self), calls[id(self)]
        if key not in drawn:
            drawn[key] = original(self, *args)
        return drawn[key]

    def restart_noise(self: AuditedRun, context: Any) -> Any:
        calls.clear()
        return one_round(self, context)

    patch.setattr(SecretGenerator, "normal", normal)
    patch.setattr(AuditedRun, "play", restart_noise)


def charge_one_release(patch: pytest.MonkeyPatch) -> None:
    charge = BudgetEnforcer.charge
    patch.setattr(BudgetEnforcer, "charge", lambda guard, row: charge(guard, replace(row, steps=1)))


# canaries change their sign from round to round: equal noise cancels in their scores
FAULTS: dict[Callable[[pytest.MonkeyPatch], None], float] = {
    quarter_noise: 2.0,
    skip_clipping: 1.0,
    repeat_noise: 2.0,
    charge_one_release: 9.0,
}


@pytest.mark.parametrize(
    ("mechanism", "fault"),
    [
        *((mechanism, quarter_noise) for mechanism in MECHANISMS if mechanism != "fedfm"),
        pytest.param("fedfm", quarter_noise, marks=pytest.mark.slow),
        pytest.param("fedaf", skip_clipping, marks=pytest.mark.slow),
        ("residual", skip_clipping),
        ("dp-sgd", skip_clipping),
        ("features", repeat_noise),
        ("dp-sgd", repeat_noise),
        ("residual", charge_one_release),
    ],
)
def test_faulty_mechanisms_are_detected(
    mechanism: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # sampling hides canaries, and thus the faults
    all_records = {"sample_rate": 1.0} if mechanism in ("dp-sgd", "fedfm") else {}
    settings = settings_of(mechanism, FAULTS[fault], **all_records)
    fault(monkeypatch)
    audit = seeded_audit(settings)
    assert 0.99 < audit.epsilon < 3
    assert audit.fault


def test_few_sampled_steps_have_no_pair_of_sums() -> None:
    """Regression: with σ = 1, q = 0.5 and one step, a Gaussian pair has ε = 4.2 instead of 3.5."""
    step = {"local_steps": 1, "batch": 20}
    settings = audit_settings("fedavg", step, 16, rounds=1, noise_multiplier=1.0, sample_rate=0.5)
    audit = seeded_audit(settings)
    assert [bound.name for bound in audit.bounds] == ["Gaussian pair of each step"]
    assert 0.6 * audit.epsilon < audit.highest < audit.epsilon


def half_noise(patch: pytest.MonkeyPatch) -> None:
    draw: Any = SecretGenerator.normal
    patch.setattr(SecretGenerator, "normal", lambda *a: draw(*a[:2], a[2] / 2, *a[3:]))


def wide_clip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "fedsynth.privacy.mechanisms.clip_factors",
        lambda squares, clip: clip_factors(squares, 2**0.5 * clip),
    )


def one_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SecretGenerator, "poisson_sample", cache(SecretGenerator.poisson_sample))


@pytest.mark.parametrize(
    ("mechanism", "fault", "finds"),
    [
        ("residual", half_noise, "order statistics"),
        ("features", wide_clip, "Gaussian pair"),
        ("dp-sgd", wide_clip, "Gaussian pair of each step"),
        ("dp-sgd", one_mask, "Gaussian pair"),
    ],
)
def test_small_faults_are_detected_by_independent_scores(
    mechanism: str, fault: Any, finds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(mechanism, 3.0)
    if fault is one_mask:  # the fewer sampled and the more steps, the more it reveals
        steps = {**TRAIN, "local_steps": 8}
        settings = audit_settings("fedavg", steps, 16, sample_rate=0.1, epsilon=3.0)
    fault(monkeypatch)
    audit = seeded_audit(settings, 1)
    assert audit.epsilon_lower_bound < audit.epsilon  # without assumptions, it is not found
    assert audit.fault
    assert {bound.name: bound.epsilon for bound in audit.bounds}[finds] > audit.epsilon


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_reduced_noise_is_detected_in_each_fedstats_release(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarter_noise(monkeypatch)
    canaries = 320 if exchange in SCATTERED else 1000
    assert seeded_audit(statistics(exchange, 3.74), 1, canaries=canaries).fault


@pytest.mark.parametrize("clips", [True, False])
def test_audited_sums_clip_products(clips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an audit that clips expanded products itself misses products without a clip."""
    if not clips:
        monkeypatch.setattr("fedsynth.privacy.products.clip_rows", lambda x, clip: x)
        monkeypatch.setattr("fedsynth.privacy.products.clip_factors", lambda x, clip: x**0)
    products = Outer(100 * torch.eye(3).double()[:2], torch.ones(2, 2).double(), 1.0)
    release = Release(1, "x", "audit", "rows", 1e-9, 1.0, 1.0, "full", 1, 6)
    canaries = Canaries(torch.tensor([0]), torch.tensor([True]), 1, torch.Generator())
    guard = BudgetEnforcer(Ledger("c"))
    mechanism = AuditedSums(canaries, release, 1, guard, SecretGenerator())
    mechanism.sample(2)
    mechanism.add_products(products)
    released = mechanism.release()[0].double()
    first = products.part(slice(0, 1)).sums()  # the record without a canary
    assert float((released - first).norm()) == pytest.approx(1.0, rel=1e-4)  # the canary's, clipped
    assert (float(released.norm()) > 50) is not clips


def test_audits_follow_plan_without_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public sizes are kept, although the random data are fewer and have no test split."""
    sections = quick_sections("feddm", run={"rounds": 1}, partition={"local_test": 0.2})
    ledger = {"ledger": str(tmp_path)}
    settings = resolve({**sections, "privacy": {"epsilon": 2.0, **ledger}})
    simulate(resolve({**sections, "privacy": {"noise_multiplier": 7.0, **ledger}}))
    initial_files = file_contents(tmp_path)
    spy = create_autospec(AuditedRun.claimed, side_effect=AuditedRun.claimed)
    monkeypatch.setattr(AuditedRun, "claimed", spy)
    audit = seeded_audit(settings, canaries=50)
    (run,) = spy.call_args.args
    assert list(run.budget.ledger.history().releases) == plan_of(settings).planned()
    assert 0 < audit.epsilon < 2
    assert file_contents(tmp_path) == initial_files


def test_audited_client_takes_part_most_often() -> None:
    run = {"rounds": 4, "participation": 0.34}
    settings = resolve(quick_sections("feddm", run=run, privacy={"noise_multiplier": 4.0}))
    audit = seeded_audit(settings, canaries=20)
    assert audit.epsilon == pytest.approx(plan_of(settings).planned_epsilon())


def test_runs_that_cannot_be_audited_are_refused() -> None:
    noise, honest = {"noise_multiplier": 1.0}, settings_of("residual", 2.0)
    secure = quick_sections("fedstats", method={"aggregation": "secure"}, privacy=noise)
    paper = quick_sections("feddm", privacy={**noise, "mechanism": "paper"})
    cases: list[tuple[RunSettings, dict[str, Any], str]] = [
        (replace(honest, privacy=None), {}, "privacy.noise_multiplier"),
        (honest, {"canaries": 1}, "canaries"),
        (honest, {"guesses": 7}, "guesses"),
        (honest, {"guesses": 1002}, "guesses"),
        (honest, {"confidence": 1.0}, "confidence"),
        (honest, {"repeats": 0}, "repeats"),
        (resolve(secure), {}, "aggregation"),  # an upload is part of a sum
        (resolve(paper), {}, "privacy.mechanism"),
    ]
    for settings, options, message in cases:
        with raises(FedsynthError, message):
            audit_run(settings, **options)


def canaries() -> Canaries:
    order = torch.arange(20)
    return Canaries(order % 10, order % 3 == 0, 30, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_vectors_belong_only_to_included_canaries(scale: float, device: torch.device) -> None:
    """Norms in float32 overflow above 1e19."""
    audited = canaries()
    row = Release(1, "x", "m", "x", 1e-9, 2.0, 1.0, "full", 1, 50)  # almost no noise
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    mechanism = AuditedSums(audited, row, 10, BudgetEnforcer(Ledger("0")), secret)
    indices = audited.among_records()
    records, labels = 30 + len(indices), torch.cat([torch.arange(30) % 10, audited.labels[indices]])
    sampled = mechanism.sample(records)
    assert len(sampled) == 30 + int(audited.included.sum())
    rows = scale * torch.randn(records, 5, generator=torch.Generator().manual_seed(1))
    for batch in sampled.split(7):
        mechanism.add(rows[batch].to(device), labels[batch].to(device))
    clipped = rows[:30].double() * (2.0 / rows[:30].double().norm(dim=1, keepdim=True)).clamp_max(1)
    sums = torch.zeros(10, 5, dtype=torch.float64).index_add(0, labels[:30], clipped)
    remainder = mechanism.release().cpu().double() - sums
    counts = torch.bincount(audited.labels[audited.included], minlength=10)
    assert counts.tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    torch.testing.assert_close(remainder.norm(dim=1), 2.0 * counts.double(), rtol=0, atol=1e-5)
    assert bool((audited.scores[audited.included] > 0).all())
    assert bool((audited.scores[~audited.included] < 0).all())


def test_unused_directions_are_scored_as_absent_canaries() -> None:
    """A broken version would score directions that lie in a sum, or that lack a sum's noise."""
    audited = Canaries(torch.zeros(40).long(), torch.arange(40) < 30, 1, torch.Generator())
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    for width, unused in ((5000, 40), (70, 30), (60, 20), (90, 20)):
        row = Release(1, "x", "m", "x", 1.0, 2.0, 1.0, "full", 1, width)
        mechanism = AuditedSums(audited, row, 1, BudgetEnforcer(Ledger("0")), secret)
        mechanism.add(torch.ones(31, width), torch.zeros(31).long()[mechanism.sample(31)])
        mechanism.release()
        assert len(audited.unused) == unused
    scores = audited.independent
    assert float(scores[audited.included].mean()) == pytest.approx(4, abs=2)  # 4 sums, σ = 1
    for absent in (scores[~audited.included], audited.unused):
        assert abs(float(absent.mean())) < 2.2  # at least three deviations
        assert 0.5 < float(absent.std()) < 4


def test_sampled_records_missing_from_the_sum_raise_errors() -> None:
    """A broken version would cap batches, which the accounting ignores."""
    audited = canaries()
    row = Release(1, "x", "m", "x", 1.0, 2.0, 1.0, "full", 1, 50)
    mechanism = AuditedSums(audited, row, 10, BudgetEnforcer(Ledger("0")), SecretGenerator())
    mechanism.sample(37)
    mechanism.add(torch.ones(36, 5), torch.zeros(36, dtype=torch.int64))
    with raises(PrivacyError, "audit.added"):
        mechanism.release()


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_scores_are_likelihood_ratios_with_others_as_noise(rate: float, orthogonal: bool) -> None:
    rng = np.random.default_rng(0)
    u, y, s = rng.normal(size=(6, 8)), rng.normal(size=8), 0.7
    if orthogonal:
        u = 2.0 * draw_directions(6, 8, torch.Generator().manual_seed(0)).units[:6].numpy()
    expected = []
    for i in range(6):
        others = np.delete(u, i, axis=0)
        noise = s**2 * np.eye(8) + rate / 2 * (1 - rate / 2) * others.T @ others
        z = u[i] @ np.linalg.solve(noise, y - rate / 2 * others.sum(axis=0))
        k = u[i] @ np.linalg.solve(noise, u[i])
        expected.append(np.log(1 - rate + rate * np.exp(z - k / 2)))
    scores = log_likelihood_ratios(torch.tensor(y), torch.tensor(u), s, rate, orthogonal=orthogonal)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 60), (40, 40), (40, 7), (3, 10 * COLUMNS)])
def test_directions_are_unit_vectors_and_orthogonal_if_possible(rows: int, width: int) -> None:
    drawn = draw_directions(rows, width, torch.Generator().manual_seed(0))
    gram = drawn.units @ drawn.units.T
    vectors = max(rows, min(2 * rows, width))  # with unused ones
    torch.testing.assert_close(gram.diagonal(), torch.ones(vectors, dtype=torch.float64))
    assert drawn.orthogonal == (rows <= width)
    assert len(set(drawn.columns.tolist())) == min(width, COLUMNS)
    if width > COLUMNS:  # of all parts
        tenths = torch.bincount(drawn.columns // COLUMNS, minlength=10)
        assert int(tenths.min()) > COLUMNS / 10 * 0.8
    if drawn.orthogonal:
        assert float((gram - torch.eye(vectors)).abs().max()) < 1e-12
