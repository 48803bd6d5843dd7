"""Tests of a step's release budget: each charged release is taken once, by name, in its exchange."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.data.images import from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.privacy.errors import (
    BudgetExceededError,
    PrivacySettingError,
    UnplannedReleaseError,
)
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.plans import (
    FIRST,
    MAIN,
    ReleaseBudget,
    ReleasePlan,
    UnaccountedNoise,
    charge_round,
    check_plans,
)
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import USER
from tests.privacy.support import plan

SPEC = dataset_spec("digits")
IMAGES = plan(name="images", sample_rate=0.5, steps=3, dimension=40, groups=10)
COUNTS = replace(
    IMAGES,
    name="counts",
    quantity="counts",
    clip=1.0,
    steps=1,
    dimension=10,
    relative_noise_multiplier=4.0,
)
LOGITS = replace(COUNTS, name="logits", quantity="sums of logits", phase=FIRST)
PLANS = (IMAGES, COUNTS, LOGITS)


def charged(
    ledger: Ledger, phase: str = MAIN, plans: tuple[ReleasePlan, ...] = PLANS, cap: float = 1e6
) -> ReleaseBudget[GaussianSumMechanism]:
    return charge_round(
        plans, 4, 3.0, BudgetEnforcer(ledger, 1e-5, cap), SecretGenerator(), phase=phase
    )


DATA = from_arrays(np.zeros((20, 1, 8, 8), np.uint8), np.arange(20) % 10, SPEC)


def group(*budgets: ReleaseBudget[GaussianSumMechanism]) -> PrivateClientView:
    parts = list(torch.arange(20).tensor_split(len(budgets)))
    return PrivateClientView(range(len(budgets)), DATA, parts, budgets)


def test_exchange_is_charged_for_planned_releases() -> None:
    ledger = Ledger("a")
    charged(ledger)
    assert list(ledger.releases) == [IMAGES.release(4, 3.0), COUNTS.release(4, 3.0)]
    row = COUNTS.release(4, 3.0, unit=USER)
    assert (row.round, row.noise_multiplier, row.sensitivity, row.unit) == (4, 12.0, 1.0, USER)
    assert (row.quantity, row.steps, row.dimension) == ("counts", 1, 10)
    assert (row.sampler, row.sample_rate, row.unaccounted) == ("poisson", 0.5, None)
    assert replace(COUNTS, sample_rate=1.0).release(4, 3.0).sampler == "full"
    with pytest.raises(BudgetExceededError):
        charged(ledger, FIRST, cap=0.1)
    charged(ledger, FIRST)
    assert [release.quantity for release in ledger.releases[2:]] == ["sums of logits"]


def test_series_are_taken_by_name_once() -> None:
    clients = group(charged(Ledger("a")), charged(Ledger("b")))
    images = clients.series("images")
    assert [mechanism.steps_left for mechanism in images] == [3, 3]
    assert [mechanism.noise_std for mechanism in images] == [6.0, 6.0]
    assert clients.series("counts")[0].noise_std == 12.0
    with pytest.raises(UnplannedReleaseError, match="release 'images' only once"):
        clients.series("images")
    for name in ("weights", "logits"):
        with pytest.raises(UnplannedReleaseError, match=f"'{name}' .*main exchange"):
            clients.series(name)
    first = group(charged(Ledger("a"), FIRST))
    with pytest.raises(UnplannedReleaseError, match="first exchange"):
        first.series("images")
    assert first.series("logits")[0].steps_left == 1


def test_mechanism_taken_by_client_is_taken_for_group() -> None:
    clients = group(charged(Ledger("a")), charged(Ledger("b")))
    (taken_mechanism,) = clients.select(1).series("images")
    for view in (clients.select(1), clients):
        with pytest.raises(UnplannedReleaseError, match="only once a round"):
            view.series("images")
    (other,) = clients.select(0).series("images")  # the rejected call consumed nothing
    assert taken_mechanism is not other


def test_step_reads_charged_plan() -> None:
    shortened = replace(IMAGES, steps=1)
    clients = group(charged(Ledger("a")), charged(Ledger("b"), plans=(shortened, COUNTS, LOGITS)))
    assert clients.plan("counts") == COUNTS
    assert [clients.select(k).plan("images").steps for k in (0, 1)] == [3, 1]
    assert [mechanism.steps_left for mechanism in clients.series("images")] == [3, 1]
    with pytest.raises(UnplannedReleaseError, match="different plans for release 'images'"):
        clients.plan("images")


def test_uncharged_group_has_no_series() -> None:
    with pytest.raises(UnplannedReleaseError, match="not charged to any client"):
        PrivateClientView([0], DATA, [torch.arange(20)], []).series("images")
    with pytest.raises(UnplannedReleaseError, match="not charged to any client"):
        ExactClientView([0], DATA, [torch.arange(20)]).noise("images")


def test_unaccounted_noise_is_taken_once() -> None:
    row = IMAGES.release(1, 3.0, unaccounted="as printed")
    budget = ReleaseBudget(MAIN, [(IMAGES, UnaccountedNoise(row, SecretGenerator()))])
    clients = ExactClientView([0], DATA, [torch.arange(20)], [budget])
    assert clients.noise("images")[0].noise_std == 6.0
    with pytest.raises(UnplannedReleaseError, match="only once a round"):
        clients.noise("images")


def reachable(root: Any, types: tuple[type, ...]) -> list[Any]:
    """Returns the objects of these types that are reachable from an object through references."""
    seen = {id(root)}
    pending = [root]
    matches = []
    while pending:
        for item in gc.get_referents(pending.pop()):
            if id(item) not in seen and not isinstance(item, type) and not callable(item):
                seen.add(id(item))
                pending.append(item)
                if isinstance(item, types):
                    matches.append(item)
    return matches


def test_client_view_references_no_ledger_or_guard() -> None:
    """A release outside the plan cannot be charged."""
    ledger = Ledger("a")
    guard = BudgetEnforcer(ledger, 1e-5, None)
    clients = group(charge_round(PLANS, 4, 3.0, guard, SecretGenerator()))
    assert reachable(clients, (Ledger, BudgetEnforcer)) == []
    assert reachable([clients, guard], (Ledger, BudgetEnforcer)) == [guard, ledger]


def test_release_budgets_cannot_be_copied() -> None:
    """A deep copy would allow a second series for one charge; a shallow one shares the budget."""
    budget = charged(Ledger("a"))
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copier(budget)
    shallow_copy = copy.copy(budget)
    budget.take("images")
    with pytest.raises(UnplannedReleaseError):
        shallow_copy.take("images")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": "last"}, "phase"),
        ({"groups": 3}, "must divide"),
        ({"groups": 0}, "must divide"),
        ({"shares": 0}, "at least 1"),
    ],
)
def test_invalid_plans_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivacySettingError, match=message):
        replace(IMAGES, **change)
    check_plans(PLANS)
    for plans in ((IMAGES, COUNTS, IMAGES), ()):
        with pytest.raises(PrivacySettingError):
            check_plans(plans)


def test_signal_to_noise_matches_sampled_noise() -> None:
    """Eight clients add a quarter of the charged variance each."""
    shared = replace(COUNTS, groups=1, dimension=6, shares=4, signal=0.5)
    noise_std = 1.5 * shared.relative_noise_multiplier * shared.clip / shared.shares**0.5
    draws = np.random.default_rng(0).normal(0, noise_std, (4000, 8, 6)).sum(axis=1)
    noise = np.sqrt(np.square(draws).sum(axis=1).mean())
    computed = shared.signal_to_noise(1.5, 100, 8)
    assert computed == pytest.approx(0.5 * 100 * shared.clip / noise, rel=0.02)
    assert COUNTS.signal_to_noise(1.5, 100, 8) is None
