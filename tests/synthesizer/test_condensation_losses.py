"""Losses of condensation: distributions against NumPy and POT, in the limit where they match means,
and FedAF's equations against NumPy and numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import ot
import pytest
import torch
from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.core.client import ExactClientView
from fedsynth.errors import SettingError
from fedsynth.models.convnet import ConvNet
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.condensation.losses import (
    DISTANCES,
    DistributionMatcher,
    average_over_holders,
    collaborative_distance,
    knowledge_matching,
    soft_labels,
    unit_directions,
)
from fedsynth.synthesizer.condensation.matching import ExactMatcher, NetworkFeatures
from fedsynth.synthesizer.condensation.sets import BatchIndices
from tests.digits import CPU, digits

LABELS = np.array([0, 0, 0, 0, 0, 1, 1, 2, 0, 1])
PARTS = [torch.arange(8), torch.arange(8, 10)]
IPC, WIDTH = 3, 6 * 4 + 10
Array = npt.NDArray[np.float64]


def network() -> ConvNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        return ConvNet((1, 8, 8), 10, width=6, depth=2).requires_grad_(False)


def exact(device: torch.device = CPU, ids: Sequence[int] = (0, 1)) -> ExactMatcher:
    data = digits(LABELS, device=device)
    data.images[8:] = 255  # client 1's are far from the others
    clients = ExactClientView(ids, data, [PARTS[k] for k in ids])
    batches = BatchIndices(clients, clients.segments(1), 100, 1, seed=0, round=1)
    return ExactMatcher(clients, batches)


def start(device: torch.device = CPU) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(5, IPC, 1, 8, 8, generator=draws).to(device)


def seen(device: torch.device = CPU) -> NetworkFeatures:
    return NetworkFeatures(network().to(device), 1.0, None)


def squared(x: Array, y: Array) -> Array:
    return np.asarray(((x[:, None] - y[None]) ** 2).sum(-1))


def gaussian(x: Array, y: Array, blur: float) -> float:
    def mean(a: Array, b: Array) -> float:
        return float(np.exp(-squared(a, b) / (2 * blur**2)).mean())

    return 2 * WIDTH * blur**2 * (mean(x, x) / 2 + mean(y, y) / 2 - mean(x, y))


def energy(x: Array, y: Array, blur: float) -> float:
    def mean(a: Array, b: Array) -> float:
        return float(np.sqrt(squared(a, b)).mean())

    return 2 * WIDTH * (mean(x, y) - mean(x, x) / 2 - mean(y, y) / 2)


def sinkhorn(x: Array, y: Array, blur: float) -> float:
    """POT's Sinkhorn divergence: the same entropic problem, with the cost ½‖x − y‖² and ε =
    blur²."""

    def cost(a: Array, b: Array) -> float:
        n, m = np.full(len(a), 1 / len(a)), np.full(len(b), 1 / len(b))
        matrix = squared(a, b) / 2
        plan = ot.sinkhorn(
            n, m, matrix, blur**2, method="sinkhorn_log", numItermax=20_000, stopThr=1e-12
        )
        return float(
            (plan * matrix).sum() + blur**2 * (plan * np.log(plan / (n[:, None] * m))).sum()
        )

    return 2 * WIDTH * (cost(x, y) - cost(x, x) / 2 - cost(y, y) / 2)


@pytest.mark.parametrize(
    ("matching", "oracle"), [("gaussian", gaussian), ("energy", energy), ("sinkhorn", sinkhorn)]
)
def test_the_gradient_descends_the_oracle(matching: str, oracle: Any, device: torch.device) -> None:
    """Along the gradient, the oracle's sum over segments of unequal sizes changes by the gradient's
    squared norm. A client's gradient does not depend on its neighbours. Catches: a Sinkhorn
    schedule that starts from the spread of all segments together."""
    S, net = start(device), network().to(device).double()
    gradient = DistributionMatcher(exact(device), matching, 0.5).gradient(0, seen(device), S)
    clients = ExactClientView([0, 1], exact(device).clients.data, PARTS)
    segments = clients.segments(1)

    def cloud(images: Tensor) -> Array:
        h = net.embed(images.double())
        both = torch.cat([h, net.classifier(h)], 1) / WIDTH**0.5
        return both.cpu().numpy()  # type: ignore[no-any-return]

    def value(images: Tensor) -> float:
        pairs = zip(segments.position.tolist(), segments.label.tolist(), strict=True)
        real = [cloud(clients.images(clients.examples(k, c))) for k, c in pairs]
        return float(sum(oracle(cloud(x), y, 0.5) for x, y in zip(images, real, strict=True)))

    with torch.no_grad():
        step = 1e-4 / float(gradient.norm())
        slope = value(S.double() + step * gradient) - value(S.double() - step * gradient)
    # geomloss stops its Sinkhorn iterations early, so its gradient is an approximation
    expected = float(gradient.double().square().sum())
    tolerance = 5e-2 if matching == "sinkhorn" else 1e-3
    assert slope / (2 * step) == pytest.approx(expected, rel=tolerance)
    alone = DistributionMatcher(exact(device, [0]), matching, 0.5).gradient(0, seen(device), S[:3])
    torch.testing.assert_close(alone, gradient[:3], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("matching", ["gaussian", "sinkhorn"])
def test_for_wide_blur_it_is_mean_matching(matching: str, device: torch.device) -> None:
    S = start(device)
    expected = exact(device).gradient(0, seen(device), S)
    actual = DistributionMatcher(exact(device), matching, 30.0).gradient(0, seen(device), S)
    assert (actual - expected).norm() < 0.02 * expected.norm()


def test_columns_leave_the_logits_out() -> None:
    """Without logits the classifier has no influence."""
    matcher, gradients = DistributionMatcher(exact(), "energy", 1.0, 24), []
    for factor in (1, 3):
        net = network()
        net.classifier.weight.mul_(factor)
        gradients.append(matcher.gradient(0, NetworkFeatures(net, 1.0, None), start()))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("method", "matching", "norm"),
    [("feddm", "energy", "instance"), ("fedaf", "gaussian", "batch")],
)
def test_a_loss_runs_and_is_refused_with_privacy(method: str, matching: str, norm: str) -> None:
    """With batch norm all segments go together."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"method": method, "rounds": 1},
        "model": {"width": 4, "depth": 2, "norm": norm},
        "partition": {"clients": 2},
        "method": {"ipc": 2, "iterations": 1, "server_epochs": 1, "matching": matching},
    }
    assert simulate(resolve(sections)).accuracy > 0
    private = {"model": {"norm": "instance"}, "privacy": {"epsilon": 10.0}}
    with pytest.raises(SettingError, match="matching"):
        simulate(resolve({**sections, **private}))


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
    blind = collaborative_distance(
        a, b, torch.zeros(1), distance="sorted", directions_PC=directions
    )
    assert float(blind) == 0


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
