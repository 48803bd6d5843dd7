"""Random-process images and the dictionary learned from them: reproducibility and NumPy."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.features.random_images import (
    AT_ONCE,
    dead_leaves,
    random_generators,
    random_images,
    spectral_noise,
)
from fedsynth.features.random_process import CONTRAST, PATCH, THRESHOLD, Dictionary, shipped
from fedsynth.seeding import torch_generator


def draw_images(seed: int, count: int, shape: tuple[int, int, int]) -> Tensor:
    return random_images(count, shape, torch_generator(seed, "test"))


def test_images_are_reproducible_by_seed() -> None:
    rng_state = torch.random.get_rng_state()
    images = draw_images(0, 7, (3, 16, 16))
    assert torch.equal(images, draw_images(0, 7, (3, 16, 16)))
    assert not torch.equal(images, draw_images(1, 7, (3, 16, 16)))
    assert torch.equal(rng_state, torch.random.get_rng_state())


@pytest.mark.parametrize("shape", [(3, 20, 48), (5, 9, 8), (1, 4, 4)], ids=str)
def test_pixels_are_between_0_and_1_for_any_shape(shape: tuple[int, int, int]) -> None:
    images = draw_images(0, 6, shape)
    assert images.shape == (6, *shape)
    assert 0 <= images.min() < images.max() <= 1
    assert draw_images(0, 0, shape).shape == (0, *shape)


@pytest.mark.parametrize("process", [dead_leaves, random_generators, spectral_noise])
def test_neighbouring_pixels_are_correlated(process: Any) -> None:
    """White noise has no correlation; photographs have 0.9 or more."""
    x = process(60, 32, 32, torch_generator(0, "test"))
    x = x - x.mean(dim=(2, 3), keepdim=True)
    adjacent = (x[..., 1:] * x[..., :-1]).mean() / x.square().mean()
    distant = (x[..., 12:] * x[..., :-12]).mean() / x.square().mean()
    assert adjacent > 0.6
    assert distant < adjacent - 0.2


def test_blocks_have_different_images() -> None:
    images = draw_images(0, AT_ONCE + 3, (1, 8, 8))
    assert torch.equal(images[:AT_ONCE], draw_images(0, AT_ONCE, (1, 8, 8)))
    assert not torch.equal(images[-3:], images[:3])


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZE = 3 * PATCH**2


def numpy_features(x: np.ndarray, mean: np.ndarray, atoms: np.ndarray) -> np.ndarray:
    """Computes the features of one image [3, H, W] patch by patch."""
    rows, columns = x.shape[1] - PATCH + 1, x.shape[2] - PATCH + 1
    z = np.zeros((rows, columns, atoms.shape[1]))
    for i in range(rows):
        for j in range(columns):
            p = x[:, i : i + PATCH, j : j + PATCH].ravel()
            p = (p - p.mean()) / np.sqrt(p.var() + CONTRAST)
            z[i, j] = (p - mean) @ atoms
    halves = []
    for sign in (1, -1):
        r = np.maximum(sign * z - THRESHOLD, 0)
        height, width = (rows + 1) // 2, (columns + 1) // 2
        starts = [(0, (n - s) // 2, n - s) for n, s in ((rows, height), (columns, width))]
        cells = [
            r[a : a + height, b : b + width].mean((0, 1)) for a in starts[0] for b in starts[1]
        ]
        halves.append(np.stack(cells, axis=1).ravel())
    return np.concatenate(halves)


def test_dictionary_features_equal_numpy() -> None:
    rng = np.random.default_rng(0)
    mean = rng.normal(0, 0.1, SIZE)
    atoms = rng.normal(0, 0.3, (SIZE, 5))
    dictionary = Dictionary(torch.tensor(mean), torch.tensor(atoms))
    x = random_images(3, (3, 16, 13), torch_generator(1, "test")).double()
    expected = np.stack([numpy_features(image.numpy(), mean, atoms) for image in x])
    np.testing.assert_allclose(dictionary(x).numpy(), expected, atol=1e-6)


def test_dictionary_depends_only_on_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    training: Any = importlib.import_module("random_process")
    rng_state = torch.random.get_rng_state()
    recipe = training.Recipe(images=32, patches=2000, atoms=12, rounds=4)
    first, second = (training.learn_dictionary(recipe) for _ in range(2))
    assert torch.equal(first.atoms, second.atoms)
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(rng_state, torch.random.get_rng_state())
    reseeded = training.learn_dictionary(replace(recipe, seed=1))
    assert not torch.equal(first.atoms, reseeded.atoms)
    assert shipped().atoms.shape == (SIZE, training.Recipe().atoms)
