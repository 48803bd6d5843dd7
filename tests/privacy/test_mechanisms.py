"""Tests of the Gaussian mechanism: sensitivity, noise, accounting and secrecy."""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth.core.client import PrivateClientView
from fedsynth.data.images import normalise
from fedsynth.privacy.errors import BudgetExceededError, LedgerError, PrivacyError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import (
    BudgetEnforcer,
    GaussianSumMechanism,
    clipped_sums,
)
from fedsynth.privacy.randomness import SecretGenerator
from tests.digits import digits
from tests.privacy.support import NUMBERS, guard, release, series

rows = st.lists(NUMBERS, min_size=4, max_size=4)


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
    x = torch.tensor([r for r, _ in data], dtype=torch.float32).reshape(-1, 4)
    g = torch.tensor([c for _, c in data], dtype=torch.int64)
    without = clipped_sums(x, g, 3, clip)
    row = torch.tensor([extra], dtype=torch.float32)
    joined = clipped_sums(torch.cat([x, row]), torch.cat([g, torch.tensor([group])]), 3, clip)
    assert torch.isfinite(joined).all()
    difference = joined - without
    assert difference.norm() <= clip * (1 + 1e-9)
    other_groups = [c for c in range(3) if c != group]
    assert torch.equal(difference[other_groups], torch.zeros(2, 4, dtype=torch.float64))


@pytest.mark.parametrize(("sigma", "clip"), [(3.0, 0.5), (0.7, 10.0)])
def test_noise_deviation_is_sigma_times_clip(sigma: float, clip: float) -> None:
    """Broken versions would scale the noise by a quarter or divide it by the batch size."""
    width = 4000
    s = series(3, noise_multiplier=sigma, sensitivity=clip, dimension=3 * width)
    s.sample(0)
    noise = s.release()
    assert noise.shape == (3, width)
    for row in noise:
        assert row.std() == pytest.approx(sigma * clip, rel=0.05)
        assert abs(row.mean()) < 5 * sigma * clip / math.sqrt(width)
    correlations = torch.corrcoef(noise)[~torch.eye(3, dtype=torch.bool)]
    assert correlations.abs().max() < 0.1  # fails for noise reused across classes


def test_releases_have_independent_noise() -> None:
    s = series(3, steps=3, dimension=1500)
    draws = []
    for _ in range(3):
        s.sample(10)
        s.add(torch.zeros(10, 500), torch.zeros(10, dtype=torch.int64))
        draws.append(s.release().flatten())
    assert torch.corrcoef(torch.stack(draws))[0, 1:].abs().max() < 0.15


def test_series_is_limited_to_charged_releases() -> None:
    ledger = Ledger("c")
    s = GaussianSumMechanism(release(steps=2), 3, guard(ledger), SecretGenerator())
    assert [row.steps for row in ledger.releases] == [2]  # charged before any draw
    for _ in range(2):
        with pytest.raises(PrivacyError, match="no step is open"):
            s.add(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))
        s.sample(5)
        with pytest.raises(PrivacyError, match="still open"):
            s.sample(5)
        s.release()
        with pytest.raises(PrivacyError, match="no step is open"):
            s.release()
    with pytest.raises(PrivacyError, match="all 2 charged steps"):
        s.sample(5)


def test_cap_rejects_before_charge_and_draw() -> None:
    ledger = Ledger("c")
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    state = np.random.default_rng(0).random()
    with pytest.raises(BudgetExceededError):
        GaussianSumMechanism(
            release(noise_multiplier=0.5), 3, BudgetEnforcer(ledger, 1e-5, 1.0), secret
        )
    assert ledger.releases == ()
    assert secret._generator.random() == state


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


def test_secret_generators_cannot_be_copied_or_pickled() -> None:
    secret = SecretGenerator()
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copier(secret)
    assert secret.is_secret
    assert not SecretGenerator(test_only=np.random.default_rng(0)).is_secret
    assert "key" not in repr(secret)


def test_clients_of_group_have_independent_noise() -> None:
    """Empty clients return all classes too."""
    group = PrivateClientView(range(2), digits(range(10)), [torch.arange(0)] * 2, [])
    charged = [series(10, dimension=3000) for _ in range(2)]
    out = group.class_sums(charged, lambda x, segment: x.flatten(1)[:, :1].repeat(1, 300))
    assert out.shape == (20, 300)
    assert torch.corrcoef(torch.stack([out[:10].flatten(), out[10:].flatten()]))[0, 1].abs() < 0.1
    assert out.std() == pytest.approx(2.0, rel=0.05)


