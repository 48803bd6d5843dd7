"""Tests of the Gaussian mechanism: sensitivity for records and users, noise, secrecy, and budgets
of which each charged release is taken once."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedsynth import errors
from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.data.images import normalise
from fedsynth.privacy import mechanisms, plans, randomness
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, EpsilonCap, GaussianSumMechanism
from fedsynth.privacy.passes import Units
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import USER
from tests.conftest import NO_CUDA
from tests.digits import digits
from tests.privacy.support import NUMBERS, guard, in_threads, mechanism, plan, release
from tests.raising import raises

rows = st.lists(NUMBERS, min_size=4, max_size=4)
TINY = {"noise_multiplier": 1e-12, "sensitivity": 1e6}


@given(
    data=st.lists(st.tuples(rows, st.integers(0, 2)), max_size=6),
    extra=rows,
    group=st.integers(0, 2),
    clip=st.sampled_from([0.1, 1.0, 50.0]),
)
@settings(max_examples=60, deadline=None)
def test_sensitivity_of_sums_is_at_most_clip(
    data: list[tuple[list[float], int]], extra: list[float], group: int, clip: float
) -> None:
    """Compares D and D ± x, also for huge, NaN and infinite x."""
    x = torch.tensor([*(r for r, _ in data), extra], dtype=torch.float32)
    g = torch.tensor([*(c for _, c in data), group])
    joined = mechanisms.clipped_sums(x, g, 3, clip)
    assert torch.isfinite(joined).all()
    difference = joined - mechanisms.clipped_sums(x[:-1], g[:-1], 3, clip)
    assert difference.norm() <= clip * (1 + 1e-9)
    other_groups = [c for c in range(3) if c != group]
    assert torch.equal(difference[other_groups], torch.zeros(2, 4, dtype=torch.float64))


@pytest.mark.parametrize(("sigma", "clip", "shares"), [(3.0, 0.5, 1), (0.7, 10.0, 9)])
def test_noise_is_independent_and_as_charged(sigma: float, clip: float, shares: int) -> None:
    """Broken versions would divide the noise by the batch size, or reuse it for other classes or
    steps."""
    width = 4000
    s = mechanism(3, noise_multiplier=sigma, sensitivity=clip, steps=3, dimension=3 * width)
    s.shares = shares
    draws = []
    for _ in range(3):
        s.sample(10)
        s.add(torch.zeros(10, width), torch.zeros(10, dtype=torch.int64))
        draws.append(s.release())
        assert draws[-1].shape == (3, width)
    noise, deviation = torch.cat(draws), sigma * clip / math.sqrt(shares)
    assert s.noise_std == pytest.approx(deviation)
    for row in noise:
        assert row.std() == pytest.approx(deviation, rel=0.08)  # seven deviations
        assert abs(row.mean()) < 5 * deviation / math.sqrt(width)
    assert (torch.corrcoef(noise) - torch.eye(9)).abs().max() < 0.1


def test_mechanism_is_limited_to_charged_releases() -> None:
    ledger = Ledger("c")
    s = GaussianSumMechanism(release(steps=2), 3, guard(ledger), SecretGenerator())
    assert [row.steps for row in ledger.releases] == [2]  # charged before any draw
    for _ in range(2):
        with raises(errors.PrivacyError, "mechanism.no_step"):
            s.add(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))
        s.sample(5)
        with raises(errors.PrivacyError, "mechanism.open_step"):
            s.sample(5)
        s.release()
        with raises(errors.PrivacyError, "mechanism.no_step"):
            s.release()
    with raises(errors.PrivacyError, "mechanism.steps"):
        s.sample(5)


def test_step_belongs_to_its_thread() -> None:
    s = mechanism(1, steps=2, dimension=1)
    rows = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    s.sample(1)
    for use in (partial(s.sample, 1), partial(s.add, *rows), s.release):
        assert in_threads(use, 1) == []
    s.add(*rows)
    s.release()
    assert len(in_threads(partial(s.sample, 1))) == 1  # and its thread has ended
    for use in (partial(s.sample, 1), s.release):
        with pytest.raises(errors.PrivacyError, match=r"thread"):
            use()
    assert s.steps_left == 1


def test_threads_neither_exceed_charge_nor_add_record_twice() -> None:
    for _ in range(300):
        s = mechanism(1, steps=2, dimension=1, **TINY)
        released: list[float] = []

        def steps(s: GaussianSumMechanism = s, released: list[float] = released) -> None:
            for _ in range(3):
                s.sample(1)
                s.add(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
                released.append(float(s.release()))

        in_threads(steps)
        assert released == pytest.approx([1.0] * (2 - s.steps_left), abs=1e-4)
        assert s.steps_left in (0, 1)  # a thread stops when it is refused


def test_cap_rejects_before_charge_and_draw() -> None:
    ledger = Ledger("c")
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    capped = BudgetEnforcer(ledger, [EpsilonCap(1.0, 1e-5)])
    with pytest.raises(errors.BudgetExceededError):
        GaussianSumMechanism(release(noise_multiplier=0.5), 3, capped, secret)
    assert ledger.releases == ()
    assert secret._generator.random() == np.random.default_rng(0).random()


def test_poisson_sampling_includes_each_record_independently() -> None:
    secret = SecretGenerator()
    sizes = np.array([len(secret.poisson_sample(400, 0.3)) for _ in range(2000)])
    assert sizes.mean() == pytest.approx(120, abs=5 * math.sqrt(400 * 0.3 * 0.7 / 2000))
    # fails for fixed-size batches
    assert sizes.std() == pytest.approx(math.sqrt(400 * 0.3 * 0.7), rel=0.1)
    assert torch.equal(secret.poisson_sample(7, 1.0), torch.arange(7))


def test_reseeding_does_not_repeat_noise_or_masks() -> None:
    """Broken versions would use the run's seed or the global generators."""
    draws = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002, TID251 - the point of the test
        torch.manual_seed(0)  # noqa: TID251
        secret = SecretGenerator()
        draws.append((secret.normal((50,), 1.0), secret.poisson_sample(200, 0.5)))
    assert not torch.equal(draws[0][0], draws[1][0])
    assert not torch.equal(draws[0][1], draws[1][1])


