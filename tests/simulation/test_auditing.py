"""Tests of seeded audits of a run's settings: every mechanism, honest and faulty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth import RunSettings, resolve, simulate
from fedsynth.errors import FedsynthError
from fedsynth.federation.context import plan_of
from fedsynth.privacy import Ledger, PrivacyError, Release
from fedsynth.privacy.mechanisms import BudgetEnforcer
from fedsynth.privacy.products import Outer
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.simulation.audit import AuditedRun, AuditResult, audit_run
from fedsynth.simulation.canaries import Canaries
from tests.families import by_family

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
    method: str,
    values: dict[str, Any],
    rounds: int = 2,
    width: int = 32,
    clients: int = 1,
    **privacy: Any,
) -> RunSettings:
    """Returns settings on the digits' shape; each client nominally has 100 records and the canaries."""
    run = {"method": method, "rounds": rounds, "device": "cpu"}
    sections = {"run": run, "partition": {"clients": clients}, "model": {"width": width}}
    return resolve({**sections, "method": values, "privacy": {"nominal_size": 100, **privacy}})


def settings_with(mechanism: str, **privacy: Any) -> RunSettings:
    method, method_settings = MECHANISMS[mechanism]
    if method == "feddm":
        privacy["mechanism"] = mechanism
    return audit_settings(method, method_settings, width=WIDTHS.get(mechanism, 32), **privacy)


SMALL_SHARES = {"centre_share": 0.01, "moment_share": 0.01}
PHASES: dict[str, dict[str, Any]] = {
    "centre": {"centre_share": 0.9, "moment_share": 0.05},
    "moments": {"centre_share": 0.01, "moment_share": 0.97},
    "steps": SMALL_SHARES,
    "pictures": {**SMALL_SHARES, "pixel_share": 0.9, "ipc": 1, "image_steps": 1},
    "covariances": {**SMALL_SHARES, "covariance_share": 0.9, "whitening": "yes"},
}
"""FedStats with most of the budget in one release."""
SCATTERED = ("centre", "covariances")
"""Features of 324 coordinates: for many canaries 64 have no room, and pixels have no
covariances."""


def statistics(phase: str, sigma: float) -> RunSettings:
    features = "scattering" if phase in SCATTERED else "pixels"
    method = {"features": features, "second_moments": "yes", **PHASES[phase]}
    return audit_settings("fedstats", method, rounds=3, noise_multiplier=sigma)


@cache
def settings_of(mechanism: str, epsilon: float, **privacy: Any) -> RunSettings:
    """Returns settings with the σ of an ε, computed once."""
    plan = plan_of(settings_with(mechanism, epsilon=epsilon, **privacy)).privacy
    return settings_with(mechanism, noise_multiplier=plan.noise_multiplier, **privacy)


def all_records(mechanism: str) -> dict[str, float]:
    """Returns settings without sampling for DP-SGD: sampling hides canaries, and thus the faults."""
    return {"sample_rate": 1.0} if mechanism in ("dp-sgd", "fedfm") else {}


def seeded_audit(settings: RunSettings, seed: int = 0, **options: Any) -> AuditResult:
    return audit_run(settings, test_only=np.random.default_rng(seed), **options)


@pytest.mark.parametrize("mechanism", by_family(MECHANISMS, ("residual", "features", "dp-sgd")))
def test_audits_of_honest_runs_are_powerful_and_consistent(mechanism: str) -> None:
    audit = seeded_audit(settings_of(mechanism, 3.0))
    assert 2.97 < audit.epsilon <= 3
    assert 0.3 < audit.epsilon_lower_bound < audit.epsilon


@pytest.mark.parametrize("phase", by_family(("moments", "covariances"), ("moments",)))
def test_audits_of_fedstats_releases_are_powerful_and_consistent(phase: str) -> None:
    audit = seeded_audit(statistics(phase, 1.37))
    assert 0.2 < audit.epsilon_lower_bound < audit.epsilon < 3.1


def quarter_noise(patch: pytest.MonkeyPatch) -> None:
    original = SecretGenerator.normal

    def normal(self: SecretGenerator, shape: Any, noise_std: float, device: Any = "cpu") -> Tensor:
        return original(self, shape, noise_std / 4, device)

    patch.setattr(SecretGenerator, "normal", normal)


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
    original = BudgetEnforcer.charge

    def charge(self: BudgetEnforcer, release: Release) -> None:
        original(self, replace(release, steps=1))

    patch.setattr(BudgetEnforcer, "charge", charge)


