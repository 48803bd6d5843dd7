"""Tests that rounding on a grid after the noise reveals no more than the sum; and broken variants."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from fedsynth.deployment.secure_aggregation.primitives import FixedPoint
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.mechanisms import GaussianSumMechanism, on_grid
from fedsynth.privacy.plans import ReleasePlan
from fedsynth.privacy.randomness import FINE, TAIL, Addends, Grid, SecretGenerator, grid_of
from tests.privacy.support import guard, plan

REACH = 60
"""The number of grid steps on each side that contain all of the probability."""
PLAN = plan(dimension=6, groups=2, shares=3, addends=Addends(clients=4, records=1000))


def rounded(mean: float, tau: float) -> np.ndarray:
    """Returns the distribution of round(mean + N(0, τ²)) on −REACH … REACH, with steps of 1."""
    k = np.arange(-REACH, REACH + 1)
    probabilities: np.ndarray = norm.cdf((k + 0.5 - mean) / tau) - norm.cdf((k - 0.5 - mean) / tau)
    return probabilities


def rounding_distance(means: tuple[float, ...], tau: float) -> float:
    """Returns the total variation distance between the sum of rounded parts and its stand-in."""
    parts = rounded(means[0], tau)
    for mean in means[1:]:
        parts = np.convolve(parts, rounded(mean, tau), mode="same")
    fine = 64
    x = np.arange(-REACH * fine, REACH * fine + 1) / fine
    density = norm.pdf(x, sum(means), tau * math.sqrt(len(means)))
    box = np.ones(fine) / fine
    for _ in means:  # H − 1 uniform numbers, and the cell that is rounded to one of its points
        density = np.convolve(density, box, mode="same")
        x = x - 0.5 / fine  # an even number of points: the box is half a point off centre
    stand_in = np.interp(np.arange(-REACH, REACH + 1), x, density)
    return float(np.abs(parts - stand_in).sum() / 2)


def bound(tau: float, shares: int) -> float:
    """Returns 2·D·H·exp(−2π²τ²/(γ²H)) with D = 1, γ = 1."""
    return 2 * shares * math.exp(-2 * math.pi**2 * tau**2 / shares)


@pytest.mark.parametrize("means", [(0.3, 0.4), (0.25, 0.25, 0.45)])
@pytest.mark.parametrize("tau", [0.9, 1.2])
def test_rounded_parts_reveal_only_their_sum(means: tuple[float, ...], tau: float) -> None:
    """Checks the lemma in one coordinate, with noise small enough for a visible difference."""
    assert rounding_distance(means, tau) < bound(tau, len(means)) + 2e-4  # of the integration


def test_coarse_grids_reveal_more_than_sum() -> None:
    """Such a coarse grid is a broken variant, and rejected."""
    assert rounding_distance((0.3, 0.4), 0.2) > 0.1
    with pytest.raises(PrivacySettingError, match="is too small for a 64-bit sum of"):
        grid_of(clip=1.0, noise_std=1e-9, shares=2, addends=Addends(3, 10**9))


def test_grid_is_coarsest_sufficient_one() -> None:
    """A step at the bound has 2^10 float64 values and sums are below 2^62 steps, or it is rejected."""
    rng = np.random.default_rng(0)
    accepted = 0
    for _ in range(400):
        clip, noise, records = 10.0 ** rng.uniform((-12, -2, 0), (12, 3, 9))
        clients = int(rng.integers(1, 500))
        shares = max(1, clients - 1)
        noise_std = noise * clip / math.sqrt(shares)
        needed = FINE * math.sqrt(shares)
        bound = int(records) * clip + TAIL * noise_std
        spacing = 2.0 ** math.floor(math.log2(noise_std / needed))
        try:
            grid = grid_of(clip, noise_std, shares, Addends(clients, int(records)))
        except PrivacySettingError:
            assert spacing < 2**10 * np.spacing(bound)
            continue
        accepted += 1
        assert needed * grid.spacing <= noise_std < 2 * needed * grid.spacing
        assert grid.bound == bound
        assert grid.spacing >= 2**10 * np.spacing(bound)
        assert clients * bound / grid.spacing <= 2**62
        form = FixedPoint(bound, clients, grid.bits, wraps=True)
        part = np.floor(bound / grid.spacing) * grid.spacing
        encoded = form.encode([part, -part]) * np.uint64(clients)
        assert form.decode(encoded).tolist() == [clients * part, -clients * part]
    assert 200 < accepted < 400


def released_sums(spec: ReleasePlan, secret: SecretGenerator, rows: torch.Tensor) -> torch.Tensor:
    series = GaussianSumMechanism(spec.release(1, 1.5), spec.groups, guard(), secret)
    series.shares = spec.shares
    series.grid = spec.grid(1.5)
    series.sample(len(rows))
    series.add(rows, torch.zeros(len(rows), dtype=torch.int64))
    return series.release()


def test_noisy_parts_are_on_grid() -> None:
    """Broken versions would round before the noise, or in float32."""
    grid = PLAN.grid(1.5)
    assert grid is not None
    rows = torch.full((900, 3), 100.0)  # clipped to a norm of 2: sums of 1039
    for inputs in (rows, rows[:0]):
        part = released_sums(PLAN, SecretGenerator(), inputs)
        assert part.dtype == torch.float64
        steps = part / grid.spacing
        assert torch.equal(steps, steps.round())
    plain = released_sums(replace(PLAN, addends=None), SecretGenerator(), rows)
    assert plain.dtype == torch.float32


def test_rounding_preserves_charge_and_deviation() -> None:
    rng = np.random.default_rng(0)
    wide = replace(PLAN, dimension=40_000)
    part = released_sums(wide, SecretGenerator(test_only=rng), torch.zeros(0, 20_000))
    noise_std = 1.5 * wide.clip / math.sqrt(wide.shares)
    assert float(part.std()) == pytest.approx(noise_std, rel=0.02)
    assert wide.release(1, 1.5) == replace(wide, addends=None).release(1, 1.5)


HUGE = replace(PLAN, clip=1e12, dimension=200_000, groups=1, shares=2, addends=Addends(4, 4000))


@pytest.mark.parametrize("records", [0, 3999])
@pytest.mark.parametrize("spec", [HUGE, replace(HUGE, clip=1.0)], ids=["huge clip", "clip 1"])
def test_even_and_odd_steps_are_equally_frequent(spec: ReleasePlan, records: int) -> None:
    """Ties rounded to even numbers of steps would reveal the size of a part."""
    grid = spec.grid(3.0)
    assert grid is not None
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    sums = torch.full((1, spec.dimension), 0.999 * spec.clip * records, dtype=torch.float64)
    parts = on_grid(sums, secret.normal(sums.shape, 3 * spec.clip / math.sqrt(2)), grid)
    steps = (parts / grid.spacing).numpy()
    np.testing.assert_array_equal(steps, np.rint(steps))
    assert abs(np.mean(steps % 2 == 0) - 0.5) < 5 * 0.5 / math.sqrt(spec.dimension)


def test_grids_as_fine_as_float64_are_rejected() -> None:
    """The smallest input with such a grid, a broken variant, is rejected."""
    noise = np.random.default_rng(0).normal(0, 3e12 / math.sqrt(2), 200_000)
    even = [np.mean(np.rint(1e12 * records + noise) % 2 == 0) for records in (0, 1000, 3000, 3999)]
    assert max(even) > 0.6
    assert min(even) < 0.55
    grid = HUGE.grid(3.0)
    assert grid is not None
    assert grid.bits == -28
    with pytest.raises(PrivacySettingError, match="or lower privacy"):
        replace(HUGE, addends=Addends(4, 10**10)).grid(3.0)


@given(st.integers(-40, 40), st.integers(-(2**50), 2**50), st.floats(-(2.0**20), 2.0**20))
def test_part_is_exact_rounded_sum(bits: int, steps: int, noise: float) -> None:
    """The reference are rational numbers, since a float64 sum would lose what decides ties."""
    grid = Grid(bits, 2.0**51 * 2.0**-bits)
    total = float(steps) / 4 * grid.spacing
    part = on_grid(*torch.tensor([total, noise * grid.spacing], dtype=torch.float64), grid)
    exact = Fraction(steps, 4) + Fraction(noise)
    if abs(exact - round(exact)) < Fraction(1, 2) - Fraction(1, 2**32):
        assert part.item() == round(exact) * grid.spacing
