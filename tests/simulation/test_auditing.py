"""The audit of a run's own settings through every mechanism, honest and broken; seeded."""

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


def audited(
    method: str,
    of_method: dict[str, Any],
    rounds: int = 2,
    width: int = 32,
    clients: int = 1,
    **privacy: Any,
) -> RunSettings:
    """On the digits' shape; each client nominally has 100 records besides the canaries."""
    run = {"method": method, "rounds": rounds, "device": "cpu"}
    given = {"run": run, "partition": {"clients": clients}, "model": {"width": width}}
    return resolve({**given, "method": of_method, "privacy": {"nominal_size": 100, **privacy}})


def settings_with(mechanism: str, **privacy: Any) -> RunSettings:
    method, of_method = MECHANISMS[mechanism]
    if method == "feddm":
        privacy["mechanism"] = mechanism
    return audited(method, of_method, width=WIDTHS.get(mechanism, 32), **privacy)


LITTLE = {"centre_share": 0.01, "moment_share": 0.01}
PHASES: dict[str, dict[str, Any]] = {
    "centre": {"centre_share": 0.9, "moment_share": 0.05},
    "moments": {"centre_share": 0.01, "moment_share": 0.97},
    "steps": LITTLE,
    "pictures": {**LITTLE, "pixel_share": 0.9, "ipc": 1, "image_steps": 1},
    "covariances": {**LITTLE, "covariance_share": 0.9, "whitening": "yes"},
}
"""FedStats with most of the budget in one release."""
SCATTERED = ("centre", "covariances")
"""Features of 324 coordinates: for many canaries 64 have no room, and pixels have no
covariances."""


def statistics(phase: str, sigma: float) -> RunSettings:
    features = "scattering" if phase in SCATTERED else "pixels"
    method = {"features": features, "second_moments": "yes", **PHASES[phase]}
    return audited("fedstats", method, rounds=3, noise_multiplier=sigma)


@cache
def settings_of(mechanism: str, epsilon: float, **privacy: Any) -> RunSettings:
    """With the σ that ε takes, found once."""
    found = plan_of(settings_with(mechanism, epsilon=epsilon, **privacy)).privacy
    return settings_with(mechanism, noise_multiplier=found.noise_multiplier, **privacy)


def all_records(mechanism: str) -> dict[str, float]:
    """DP-SGD without sampling, which hides canaries from most releases, and these faults too."""
    return {"sample_rate": 1.0} if mechanism in ("dp-sgd", "fedfm") else {}


def seeded(settings: RunSettings, seed: int = 0, **options: Any) -> AuditResult:
    return audit_run(settings, test_only=np.random.default_rng(seed), **options)


@pytest.mark.parametrize("mechanism", by_family(MECHANISMS, ("residual", "features", "dp-sgd")))
def test_an_honest_run_is_not_refuted_and_the_audit_has_power(mechanism: str) -> None:
    found = seeded(settings_of(mechanism, 3.0))
    assert 2.97 < found.epsilon <= 3
    assert 0.3 < found.epsilon_lower_bound < found.epsilon


@pytest.mark.parametrize("phase", by_family(("moments", "covariances"), ("moments",)))
def test_an_honest_release_of_fedstats_is_not_refuted_and_the_audit_has_power(phase: str) -> None:
    found = seeded(statistics(phase, 1.37))
    assert 0.2 < found.epsilon_lower_bound < found.epsilon < 3.1


def a_quarter_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    original = SecretGenerator.normal

    def normal(self: SecretGenerator, shape: Any, noise_std: float, device: Any = "cpu") -> Tensor:
        return original(self, shape, noise_std / 4, device)

    patch.setattr(SecretGenerator, "normal", normal)


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fedsynth.privacy.mechanisms.clip_rows", lambda rows, clip: rows.double())


def the_same_noise_in_every_round(patch: pytest.MonkeyPatch) -> None:
    drawn: dict[tuple[int, int], Tensor] = {}
    calls: Counter[int] = Counter()
    original, one_round = SecretGenerator.normal, AuditedRun.play

    def normal(self: SecretGenerator, *args: Any) -> Tensor:
        calls[id(self)] += 1
        key = id(self), calls[id(self)]
        if key not in drawn:
            drawn[key] = original(self, *args)
        return drawn[key]

    def start_again(self: AuditedRun, context: Any) -> Any:
        calls.clear()
        return one_round(self, context)

    patch.setattr(SecretGenerator, "normal", normal)
    patch.setattr(AuditedRun, "play", start_again)


def one_release_of_each_series_charged(patch: pytest.MonkeyPatch) -> None:
    original = BudgetEnforcer.charge

    def charge(self: BudgetEnforcer, release: Release) -> None:
        original(self, replace(release, steps=1))

    patch.setattr(BudgetEnforcer, "charge", charge)


Twin = Callable[[pytest.MonkeyPatch], None]
# the canaries turn their sign from round to round: the same noise cancels in their scores
FAULTS: dict[Twin, float] = {
    a_quarter_of_the_noise: 2.0,
    no_clipping: 1.0,
    the_same_noise_in_every_round: 2.0,
    one_release_of_each_series_charged: 9.0,
}


