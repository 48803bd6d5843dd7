"""Users as the protected unit: a user's records together move the sums by at most the clip, in
every method and however they come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedsynth.methods import method_class
from fedsynth.privacy.errors import LedgerError, PrivacyError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.passes import Units
from fedsynth.privacy.releases import USER
from fedsynth.privacy.settings import PrivacySettings
from tests.conftest import NO_CUDA
from tests.digits import digits, round_context
from tests.privacy.support import private_step, release, series

CLIP, GROUPS, WIDTH = 2.0, 3, 4


def users_series(rate: float = 1.0) -> GaussianSumMechanism:
    return series(GROUPS, unit=USER, sample_rate=rate)


def summed(
    rows: Tensor, groups: Tensor, users: Tensor, piece: int = 1000, device: str = "cpu"
) -> Tensor:
    """Returns the un-noised sums [GROUPS, WIDTH] over all users, in pieces."""
    one = users_series()
    for part in Units(len(rows), users).sample(one).split(piece):
        one.add(rows[part.records].to(device), groups[part.records].to(device), part)
    assert one._sums is not None
    one._users.close(one._sums)
    return one._sums.cpu()


def oracle(rows: np.ndarray, groups: np.ndarray, users: np.ndarray) -> np.ndarray:
    total = np.zeros((GROUPS, WIDTH))
    for user in np.unique(users):
        mine = np.flatnonzero(users == user)
        own = np.zeros((GROUPS, WIDTH))
        for i in mine:
            if np.isfinite(rows[i]).all():
                u = rows[i].astype(np.float64)
                u *= min(1.0, 2.0**16 * CLIP / max(np.sqrt((u**2).sum()), 1e-300))
                own[groups[i]] += u / len(mine)
        norm = np.sqrt((own**2).sum())
        total += own * min(1.0, CLIP / norm) if norm > 0 else 0.0
    return total


VALUES = st.one_of(
    st.floats(-3, 3, width=32), st.sampled_from([0.0, 1e20, -3e38, np.nan, np.inf, -np.inf])
)
PEOPLE = st.integers(1, 25).flatmap(
    lambda n: st.tuples(
        arrays(np.float32, (n, WIDTH), elements=VALUES),
        arrays(np.int64, n, elements=st.integers(0, GROUPS - 1)),
        arrays(np.int64, n, elements=st.integers(0, 5)),
    )
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])])
@given(PEOPLE, st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_sums_are_of_users_means_clipped_over_all_groups(
    device: str, people: tuple[np.ndarray, np.ndarray, np.ndarray], piece: int
) -> None:
    rows, groups, users = people
    got = summed(*map(torch.from_numpy, people), piece, device)
    np.testing.assert_allclose(got.numpy(), oracle(rows, groups, users), rtol=1e-9, atol=1e-9)


@given(PEOPLE, st.integers(0, 5), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_one_user_moves_the_unnoised_sums_by_at_most_the_clip(
    people: tuple[np.ndarray, np.ndarray, np.ndarray], gone: int, piece: int
) -> None:
    """Whatever they hold: many records, of all classes, huge, not finite."""
    rows, groups, users = map(torch.from_numpy, people)
    kept = users != gone
    moved = summed(rows, groups, users, piece) - summed(
        rows[kept], groups[kept], users[kept], piece
    )
    assert float(moved.norm()) <= CLIP * (1 + 1e-9)


def test_rows_that_cancel_leave_no_residue_that_goes_by_other_users() -> None:
    """A server's weights may make rows of 1e30 cancel within a user."""
    a, b, c = 2.1327155287829078e29, 4.589931303856093e29, -6.722646832639001e29
    third = 1 / 3
    assert (a * third + b * third) + c * third == 0
    assert abs(a * third + (b * third + c * third)) > 1e12
    users = torch.tensor([u for k in range(20) for u in (2 * k + 1,) * 3 + (2 * k + 2,)])
    rows = torch.zeros(80, WIDTH)
    rows[:, 0] = torch.tensor([a, b, c, 0.0] * 20)
    groups = torch.zeros(81, dtype=torch.int64)
    without = summed(rows, groups[:80], users, 2)
    more = torch.cat([torch.zeros(1, dtype=torch.int64), users])
    moved = summed(torch.cat([torch.zeros(1, WIDTH), rows]), groups, more, 2) - without
    assert float(moved.norm()) < 1e-6 * CLIP


