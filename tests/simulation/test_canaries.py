"""Tests of canaries in one client's releases: their sums, releases and scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor

from fedsynth.privacy import Ledger, PrivacyError, Release
from fedsynth.privacy.mechanisms import BudgetEnforcer
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.simulation.canaries import COLUMNS, Canaries, draw_directions, log_likelihood_ratios


def canaries(count: int = 20, rest: int = 30) -> Canaries:
    coins = torch.arange(count) % 3 == 0
    generator = torch.Generator().manual_seed(0)
    return Canaries(torch.arange(count) % 10, coins, rest, generator)


def release_with(
    audited: Canaries, width: int, device: torch.device, rate: float = 1.0, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (release, sampled records, added rows) of one release with almost no noise."""
    sampler = "full" if rate == 1 else "poisson"
    row = Release(1, "x", "m", "x", 1e-9, 2.0, rate, sampler, 1, 10 * width)
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    series = audited.series(row, 10, BudgetEnforcer(Ledger("0"), 1e-5, None), secret)
    indices = audited.among_records()
    records = audited.rest + len(indices)
    labels = torch.cat([torch.arange(audited.rest) % 10, audited.labels[indices]])
    sampled = series.sample(records)
    rows = scale * torch.randn(records, width, generator=torch.Generator().manual_seed(1))
    for batch in sampled.split(7):
        series.add(rows[batch].to(device), labels[batch].to(device))
    return series.release().cpu().double(), sampled, rows


def sums(rows: Tensor, labels: Tensor, clip: float) -> Tensor:
    rows = rows.double() * (clip / rows.double().norm(dim=1, keepdim=True)).clamp_max(1)
    return torch.zeros(10, rows.shape[1], dtype=torch.float64).index_add(0, labels, rows)


def test_vectors_belong_only_to_included_canaries(
    device: torch.device,
) -> None:
    audited = canaries()
    released, sampled, rows = release_with(audited, 5, device)
    assert len(sampled) == 30 + int(audited.included.sum())
    remainder = released - sums(rows[:30], torch.arange(30) % 10, 2.0)
    included_counts = torch.bincount(audited.labels[audited.included], minlength=10)
    assert included_counts.tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    torch.testing.assert_close(
        remainder.norm(dim=1), 2.0 * included_counts.double(), rtol=0, atol=1e-5
    )
    assert bool((audited.scores[audited.included] > 0).all())
    assert bool((audited.scores[~audited.included] < 0).all())


def test_records_of_any_norm_are_scored_by_clipped_vectors(device: torch.device) -> None:
    """Regression: norms in float32 overflow above 1e19."""
    scores = []
    for scale in (1e3, 1e30):
        audited = canaries()
        release_with(audited, 5, device, scale=scale)
        scores.append(audited.scores)
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3)
    assert bool((scores[1][audited.included] > 0).all())
    assert bool((scores[1][~audited.included] < 0).all())


def test_sampled_records_missing_from_the_sum_raise_errors() -> None:
    """A broken version would cap batches, which the accounting ignores."""
    audited = canaries()
    row = Release(1, "x", "m", "x", 1.0, 2.0, 1.0, "full", 1, 50)
    series = audited.series(row, 10, BudgetEnforcer(Ledger("0"), 1e-5, None), SecretGenerator())
    series.sample(37)
    series.add(torch.ones(36, 5), torch.zeros(36, dtype=torch.int64))
    with pytest.raises(PrivacyError, match="all 37 sampled records, but added 36"):
        series.release()


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_scores_are_likelihood_ratios_with_other_auditedas_noise(rate: float) -> None:
    """Compares with a direct solution for vectors that overlap."""
    rng = np.random.default_rng(0)
    u, y, s = rng.normal(size=(6, 4)), rng.normal(size=4), 0.7
    expected = []
    for i in range(6):
        others = np.delete(u, i, axis=0)
        noise = s**2 * np.eye(4) + rate / 2 * (1 - rate / 2) * others.T @ others
        z = u[i] @ np.linalg.solve(noise, y - rate / 2 * others.sum(axis=0))
        k = u[i] @ np.linalg.solve(noise, u[i])
        expected.append(np.log(1 - rate + rate * np.exp(z - k / 2)))
    scores = log_likelihood_ratios(torch.tensor(y), torch.tensor(u), s, rate, orthogonal=False)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_orthogonal_canary_scores_are_density_ratios(rate: float) -> None:
    directions = draw_directions(5, 8, torch.Generator().manual_seed(0))
    u, s = 2.0 * directions.units, 0.7
    y = torch.randn(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    along = (directions.units @ y).numpy()
    out, sampled = norm.pdf(along, 0, s), norm.pdf(along, 2.0, s)
    expected = np.log(((1 - rate) * out + rate * sampled) / out)
    for orthogonal in (True, False):
        vectors = u[:1] if not orthogonal else u
        scores = log_likelihood_ratios(y, vectors, s, rate, orthogonal=orthogonal).numpy()
        np.testing.assert_allclose(scores, expected[: len(vectors)], rtol=1e-9)


@given(count=st.integers(1, 40), width=st.integers(1, 60), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_directions_are_unit_vectors_and_orthogonal_if_possible(
    count: int, width: int, seed: int
) -> None:
    drawn = draw_directions(count, width, torch.Generator().manual_seed(seed))
    gram = drawn.units @ drawn.units.T
    torch.testing.assert_close(gram.diagonal(), torch.ones(count, dtype=torch.float64))
    assert drawn.orthogonal == (count <= width)
    assert sorted(drawn.columns.tolist()) == list(range(width))
    if drawn.orthogonal:
        assert float((gram - torch.eye(count)).abs().max()) < 1e-12


def test_directions_of_wide_releases_use_coordinates_of_all_parts() -> None:
    drawn = draw_directions(3, 10 * COLUMNS, torch.Generator().manual_seed(0))
    assert len(set(drawn.columns.tolist())) == COLUMNS
    tenths = torch.bincount(drawn.columns // COLUMNS, minlength=10)
    assert int(tenths.min()) > COLUMNS / 10 * 0.8
