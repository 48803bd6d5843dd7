"""Rounding on a grid after the noise tells no more than the sum does; and broken twins of it."""

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
"""Grid steps to either side that have all of the probability."""
PLAN = plan(dimension=6, groups=2, shares=3, addends=Addends(clients=4, records=1000))


def rounded(mean: float, tau: float) -> np.ndarray:
    """The distribution of round(mean + N(0, τ²)) on −REACH … REACH, with steps of 1."""
    k = np.arange(-REACH, REACH + 1)
    found: np.ndarray = norm.cdf((k + 0.5 - mean) / tau) - norm.cdf((k - 0.5 - mean) / tau)
    return found


def apart(means: tuple[float, ...], tau: float) -> float:
    """Total variation between the sum of rounded parts and its stand-in."""
    parts = rounded(means[0], tau)
    for mean in means[1:]:
        parts = np.convolve(parts, rounded(mean, tau), mode="same")
    fine = 64
    x = np.arange(-REACH * fine, REACH * fine + 1) / fine
    density = norm.pdf(x, sum(means), tau * math.sqrt(len(means)))
    box = np.ones(fine) / fine
    for _ in means:  # H − 1 uniform numbers, and the cell that is rounded to one of its points
        density = np.convolve(density, box, mode="same")
        x = x - 0.5 / fine  # an even number of points: the box stands half a point to one side
    stand_in = np.interp(np.arange(-REACH, REACH + 1), x, density)
    return float(np.abs(parts - stand_in).sum() / 2)


def bound(tau: float, shares: int) -> float:
    """2·D·H·exp(−2π²τ²/(γ²H)) with D = 1, γ = 1."""
    return 2 * shares * math.exp(-2 * math.pi**2 * tau**2 / shares)


@pytest.mark.parametrize("means", [(0.3, 0.4), (0.25, 0.25, 0.45)])
@pytest.mark.parametrize("tau", [0.9, 1.2])
def test_rounded_parts_tell_what_their_sum_tells(means: tuple[float, ...], tau: float) -> None:
    """The lemma, in one coordinate, with noise so small that the difference can be seen at all."""
    assert apart(means, tau) < bound(tau, len(means)) + 2e-4  # of the integration


def test_with_less_noise_than_a_step_rounded_parts_tell_more() -> None:
    """The broken twin: a grid that is too coarse, which is refused."""
    assert apart((0.3, 0.4), 0.2) > 0.1
    with pytest.raises(PrivacySettingError, match="is too small for a 64-bit sum of"):
        grid_of(clip=1.0, noise_std=1e-9, shares=2, addends=Addends(3, 10**9))


def test_the_coarsest_grid_that_is_fine_enough_is_taken() -> None:
    """A step at the bound has 2^10 float64 values, sums are below 2^62 steps; else it is refused."""
    rng = np.random.default_rng(0)
    taken = 0
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
        taken += 1
        assert needed * grid.spacing <= noise_std < 2 * needed * grid.spacing
        assert grid.bound == bound
        assert grid.spacing >= 2**10 * np.spacing(bound)
        assert clients * bound / grid.spacing <= 2**62
        form = FixedPoint(bound, clients, grid.bits, wraps=True)
        part = np.floor(bound / grid.spacing) * grid.spacing
        words = form.encode([part, -part]) * np.uint64(clients)
        assert form.decode(words).tolist() == [clients * part, -clients * part]
    assert 200 < taken < 400


def released(one: ReleasePlan, secret: SecretGenerator, rows: torch.Tensor) -> torch.Tensor:
    series = GaussianSumMechanism(one.release(1, 1.5), one.groups, guard(), secret)
    series.shares = one.shares
    series.grid = one.grid(1.5)
    series.sample(len(rows))
    series.add(rows, torch.zeros(len(rows), dtype=torch.int64))
    return series.release()


def test_a_part_is_on_its_grid_after_the_noise() -> None:
    """Not before it, and not in float32, whose steps go by the sums."""
    grid = PLAN.grid(1.5)
    assert grid is not None
    rows = torch.full((900, 3), 100.0)  # clipped to a norm of 2: sums of 1039
    for some in (rows, rows[:0]):
        part = released(PLAN, SecretGenerator(), some)
        assert part.dtype == torch.float64
        steps = part / grid.spacing
        assert torch.equal(steps, steps.round())
    plain = released(replace(PLAN, addends=None), SecretGenerator(), rows)
    assert plain.dtype == torch.float32


def test_rounding_changes_neither_the_charge_nor_the_deviation() -> None:
    rng = np.random.default_rng(0)
    wide = replace(PLAN, dimension=40_000)
    part = released(wide, SecretGenerator(test_only=rng), torch.zeros(0, 20_000))
    noise_std = 1.5 * wide.clip / math.sqrt(wide.shares)
    assert float(part.std()) == pytest.approx(noise_std, rel=0.02)
    assert wide.release(1, 1.5) == replace(wide, addends=None).release(1, 1.5)


HUGE = replace(PLAN, clip=1e12, dimension=200_000, groups=1, shares=2, addends=Addends(4, 4000))


@pytest.mark.parametrize("records", [0, 3999])
@pytest.mark.parametrize("one", [HUGE, replace(HUGE, clip=1.0)], ids=["huge clip", "clip 1"])
def test_parts_have_as_many_even_as_odd_steps(one: ReleasePlan, records: int) -> None:
    """However large they are: ties to even numbers of steps would tell the size of a part."""
    grid = one.grid(3.0)
    assert grid is not None
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    sums = torch.full((1, one.dimension), 0.999 * one.clip * records, dtype=torch.float64)
    parts = on_grid(sums, secret.normal(sums.shape, 3 * one.clip / math.sqrt(2)), grid)
    steps = (parts / grid.spacing).numpy()
    np.testing.assert_array_equal(steps, np.rint(steps))
    assert abs(np.mean(steps % 2 == 0) - 0.5) < 5 * 0.5 / math.sqrt(one.dimension)


def test_on_a_grid_as_fine_as_float64_ties_would_decide() -> None:
    """The broken twin is refused: the least input that had such a grid."""
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
def test_a_part_is_the_exact_sum_rounded(bits: int, steps: int, noise: float) -> None:
    """Beside rational numbers: the sum in float64 would lose what ties are decided by."""
    grid = Grid(bits, 2.0**51 * 2.0**-bits)
    total = float(steps) / 4 * grid.spacing
    made = on_grid(*torch.tensor([total, noise * grid.spacing], dtype=torch.float64), grid)
    exact = Fraction(steps, 4) + Fraction(noise)
    if abs(exact - round(exact)) < Fraction(1, 2) - Fraction(1, 2**32):
        assert made.item() == round(exact) * grid.spacing