def test_class_sums_equal_loop_over_clients_and_classes() -> None:
    data = digits(np.arange(40) % 10)
    parts = [torch.arange(25), torch.arange(25, 40)]
    group = PrivateClientView(range(2), data, parts, [])
    tiny = {"noise_multiplier": 1e-12, "sensitivity": 1e6, "dimension": 640}
    out = group.class_sums(
        [series(10, **tiny) for _ in parts], lambda x, segment: x.flatten(1) + segment[:, None]
    )
    for client, part in enumerate(parts):
        for label in range(10):
            indices = part[data.labels[part] == label]
            rows = normalise(data.images[indices], data.spec).flatten(1) + 10 * client + label
            torch.testing.assert_close(out[10 * client + label], rows.sum(0), atol=1e-3, rtol=1e-4)


def test_widths_must_match_charged_dimension() -> None:
    """Narrower noise would be broadcast, so that coordinates share a draw."""
    s = series(3, dimension=3)
    s.sample(2)
    with pytest.raises(PrivacyError, match="rows_ND must have shape"):
        s.add(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))
    ledger = Ledger("c")
    with pytest.raises(PrivacyError, match="equal width"):
        GaussianSumMechanism(release(dimension=19), 10, guard(ledger), SecretGenerator())
    assert ledger.releases == ()


def test_batches_are_uncapped_secret_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample has more records than a chunk."""
    records = 1300
    data = digits(np.random.default_rng(0).integers(0, 10, records))
    masks: list[tuple[int, float, Tensor]] = []
    draw = SecretGenerator.poisson_sample

    def spy(self: SecretGenerator, n: int, rate: float) -> Tensor:
        masks.append((n, rate, draw(self, n, rate)))
        return masks[-1][2]

    monkeypatch.setattr(SecretGenerator, "poisson_sample", spy)
    group = PrivateClientView([0], data, [torch.arange(records)], [])
    values = {"noise_multiplier": 1e-12, "sensitivity": 1e6, "sample_rate": 0.9, "steps": 2}
    charged = [series(10, dimension=10, **values)]
    for step in range(2):
        out = group.class_sums(charged, lambda x, segment: torch.ones(len(x), 1))
        n, rate, mask = masks[step]
        assert (n, rate) == (records, 0.9)
        counts = torch.bincount(data.labels[mask], minlength=10).float()
        torch.testing.assert_close(out[:, 0], counts, atol=1e-3, rtol=0)
    assert len(masks) == 2
    assert not torch.equal(masks[0][2], masks[1][2])


def test_halved_sum_of_four_gaussians_keeps_deviation() -> None:
    """Compares with the sum of the same random stream; the deviation is σ, not 2σ."""
    generator, reference_generator = np.random.default_rng(5), np.random.default_rng(5)
    noise = SecretGenerator(four_sums=True, test_only=generator).normal((50, 400), 3.0)
    expected = 3.0 * sum(reference_generator.standard_normal((50, 400)) for _ in range(4)) / 2
    np.testing.assert_allclose(noise.numpy(), expected)
    assert float(noise.std()) == pytest.approx(3.0, rel=0.02)


# After a fork two processes hold a client's secret and its charged series, which must not be used
# twice.


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


def test_forked_processes_draw_different_noise_and_masks() -> None:
    secret = SecretGenerator()

    def draw() -> bytes:
        masks = secret.poisson_sample(64, 0.5).numpy().astype(np.uint8)
        return (
            secret.normal((4,), 1.0).numpy().tobytes()
            + np.packbits(np.isin(np.arange(64), masks)).tobytes()
        )

    drawn = [in_fork(draw), in_fork(lambda: in_fork(draw)), in_fork(draw), draw(), draw()]
    assert len({data[:32] for data in drawn}) == len({data[32:] for data in drawn}) == 5


def test_reused_process_number_draws_different_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grandchild may reuse the number of its grandparent; here all numbers are equal."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    secret = SecretGenerator()
    child_noise = in_fork(lambda: secret.normal((4,), 1.0).numpy().tobytes())
    assert child_noise != secret.normal((4,), 1.0).numpy().tobytes()


def test_forked_series_are_rejected() -> None:
    """Parent and child would both release a series that was charged once."""
    forked = series(3, steps=2)
    forked.sample(0)

    def check_rejected() -> bytes:
        with pytest.raises(PrivacyError, match="another process"):
            forked.release()
        with pytest.raises(PrivacyError, match="another process"):
            forked.sample(0)
        return b"refused"

    assert in_fork(check_rejected) == b"refused"
    forked.release()


def test_forked_memory_ledgers_are_not_charged() -> None:
    """The parent would report an ε without the child's charge."""
    row = release()
    charged = guard()

    def check_rejected() -> bytes:
        with pytest.raises(LedgerError, match="memory of another process"):
            GaussianSumMechanism(row, 3, charged, SecretGenerator())
        return b"refused"

    assert in_fork(check_rejected) == b"refused"
    charged.charge(row)
    assert charged.ledger.releases == (row,)
