"""Vectors given by factors: what one example may move, that sums are those of the vectors written
out, and twins that are broken on purpose."""

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
from fedsynth.privacy.products import Grams, Moments, Outer, Products, Rows, grams_width, smat, svec
from fedsynth.privacy.releases import USER
from tests.privacy.support import NUMBERS, series

CLASSES, D, CLIP = 4, 3, 0.7
B = math.sqrt(1 - 1 / CLASSES)
vectors = st.lists(NUMBERS, min_size=D, max_size=D)
KINDS = ("rows", "outer", "moments", "grams")


def targets(labels: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).float() - 1 / CLASSES


def products(kind: str, z: Tensor, labels: Tensor, left: Tensor | None = None) -> Products:
    if kind == "rows":
        return Rows(z, CLIP)
    if kind == "outer":
        return Outer(targets(labels) if left is None else left, z, CLIP)
    if kind == "grams":
        return Grams(z, ((D, 1),), 0.3)
    return Moments(z, targets(labels), B)


@pytest.mark.parametrize("kind", KINDS)
@given(
    data=st.lists(vectors, max_size=4),
    extra=vectors,
    left=st.lists(NUMBERS, min_size=CLASSES, max_size=CLASSES),
    label=st.integers(0, CLASSES - 1),
)
@settings(max_examples=40, deadline=None)
def test_one_example_moves_the_sums_by_at_most_the_bound(
    kind: str, data: list[list[float]], extra: list[float], left: list[float], label: int
) -> None:
    """On D and D + x, for huge, constant, NaN and infinite x and factors, and for an empty D."""
    z = torch.tensor([*data, extra], dtype=torch.float32)
    labels = torch.tensor([0] * len(data) + [label])
    whole = products(kind, z, labels, torch.tensor([left] * len(z)))
    moved = whole.sums() - whole.part(slice(len(data))).sums()
    assert float(moved.norm()) <= whole.bound * (1 + 1e-9) + 1e-9 * len(data)
    assert bool(torch.isfinite(moved).all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_reached(kind: str) -> None:
    """By an example in the worst direction: a smaller sensitivity would be wrong."""
    z = 5 * F.normalize(torch.tensor([[1.0, -2.0, 0.5]]))
    left = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    whole = products(kind, z, torch.tensor([2]), left)
    assert float(whole.sums().norm()) == pytest.approx(whole.bound, rel=1e-6)


BLOCKS = ((3, 2), (1, 4))


def grams_by_numpy(z: np.ndarray, cells_part: float) -> np.ndarray:
    """[√(1 − part)·svec(Z Zᵀ); √part·svec(Zᵀ Z)] of one example's matrices."""
    pieces = []
    for Z in (z[:6].reshape(3, 2), z[6:].reshape(1, 4)):
        for square, part in ((Z @ Z.T, 1 - cells_part), (Z.T @ Z, cells_part)):
            i, j = np.triu_indices(len(square))
            pieces.append(part**0.5 * square[i, j] * np.where(i == j, 1, 2**0.5))
    return np.concatenate(pieces)


def test_grams_are_numpy_s_and_shares_weigh_examples() -> None:
    """Catches: channels and cells exchanged, a weight that counts twice, a block left out."""
    z = np.random.default_rng(0).normal(size=(5, 10))
    z /= 1.5 * np.linalg.norm(z, axis=1, keepdims=True)
    expected = np.stack([grams_by_numpy(one, 0.3) for one in z])
    made = Grams(torch.from_numpy(z), BLOCKS, 0.3)
    assert made.width == grams_width(BLOCKS) == expected.shape[1]
    np.testing.assert_allclose(made.rows(), expected, atol=1e-12)
    shares = np.array([1.0, 0.5, 0.0, 0.25, 1.0])
    found = made.sums(torch.from_numpy(shares))
    np.testing.assert_allclose(found, shares @ expected, atol=1e-12)


def test_the_broken_twin_of_grams_moves_by_more() -> None:
    """Channels and cells with weight 1 each, where squares of weights must add up to 1."""
    z = np.zeros(10)
    z[0] = 1.0
    twin = np.concatenate([grams_by_numpy(z, 0.0), grams_by_numpy(z, 1.0)])
    assert np.linalg.norm(twin) == pytest.approx(2**0.5)
    assert float(Grams(torch.from_numpy(z)[None], BLOCKS, 0.3).sums().norm()) == pytest.approx(1.0)


def moments(z: Tensor, e: Tensor) -> Tensor:
    """√½·[svec(z zᵀ); e/b ⊗ z], neither clipped nor centred."""
    z = z.double()
    squares = svec(torch.einsum("nd,ne->nde", z, z))
    return math.sqrt(0.5) * torch.cat([squares, torch.einsum("nc,nd->ncd", e / B, z).flatten(1)], 1)


def test_broken_twins_break_the_bound_or_the_matrix() -> None:
    """No clip; labels about zero and not their mean; svec without √2."""
    z, labels = torch.tensor([[3.0, 0.0, 4.0]]), torch.tensor([1])
    assert float(moments(z, targets(labels).double()).norm()) > 5
    unit = F.normalize(z)
    assert float(moments(unit, F.one_hot(labels, CLASSES).double()).norm()) > 1.05
    whole = torch.outer(unit[0], unit[0]).double()
    honest = svec(whole)
    torch.testing.assert_close(smat(honest, D), whole)
    assert float(honest.norm()) == pytest.approx(1.0, abs=1e-6)
    twin = whole[tuple(torch.triu_indices(D, D))]
    assert float((smat(twin, D) - whole).abs().max()) > 0.1
    assert float(twin.norm()) < 0.9  # its noise, of the same size, would be too large off diagonal


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_the_vectors_written_out(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, D, generator=generator)
    made = products(kind, z, torch.arange(50) % CLASSES)
    rows = made.rows()
    assert rows.shape == (50, made.width)
    torch.testing.assert_close(made.sums(), rows.sum(0))
    shares = torch.rand(50, generator=generator)
    torch.testing.assert_close(made.sums(shares), (rows * shares[:, None]).sum(0))


def test_moments_by_numpy() -> None:
    """Σ z zᵀ and Σ z ⊗ e come back from the released vector."""
    z = np.random.default_rng(0).normal(size=(20, D)).astype(np.float32)
    labels = np.arange(20) % CLASSES
    made = Moments(torch.from_numpy(z), targets(torch.from_numpy(labels)), B).sums()
    clipped = z / np.maximum(1, np.linalg.norm(z, axis=1, keepdims=True))
    packed = D * (D + 1) // 2
    second = smat(made[:packed] * math.sqrt(2), D)
    crossed = made[packed:].view(CLASSES, D) * math.sqrt(2) * B
    e = np.eye(CLASSES)[labels] - 1 / CLASSES
    np.testing.assert_allclose(second, clipped.T @ clipped, atol=1e-5)
    np.testing.assert_allclose(crossed, e.T @ clipped, atol=1e-5)


def charged(width: int, clip: float = 1.0, groups: int = 1, **unit: str) -> GaussianSumMechanism:
    """Returns a series with next to no noise."""
    values = {"noise_multiplier": 1e-9, "sensitivity": clip, "dimension": groups * width}
    return series(groups, **unit, **values)


def test_a_series_refuses_more_than_was_charged() -> None:
    made = Moments(torch.ones(2, D), targets(torch.tensor([0, 1])), B)
    with pytest.raises(PrivacyError, match="no step is open"):
        charged(made.width).add_products(made)
    for one in (charged(made.width, 0.9), charged(made.width + 1), charged(made.width, groups=2)):
        one.sample(2)
        with pytest.raises(PrivacyError, match="the mechanism"):
            one.add_products(made)


def test_a_user_counts_as_one_however_many_records() -> None:
    """The mean of a user's vectors is no longer than the bound; without whose they are, refused."""
    made = Moments(100 * torch.ones(6, D), targets(torch.zeros(6, dtype=torch.int64)), B)
    one = charged(made.width, unit=USER)
    one.sample(1)
    with pytest.raises(PrivacyError, match="protects users"):
        one.add_products(made)
    whose = Sample(torch.arange(6), torch.zeros(6, dtype=torch.int64), torch.full((6,), 1 / 6))
    one.add_products(made, whose)
    assert float(one.release().norm()) <= 1 + 1e-6
    with pytest.raises(PrivacyError, match=r"\[0, 1\]"):
        Rows(torch.ones(1, D), 1.0).sums(torch.tensor([2.0]))


def test_shares_divide_the_noise_of_a_client_and_not_what_is_charged() -> None:
    one = series()
    one.shares = 9
    assert one.noise_std == pytest.approx(2 / 3)
