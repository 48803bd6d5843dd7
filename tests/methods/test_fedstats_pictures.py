"""FedStats' release of small pictures: what one example may move, sums that do not depend on who
has what, its share of the budget, and images drawn from it; and the momentum of steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth import (
    FedStats,
    PrivacySettings,
)
from fedsynth.core.context import RoundContext
from fedsynth.data.registry import dataset_spec
from fedsynth.features.scattering import low_pass
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.methods.statistics.class_moments import (
    PixelMoments,
    pixel_rows,
    pixel_width,
)
from fedsynth.methods.statistics.settings import FedStatsState, StatisticSums
from fedsynth.models.on_features import FeatureLinear
from tests.digits import SPEC
from tests.digits import context as some_context

METHOD = FedStats(features="pixels", ipc=2, image_steps=1, second_moments="no")
WIDTH = 65  # 8×8 cells and the constant
HOSTILE = [0.0, 1e-30, 1.0, -3.0, 1e20, 3e38, float("nan"), float("inf"), -float("inf")]


def context(
    number: int = 1, sigma: float | None = None, rounds: int = 3, **other: Any
) -> RoundContext:
    privacy = None if sigma is None else PrivacySettings(noise_multiplier=sigma)
    network = FeatureLinear(METHOD.map_of(SPEC), SPEC)
    federation = {"rounds": rounds, "clients": 2, **other}
    return some_context(privacy, number, network=network, nominal=20.0, **federation)


# ------------------------------------------------------------------------------------- sensitivity


@given(
    u=st.lists(
        st.one_of(st.floats(-9, 9, width=32), st.sampled_from(HOSTILE)), min_size=4, max_size=4
    ),
    label=st.integers(0, 2),
)
@settings(max_examples=100, deadline=None)
def test_hostile_vectors_move_it_by_no_more(u: list[float], label: int) -> None:
    moved = pixel_rows(torch.tensor([u]), torch.tensor([label]), 3).sums()
    assert float(moved.norm()) <= 1 + 1e-9
    assert bool(torch.isfinite(moved).all())


# -------------------------------------------------------------------------------------- accounting


def test_in_colour_images_start_from_random_processes() -> None:
    """Then nothing is released for them; "yes" and "no" say otherwise."""
    colour, grey = dataset_spec("cifar10"), dataset_spec("mnist")
    for pictures, released in {"auto": [True, False], "yes": [True] * 2, "no": [False] * 2}.items():
        method = FedStats(ipc=1, pictures=pictures)
        assert [method.releases_pictures(spec) for spec in (grey, colour)] == released
    vectors = replace(grey, height=1, width=64)
    assert not FedStats(ipc=1).releases_pictures(vectors)


# ------------------------------------------------------------------------------- from the release


def test_means_and_covariance_by_numpy() -> None:
    """Of classes of different sizes, whose counts come with the sums."""
    draws = np.random.default_rng(0)
    x = draws.random((60, 1, 8, 8)).astype(np.float32)
    labels = np.sort(np.r_[np.arange(10), draws.integers(0, 4, 50)])
    sums = pixel_rows(low_pass((1, 8, 8))(torch.from_numpy(x)), torch.from_numpy(labels), 10).sums()
    actual = PixelMoments.unpacked(Pool(sums, 0.0, 60), WIDTH, 10)
    v = x.reshape(60, -1)
    v = v / np.linalg.norm(v, axis=1, keepdims=True)
    means = np.stack([v[labels == c].mean(axis=0) for c in range(10)])
    np.testing.assert_allclose(actual.means, means, atol=1e-5)
    about = v - means[labels]
    np.testing.assert_allclose(actual.roots @ actual.roots.T, about.T @ about / 60, atol=1e-5)


def test_directions_below_the_noise_are_dropped() -> None:
    """Noise alone leaves but a few of 65."""
    draws = torch.Generator().manual_seed(0)
    noise = torch.randn(pixel_width(WIDTH, 10), generator=draws, dtype=torch.float64)
    actual = PixelMoments.unpacked(Pool(10.0 * noise, 10.0, 1000.0), WIDTH, 10)
    assert bool(torch.isfinite(actual.means).all())
    assert actual.roots.shape[1] < 22
    assert PixelMoments.unpacked(Pool(10.0 * noise, 0.0, 1000.0), WIDTH, 10).roots.shape[1] > 25


def test_images_are_drawn_about_their_class_s_mean() -> None:
    means = torch.eye(64, dtype=torch.float64)[:10]
    roots = 0.05 * torch.ones(64, 1, dtype=torch.float64)
    moments = PixelMoments(means, roots)
    made = moments.drawn(50, (1, 8, 8), (0.5, 1.0), torch.Generator().manual_seed(0))
    assert made.shape == (10, 50, 1, 8, 8)
    assert float(made.min()) >= 0
    assert float(made.max()) <= 1
    assert made.flatten(2).mean(dim=1).argmax(dim=1).tolist() == list(range(10))
    assert float(made[:, -10:].std(dim=1).mean()) > float(made[:, :10].std(dim=1).mean())


# ---------------------------------------------------------------------------------------- momentum


def test_a_step_makes_a_part_of_the_last_move_again() -> None:
    """W₁ = W₀ − r·g₁ and W₂ = W₁ − r·(g₂ + m·g₁), by hand, with the pace that noise allows."""
    method = FedStats(features="pixels", second_moments="no", momentum=0.25)
    settings_of_run = {"rounds": 9, "sigma": 5.0, "noise": {"moments": 5.0}}
    rate = method.rate(context(3, **settings_of_run))
    network = FeatureLinear(method.map_of(SPEC), SPEC)
    state = FedStatsState(network.state_dict())
    weight = state.parameters["classifier.weight"].double()
    gradients = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(0))
    moves = []
    for number, gradient in enumerate(gradients, start=2):
        upload = StatisticSums(20.0 * gradient.flatten())  # of a client of nominal size 20
        moved = method.server_step(state, {0: upload}, context(number, **settings_of_run))
        assert isinstance(moved, FedStatsState)
        state = moved
        moves.append(rate * gradient.double())
    expected = weight - moves[0] - (moves[1] + 0.25 * moves[0])
    torch.testing.assert_close(
        state.parameters["classifier.weight"].double(), expected, rtol=1e-4, atol=1e-4
    )


# ----------------------------------------------------------------------------- settings and budget


@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_the_pace_is_of_the_noise_that_a_sum_has(aggregation: str) -> None:
    """The noise of a logit after all steps, drawn: about what the setting says, for few records and
    many, with every client's own noise and with shares of it."""
    method = FedStats(features="pixels", second_moments="no", aggregation=aggregation)
    privacy = PrivacySettings(noise_multiplier=5.0)
    plans = method.release_plans(privacy, context(rounds=12, clients=4))
    noise = {one.name: 5.0 * one.relative_noise_multiplier * one.clip for one in plans}
    rate = method.rate(context(rounds=12, clients=4, sigma=5.0, noise=noise))
    shares = 3 if aggregation == "secure" else 1
    noise_std = noise["step"] * math.sqrt(4 / shares) / (4 * 20.0)
    draws = noise_std * np.random.default_rng(0).normal(size=(12, 4000))
    velocity = weight = np.zeros(4000)
    for gradient in draws:
        velocity = method.momentum * velocity + gradient
        weight = weight - rate * velocity
    assert weight.std() == pytest.approx(method.logit_noise, rel=0.1)
