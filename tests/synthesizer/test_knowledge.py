"""FedAF's equations against NumPy and against numbers by hand; gradients, also where both sides are
equal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedsynth.synthesizer.condensation.losses import (
    DISTANCES,
    average_over_holders,
    collaborative_distance,
    knowledge_matching,
    soft_labels,
    unit_directions,
)

GENERATOR = torch.Generator().manual_seed(0)


def test_eqs_8_and_12_average_over_the_clients_that_have_the_class() -> None:
    """Class 0: both; class 1: the second alone; class 2: nobody."""
    a, b = (
        torch.tensor([[2.0, 0, 0], [9, 9, 9], [9, 9, 9]]),
        torch.tensor([[4.0, 2, 0], [0, 6, 0], [9, 9, 9]]),
    )
    a[1], b[2] = math.nan, math.inf  # what a client lacks is undefined, and must not spread
    mean, known = average_over_holders([a, b], [torch.tensor([1, 0, 0]), torch.tensor([1, 1, 0])])
    assert known.tolist() == [True, True, False]
    assert mean.tolist() == [[3, 1, 0], [0, 6, 0], [0, 0, 0]]


def test_point_distance_and_its_gradient_are_the_expectation_over_directions() -> None:
    u = torch.randn(1, 10, generator=GENERATOR).double().requires_grad_()
    v = torch.randn(1, 10, generator=GENERATOR).double()
    directions = next(unit_directions(200_000, 10, GENERATOR)).double()
    exact = collaborative_distance(u, v, torch.zeros(1), distance="point", directions_PC=directions)
    mean = (directions @ (u - v)[0]).abs().mean()
    assert exact.item() == pytest.approx(mean.item(), rel=0.01)
    a, b = torch.autograd.grad(exact, u)[0], torch.autograd.grad(mean, u)[0]
    assert (a - b).norm() < 0.02 * a.norm()


def test_rows_distance_equals_numpy_sorting_client_by_client() -> None:
    rng = np.random.default_rng(1)
    u, v, client = rng.normal(size=(5, 4)), rng.normal(size=(5, 4)), np.array([0, 0, 0, 1, 1])
    directions = next(unit_directions(7, 4, GENERATOR)).double()
    expected = 0.0
    for k in (0, 1):
        for theta in directions.numpy():
            one, other = (np.sort(w[client == k] @ theta) for w in (u, v))
            expected += np.abs(one - other).sum() / 7
    given = [torch.tensor(a) for a in (u, v, client)]
    found = collaborative_distance(*given, distance="rows", directions_PC=directions)  # type: ignore[misc]
    assert float(found) == pytest.approx(expected)
    # sorted: blind to which class is which
    a, b = torch.tensor([[1.0, 2, 3]]), torch.tensor([[3.0, 1, 2]])
    directions = next(unit_directions(3, 3, GENERATOR))
    one = torch.zeros(1)
    assert (
        float(collaborative_distance(a, b, one, distance="sorted", directions_PC=directions)) == 0
    )


@pytest.mark.parametrize("distance", DISTANCES)
def test_gradients_flow_and_are_finite_where_both_sides_are_equal(
    distance: str, device: torch.device
) -> None:
    """A detached term would have no gradient; a plain norm, or POT's, has NaN at zero."""
    v, directions = (
        torch.randn(4, 5, generator=GENERATOR).double().to(device),
        next(unit_directions(20, 5, GENERATOR)).double().to(device),
    )
    client = torch.tensor([0, 0, 1, 1], device=device)

    def loss(u: torch.Tensor) -> torch.Tensor:
        return collaborative_distance(u, v, client, distance=distance, directions_PC=directions)

    u = (v + torch.randn(4, 5, generator=GENERATOR).to(device)).requires_grad_()
    assert torch.autograd.gradcheck(loss, (u,))
    (gradient,) = torch.autograd.grad(loss(u), u)
    assert gradient.norm() > 0
    same = v.clone().requires_grad_()
    (at_zero,) = torch.autograd.grad(loss(same), same)
    assert torch.isfinite(at_zero).all()
    assert float(loss(same).detach()) == 0


def test_knowledge_matching_is_zero_at_equality_and_finite_for_certain_labels() -> None:
    v = torch.randn(3, 4, generator=GENERATOR).double()
    everything = torch.ones(3, dtype=torch.bool)
    leaf = v.clone().requires_grad_()
    loss = knowledge_matching(leaf, soft_labels(v, 1.5), everything, 1.5)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    assert gradient.abs().max() < 1e-12
    assert float(knowledge_matching(v, soft_labels(-v, 1.0), ~everything, 1.0)) == 0
    certain = torch.tensor([[1000.0, 0.0]]).requires_grad_()
    far = knowledge_matching(certain, torch.tensor([[0.0, 1.0]]), torch.tensor([True]), 1.0)
    (gradient,) = torch.autograd.grad(far, certain)
    assert torch.isfinite(far)
    assert torch.isfinite(gradient).all()
    assert torch.autograd.gradcheck(
        lambda t: knowledge_matching(t, soft_labels(v, 1.0), everything, 1.0), (leaf,)
    )
