"""The random-process dictionary: beside NumPy, from its recipe, and as a feature map."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.features.random_images import random_images
from fedsynth.features.random_process import CONTRAST, PATCH, THRESHOLD, Dictionary, shipped
from fedsynth.seeding import torch_generator

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = {"images": 32, "patches": 2000, "atoms": 12, "rounds": 4}
SIZE = 3 * PATCH**2


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that learned the dictionary."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("random_process")


def images(count: int, shape: tuple[int, int, int] = (3, 32, 32)) -> Tensor:
    return random_images(count, shape, torch_generator(1, "test"))


def by_numpy(x: np.ndarray, mean: np.ndarray, atoms: np.ndarray) -> np.ndarray:
    """One image [3, H, W], patch by patch."""
    rows, columns = x.shape[1] - PATCH + 1, x.shape[2] - PATCH + 1
    z = np.zeros((rows, columns, atoms.shape[1]))
    for i in range(rows):
        for j in range(columns):
            p = x[:, i : i + PATCH, j : j + PATCH].ravel()
            p = (p - p.mean()) / np.sqrt(p.var() + CONTRAST)
            z[i, j] = (p - mean) @ atoms
    found = []
    for sign in (1, -1):
        r = np.maximum(sign * z - THRESHOLD, 0)
        tall, wide = (rows + 1) // 2, (columns + 1) // 2
        starts = [(0, (n - s) // 2, n - s) for n, s in ((rows, tall), (columns, wide))]
        cells = [r[a : a + tall, b : b + wide].mean((0, 1)) for a in starts[0] for b in starts[1]]
        found.append(np.stack(cells, axis=1).ravel())
    return np.concatenate(found)


def test_features_are_numpys() -> None:
    rng = np.random.default_rng(0)
    mean = rng.normal(0, 0.1, SIZE)
    atoms = rng.normal(0, 0.3, (SIZE, 5))
    made = Dictionary(torch.tensor(mean), torch.tensor(atoms))
    x = images(3, (3, 16, 13)).double()
    expected = np.stack([by_numpy(one.numpy(), mean, atoms) for one in x])
    np.testing.assert_allclose(made(x).numpy(), expected, atol=1e-6)


def test_whitening_makes_the_covariance_one_but_for_the_floor(training: Any) -> None:
    rng = np.random.default_rng(0)
    points = torch.tensor(rng.normal(size=(4000, 4)) * [4.0, 2.0, 1.0, 0.5], dtype=torch.float32)
    points = points - points.mean(dim=0)
    white = points @ training.whitener(points, 0.0)
    torch.testing.assert_close(white.T @ white / 4000, torch.eye(4), atol=1e-3, rtol=0)
    damped = points @ training.whitener(points, 0.1)
    assert float(damped[:, 3].var()) < 0.8


def test_kmeans_finds_directions_of_either_sign(training: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.eye(6)[:3]
    which = torch.randint(3, (600,), generator=generator)
    sign = torch.randint(2, (600, 1), generator=generator) * 2.0 - 1
    points = sign * true[which] + 0.1 * torch.randn(600, 6, generator=generator)
    points = torch.nn.functional.normalize(points, dim=1)
    found = training.spherical_kmeans(points, true + 0.5, 10)
    assert ((found @ true.T).abs().max(dim=0).values > 0.99).all()
    alone = training.spherical_kmeans(points, torch.cat([found, torch.eye(6)[5:]]), 1)
    assert torch.isfinite(alone).all()


def test_images_depend_only_on_the_recipe(training: Any) -> None:
    before = torch.random.get_rng_state()
    one, other = (
        training.learn_dictionary(training.Recipe(**SMALL)),
        training.learn_dictionary(training.Recipe(**SMALL)),
    )
    assert torch.equal(one.atoms, other.atoms)
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(before, torch.random.get_rng_state())
    assert one.atoms.shape == (SIZE, 12)
    again = training.learn_dictionary(training.Recipe(seed=1, **SMALL))
    assert not torch.equal(one.atoms, again.atoms)


def test_patches_are_normalised_pieces_of_the_images(training: Any) -> None:
    x = images(5)
    patches = training.drawn_patches(x, 10, torch.Generator().manual_seed(0))
    windows = x.unfold(2, PATCH, 1).unfold(3, PATCH, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, SIZE)
    apart = (patches[:, None] - windows[None]).abs().amax(dim=2).min(dim=1).values
    assert apart.max() == 0
    made = training.normalised(patches)
    assert made.mean(dim=1).abs().max() < 1e-5
    assert made.std(dim=1).max() < 1.01
    assert shipped().atoms.shape == (SIZE, training.Recipe().atoms)
