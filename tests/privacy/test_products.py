"""Tests of factored vectors and of sums on a grid: both have the sensitivity and the distribution
of the plain sums."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedsynth.deployment.secure_aggregation.primitives import FixedPoint
from fedsynth.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy import products
from fedsynth.privacy.mechanisms import GaussianSumMechanism, on_grid
from fedsynth.privacy.passes import Sample
from fedsynth.privacy.plans import ReleasePlan
from fedsynth.privacy.products import Grams, LayerGradients, Moments, Outer, Products, Rows
from fedsynth.privacy.randomness import FINE, TAIL, Addends, Grid, SecretGenerator, grid_of
from fedsynth.privacy.releases import USER
from tests.privacy.support import NUMBERS, guard, mechanism, plan
from tests.raising import raises

CLASSES, D, CLIP = 4, 3, 0.7
B = math.sqrt(1 - 1 / CLASSES)
vectors = st.lists(NUMBERS, min_size=D, max_size=D)
KINDS = ("rows", "outer", "gradients", "moments", "grams")


def targets(labels: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).float() - 1 / CLASSES


def vectors_of(kind: str, z: Tensor, labels: Tensor, factors: Tensor | None = None) -> Products:
    left = targets(labels) if factors is None else factors
    return {
        "rows": Rows(z, CLIP),
        "outer": Outer(left, z, CLIP),
        "gradients": LayerGradients(torch.cat([z, left, z], 1), ((D,), (CLASSES, D)), CLIP),
        "grams": Grams(z, ((D, 1),), 0.3),
        "moments": Moments(z, targets(labels), B),
    }[kind]


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
    vectors_sum = vectors_of(kind, z, labels, torch.tensor([factor] * len(z)))
    difference = vectors_sum.sums() - vectors_sum.part(slice(len(data))).sums()
    assert float(difference.norm()) <= vectors_sum.bound * (1 + 1e-9) + 1e-9 * len(data)
    assert bool(torch.isfinite(difference).all())


@pytest.mark.parametrize("kind", KINDS)
def test_sensitivity_bound_is_reached(kind: str) -> None:
    """An example in the worst direction shows that a smaller sensitivity would be wrong."""
    z = 5 * F.normalize(torch.tensor([[1.0, -2.0, 0.5]]))
    factors = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    extreme = vectors_of(kind, z, torch.tensor([2]), factors)
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
    assert grams.width == products.grams_width(BLOCKS) == expected.shape[1]
    np.testing.assert_allclose(grams.rows(), expected, atol=1e-12)
    shares = np.array([1.0, 0.5, 0.0, 0.25, 1.0])
    weighted = grams.sums(torch.from_numpy(shares))
    np.testing.assert_allclose(weighted, shares @ expected, atol=1e-12)


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


def test_sums_of_products_equal_numpy() -> None:
    """Σ_t l_t ⊗ r_t is clipped by its own norm. Broken versions would clip each product."""
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(6, 3, 4)), rng.normal(size=(6, 3, 5))
    total = np.zeros(20)
    for gradient in np.einsum("ntp,ntq->npq", left, right).reshape(6, -1):
        total += gradient * min(1, CLIP / np.linalg.norm(gradient))
    values = torch.from_numpy(np.concatenate([left.reshape(6, -1), right.reshape(6, -1)], 1))
    vectors_sum = LayerGradients(values, ((4, 5, 3),), CLIP)
    assert vectors_sum.width == 20
    np.testing.assert_allclose(vectors_sum.sums(), total, atol=1e-9)
    np.testing.assert_allclose(vectors_sum.rows().sum(0), total, atol=1e-12)


@pytest.mark.parametrize("difference", [0.0, 1e-12, 1e-10, 1e-9, 1e-8, 1e-4, 1.0])
def test_products_that_cancel_are_within_bound(difference: float) -> None:
    """Without the bound on rounding, the norm of two huge, almost opposite products may be 0."""
    for scale in (1.0, 1e6, 1e12):
        rows = [1.0, 0.5, 1 - difference, 0.5 + difference]
        values = torch.tensor([[scale, -scale, *rows]], dtype=torch.float64)
        total = LayerGradients(values, ((1, 2, 2),), CLIP).sums()
        assert float(total.norm()) <= CLIP * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_factored_sums_equal_explicit_sums(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, D, generator=generator)
    factored = vectors_of(kind, z, torch.arange(50) % CLASSES)
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
    second = products.smat(sums[:packed] * math.sqrt(2), D)
    crossed = sums[packed:].view(CLASSES, D) * math.sqrt(2) * B
    e = np.eye(CLASSES)[labels] - 1 / CLASSES
    np.testing.assert_allclose(second, clipped.T @ clipped, atol=1e-5)
    np.testing.assert_allclose(crossed, e.T @ clipped, atol=1e-5)


def charged(width: int, clip: float = 1.0, groups: int = 1, **unit: str) -> GaussianSumMechanism:
    """Returns a mechanism with negligible noise."""
    values = {"noise_multiplier": 1e-9, "sensitivity": clip, "dimension": groups * width}
    return mechanism(groups, **unit, **values)


def test_uncharged_products_are_rejected() -> None:
    data = Moments(torch.ones(2, D), targets(torch.tensor([0, 1])), B)
    with raises(PrivacyError, "mechanism.no_step"):
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
    with raises(PrivacyError, "mechanism.users"):
        mechanism.add_products(moments)
    sample = Sample(torch.arange(6), torch.zeros(6, dtype=torch.int64), torch.full((6,), 1 / 6))
    mechanism.add_products(moments, sample)
    assert float(mechanism.release().norm()) <= 1 + 1e-6
    with raises(PrivacyError, "privacy.refused"):
        Rows(torch.ones(1, D), 1.0).sums(torch.tensor([2.0]))


# ---------------------------------------------------------------------------- sums on a grid

PLAN = plan(dimension=6, groups=2, shares=3, addends=Addends(clients=4, records=1000))


def test_grid_is_coarsest_sufficient_one() -> None:
    """A step at the bound has 2^10 float64 values and sums are below 2^62 steps, or it is
    rejected."""
    rng = np.random.default_rng(0)
    accepted = 0
    for _ in range(400):
        clip, noise, records = 10.0 ** rng.uniform((-12, -2, 0), (12, 3, 9))
        clients = int(rng.integers(1, 500))
        shares = max(1, clients - 1)
        noise_std = noise * clip / math.sqrt(shares)
        needed = FINE * math.sqrt(shares)
        bound = int(records) * clip + TAIL * noise_std
        spacing = 2.0 ** math.floor(math.log2(noise_std / needed))
        try:
            grid = grid_of(clip, noise_std, shares, Addends(clients, int(records)))
        except PrivacySettingError:
            assert spacing < 2**10 * np.spacing(bound)
            continue
        accepted += 1
        assert needed * grid.spacing <= noise_std < 2 * needed * grid.spacing
        assert grid.bound == bound
        assert grid.spacing >= 2**10 * np.spacing(bound)
        assert clients * bound / grid.spacing <= 2**62
        form = FixedPoint(grid, wraps=True)
        part = np.floor(bound / grid.spacing) * grid.spacing
        encoded = form.encode([part, -part]) * np.uint64(clients)
        assert form.decode(encoded).tolist() == [clients * part, -clients * part]
    assert 200 < accepted < 400


def released_sums(spec: ReleasePlan, secret: SecretGenerator, rows: Tensor) -> Tensor:
    mechanism = GaussianSumMechanism(spec.release(1, 1.5), spec.groups, guard(), secret)
    mechanism.shares = spec.shares
    mechanism.grid = spec.grid(1.5)
    mechanism.sample(len(rows))
    mechanism.add(rows, torch.zeros(len(rows), dtype=torch.int64))
    return mechanism.release()


def test_noisy_parts_are_on_grid() -> None:
    """Broken versions would round before the noise, or in float32."""
    grid = PLAN.grid(1.5)
    rows = torch.full((900, 3), 100.0)  # clipped to a norm of 2: sums of 1039
    for inputs in (rows, rows[:0]):
        part = released_sums(PLAN, SecretGenerator(), inputs)
        assert part.dtype == torch.float64
        steps = part / grid.spacing
        assert torch.equal(steps, steps.round())
    plain = released_sums(replace(PLAN, addends=None), SecretGenerator(), rows)
    assert plain.dtype == torch.float32


def test_rounding_preserves_charge_and_deviation() -> None:
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    wide = replace(PLAN, dimension=40_000)
    part = released_sums(wide, secret, torch.zeros(0, 20_000))
    noise_std = 1.5 * wide.clip / math.sqrt(wide.shares)
    assert float(part.std()) == pytest.approx(noise_std, rel=0.02)
    assert wide.release(1, 1.5) == replace(wide, addends=None).release(1, 1.5)


HUGE = replace(PLAN, clip=1e12, dimension=200_000, groups=1, shares=2, addends=Addends(4, 4000))


@pytest.mark.parametrize("records", [0, 3999])
@pytest.mark.parametrize("spec", [HUGE, replace(HUGE, clip=1.0)], ids=["huge clip", "clip 1"])
def test_even_and_odd_steps_are_equally_frequent(spec: ReleasePlan, records: int) -> None:
    """Ties rounded to even numbers of steps would reveal the size of a part."""
    grid = spec.grid(3.0)
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    sums = torch.full((1, spec.dimension), 0.999 * spec.clip * records, dtype=torch.float64)
    parts = on_grid(sums, secret.normal(sums.shape, 3 * spec.clip / math.sqrt(2)), grid)
    steps = (parts / grid.spacing).numpy()
    np.testing.assert_array_equal(steps, np.rint(steps))
    assert abs(np.mean(steps % 2 == 0) - 0.5) < 5 * 0.5 / math.sqrt(spec.dimension)


def test_grids_as_fine_as_float64_are_rejected() -> None:
    """The smallest input with such a grid is rejected, and so are sums beyond 64 bits."""
    assert HUGE.grid(3.0).bits == -28
    with raises(PrivacySettingError, "privacy.noise_multiplier"):
        replace(HUGE, addends=Addends(4, 10**10)).grid(3.0)
    with raises(PrivacySettingError, "privacy.noise_multiplier"):
        grid_of(clip=1.0, noise_std=1e-9, shares=2, addends=Addends(3, 10**9))


@given(st.integers(-40, 40), st.integers(-(2**50), 2**50), st.floats(-(2.0**20), 2.0**20))
def test_part_is_exact_rounded_sum(bits: int, steps: int, noise: float) -> None:
    """The reference are rational numbers, since a float64 sum would lose what decides ties."""
    grid = Grid(bits, 2.0**51 * 2.0**-bits)
    total = float(steps) / 4 * grid.spacing
    part = on_grid(*torch.tensor([total, noise * grid.spacing], dtype=torch.float64), grid)
    exact = Fraction(steps, 4) + Fraction(noise)
    if abs(exact - round(exact)) < Fraction(1, 2) - Fraction(1, 2**32):
        assert part.item() == round(exact) * grid.spacing
