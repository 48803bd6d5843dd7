"""FedStats' small pictures, noisy steps and covariances: sensitivities and the server's use."""

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
    PartitionSettings,
    PrivacySettings,
    RunSettings,
    simulate,
)
from fedsynth.core.context import RoundContext
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.scattering import low_pass
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.methods.statistics import whitening
from fedsynth.methods.statistics.class_moments import (
    PixelMoments,
    pixel_rows,
    pixel_width,
    step_rate,
    total_weight,
)
from fedsynth.methods.statistics.settings import FedStatsState, StatisticSums
from fedsynth.methods.statistics.whitening import released_roots, white_signal
from fedsynth.models.on_features import Embedding, FeatureLinear, root_names
from fedsynth.privacy.products import Grams
from tests.digits import SPEC, round_context

METHOD = FedStats(features="pixels", ipc=2, image_steps=1, second_moments="no")
WIDTH = 65  # 8×8 cells and the constant
COUNTS = st.integers(1, 40)
HOSTILE = [0.0, 1e-30, 1.0, -3.0, 1e20, 3e38, float("nan"), float("inf"), -float("inf")]


def context(
    number: int = 1, sigma: float | None = None, rounds: int = 3, **other: Any
) -> RoundContext:
    privacy = None if sigma is None else PrivacySettings(noise_multiplier=sigma)
    network = FeatureLinear(METHOD.map_of(SPEC), SPEC)
    federation = {"rounds": rounds, "clients": 2, **other}
    return round_context(privacy, number, network=network, nominal=20.0, **federation)


@given(
    u=st.lists(
        st.one_of(st.floats(-9, 9, width=32), st.sampled_from(HOSTILE)), min_size=4, max_size=4
    ),
    label=st.integers(0, 2),
)
@settings(max_examples=100, deadline=None)
def test_hostile_vectors_respect_the_sensitivity(u: list[float], label: int) -> None:
    sums = pixel_rows(torch.tensor([u]), torch.tensor([label]), 3).sums()
    assert float(sums.norm()) <= 1 + 1e-9
    assert bool(torch.isfinite(sums).all())


def test_colour_images_start_from_random_processes() -> None:
    """By default nothing is released for them; "yes" and "no" override this."""
    colour, grey = dataset_spec("cifar10"), dataset_spec("mnist")
    for pictures, released in {"auto": [True, False], "yes": [True] * 2, "no": [False] * 2}.items():
        method = FedStats(ipc=1, pictures=pictures)
        assert [method.releases_pictures(spec) for spec in (grey, colour)] == released
    vectors = replace(grey, height=1, width=64)
    assert not FedStats(ipc=1).releases_pictures(vectors)


def test_means_and_covariance_equal_numpy() -> None:
    """Classes have different sizes, and their counts come with the sums."""
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
    """Pure noise leaves a few of 65 directions."""
    draws = torch.Generator().manual_seed(0)
    noise = torch.randn(pixel_width(WIDTH, 10), generator=draws, dtype=torch.float64)
    actual = PixelMoments.unpacked(Pool(10.0 * noise, 10.0, 1000.0), WIDTH, 10)
    assert bool(torch.isfinite(actual.means).all())
    assert actual.roots.shape[1] < 22
    assert PixelMoments.unpacked(Pool(10.0 * noise, 0.0, 1000.0), WIDTH, 10).roots.shape[1] > 25


def test_images_are_drawn_around_class_means() -> None:
    means = torch.eye(64, dtype=torch.float64)[:10]
    roots = 0.05 * torch.ones(64, 1, dtype=torch.float64)
    moments = PixelMoments(means, roots)
    images = moments.drawn(50, (1, 8, 8), (0.5, 1.0), torch.Generator().manual_seed(0))
    assert images.shape == (10, 50, 1, 8, 8)
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    assert images.flatten(2).mean(dim=1).argmax(dim=1).tolist() == list(range(10))
    assert float(images[:, -10:].std(dim=1).mean()) > float(images[:, :10].std(dim=1).mean())


def test_steps_have_momentum() -> None:
    """W₁ = W₀ − r·g₁ and W₂ = W₁ − r·(g₂ + m·g₁), at the rate that noise allows."""
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