def test_halved_sum_of_four_gaussians_keeps_deviation() -> None:
    """Compares with the sum of the same random stream; the deviation is σ, not 2σ."""
    generator, reference_generator = np.random.default_rng(5), np.random.default_rng(5)
    noise = SecretGenerator(four_sums=True, test_only=generator).normal((50, 400), 3.0)
    expected = 3.0 * sum(reference_generator.standard_normal((50, 400)) for _ in range(4)) / 2
    np.testing.assert_allclose(noise.numpy(), expected)
    assert float(noise.std()) == pytest.approx(3.0, rel=0.02)


def test_class_sums_equal_loop_over_clients_and_classes() -> None:
    data = digits(np.arange(40) % 10)
    parts = [torch.arange(25), torch.arange(25, 40)]
    group = PrivateClientView(range(2), data, parts, [])
    charged = [mechanism(10, dimension=640, **TINY) for _ in parts]
    out = group.class_sums(charged, lambda x, pair: x.flatten(1) + pair[:, None])
    for client, part in enumerate(parts):
        for label in range(10):
            indices = part[data.labels[part] == label]
            rows = normalise(data.images[indices], data.spec).flatten(1) + 10 * client + label
            torch.testing.assert_close(out[10 * client + label], rows.sum(0), atol=1e-3, rtol=1e-4)


