"""FedStats' covariances of channels and cells: what one example may move, sums over clients, the
share of the budget, and what the server makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import FedStats, PartitionSettings, PrivacySettings, RunSettings, simulate
from fedsynth.core.context import RoundContext
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.methods.statistics import whitening
from fedsynth.methods.statistics.whitening import released_roots, white_signal
from fedsynth.models.on_features import Embedding, root_names
from fedsynth.privacy.products import Grams
from fedsynth.privacy.settings import PrivacySettings as Settings

SPEC = dataset_spec("digits")
METHOD = FedStats(features="scattering", whitening="yes")
PRIVATE = Settings(noise_multiplier=1.0)


def context(**other: Any) -> RoundContext:
    network = METHOD.network(other.pop("model", None), SPEC, 0)
    return RoundContext(
        1, 0, torch.device("cpu"), SPEC, network, 20.0, PRIVATE, rounds=3, clients=2, **other
    )


# ------------------------------------------------------------------------------------- privacy


def test_the_signal_is_that_of_white_examples() -> None:
    """±√d·axes of a block each, whose channels and cells are white: written out."""
    blocks = ((3, 2), (4, 2))
    axes = np.eye(14)
    z = 2**-0.5 * np.stack([axes[i] + axes[6 + j] for i in range(6) for j in range(8)])
    made = Grams(torch.from_numpy(z), blocks, whitening.CELLS_PART).sums()
    assert float(made.norm()) / len(z) == pytest.approx(white_signal(blocks))


# -------------------------------------------------------------------------------------- server

BLOCKS = ((3, 2),)
MAP = FeatureMap("grid", (1, 2, 3), 6, 2.0, 1.0, "a test", lambda x: x.flatten(1), BLOCKS)


def pool_of(z_Nd: np.ndarray, noise_std: float) -> Pool:
    made = Grams(torch.from_numpy(z_Nd / MAP.norm_bound), BLOCKS, whitening.CELLS_PART).sums()
    return Pool(made, noise_std, len(z_Nd))


def test_roots_are_powers_of_the_covariances_and_keep_their_trace() -> None:
    """By NumPy, of examples about a mean that is not 0, without noise."""
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


def test_the_centre_s_own_noise_is_taken_off() -> None:
    """A noisy centre's outer product is spread over all directions, and must not make them look
    flatter than they are: told its deviation, roots are nearer those by the true centre."""
    rng = np.random.default_rng(1)
    spread = np.array([1.0, 0.5, 0.3])[:, None] * np.array([1.0, 0.5])
    z = (0.5 * spread * rng.normal(size=(4000, 3, 2))).reshape(4000, 6)
    pool = pool_of(z, 0.0)
    exact = released_roots(pool, torch.zeros(6), 0.0, MAP)["channels_root_0"]
    misses = []
    for deviation in (0.1, 0.0):
        draws = np.random.default_rng(2)
        actual = [
            released_roots(pool, torch.from_numpy(0.1 * draws.normal(size=6)), deviation, MAP)
            for _ in range(200)
        ]
        mean = torch.stack([roots["channels_root_0"] for roots in actual]).mean(0)
        misses.append(float((mean - exact).norm()))
    assert misses[0] < 0.75 * misses[1]


def test_drowned_covariances_change_next_to_nothing() -> None:
    """Of the sizes that maps have, where noise is all there is: single eigenvalues are above the
    noise's edge by chance, by up to a quarter. Catches: a trace of both signs in the scale."""
    draws = torch.Generator().manual_seed(0)
    for size in (3, 9, 41, 98):
        for signal in (0.0, 3.0):  # one direction that can just be seen
            for _ in range(50):
                noise = torch.randn(size, size, generator=draws, dtype=torch.float64)
                noise = (noise.triu() + noise.triu(1).T) * 0.5**0.5
                noise.diagonal().mul_(2**0.5)
                noise[0, 0] += signal * (2 * size) ** 0.5
                values = torch.linalg.eigvalsh(whitening._root(noise, 1.0))
                assert float(values.min()) > 0.4
                assert float(values.max()) < 1.3 * max(1.0, signal + 1) ** (whitening.POWER / 2)


def test_a_model_s_vectors_are_turned_block_by_block() -> None:
    """T of a model's buffers is channels·Z·cells, before the clip."""
    rng = np.random.default_rng(3)
    Z = 0.05 * rng.normal(size=(4, 3, 2))
    left = rng.normal(size=(3, 3))
    right = rng.normal(size=(2, 2))
    parameters = {
        "centre": torch.zeros(6, dtype=torch.float64),
        "channels_root_0": torch.from_numpy(left),
        "cells_root_0": torch.from_numpy(right),
    }
    actual = Embedding.of(parameters, MAP)(torch.from_numpy(Z.reshape(4, 6)))
    expected = (left @ Z @ right).reshape(4, 6)
    expected /= np.maximum(1, np.linalg.norm(expected, axis=1, keepdims=True))
    np.testing.assert_allclose(actual, expected, atol=1e-12)


# ---------------------------------------------------------------------------------------- runs


def run(output: Path | None = None, **other: Any) -> Any:
    parts = PartitionSettings("iid", clients=2)
    return simulate(RunSettings(METHOD, rounds=2, partition=parts, **other), output=output)


def test_a_private_run_whitens_and_an_open_one_does_not() -> None:
    private = run(privacy=PrivacySettings(epsilon=8.0))
    names = root_names(METHOD.map_of(SPEC).blocks)
    for result, whitened in ((private, True), (run(), False)):
        state = result.model.state_dict()
        same = [torch.equal(state[name], torch.eye(len(state[name]))) for name in names]
        assert same == [not whitened] * 2
    assert private.accuracy > 0.7
    quantities = [row["quantity"] for row in private.privacy["ledger"]]
    assert sum("channels" in quantity for quantity in quantities) == 1


def test_which_features_are_whitened_is_public() -> None:
    shapes = ((1, 8, 8), (1, 28, 28), (3, 32, 32))
    specs = [
        replace(SPEC, channels=c, height=h, width=w, mean=(0.5,) * c, std=(0.5,) * c)
        for c, h, w in shapes
    ]
    actual = {
        choice: [replace(METHOD, whitening=choice).whitens(spec) for spec in specs]
        for choice in ("auto", "yes", "no")
    }
    assert actual == {"auto": [False, True, False], "yes": [True] * 3, "no": [False] * 3}
    assert not FedStats().whitens(SPEC)
    assert METHOD.whitens(SPEC)
    with pytest.raises(SettingError, match="channels and spatial cells"):
        FedStats(whitening="yes", features="pixels").whitens(SPEC)
    with pytest.raises(SettingError, match="covariance_share"):
        FedStats(whitening="yes", covariance_share=0.89, moment_share=0.1)
    unsaid = FedStats(covariance_share=0.89, moment_share=0.1)  # "auto": known with the data set
    larger, none = replace(SPEC, height=12, width=12), torch.nn.Identity()
    ctx = RoundContext(1, 0, torch.device("cpu"), larger, none, 20.0, PRIVATE)
    with pytest.raises(SettingError, match="covariance_share"):
        unsaid.release_plans(PRIVATE, ctx)
