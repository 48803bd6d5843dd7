"""Tests of factored vectors: their sensitivity, their sums, and deliberately broken variants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.passes import Sample
from fedsynth.privacy.products import (
    Grams,
    LayerGradients,
    Moments,
    Outer,
    Products,
    Rows,
    grams_width,
    smat,
    svec,
)
from fedsynth.privacy.releases import USER
from tests.privacy.support import NUMBERS, series

CLASSES, D, CLIP = 4, 3, 0.7
B = math.sqrt(1 - 1 / CLASSES)
vectors = st.lists(NUMBERS, min_size=D, max_size=D)
KINDS = ("rows", "outer", "gradients", "moments", "grams")


def targets(labels: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).float() - 1 / CLASSES


def products(kind: str, z: Tensor, labels: Tensor, factors: Tensor | None = None) -> Products:
    if kind == "rows":
        return Rows(z, CLIP)
    if kind == "outer":
        return Outer(targets(labels) if factors is None else factors, z, CLIP)
    if kind == "gradients":
        left = targets(labels) if factors is None else factors
        values = torch.cat([z, left, z], dim=1)
        return LayerGradients(values, ((D,), (CLASSES, D)), CLIP)
    if kind == "grams":
        return Grams(z, ((D, 1),), 0.3)
    return Moments(z, targets(labels), B)


@pytest.mark.parametrize("kind", KINDS)
@given(
    data=st.lists(vectors, max_size=4),
    extra=vectors,
    factor=st.lists(NUMBERS, min_size=CLASSES, max_size=CLASSES),
    label=st.integers(0, CLASSES - 1),
)
@settings(max_examples=40, deadline=None)
def test_sensitivity_of_sums_is_at_most_bound(
    kind: str, data: list[list[float]], extra: list[float], factor: list[float], label: int
) -> None:
    """Compares D and D + x, for huge, constant, NaN and infinite x and factors, and an empty D."""
    z = torch.tensor([*data, extra], dtype=torch.float32)
    labels = torch.tensor([0] * len(data) + [label])
    vectors_sum = products(kind, z, labels, torch.tensor([factor] * len(z)))
    difference = vectors_sum.sums() - vectors_sum.part(slice(len(data))).sums()
    assert float(difference.norm()) <= vectors_sum.bound * (1 + 1e-9) + 1e-9 * len(data)
    assert bool(torch.isfinite(difference).all())


@pytest.mark.parametrize("kind", KINDS)
def test_sensitivity_bound_is_reached(kind: str) -> None:
    """An example in the worst direction shows that a smaller sensitivity would be wrong."""
    z = 5 * F.normalize(torch.tensor([[1.0, -2.0, 0.5]]))
    factors = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    extreme = products(kind, z, torch.tensor([2]), factors)
    assert float(extreme.sums().norm()) == pytest.approx(extreme.bound, rel=1e-6)


BLOCKS = ((3, 2), (1, 4))


def numpy_grams(z: np.ndarray, cells_part: float) -> np.ndarray:
    """Returns [√(1 − part)·svec(Z Zᵀ); √part·svec(Zᵀ Z)] of an example's matrices."""
    pieces = []
    for Z in (z[:6].reshape(3, 2), z[6:].reshape(1, 4)):
        for square, part in ((Z @ Z.T, 1 - cells_part), (Z.T @ Z, cells_part)):
            i, j = np.triu_indices(len(square))
            pieces.append(part**0.5 * square[i, j] * np.where(i == j, 1, 2**0.5))
    return np.concatenate(pieces)


def test_grams_equal_numpy_with_shares_as_weights() -> None:
    """Broken versions would swap channels and cells, apply a weight twice or omit a block."""
    z = np.random.default_rng(0).normal(size=(5, 10))
    z /= 1.5 * np.linalg.norm(z, axis=1, keepdims=True)
    expected = np.stack([numpy_grams(vector, 0.3) for vector in z])
    grams = Grams(torch.from_numpy(z), BLOCKS, 0.3)
    assert grams.width == grams_width(BLOCKS) == expected.shape[1]
    np.testing.assert_allclose(grams.rows(), expected, atol=1e-12)
    shares = np.array([1.0, 0.5, 0.0, 0.25, 1.0])
    weighted = grams.sums(torch.from_numpy(shares))
    np.testing.assert_allclose(weighted, shares @ expected, atol=1e-12)