@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_rate_gives_the_intended_logit_noise(aggregation: str) -> None:
    """Simulates a logit's noise after all steps, with noise of every client and with shares of it."""
    method = FedStats(features="pixels", second_moments="no", aggregation=aggregation)
    privacy = PrivacySettings(noise_multiplier=5.0)
    plans = method.release_plans(privacy, context(rounds=12, clients=4))
    noise = {plan.name: 5.0 * plan.relative_noise_multiplier * plan.clip for plan in plans}
    rate = method.rate(context(rounds=12, clients=4, sigma=5.0, noise=noise))
    shares = 3 if aggregation == "secure" else 1
    noise_std = noise["step"] * math.sqrt(4 / shares) / (4 * 20.0)
    draws = noise_std * np.random.default_rng(0).normal(size=(12, 4000))
    velocity = weight = np.zeros(4000)
    for gradient in draws:
        velocity = method.momentum * velocity + gradient
        weight = weight - rate * velocity
    assert weight.std() == pytest.approx(method.logit_noise, rel=0.1)


@given(COUNTS, st.floats(0, 0.95))
def test_total_weight_counts_constant_gradients(steps: int, momentum: float) -> None:
    """Adds gradients of 1 step by step."""
    velocity = weight = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        weight += velocity
    assert total_weight(steps, momentum) == pytest.approx(weight, rel=1e-9)


@given(st.floats(1e-6, 1.0), COUNTS, st.floats(0.01, 10), st.floats(0, 0.9))
def test_step_rate_is_limited_by_noise_or_maximum(
    noise: float, steps: int, logit_noise: float, momentum: float
) -> None:
    rate = step_rate(noise, steps, logit_noise, 200.0, momentum)
    distance = rate * total_weight(steps, momentum)
    assert rate <= 200.0
    assert distance <= logit_noise / noise * (1 + 1e-9)
    below_noise = distance < logit_noise / noise * (1 - 1e-9)
    assert not below_noise or rate == 200.0


def test_step_rate_without_noise_is_the_maximum() -> None:
    assert step_rate(0.0, 16, 0.6, 100.0, 0.5) == 100.0


WHITE = FedStats(features="scattering", whitening="yes")
PRIVATE = PrivacySettings(noise_multiplier=1.0)


def test_white_signal_equals_white_examples() -> None:
    """Examples are ±√d·axes of a block each, whose channels and cells are white."""
    blocks = ((3, 2), (4, 2))
    axes = np.eye(14)
    z = 2**-0.5 * np.stack([axes[i] + axes[6 + j] for i in range(6) for j in range(8)])
    sums = Grams(torch.from_numpy(z), blocks, whitening.CELLS_PART).sums()
    assert float(sums.norm()) / len(z) == pytest.approx(white_signal(blocks))


BLOCKS = ((3, 2),)
MAP = FeatureMap("grid", (1, 2, 3), 6, 2.0, 1.0, "a test", lambda x: x.flatten(1), BLOCKS)


def pool_of(z_Nd: np.ndarray, noise_std: float) -> Pool:
    sums = Grams(torch.from_numpy(z_Nd / MAP.norm_bound), BLOCKS, whitening.CELLS_PART).sums()
    return Pool(sums, noise_std, len(z_Nd))


def test_roots_are_covariance_powers_of_equal_trace() -> None:
    """Compares NumPy on examples with a mean other than 0, without noise."""
    rng = np.random.default_rng(0)
    spread = np.array([1.0, 0.3, 0.1])[:, None] * np.array([1.0, 0.5])
    Z = 0.3 + 0.3 * spread * rng.normal(size=(400, 3, 2))
    z = Z.reshape(400, 6)
    assert np.linalg.norm(z, axis=1).max() < MAP.norm_bound
    centre = torch.from_numpy(z.mean(0))
    actual = released_roots(pool_of(z, 0.0), centre, 0.0, MAP)
    about = (Z - Z.mean(0)) / MAP.norm_bound
    for name, pattern in zip(root_names(BLOCKS), ("nas,nbs->ab", "nas,nat->st"), strict=True):
        covariance = np.einsum(pattern, about, about) / 400
        values, vectors = np.linalg.eigh(covariance)
        floored = np.maximum(values, whitening.FLOOR * values.mean())
        root = vectors @ np.diag(floored ** (-whitening.POWER / 2)) @ vectors.T
        root *= np.sqrt(np.trace(covariance) / np.trace(root @ covariance @ root))
        np.testing.assert_allclose(actual[name], root, rtol=1e-4, atol=1e-5)