def test_a_users_records_are_sampled_together_and_users_independently() -> None:
    users = torch.tensor([4, 9, 4, 4, 1, 9])
    together = np.zeros((3, 3))
    for _ in range(400):
        sample = Units(6, users).sample(users_series(0.5))
        seen = [int((users[sample.records] == user).sum()) for user in (1, 4, 9)]
        assert all(n in (0, size) for n, size in zip(seen, (1, 3, 2), strict=True))
        there = np.array(seen) > 0
        together += np.outer(there, there)
    frequency = np.diag(together) / 400
    assert (np.abs(frequency - 0.5) < 0.125).all()  # five deviations
    off = together[np.triu_indices(3, 1)] / 400
    assert (np.abs(off - 0.25) < 0.11).all()


def test_shares_add_up_to_one_and_records_stay_apart_from_users() -> None:
    one = users_series()
    with pytest.raises(PrivacyError, match="no step is open"):
        one.add(torch.ones(4, WIDTH), torch.zeros(4, dtype=torch.int64))
    sample = Units(5, torch.tensor([2, 0, 2, 2, 0])).sample(one)
    assert sample.records.tolist() == [1, 4, 0, 2, 3]
    assert sample.users is not None
    assert sample.users.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(sample.shares, [1 / 2] * 2 + [1 / 3] * 3)
    for somebodys in (None, replace(sample, users=None), replace(sample, shares=None)):
        with pytest.raises(PrivacyError, match="protects users"):
            one.add(torch.ones(5, WIDTH), torch.zeros(5, dtype=torch.int64), somebodys)


STEPS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("feddm", {"iterations": 2, "ipc": 2}, {"mechanism": "residual", "clip": 0.05}),
    ("feddm", {"iterations": 1, "ipc": 2}, {"mechanism": "gradient", "clip": 0.01}),
    ("feddm", {"iterations": 2, "ipc": 2, "networks": 2}, {"mechanism": "features", "clip": 0.05}),
    ("fedaf", {"iterations": 2, "ipc": 2}, {}),
    ("fedfm", {"local_steps": 1, "weight": 0.5}, {}),
    ("fedkf", {"local_steps": 1, "generator_width": 4, "generator_batch": 8}, {}),
]


@pytest.mark.parametrize(("name", "values", "privacy"), STEPS, ids=str)
def test_a_user_moves_every_sum_of_every_method_by_at_most_the_clip(
    name: str, values: dict[str, Any], privacy: dict[str, Any], unnoised: list[tuple[Tensor, float]]
) -> None:
    """A user with 50 of 90 records, of all classes."""
    method = method_class(name).from_mapping(values)
    given_ = PrivacySettings(noise_multiplier=1.0, sample_rate=1.0, **privacy)
    ctx = round_context(given_, nominal=1.0)
    message = method.broadcast(method.initial_state(ctx.architecture.state_dict()), ctx)
    users = torch.arange(90).clamp(max=40)
    data = digits(np.random.default_rng(1).integers(0, 10, 90))
    everyone = torch.arange(90)
    sums = []
    for part in (everyone, everyone[:40], everyone[1:]):  # without the large user; a small one
        unnoised.clear()
        private_step(method, message, ctx, data, part, users)
        sums.append(list(unnoised))
    for other in sums[1:]:
        for (a, clip), (b, _) in zip(sums[0], other, strict=True):
            assert float((a - b).norm()) <= clip * (1 + 1e-6)


def test_a_ledger_holds_one_unit() -> None:
    ledger = Ledger("c")
    BudgetEnforcer(ledger, 1e-5, None, unit=USER).charge(release())
    assert ledger.releases[0].unit == USER
    with pytest.raises(LedgerError, match=r"privacy\.unit=user"):
        BudgetEnforcer(ledger, 1e-5, None)
    later = BudgetEnforcer(Ledger("d"), 1e-5, 10.0)
    later.ledger.charge(replace(release(), unit=USER))  # by another process
    with pytest.raises(LedgerError, match="protect a user"):
        later.charge(release())