def test_batches_are_uncapped_secret_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample has more records than a chunk."""
    records = 1300
    data = digits(np.random.default_rng(0).integers(0, 10, records))
    masks: list[Tensor] = []
    draw = SecretGenerator.poisson_sample

    def spy(self: SecretGenerator, n: int, rate: float) -> Tensor:
        assert (n, rate) == (records, 0.9)
        masks.append(draw(self, n, rate))
        return masks[-1]

    monkeypatch.setattr(SecretGenerator, "poisson_sample", spy)
    group = PrivateClientView([0], data, [torch.arange(records)], [])
    charged = [mechanism(10, dimension=10, sample_rate=0.9, steps=2, **TINY)]
    for step in range(2):
        out = group.class_sums(charged, lambda x, pair: torch.ones(len(x), 1))
        counts = torch.bincount(data.labels[masks[step]], minlength=10).float()
        torch.testing.assert_close(out[:, 0], counts, atol=1e-3, rtol=0)
    assert len(masks) == 2
    assert not torch.equal(*masks)


def test_widths_must_match_charged_dimension() -> None:
    """Narrower noise would be broadcast, so that coordinates share a draw."""
    s = mechanism(3, dimension=3)
    s.sample(2)
    with raises(errors.PrivacyError, "mechanism.shape"):
        s.add(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))
    ledger = Ledger("c")
    with raises(errors.PrivacyError, "mechanism.groups"):
        GaussianSumMechanism(release(dimension=19), 10, guard(ledger), SecretGenerator())
    assert ledger.releases == ()


# After a fork two processes hold a client's secret and its charged mechanism, which must not be
# used twice.


def in_fork(work: Callable[[], bytes]) -> bytes:
    """Returns the result of `work` in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, work())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        return file.read()


