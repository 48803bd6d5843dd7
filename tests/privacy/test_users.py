"""Users as the protected unit: a user's records together move the sums by at most the clip, in
every method and however they come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedsynth.core.charging import charge_for
from fedsynth.core.client import PrivateClients
from fedsynth.core.context import RoundContext
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.methods import method_class
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy import mechanisms
from fedsynth.privacy.errors import LedgerError, PrivacyError, PrivacySettingError
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums, Released
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import RECORD, USER, Release
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.privacy.units import Units

SPEC = dataset_spec("digits")
CLIP, GROUPS, WIDTH = 2.0, 3, 4


def row(rate: float = 1.0, steps: int = 1) -> Release:
    sampler = "full" if rate == 1 else "poisson"
    return Release(1, "q", "test", "rows", 1.0, CLIP, rate, sampler, steps, GROUPS * WIDTH)


def summed(rows: Tensor, groups: Tensor, users: Tensor, piece: int = 1000) -> Tensor:
    """The un-noised sums [GROUPS, WIDTH] over all users, in pieces."""
    series = GaussianSums(
        row(), GROUPS, Guard(Ledger("c"), 1e-5, None, unit=USER), SecretGenerator()
    )
    for part in Units(len(rows), users).sample(series).split(piece):
        series.add(rows[part.records], groups[part.records], part)
    assert series._sums is not None
    series._users.close(series._sums)
    return series._sums


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


@given(PEOPLE, st.integers(1, 30))
@settings(deadline=None)
def test_sums_are_of_users_means_clipped_over_all_groups(
    people: tuple[np.ndarray, np.ndarray, np.ndarray], piece: int
) -> None:
    rows, groups, users = people
    got = summed(*map(torch.from_numpy, people), piece)
    np.testing.assert_allclose(got.numpy(), oracle(rows, groups, users), rtol=1e-9, atol=1e-9)


@given(PEOPLE, st.integers(0, 5), st.integers(1, 30))
@settings(deadline=None)
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
    """A server's weights may make rows of 1e30 cancel within a user; the residue goes by where
    passes cut the user, and so by how many records others have. A user more, of one record, moved
    the sums by one clip for each other user."""
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


def test_clipping_records_or_groups_apart_is_caught() -> None:
    """Three records in three classes: clipped apart they would move the sums by √3 or 3 times as
    much as together."""
    rows, users = 100 * torch.ones(3, WIDTH), torch.zeros(3, dtype=torch.int64)
    assert float(summed(rows, torch.arange(3), users).norm()) == pytest.approx(CLIP)
    apart = mechanisms.clipped_sums(rows, torch.arange(3), GROUPS, CLIP)
    assert float(apart.norm()) == pytest.approx(CLIP * 3**0.5)


def test_a_users_records_are_sampled_together_and_each_user_alone() -> None:
    users = torch.tensor([4, 9, 4, 4, 1, 9])
    together = np.zeros((3, 3))
    for _ in range(400):
        series = GaussianSums(
            row(0.5), GROUPS, Guard(Ledger("c"), 1e-5, None, unit=USER), SecretGenerator()
        )
        sample = Units(6, users).sample(series)
        seen = [int((users[sample.records] == user).sum()) for user in (1, 4, 9)]
        assert all(n in (0, size) for n, size in zip(seen, (1, 3, 2), strict=True))
        there = np.array(seen) > 0
        together += np.outer(there, there)
    frequency = np.diag(together) / 400
    assert (np.abs(frequency - 0.5) < 0.125).all()  # five deviations
    off = together[np.triu_indices(3, 1)] / 400
    assert (np.abs(off - 0.25) < 0.11).all()


def test_shares_add_up_to_one_and_records_stay_apart_from_users() -> None:
    series = GaussianSums(
        row(), GROUPS, Guard(Ledger("c"), 1e-5, None, unit=USER), SecretGenerator()
    )
    sample = Units(5, torch.tensor([2, 0, 2, 2, 0])).sample(series)
    assert sample.records.tolist() == [1, 4, 0, 2, 3]
    assert sample.users is not None
    assert sample.shares is not None
    assert sample.users.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(sample.shares, [1 / 2] * 2 + [1 / 3] * 3)
    series.release()
    assert len(Units(5)) == 5


def test_what_was_charged_for_users_is_not_clipped_by_record() -> None:
    series = GaussianSums(
        row(), GROUPS, Guard(Ledger("c"), 1e-5, None, unit=USER), SecretGenerator()
    )
    sample = Units(4).sample(series)  # somebody forgot whose they are
    for given_ in (None, sample):
        with pytest.raises(PrivacyError, match="clipped by user"):
            series.add(torch.ones(4, WIDTH), torch.zeros(4, dtype=torch.int64), given_)


# ------------------------------------------------------------------------------ through the methods


def data(records: int) -> ImageData:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (records, 1, 8, 8)).astype(np.uint8)
    return from_arrays(images, rng.integers(0, 10, records), SPEC)


STEPS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("feddm", {"iterations": 2, "ipc": 2}, {"mechanism": "residual", "clip": 0.05}),
    ("feddm", {"iterations": 1, "ipc": 2}, {"mechanism": "gradient", "clip": 0.01}),
    ("feddm", {"iterations": 2, "ipc": 2, "networks": 2}, {"mechanism": "features", "clip": 0.05}),
    ("fedaf", {"iterations": 2, "ipc": 2}, {}),
    ("fedavg", {"local_steps": 2}, {"clip": 0.1}),
    ("fedfm", {"local_steps": 1, "weight": 0.5}, {}),
    ("fedfm-lite", {"local_steps": 1, "weight": 0.5}, {}),
    ("fedkf", {"local_steps": 1, "generator_width": 4, "generator_batch": 8}, {}),
]


@pytest.mark.parametrize(("name", "values", "privacy"), STEPS, ids=str)
@pytest.mark.parametrize("nominal", [1.0, 40.0])
def test_a_user_moves_every_sum_of_every_method_by_at_most_the_clip(
    name: str, values: dict[str, Any], privacy: dict[str, Any], nominal: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A user with 50 of 90 records, of all classes; all releases are forced to zero, so that later
    steps see the same.

    A nominal size of 1 cuts the sample into short passes, and so the user into many pieces.
    """
    method = method_class(name).from_mapping(values)
    settings_ = PrivacySettings(noise_multiplier=1.0, sample_rate=1.0, **privacy)
    network = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    context = RoundContext(1, 0, torch.device("cpu"), SPEC, network, nominal, settings_)
    message = method.broadcast(method.initial_state(network.state_dict()), context)
    users = torch.arange(90).clamp(max=40)
    sums: list[list[tuple[Tensor, float]]] = []

    def release(self: GaussianSums) -> Released:
        assert self._sums is not None
        self._users.close(self._sums)
        sums[-1].append((self._sums.clone(), self._release.sensitivity))
        self._sums, self.steps_left = None, self.steps_left - 1
        return Released(torch.zeros(self._groups, self._width))

    monkeypatch.setattr(GaussianSums, "release", release)
    everyone = torch.arange(90)
    # without the large user; without a small one
    for part in (
        everyone,
        everyone[:40],
        everyone[1:],
    ):
        sums.append([])
        guard = Guard(Ledger("0"), 1e-5, None, unit=USER)
        charged = charge_for(method, context, [0], [guard], [SecretGenerator()])
        clients = PrivateClients([0], data(90), [part], charged, nominal_size=nominal, users=users)
        method.client_step(message, clients, [{}], context)
        assert {r.unit for r in guard.ledger.releases} == {USER}
    for other in sums[1:]:
        for (a, clip), (b, _) in zip(sums[0], other, strict=True):
            assert float((a - b).norm()) <= clip * (1 + 1e-6)


