"""The attacker looks for releases whose stated ε is too small.

An accountant written for this test composes the privacy losses by a Fourier transform. Its grid
preserves means, so that it is neither a lower nor an upper bound, but close to the exact value.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import norm

from fedsynth.privacy.accounting import epsilon
from tests.privacy.support import release

pytestmark = pytest.mark.slow

Kind = tuple[float, float, int]  # σ, the sampling rate and the number of steps
Floats = npt.NDArray[np.float64]
DELTA, SIZE = 1e-5, 2**20


def losses(sigma: float, rate: float, replace_one: bool, swapped: bool) -> tuple[Floats, Floats]:
    """Returns the probabilities of one step's outputs, and their privacy losses."""
    z = np.linspace(-14 * sigma - 1, 14 * sigma + 1, 400_001)
    without = (math.log1p(-rate) if rate < 1 else -np.inf) + norm.logpdf(z, 0, sigma)
    p = np.logaddexp(without, math.log(rate) + norm.logpdf(z, 1, sigma))
    q = norm.logpdf(z, 0, sigma)
    if replace_one:
        q = np.logaddexp(without, math.log(rate) + norm.logpdf(z, -1, sigma))
    if swapped:
        p, q = q, p
    return np.exp(p) * (z[1] - z[0]), p - q


def composed(kinds: list[Kind], replace_one: bool, swapped: bool) -> float:
    steps = [(*losses(sigma, q, replace_one, swapped), n) for sigma, q, n in kinds]
    means = [float((weights * loss).sum()) for weights, loss, _ in steps]
    mean = sum(n * m for m, (_, _, n) in zip(means, steps, strict=True))
    variance = 0.0
    for m, (weights, loss, n) in zip(means, steps, strict=True):
        variance += n * (float((weights * loss**2).sum()) - m**2)
    span = max(12 * math.sqrt(variance) + abs(mean), 3.0)
    width = 2 * span / SIZE
    transform = np.ones(SIZE // 2 + 1, complex)
    for weights, loss, n in steps:
        low = np.floor(loss / width).astype(np.int64)
        share = loss / width - low
        grid = np.zeros(SIZE)
        np.add.at(grid, low % SIZE, weights * (1 - share))
        np.add.at(grid, (low + 1) % SIZE, weights * share)
        transform *= np.fft.rfft(grid) ** n
    weights = np.maximum(np.fft.irfft(transform, SIZE), 0)
    total = np.fft.fftfreq(SIZE, 1 / SIZE) * width
    low_epsilon, high_epsilon = 0.0, span
    for _ in range(60):
        middle = (low_epsilon + high_epsilon) / 2
        above = total > middle
        if float((weights[above] * -np.expm1(middle - total[above])).sum()) <= DELTA:
            high_epsilon = middle
        else:
            low_epsilon = middle
    return high_epsilon


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize(
    "kinds",
    [
        [(3.0, 1.0, 30)],
        [(1.0, 0.05, 1000)],
        [(20.0, 0.1, 50_000)],
        [(0.6, 0.02, 500)],
        [(4.0, 0.9, 20)],
        [(2.0, 0.1, 50), (3.7, 0.05, 100), (1.3, 0.02, 40), (8.0, 1.0, 12)],
    ],
    ids=str,
)
def test_epsilon_is_that_of_another_accountant(kinds: list[Kind], adjacency: str) -> None:
    rows = [release(noise_multiplier=sigma, sample_rate=q, steps=n) for sigma, q, n in kinds]
    own = max(composed(kinds, adjacency == "replace-one", swapped) for swapped in (False, True))
    assert own * (1 - 1e-3) <= epsilon(rows, DELTA, adjacency) <= own * (1 + 5e-3) + 1e-4