def test_unweighted_grams_exceed_bound() -> None:
    """Channels and cells have weight 1 each, but the squared weights must sum to 1."""
    z = np.zeros(10)
    z[0] = 1.0
    unweighted = np.concatenate([numpy_grams(z, 0.0), numpy_grams(z, 1.0)])
    assert np.linalg.norm(unweighted) == pytest.approx(2**0.5)
    assert float(Grams(torch.from_numpy(z)[None], BLOCKS, 0.3).sums().norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("clip", [0.3, 5.0, 100.0])
def test_layer_gradients_equal_numpy(clip: float) -> None:
    """Broken versions would clip each block separately, or confuse l with r."""
    rng = np.random.default_rng(0)
    vector, left, right = rng.normal(size=(6, 2)), rng.normal(size=(6, 4)), rng.normal(size=(6, 3))
    total = np.zeros(2 + 12)
    for v, l_, r in zip(vector, left, right, strict=True):
        gradient = np.concatenate([v, np.outer(l_, r).ravel()])
        total += gradient * min(1, clip / np.linalg.norm(gradient))
    values = torch.from_numpy(np.concatenate([vector, left, right], axis=1))
    sums = LayerGradients(values, ((2,), (4, 3)), clip).sums()
    np.testing.assert_allclose(sums, total, atol=1e-12)


def moments(z: Tensor, e: Tensor) -> Tensor:
    """Returns √½·[svec(z zᵀ); e/b ⊗ z], neither clipped nor centred."""
    z = z.double()
    squares = svec(torch.einsum("nd,ne->nde", z, z))
    return math.sqrt(0.5) * torch.cat([squares, torch.einsum("nc,nd->ncd", e / B, z).flatten(1)], 1)


def test_broken_moments_violate_bound_or_matrix() -> None:
    """The variants omit the clip, the centring of labels, or the factor √2 of svec."""
    z, labels = torch.tensor([[3.0, 0.0, 4.0]]), torch.tensor([1])
    assert float(moments(z, targets(labels).double()).norm()) > 5
    unit = F.normalize(z)
    assert float(moments(unit, F.one_hot(labels, CLASSES).double()).norm()) > 1.05
    matrix = torch.outer(unit[0], unit[0]).double()
    correct = svec(matrix)
    torch.testing.assert_close(smat(correct, D), matrix)
    assert float(correct.norm()) == pytest.approx(1.0, abs=1e-6)
    broken = matrix[tuple(torch.triu_indices(D, D))]
    assert float((smat(broken, D) - matrix).abs().max()) > 0.1
    assert float(broken.norm()) < 0.9  # noise of the same size would be too large


@pytest.mark.parametrize("kind", KINDS)
def test_factored_sums_equal_explicit_sums(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, D, generator=generator)
    factored = products(kind, z, torch.arange(50) % CLASSES)
    rows = factored.rows()
    assert rows.shape == (50, factored.width)
    torch.testing.assert_close(factored.sums(), rows.sum(0))
    shares = torch.rand(50, generator=generator)
    torch.testing.assert_close(factored.sums(shares), (rows * shares[:, None]).sum(0))


def test_moments_equal_numpy() -> None:
    """Σ z zᵀ and Σ z ⊗ e are recovered from the released vector."""
    z = np.random.default_rng(0).normal(size=(20, D)).astype(np.float32)
    labels = np.arange(20) % CLASSES
    sums = Moments(torch.from_numpy(z), targets(torch.from_numpy(labels)), B).sums()
    clipped = z / np.maximum(1, np.linalg.norm(z, axis=1, keepdims=True))
    packed = D * (D + 1) // 2
    second = smat(sums[:packed] * math.sqrt(2), D)
    crossed = sums[packed:].view(CLASSES, D) * math.sqrt(2) * B
    e = np.eye(CLASSES)[labels] - 1 / CLASSES
    np.testing.assert_allclose(second, clipped.T @ clipped, atol=1e-5)
    np.testing.assert_allclose(crossed, e.T @ clipped, atol=1e-5)


def charged(width: int, clip: float = 1.0, groups: int = 1, **unit: str) -> GaussianSumMechanism:
    """Returns a series with negligible noise."""
    values = {"noise_multiplier": 1e-9, "sensitivity": clip, "dimension": groups * width}
    return series(groups, **unit, **values)


def test_uncharged_products_are_rejected() -> None:
    data = Moments(torch.ones(2, D), targets(torch.tensor([0, 1])), B)
    with pytest.raises(PrivacyError, match="no step is open"):
        charged(data.width).add_products(data)
    for s in (charged(data.width, 0.9), charged(data.width + 1), charged(data.width, groups=2)):
        s.sample(2)
        with pytest.raises(PrivacyError, match="the mechanism"):
            s.add_products(data)


def test_user_influence_is_at_most_bound() -> None:
    """The mean of a user's vectors is within the bound; rows without users are rejected."""
    moments = Moments(100 * torch.ones(6, D), targets(torch.zeros(6, dtype=torch.int64)), B)
    mechanism = charged(moments.width, unit=USER)
    mechanism.sample(1)
    with pytest.raises(PrivacyError, match="protects users"):
        mechanism.add_products(moments)
    sample = Sample(torch.arange(6), torch.zeros(6, dtype=torch.int64), torch.full((6,), 1 / 6))
    mechanism.add_products(moments, sample)
    assert float(mechanism.release().norm()) <= 1 + 1e-6
    with pytest.raises(PrivacyError, match=r"\[0, 1\]"):
        Rows(torch.ones(1, D), 1.0).sums(torch.tensor([2.0]))


def test_shares_divide_client_noise() -> None:
    mechanism = series()
    mechanism.shares = 9
    assert mechanism.noise_std == pytest.approx(2 / 3)
