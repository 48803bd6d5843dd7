"""Tests of users as the protected unit: the records of a user change the sums by at most the clip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedsynth.privacy.errors import LedgerError, PrivacyError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.passes import Units
from fedsynth.privacy.releases import USER
from tests.conftest import NO_CUDA
from tests.privacy.support import release, series

CLIP, GROUPS, WIDTH = 2.0, 3, 4


def users_series(rate: float = 1.0) -> GaussianSumMechanism:
    return series(GROUPS, unit=USER, sample_rate=rate)


def user_sums(
    rows: Tensor, groups: Tensor, users: Tensor, piece: int = 1000, device: str = "cpu"
) -> Tensor:
    """Returns the sums without noise [GROUPS, WIDTH] over all users, computed in pieces."""
    mechanism = users_series()
    for part in Units(len(rows), users).sample(mechanism).split(piece):
        mechanism.add(rows[part.records].to(device), groups[part.records].to(device), part)
    assert mechanism._sums is not None
    mechanism._users.close(mechanism._sums)
    return mechanism._sums.cpu()


def oracle(rows: np.ndarray, groups: np.ndarray, users: np.ndarray) -> np.ndarray:
    total = np.zeros((GROUPS, WIDTH))
    for user in np.unique(users):
        indices = np.flatnonzero(users == user)
        user_sum = np.zeros((GROUPS, WIDTH))
        for i in indices:
            if np.isfinite(rows[i]).all():
                u = rows[i].astype(np.float64)
                u *= min(1.0, 2.0**16 * CLIP / max(np.sqrt((u**2).sum()), 1e-300))
                user_sum[groups[i]] += u / len(indices)
        norm = np.sqrt((user_sum**2).sum())
        total += user_sum * min(1.0, CLIP / norm) if norm > 0 else 0.0
    return total


VALUES = st.one_of(
    st.floats(-3, 3, width=32), st.sampled_from([0.0, 1e20, -3e38, np.nan, np.inf, -np.inf])
)
USER_RECORDS = st.integers(1, 25).flatmap(
    lambda n: st.tuples(
        arrays(np.float32, (n, WIDTH), elements=VALUES),
        arrays(np.int64, n, elements=st.integers(0, GROUPS - 1)),
        arrays(np.int64, n, elements=st.integers(0, 5)),
    )
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])])
@given(USER_RECORDS, st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_sums_equal_clipped_user_means(
    device: str, people: tuple[np.ndarray, np.ndarray, np.ndarray], piece: int
) -> None:
    rows, groups, users = people
    computed = user_sums(*map(torch.from_numpy, people), piece, device)
    np.testing.assert_allclose(computed.numpy(), oracle(rows, groups, users), rtol=1e-9, atol=1e-9)


@given(USER_RECORDS, st.integers(0, 5), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_user_sensitivity_of_sums_is_at_most_clip(
    people: tuple[np.ndarray, np.ndarray, np.ndarray], removed: int, piece: int
) -> None:
    """Covers users with many records, of all classes, and huge or non-finite values."""
    rows, groups, users = map(torch.from_numpy, people)
    remaining = users != removed
    difference = user_sums(rows, groups, users, piece) - user_sums(
        rows[remaining], groups[remaining], users[remaining], piece
    )
    assert float(difference.norm()) <= CLIP * (1 + 1e-9)


def test_cancelling_rows_leave_no_residue() -> None:
    """A server's weights may cause rows of 1e30 that cancel within a user."""
    a, b, c = 2.1327155287829078e29, 4.589931303856093e29, -6.722646832639001e29
    third = 1 / 3
    assert (a * third + b * third) + c * third == 0
    assert abs(a * third + (b * third + c * third)) > 1e12
    users = torch.tensor([u for k in range(20) for u in (2 * k + 1,) * 3 + (2 * k + 2,)])
    rows = torch.zeros(80, WIDTH)
    rows[:, 0] = torch.tensor([a, b, c, 0.0] * 20)
    groups = torch.zeros(81, dtype=torch.int64)
    without = user_sums(rows, groups[:80], users, 2)
    joined = torch.cat([torch.zeros(1, dtype=torch.int64), users])
    shift = user_sums(torch.cat([torch.zeros(1, WIDTH), rows]), groups, joined, 2) - without
    assert float(shift.norm()) < 1e-6 * CLIP


def test_users_are_sampled_independently_as_a_whole() -> None:
    users = torch.tensor([4, 9, 4, 4, 1, 9])
    together = np.zeros((3, 3))
    for _ in range(400):
        sample = Units(6, users).sample(users_series(0.5))
        counts = [int((users[sample.records] == user).sum()) for user in (1, 4, 9)]
        assert all(n in (0, size) for n, size in zip(counts, (1, 3, 2), strict=True))
        sampled = np.array(counts) > 0
        together += np.outer(sampled, sampled)
    frequency = np.diag(together) / 400
    assert (np.abs(frequency - 0.5) < 0.125).all()  # five deviations
    pairs = together[np.triu_indices(3, 1)] / 400
    assert (np.abs(pairs - 0.25) < 0.11).all()


def test_shares_of_user_sum_to_one() -> None:
    mechanism = users_series()
    with pytest.raises(PrivacyError, match="no step is open"):
        mechanism.add(torch.ones(4, WIDTH), torch.zeros(4, dtype=torch.int64))
    sample = Units(5, torch.tensor([2, 0, 2, 2, 0])).sample(mechanism)
    assert sample.records.tolist() == [1, 4, 0, 2, 3]
    assert sample.users is not None
    assert sample.users.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(sample.shares, [1 / 2] * 2 + [1 / 3] * 3)
    for invalid_sample in (None, replace(sample, users=None), replace(sample, shares=None)):
        with pytest.raises(PrivacyError, match="protects users"):
            mechanism.add(torch.ones(5, WIDTH), torch.zeros(5, dtype=torch.int64), invalid_sample)


def test_ledger_has_single_unit() -> None:
    ledger = Ledger("c")
    BudgetEnforcer(ledger, 1e-5, None, unit=USER).charge(release())
    assert ledger.releases[0].unit == USER
    with pytest.raises(LedgerError, match=r"privacy\.unit=user"):
        BudgetEnforcer(ledger, 1e-5, None)
    record_enforcer = BudgetEnforcer(Ledger("d"), 1e-5, 10.0)
    record_enforcer.ledger.charge(replace(release(), unit=USER))  # by another process
    with pytest.raises(LedgerError, match=r"charged with privacy\.unit=user"):
        record_enforcer.charge(release())
