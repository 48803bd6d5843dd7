"""What a step may spend: what its client was charged for, by name, once, in its own exchange."""

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


def group(*allowances: ReleaseBudget[GaussianSumMechanism]) -> PrivateClientView:
    parts = list(torch.arange(20).tensor_split(len(allowances)))
    return PrivateClientView(range(len(allowances)), DATA, parts, allowances)


def test_an_exchange_is_charged_for_all_that_it_plans_and_for_nothing_else() -> None:
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
    assert [one.quantity for one in ledger.releases[2:]] == ["sums of logits"]


def test_series_are_handed_out_by_name_and_once() -> None:
    clients = group(charged(Ledger("a")), charged(Ledger("b")))
    images = clients.series("images")
    assert [one.steps_left for one in images] == [3, 3]
    assert [one.noise_std for one in images] == [6.0, 6.0]
    assert clients.series("counts")[0].noise_std == 12.0
    with pytest.raises(UnplannedReleaseError, match="'images' was already taken"):
        clients.series("images")
    for name in ("weights", "logits"):
        with pytest.raises(UnplannedReleaseError, match=f"'{name}' .*main exchange"):
            clients.series(name)
    first = group(charged(Ledger("a"), FIRST))
    with pytest.raises(UnplannedReleaseError, match="first exchange"):
        first.series("images")
    assert first.series("logits")[0].steps_left == 1


def test_a_mechanism_taken_by_one_client_is_taken_for_its_group() -> None:
    clients = group(charged(Ledger("a")), charged(Ledger("b")))
    (own,) = clients.select(1).series("images")
    for group_of_it in (clients.select(1), clients):
        with pytest.raises(UnplannedReleaseError, match="was already taken"):
            group_of_it.series("images")
    (other,) = clients.select(0).series("images")  # the refusal before took nothing from it
    assert own is not other


def test_a_step_reads_the_plan_that_its_clients_were_charged_for() -> None:
    late = replace(IMAGES, steps=1)
    clients = group(charged(Ledger("a")), charged(Ledger("b"), plans=(late, COUNTS, LOGITS)))
    assert clients.plan("counts") == COUNTS
    assert [clients.select(k).plan("images").steps for k in (0, 1)] == [3, 1]
    assert [one.steps_left for one in clients.series("images")] == [3, 1]
    with pytest.raises(UnplannedReleaseError, match="different plans for release 'images'"):
        clients.plan("images")


def test_a_group_that_was_charged_for_nothing_has_nothing() -> None:
    with pytest.raises(UnplannedReleaseError, match="not charged to any client"):
        PrivateClientView([0], DATA, [torch.arange(20)], []).series("images")
    with pytest.raises(UnplannedReleaseError, match="not charged to any client"):
        ExactClientView([0], DATA, [torch.arange(20)]).noise("images")


def test_noise_that_nothing_accounts_for_is_handed_out_likewise() -> None:
    row = IMAGES.release(1, 3.0, unaccounted="as printed")
    given = ReleaseBudget(MAIN, [(IMAGES, UnaccountedNoise(row, SecretGenerator()))])
    clients = ExactClientView([0], DATA, [torch.arange(20)], [given])
    assert clients.noise("images")[0].noise_std == 6.0
    with pytest.raises(UnplannedReleaseError, match="was already taken"):
        clients.noise("images")


def reachable(found: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Everything of these kinds that can be reached from an object by whatever refers to what."""
    seen = {id(found)}
    left = [found]
    met = []
    while left:
        for one in gc.get_referents(left.pop()):
            if id(one) not in seen and not isinstance(one, type) and not callable(one):
                seen.add(id(one))
                left.append(one)
                if isinstance(one, kinds):
                    met.append(one)
    return met


def test_no_ledger_and_no_guard_can_be_reached_from_what_a_step_gets() -> None:
    """A release outside the plan cannot be charged."""
    ledger = Ledger("a")
    guard = BudgetEnforcer(ledger, 1e-5, None)
    clients = group(charge_round(PLANS, 4, 3.0, guard, SecretGenerator()))
    assert reachable(clients, (Ledger, BudgetEnforcer)) == []
    assert reachable([clients, guard], (Ledger, BudgetEnforcer)) == [guard, ledger]


def test_allowances_cannot_be_copied() -> None:
    """A copy would hand out a second series for one charge; a shallow one shares what is left."""
    given = charged(Ledger("a"))
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            attempt(given)
    again = copy.copy(given)
    given.take("images")
    with pytest.raises(UnplannedReleaseError):
        again.take("images")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": "last"}, "phase"),
        ({"groups": 3}, "must divide"),
        ({"groups": 0}, "must divide"),
        ({"shares": 0}, "at least 1"),
    ],
)
def test_plans_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivacySettingError, match=message):
        replace(IMAGES, **change)
    check_plans(PLANS)
    for plans in ((IMAGES, COUNTS, IMAGES), ()):
        with pytest.raises(PrivacySettingError):
            check_plans(plans)


def test_signal_over_noise_is_that_of_draws() -> None:
    """Eight clients, each with a quarter of the charged variance."""
    shared = replace(COUNTS, groups=1, dimension=6, shares=4, signal=0.5)
    each = 1.5 * shared.relative_noise_multiplier * shared.clip / shared.shares**0.5
    draws = np.random.default_rng(0).normal(0, each, (4000, 8, 6)).sum(axis=1)
    noise = np.sqrt(np.square(draws).sum(axis=1).mean())
    found = shared.signal_to_noise(1.5, 100, 8)
    assert found == pytest.approx(0.5 * 100 * shared.clip / noise, rel=0.02)
    assert COUNTS.signal_to_noise(1.5, 100, 8) is None