Fault = Callable[[pytest.MonkeyPatch], None]
# canaries change their sign from round to round: equal noise cancels in their scores
FAULTS: dict[Fault, float] = {
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
    mechanism: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(mechanism, FAULTS[fault], **all_records(mechanism))
    fault(monkeypatch)
    audit = seeded_audit(settings)
    assert 0.99 < audit.epsilon < 3
    assert audit.fault


@pytest.mark.parametrize("phase", PHASES)
def test_reduced_noise_is_detected_in_each_fedstats_release(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claimed ε is 1."""
    quarter_noise(monkeypatch)
    canaries = 320 if phase in SCATTERED else 1000
    assert seeded_audit(statistics(phase, 3.74), canaries=canaries).fault


@pytest.mark.parametrize("clips", [True, False])
def test_audited_sums_clip_products_like_other_sums(
    clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an audit that clips expanded products itself misses products without a clip."""
    if not clips:
        for name, value in (
            ("clip_rows", lambda x, clip: x),
            ("clip_factors", lambda x, clip: x**0),
        ):
            monkeypatch.setattr(f"fedsynth.privacy.products.{name}", value)
    columns = 100 * torch.eye(3, dtype=torch.float64)[:2]
    rows = torch.ones(2, 2).double()
    products = Outer(columns, rows, 1.0)
    release = Release(1, "x", "audit", "rows", 1e-9, 1.0, 1.0, "full", 1, 6)
    canaries = Canaries(torch.tensor([0]), torch.tensor([True]), 1, torch.Generator())
    guard = BudgetEnforcer(Ledger("c"), 1e-5, None)
    series = canaries.series(release, 1, guard, SecretGenerator())
    series.sample(2)
    series.add_products(products)
    released = series.release()[0].double()
    first = products.part(slice(0, 1)).sums()  # the record without a canary
    assert float((released - first).norm()) == pytest.approx(1.0, rel=1e-4)  # the canary's, clipped
    assert (float(released.norm()) > 50) is not clips


def test_audits_follow_the_plan_without_using_the_ledger(tmp_path: Path) -> None:
    """Public sizes are kept, although the random data are fewer and have no test split."""
    sections = {
        "run": {"method": "feddm", "rounds": 1, "device": "cpu"},
        "partition": {"clients": 2, "local_test": 0.2},
        "model": {"width": 8},
        "method": {"iterations": 2, "ipc": 1, "server_epochs": 1, "batch": 8},
    }
    ledger = str(tmp_path)
    settings = resolve({**sections, "privacy": {"epsilon": 2.0, "ledger": ledger}})
    simulate(resolve({**sections, "privacy": {"noise_multiplier": 7.0, "ledger": ledger}}))

    def files() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    initial_files = files()
    rows: list[Release] = []
    original = AuditedRun.claimed

    def claimed(self: AuditedRun) -> float:
        rows.extend(self.budget.ledger.history().releases)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AuditedRun, "claimed", claimed)
        audit = seeded_audit(settings, canaries=50)
    assert rows == plan_of(settings).planned()
    assert 0 < audit.epsilon < 2
    assert files() == initial_files


def test_audited_client_takes_part_most_often() -> None:
    settings = settings_of("residual", 2.0)
    method = replace(settings.method, iterations=1, ipc=1)  # type: ignore[call-arg]
    settings = replace(settings, participation=0.34, rounds=4, method=method)
    settings = replace(settings, partition=replace(settings.partition, clients=3))
    audit = seeded_audit(settings, canaries=20)
    assert audit.epsilon == pytest.approx(plan_of(settings).planned_epsilon())


SECURE = {"features": "pixels", "aggregation": "secure"}  # an upload is part of a sum
PAPER = {"noise_multiplier": 1.0, "mechanism": "paper"}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"privacy": None}, {}, "privacy.noise_multiplier or privacy.epsilon must be set"),
        ({}, {"canaries": 1}, "canaries must be at least 2"),
        ({}, {"guesses": 7}, "must be even"),
        ({}, {"guesses": 1002}, "must be even"),
        ({}, {"confidence": 1.0}, "confidence must be in"),
        (audit_settings("fedstats", SECURE, clients=3, noise_multiplier=1.0), {}, "aggregation"),
        (audit_settings("feddm", {}, **PAPER), {}, "has no ε to test"),
    ],
)
def test_runs_that_cannot_be_audited_are_refused(
    change: Any, options: dict[str, Any], message: str
) -> None:
    settings = change
    if isinstance(change, dict):
        settings = replace(settings_of("residual", 2.0), **change)
    with pytest.raises((FedsynthError, PrivacyError), match=message):
        audit_run(settings, **options)
