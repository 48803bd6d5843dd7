"""Rounding on a grid after the noise: what the sum of rounded parts can tell beside the sum of the
unrounded ones, by numbers, and broken twins of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.grid import FINE, TAIL, Addends, Grid, finest, grid_of
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.plans import PrivatePlan
from fedsynth.privacy.randomness import SecretGenerator

REACH = 60
"""Grid steps to either side that have all of the probability."""
PLAN = PrivatePlan(
    name="sums",
    quantity="sums",
    mechanism="statistics",
    clipped="each",
    clip=2.0,
    sample_rate=1.0,
    steps=1,
    dimension=6,
    groups=2,
    shares=3,
    addends=Addends(clients=4, records=1000),
)


def rounded(mean: float, tau: float) -> np.ndarray:
    """The distribution of round(mean + N(0, τ²)) on −REACH … REACH, with steps of 1."""
    k = np.arange(-REACH, REACH + 1)
    found: np.ndarray = norm.cdf((k + 0.5 - mean) / tau) - norm.cdf((k - 0.5 - mean) / tau)
    return found


def apart(means: tuple[float, ...], tau: float) -> float:
    """Total variation between the sum of rounded parts and its stand-in, which is a function of the
    unrounded parts' sum G alone: G, less H − 1 uniform numbers of one step, rounded."""
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


@pytest.mark.parametrize("means", [(0.3, 0.4), (0.0, 0.5), (0.25, 0.25, 0.45)])
@pytest.mark.parametrize("tau", [0.9, 1.0, 1.2])
def test_rounded_parts_tell_what_their_sum_tells(means: tuple[float, ...], tau: float) -> None:
    """The lemma, in one coordinate, with noise so small that the difference can be seen at all."""
    assert apart(means, tau) < bound(tau, len(means)) + 2e-4  # of the integration


def test_with_less_noise_than_a_step_rounded_parts_tell_more() -> None:
    """The broken twin: a grid that is too coarse, which is refused."""
    assert apart((0.3, 0.4), 0.2) > 0.1
    with pytest.raises(PrivacySettingError, match="is too small for a sum of"):
        grid_of(clip=1.0, deviation=1e-9, shares=2, addends=Addends(3, 10**9))


@given(
    st.floats(1e-3, 1e4),
    st.floats(0.05, 1e3),
    st.integers(1, 500),
    st.integers(1, 10**8),
)
def test_sums_never_overflow_and_grids_are_fine(
    clip: float, noise: float, clients: int, records: int
) -> None:
    """Whatever the public values are: parts are whole numbers of steps that a float64 has, sums are
    below 2^62 steps, and the noise of each has many."""
    shares = max(1, clients - 1)
    deviation = noise * clip / math.sqrt(shares)
    try:
        grid = grid_of(clip, deviation, shares, Addends(clients, records))
    except PrivacySettingError:
        steps = deviation / finest(records * clip + TAIL * deviation, clients).spacing
        assert steps < FINE * math.sqrt(shares)
        return
    assert grid.bound >= records * clip + TAIL * deviation
    assert grid.bound / grid.spacing <= 2**52
    assert clients * grid.bound / grid.spacing <= 2**62
    odds = 2 * math.pi**2 * (deviation / grid.spacing) ** 2 / shares
    assert odds > 2e7  # nats: below 10^-8000000


def released(plan: PrivatePlan, secret: SecretGenerator, rows: torch.Tensor) -> torch.Tensor:
    guard = Guard(Ledger("c"), 1e-5, None)
    series = GaussianSums(plan.release(1, 1.5), plan.groups, guard, secret)
    series.shares = plan.shares
    series.grid = plan.grid(1.5)
    series.sample(len(rows))
    series.add(rows, torch.zeros(len(rows), dtype=torch.int64))
    return series.release()


def test_a_part_is_on_its_grid_after_the_noise() -> None:
    """Not before it, and not in float32, whose steps go by the sums: another bit of the noise moves
    the part, and large sums have as fine steps as small ones."""
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
    deviation = 1.5 * wide.clip / math.sqrt(wide.shares)
    assert float(part.std()) == pytest.approx(deviation, rel=0.02)
    assert wide.release(1, 1.5) == replace(wide, addends=None).release(1, 1.5)


def evenness(grid: Grid, deviation: float, mean: float) -> float:
    """The share of parts of an even number of steps, less that of odd ones."""
    noise = SecretGenerator(test_only=np.random.default_rng(0)).normal((200_000,), deviation)
    steps = torch.round((mean + noise) / grid.spacing)
    return float(1 - 2 * (steps % 2).abs().mean())


def test_no_grid_is_as_fine_as_float64() -> None:
    """Its ties go to even numbers of steps, more of them for larger parts; the broken twin is the
    finest grid."""
    deviation, addends = 10 / math.sqrt(2), Addends(3, 1000)
    for mean in (0.0, 400.0, 900.0):
        assert abs(evenness(grid_of(1.0, deviation, 2, addends), deviation, mean)) < 0.01
    twin = finest(1000 + TAIL * deviation, 3)
    assert evenness(twin, deviation, 900.0) > 0.05