@pytest.mark.parametrize(
    ("mechanism", "twin"),
    [
        *((mechanism, a_quarter_of_the_noise) for mechanism in MECHANISMS if mechanism != "fedfm"),
        pytest.param("fedfm", a_quarter_of_the_noise, marks=pytest.mark.slow),
        pytest.param("fedaf", no_clipping, marks=pytest.mark.slow),
        ("residual", no_clipping),
        ("dp-sgd", no_clipping),
        ("features", the_same_noise_in_every_round),
        ("dp-sgd", the_same_noise_in_every_round),
        ("residual", one_release_of_each_series_charged),
    ],
)
def test_broken_twins_are_caught_at_a_claim_of_1_to_3(
    mechanism: str, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(mechanism, FAULTS[twin], **all_records(mechanism))
    twin(monkeypatch)
    found = seeded(settings)
    assert 0.99 < found.epsilon < 3
    assert found.fault


@pytest.mark.parametrize("phase", PHASES)
def test_a_quarter_of_the_noise_shows_in_each_release_of_fedstats(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a claim of ε = 1."""
    a_quarter_of_the_noise(monkeypatch)
    canaries = 320 if phase in SCATTERED else 1000
    assert seeded(statistics(phase, 3.74), canaries=canaries).fault


@pytest.mark.parametrize("clips", [True, False])
def test_products_enter_a_watched_sum_as_they_enter_any_other(
    clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an audit that writes products out and clips them itself, so that products without a
    clip look sound."""
    if not clips:
        monkeypatch.setattr(Outer, "_clipped", lambda self: (self.column, self.row))
    left = 100 * torch.eye(3, dtype=torch.float64)[:2]
    right = torch.ones(2, 2).double()
    products = Outer(left, right, 1.0)
    row = Release(1, "x", "audit", "rows", 1e-9, 1.0, 1.0, "full", 1, 6)
    canaries = Canaries(torch.tensor([0]), torch.tensor([True]), 1, torch.Generator())
    guard = BudgetEnforcer(Ledger("c"), 1e-5, None)
    made = canaries.series(row, 1, guard, SecretGenerator())
    made.sample(2)
    made.add_products(products)
    watched = made.release()[0].double()
    first = products.part(slice(0, 1)).sums()  # the record beside the canary
    assert float((watched - first).norm()) == pytest.approx(1.0, rel=1e-4)  # the canary's, clipped
    assert (float(watched.norm()) > 50) is not clips


def test_an_audit_has_the_runs_plan_and_does_not_use_its_ledger(tmp_path: Path) -> None:
    """Public sizes stay as they are, though the random data are fewer and none is held out."""
    sections = {
        "run": {"method": "feddm", "rounds": 1, "device": "cpu"},
        "partition": {"clients": 2, "local_test": 0.2},
        "model": {"width": 8},
        "method": {"iterations": 2, "ipc": 1, "server_epochs": 1, "batch": 8},
    }
    ledger = str(tmp_path)
    given_settings = resolve({**sections, "privacy": {"epsilon": 2.0, "ledger": ledger}})
    simulate(resolve({**sections, "privacy": {"noise_multiplier": 7.0, "ledger": ledger}}))

    def files() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    before = files()
    rows: list[Release] = []
    original = AuditedRun.claimed

    def claimed(self: AuditedRun) -> float:
        rows.extend(self.budget.ledger.history().releases)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AuditedRun, "claimed", claimed)
        found = seeded(given_settings, canaries=50)
    assert rows == plan_of(given_settings).planned()
    assert 0 < found.epsilon < 2
    assert files() == before


def test_the_client_is_one_that_takes_part_most_often() -> None:
    few = settings_of("residual", 2.0)
    brief = replace(few.method, iterations=1, ipc=1)  # type: ignore[call-arg]
    few = replace(few, participation=0.34, rounds=4, method=brief)
    few = replace(few, partition=replace(few.partition, clients=3))
    found = seeded(few, canaries=20)
    assert found.epsilon == pytest.approx(plan_of(few).planned_epsilon())


SECURE = {"features": "pixels", "aggregation": "secure"}  # an upload is part of a sum
PAPER = {"noise_multiplier": 1.0, "mechanism": "paper"}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"privacy": None}, {}, "privacy.noise_multiplier or privacy.epsilon must be set"),
        ({}, {"canaries": 1}, "canaries must be at least 2"),
        ({}, {"guesses": 7}, "even number"),
        ({}, {"guesses": 1002}, "even number"),
        ({}, {"confidence": 1.0}, "confidence must be at least"),
        (audited("fedstats", SECURE, clients=3, noise_multiplier=1.0), {}, "aggregation"),
        (audited("feddm", {}, **PAPER), {}, "has no ε that an audit could test"),
    ],
)
def test_a_run_that_cannot_be_audited_is_refused(
    change: Any, options: dict[str, Any], message: str
) -> None:
    settings = change
    if isinstance(change, dict):
        settings = replace(settings_of("residual", 2.0), **change)
    with pytest.raises((FedsynthError, PrivacyError), match=message):
        audit_run(settings, **options)