def test_noise_of_the_centre_is_subtracted() -> None:
    """A noisy centre's outer product flattens the covariance. With its deviation, roots are nearer
    those of the true centre."""
    rng = np.random.default_rng(1)
    spread = np.array([1.0, 0.5, 0.3])[:, None] * np.array([1.0, 0.5])
    z = (0.5 * spread * rng.normal(size=(4000, 3, 2))).reshape(4000, 6)
    pool = pool_of(z, 0.0)
    exact = released_roots(pool, torch.zeros(6), 0.0, MAP)["channels_root_0"]
    errors = []
    for deviation in (0.1, 0.0):
        draws = np.random.default_rng(2)
        actual = [
            released_roots(pool, torch.from_numpy(0.1 * draws.normal(size=6)), deviation, MAP)
            for _ in range(200)
        ]
        mean = torch.stack([roots["channels_root_0"] for roots in actual]).mean(0)
        errors.append(float((mean - exact).norm()))
    assert errors[0] < 0.75 * errors[1]


def test_noisy_covariances_give_roots_near_identity() -> None:
    """Single eigenvalues of pure noise exceed the edge by up to a quarter by chance. Regression: a
    trace of both signs in the scale."""
    draws = torch.Generator().manual_seed(0)
    for size in (3, 9, 41, 98):
        for signal in (0.0, 3.0):  # one direction just above the noise
            for _ in range(50):
                noise = torch.randn(size, size, generator=draws, dtype=torch.float64)
                noise = (noise.triu() + noise.triu(1).T) * 0.5**0.5
                noise.diagonal().mul_(2**0.5)
                noise[0, 0] += signal * (2 * size) ** 0.5
                values = torch.linalg.eigvalsh(whitening._root(noise, 1.0))
                assert float(values.min()) > 0.4
                assert float(values.max()) < 1.3 * max(1.0, signal + 1) ** (whitening.POWER / 2)


def test_embedding_transforms_vectors_by_blocks() -> None:
    """The embedding is channels·Z·cells, before the clip."""
    rng = np.random.default_rng(3)
    Z = 0.05 * rng.normal(size=(4, 3, 2))
    channel_root = rng.normal(size=(3, 3))
    cell_root = rng.normal(size=(2, 2))
    parameters = {
        "centre": torch.zeros(6, dtype=torch.float64),
        "channels_root_0": torch.from_numpy(channel_root),
        "cells_root_0": torch.from_numpy(cell_root),
    }
    actual = Embedding.of(parameters, MAP)(torch.from_numpy(Z.reshape(4, 6)))
    expected = (channel_root @ Z @ cell_root).reshape(4, 6)
    expected /= np.maximum(1, np.linalg.norm(expected, axis=1, keepdims=True))
    np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_only_private_runs_whiten() -> None:
    names = root_names(WHITE.map_of(SPEC).blocks)
    for privacy in (None, PrivacySettings(epsilon=8.0)):
        parts = PartitionSettings("iid", clients=2)
        result = simulate(RunSettings(WHITE, rounds=2, partition=parts, privacy=privacy))
        state = result.model.state_dict()
        is_identity = [torch.equal(state[name], torch.eye(len(state[name]))) for name in names]
        assert is_identity == [privacy is None] * 2
    assert result.accuracy > 0.7


def test_whitening_depends_on_public_shapes() -> None:
    shapes = ((1, 8, 8), (1, 28, 28), (3, 32, 32))
    specs = [
        replace(SPEC, channels=c, height=h, width=w, mean=(0.5,) * c, std=(0.5,) * c)
        for c, h, w in shapes
    ]
    actual = {
        choice: [replace(WHITE, whitening=choice).whitens(spec) for spec in specs]
        for choice in ("auto", "yes", "no")
    }
    assert actual == {"auto": [False, True, False], "yes": [True] * 3, "no": [False] * 3}
    assert not FedStats().whitens(SPEC)
    assert WHITE.whitens(SPEC)
    with pytest.raises(SettingError, match="channels and spatial cells"):
        FedStats(whitening="yes", features="pixels").whitens(SPEC)
    with pytest.raises(SettingError, match="covariance_share"):
        FedStats(whitening="yes", covariance_share=0.89, moment_share=0.1)
    automatic = FedStats(
        covariance_share=0.89, moment_share=0.1
    )  # "auto" is resolved with the data set
    larger, none = replace(SPEC, height=12, width=12), torch.nn.Identity()
    ctx = RoundContext(1, 0, torch.device("cpu"), larger, none, 20.0, PRIVATE)
    with pytest.raises(SettingError, match="covariance_share"):
        automatic.release_plans(PRIVATE, ctx)