def test_one_record_for_each_user_is_as_records_are(monkeypatch: pytest.MonkeyPatch) -> None:
    method = method_class("feddm").from_mapping({"iterations": 2, "ipc": 2})
    privacy = PrivacySettings(noise_multiplier=1e-9, sample_rate=1.0, mechanism="residual")
    network = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    context = RoundContext(1, 0, torch.device("cpu"), SPEC, network, 90.0, privacy)
    message = method.broadcast(method.initial_state(network.state_dict()), context)
    images = []
    for unit, users in ((RECORD, None), (USER, torch.randperm(90))):
        guard = Guard(Ledger("0"), 1e-5, None, unit=unit)
        charged = charge_for(method, context, [0], [guard], [SecretGenerator()])
        clients = PrivateClients(
            [0], data(90), [torch.arange(90)], charged, nominal_size=90.0, users=users
        )
        ((upload, _),) = method.client_step(message, clients, [{}], context)
        images.append(dict(upload.arrays())["images"])
    torch.testing.assert_close(images[0], images[1], atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------ ledgers


def test_a_ledger_holds_one_unit() -> None:
    ledger = Ledger("c")
    Guard(ledger, 1e-5, None, unit=USER).charge(row())
    assert ledger.releases[0].unit == USER
    with pytest.raises(LedgerError, match=r"privacy\.unit=user"):
        Guard(ledger, 1e-5, None)
    guard = Guard(Ledger("d"), 1e-5, 10.0)
    guard.ledger.charge(Release.from_json({**row().to_json(), "unit": USER}))  # by another process
    with pytest.raises(LedgerError, match="protect a user"):
        guard.charge(row())


def test_a_row_names_a_known_unit() -> None:
    without = {k: v for k, v in row().to_json().items() if k != "unit"}
    for wrong in (without, {**without, "unit": "household"}):
        with pytest.raises(PrivacySettingError, match="unit"):
            Release.from_json(wrong)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sums_of_users_on_cuda_are_those_of_the_cpu() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 2, (200, WIDTH)).astype(np.float32)
    groups = rng.integers(0, GROUPS, 200)
    users = rng.integers(0, 30, 200)
    series = GaussianSums(
        row(), GROUPS, Guard(Ledger("c"), 1e-5, None, unit=USER), SecretGenerator()
    )
    device = torch.device("cuda")
    x, g = torch.from_numpy(rows).to(device), torch.from_numpy(groups).to(device)
    for part in Units(200, torch.from_numpy(users)).sample(series).split(32):
        where = part.records.to(device)
        series.add(x[where], g[where], part)
    assert series._sums is not None
    series._users.close(series._sums)
    np.testing.assert_allclose(
        series._sums.cpu(), oracle(rows, groups, users), rtol=1e-9, atol=1e-9
    )