@pytest.mark.parametrize("getpid", [os.getpid, lambda: 7])
def test_forks_draw_different_noise_and_masks(getpid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grandchild may reuse the number of its grandparent; once all numbers are equal."""
    monkeypatch.setattr(os, "getpid", getpid)
    secret = SecretGenerator()

    def draw() -> bytes:
        mask = np.isin(np.arange(64), secret.poisson_sample(64, 0.5).numpy())
        return secret.normal((4,), 1.0).numpy().tobytes() + np.packbits(mask).tobytes()

    drawn = [in_fork(draw), in_fork(lambda: in_fork(draw)), in_fork(draw), draw(), draw()]
    assert len({data[:32] for data in drawn}) == len({data[32:] for data in drawn}) == 5


def test_threads_of_fork_do_not_draw_with_old_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread draws while the first is taking the new key."""
    secret, fresh = SecretGenerator(), randomness._fresh_generator
    drawn: list[Tensor] = []

    def slowly() -> np.random.Generator:
        monkeypatch.undo()
        drawn.extend(in_threads(partial(secret.normal, (2,), 1.0), 1))
        return fresh()

    def draw() -> bytes:
        monkeypatch.setattr(randomness, "_fresh_generator", slowly)
        secret.normal((2,), 1.0)
        return drawn[0].numpy().tobytes()

    assert in_fork(draw) != secret.normal((2,), 1.0).numpy().tobytes()


def test_forked_mechanisms_and_memory_ledgers_are_rejected() -> None:
    """Parent and child would both release a mechanism that was charged once, or the parent would
    report an ε without the child's charge."""
    forked, charged = mechanism(3, steps=2), guard()
    forked.sample(0)

    def check_rejected() -> bytes:
        for use in (forked.release, partial(forked.sample, 0)):
            with pytest.raises(errors.PrivacyError, match="another process"):
                use()
        with pytest.raises(errors.LedgerError, match="another process's memory"):
            GaussianSumMechanism(release(), 3, charged, SecretGenerator())
        return b"refused"

    assert in_fork(check_rejected) == b"refused"
    forked.release()
    charged.charge(release())
    assert charged.ledger.releases == (release(),)


# ------------------------------------------------------------------- users as the protected unit

CLIP, GROUPS, WIDTH = 2.0, 3, 4


def users_mechanism(rate: float = 1.0) -> GaussianSumMechanism:
    return mechanism(GROUPS, unit=USER, sample_rate=rate)


def user_sums(
    rows: Tensor, groups: Tensor, users: Tensor, piece: int = 1000, device: str = "cpu"
) -> Tensor:
    """Returns the sums without noise [GROUPS, WIDTH] over all users, computed in pieces."""
    mechanism = users_mechanism()
    for part in Units(len(rows), users).sample(mechanism).split(piece):
        mechanism.add(rows[part.records].to(device), groups[part.records].to(device), part)
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
    st.floats(-3, 3, width=32),
    st.sampled_from([0.0, 2.0**66, -(2.0**127), np.nan, np.inf, -np.inf]),
)
USER_RECORDS = st.integers(1, 25).flatmap(
    lambda n: st.tuples(
        arrays(np.float32, (n, WIDTH), elements=VALUES),
        arrays(np.int64, n, elements=st.integers(0, GROUPS - 1)),
        arrays(np.int64, n, elements=st.integers(0, 5)),
    )
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])])
@given(USER_RECORDS, st.integers(0, 5), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_sums_are_clipped_user_means_of_bounded_sensitivity(
    device: str, people: tuple[np.ndarray, np.ndarray, np.ndarray], removed: int, piece: int
) -> None:
    """Covers users with many records, of all classes, and huge or non-finite values."""
    computed = user_sums(*map(torch.from_numpy, people), piece, device)
    np.testing.assert_allclose(computed.numpy(), oracle(*people), rtol=1e-9, atol=1e-9)
    remaining = (torch.from_numpy(values[people[2] != removed]) for values in people)
    difference = computed - user_sums(*remaining, piece, device)
    assert float(difference.norm()) <= CLIP * (1 + 1e-9)


def test_cancelling_rows_leave_no_residue() -> None:
    """A server's weights may cause rows of 1e30 that cancel within a user."""
    a, b, c = 2.1327155287829078e29, 4.589931303856093e29, -6.722646832639001e29
    users = torch.tensor([0, *(u for k in range(20) for u in (2 * k + 1,) * 3 + (2 * k + 2,))])
    rows = torch.zeros(81, WIDTH)
    rows[1:, 0] = torch.tensor([a, b, c, 0.0] * 20)
    groups = torch.zeros(81, dtype=torch.int64)
    without = user_sums(rows[1:], groups[1:], users[1:], 2)
    assert float((user_sums(rows, groups, users, 2) - without).norm()) < 1e-6 * CLIP


def test_users_are_sampled_independently_as_a_whole() -> None:
    users = torch.tensor([4, 9, 4, 4, 1, 9])
    together = np.zeros((3, 3))
    for _ in range(400):
        sample = Units(6, users).sample(users_mechanism(0.5))
        counts = [int((users[sample.records] == user).sum()) for user in (1, 4, 9)]
        assert all(n in (0, size) for n, size in zip(counts, (1, 3, 2), strict=True))
        sampled = np.array(counts) > 0
        together += np.outer(sampled, sampled)
    frequency = np.diag(together) / 400
    assert (np.abs(frequency - 0.5) < 0.125).all()  # five deviations
    pairs = together[np.triu_indices(3, 1)] / 400
    assert (np.abs(pairs - 0.25) < 0.11).all()


def test_shares_of_user_sum_to_one() -> None:
    mechanism = users_mechanism()
    with raises(errors.PrivacyError, "mechanism.no_step"):
        mechanism.add(torch.ones(4, WIDTH), torch.zeros(4, dtype=torch.int64))
    sample = Units(5, torch.tensor([2, 0, 2, 2, 0])).sample(mechanism)
    assert sample.records.tolist() == [1, 4, 0, 2, 3]
    assert sample.users.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(sample.shares, [1 / 2] * 2 + [1 / 3] * 3)
    for invalid_sample in (None, replace(sample, users=None), replace(sample, shares=None)):
        with raises(errors.PrivacyError, "mechanism.users"):
            mechanism.add(torch.ones(5, WIDTH), torch.zeros(5, dtype=torch.int64), invalid_sample)


def test_ledger_has_single_unit() -> None:
    ledger = Ledger("c")
    BudgetEnforcer(ledger, unit=USER).charge(release())
    assert ledger.releases[0].unit == USER
    with raises(errors.LedgerError, "ledger.unit"):
        BudgetEnforcer(ledger)
    record_enforcer = BudgetEnforcer(Ledger("d"), [EpsilonCap(10.0, 1e-5)])
    record_enforcer.ledger.charge(replace(release(), unit=USER))  # by another process
    with raises(errors.LedgerError, "ledger.unit"):
        record_enforcer.charge(release())


# ------------------------------------------------------------------ budgets of planned releases

IMAGES = plan(name="images", sample_rate=0.5, steps=3, dimension=40, groups=10)
COUNTS = plan(
    name="counts",
    quantity="counts",
    sample_rate=0.5,
    clip=1.0,
    dimension=10,
    groups=10,
    relative_noise_multiplier=4.0,
)
LOGITS = replace(COUNTS, name="logits", quantity="sums of logits", exchange=plans.FIRST)
PLANS = (IMAGES, COUNTS, LOGITS)
DATA = digits(np.arange(20) % 10)


def budget(
    ledger: Ledger, exchange: str = plans.MAIN, planned: Any = PLANS, cap: float = 1e6
) -> plans.ReleaseBudget[GaussianSumMechanism]:
    capped = BudgetEnforcer(ledger, [EpsilonCap(cap, 1e-5)])
    return plans.charge_round(planned, 4, 3.0, capped, SecretGenerator(), exchange=exchange)


def group(*budgets: plans.ReleaseBudget[GaussianSumMechanism]) -> PrivateClientView:
    parts = list(torch.arange(20).tensor_split(len(budgets)))
    return PrivateClientView(range(len(budgets)), DATA, parts, budgets)


def test_exchange_is_charged_for_planned_releases() -> None:
    ledger = Ledger("a")
    budget(ledger)
    assert list(ledger.releases) == [IMAGES.release(4, 3.0), COUNTS.release(4, 3.0)]
    row = COUNTS.release(4, 3.0, unit=USER)
    assert (row.round, row.noise_multiplier, row.sensitivity, row.unit) == (4, 12.0, 1.0, USER)
    assert (row.quantity, row.steps, row.dimension) == ("counts", 1, 10)
    assert (row.sampler, row.sample_rate, row.unaccounted) == ("poisson", 0.5, None)
    assert replace(COUNTS, sample_rate=1.0).release(4, 3.0).sampler == "full"
    with pytest.raises(errors.BudgetExceededError):
        budget(ledger, plans.FIRST, cap=0.1)
    budget(ledger, plans.FIRST)
    assert [release.quantity for release in ledger.releases[2:]] == ["sums of logits"]


def test_mechanisms_are_taken_by_name_once() -> None:
    clients = group(budget(Ledger("a")), budget(Ledger("b")))
    images = clients.mechanisms("images")
    assert [mechanism.steps_left for mechanism in images] == [3, 3]
    assert [mechanism.noise_std for mechanism in images] == [6.0, 6.0]
    (counts,) = clients.select(1).mechanisms("counts")
    for view in (clients.select(1), clients):  # what a client has taken is taken for the group
        for name in ("images", "counts"):
            with pytest.raises(
                errors.UnplannedReleaseError, match=f"'{name}' is used twice in a round"
            ):
                view.mechanisms(name)
    (other_counts,) = clients.select(0).mechanisms("counts")  # the rejected call consumed nothing
    assert [mechanism.noise_std for mechanism in (counts, other_counts)] == [12.0, 12.0]
    assert counts is not other_counts
    for name in ("weights", "logits"):
        with raises(errors.UnplannedReleaseError, "release.unplanned_name"):
            clients.mechanisms(name)
    first = group(budget(Ledger("a"), plans.FIRST))
    with raises(errors.UnplannedReleaseError, "release.unplanned_name"):
        first.mechanisms("images")
    assert first.mechanisms("logits")[0].steps_left == 1


def test_step_reads_charged_plan() -> None:
    shortened = replace(IMAGES, steps=1)
    clients = group(budget(Ledger("a")), budget(Ledger("b"), planned=(shortened, COUNTS, LOGITS)))
    assert clients.plan("counts") == COUNTS
    assert [clients.select(k).plan("images").steps for k in (0, 1)] == [3, 1]
    assert [mechanism.steps_left for mechanism in clients.mechanisms("images")] == [3, 1]
    with raises(errors.UnplannedReleaseError, "release.different_plans"):
        clients.plan("images")


def test_unaccounted_noise_is_taken_once() -> None:
    records = [0], DATA, [torch.arange(20)]
    row = IMAGES.release(1, 3.0, unaccounted="as printed")
    unaccounted = plans.ReleaseBudget(
        plans.MAIN, [(IMAGES, plans.UnaccountedNoise(row, SecretGenerator()))]
    )
    clients = ExactClientView(*records, [unaccounted])
    assert clients.noise("images")[0].noise_std == 6.0
    with raises(errors.UnplannedReleaseError, "release.unplanned"):
        clients.noise("images")
    for take in (PrivateClientView(*records, []).mechanisms, ExactClientView(*records).noise):
        with raises(errors.UnplannedReleaseError, "release.uncharged"):
            take("images")


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
    enforcer = guard(ledger)
    clients = group(plans.charge_round(PLANS, 4, 3.0, enforcer, SecretGenerator()))
    assert reachable(clients, (Ledger, BudgetEnforcer)) == []
    assert reachable([clients, enforcer], (Ledger, BudgetEnforcer)) == [enforcer, ledger]


def test_secrets_mechanisms_and_budgets_cannot_be_copied() -> None:
    """A deep copy would allow a second mechanism for one charge; a shallow one shares the budget."""
    secret, charged = SecretGenerator(), budget(Ledger("a"))
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        for value in (secret, mechanism(), Ledger("a"), charged)[: 3 if copier is copy.copy else 4]:
            with pytest.raises(TypeError, match="cannot be"):
                copier(value)
    shallow_copy = copy.copy(charged)
    charged.take("images")
    with pytest.raises(errors.UnplannedReleaseError):
        shallow_copy.take("images")
    assert secret.is_secret
    assert not SecretGenerator(test_only=np.random.default_rng(0)).is_secret
    assert "key" not in repr(secret)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exchange": "last"}, "exchange"),
        ({"groups": 3}, "groups"),
        ({"groups": 0}, "groups"),
        ({"shares": 0}, "shares"),
    ],
)
def test_invalid_plans_are_rejected(change: dict[str, Any], message: str) -> None:
    with raises(errors.PrivacySettingError, message):
        replace(IMAGES, **change)
    plans.check_plans(PLANS)
    for planned in ((IMAGES, COUNTS, IMAGES), ()):
        with pytest.raises(errors.PrivacySettingError):
            plans.check_plans(planned)


def test_signal_to_noise_matches_sampled_noise() -> None:
    """Eight clients add a quarter of the charged variance each."""
    shared = replace(COUNTS, groups=1, dimension=6, shares=4, signal=0.5)
    noise_std = 1.5 * shared.relative_noise_multiplier * shared.clip / shared.shares**0.5
    draws = np.random.default_rng(0).normal(0, noise_std, (4000, 8, 6)).sum(axis=1)
    noise = np.sqrt(np.square(draws).sum(axis=1).mean())
    computed = shared.signal_to_noise(1.5, 100, 8)
    assert computed == pytest.approx(0.5 * 100 * shared.clip / noise, rel=0.02)
    # without a stated signal: 8 sums over 2 rounds and 10 groups, at best
    counts = replace(COUNTS, steps=4)
    most = 0.5 * 100 * (8 / 10) ** 0.5 / (1.5 * 4 * (8 * 10) ** 0.5)
    assert counts.signal_to_noise(1.5, 100, 8, rounds=2) == pytest.approx(most)
