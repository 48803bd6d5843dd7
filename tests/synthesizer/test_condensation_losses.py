"""Losses of condensation: distribution distances against NumPy and POT, their limit of mean
matching, and FedAF's equations."""

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
    data.images[8:] = 255  # far from client 0's images
    clients = ExactClientView(ids, data, [PARTS[k] for k in ids])
    batches = BatchIndices(clients, clients.segments(1), 100, 1, seed=0, round=1)
    return ExactMatcher(clients, batches)


def synthetic(device: torch.device = CPU) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(5, IPC, 1, 8, 8, generator=draws).to(device)


def features(device: torch.device = CPU) -> NetworkFeatures:
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
    """Returns POT's Sinkhorn divergence, with the cost ½‖x − y‖² and ε = blur²."""

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
def test_gradient_matches_the_oracle(matching: str, oracle: Any, device: torch.device) -> None:
    """Along the gradient, the oracle's sum over unequal segments changes by the squared norm. A
    client's gradient does not depend on other clients. Regression: a Sinkhorn schedule that
    starts from the spread of all segments."""
    S, net = synthetic(device), network().to(device).double()
    gradient = DistributionMatcher(exact(device), matching, 0.5).gradient(0, features(device), S)
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
    single = DistributionMatcher(exact(device, [0]), matching, 0.5).gradient(
        0, features(device), S[:3]
    )
    torch.testing.assert_close(single, gradient[:3], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("matching", ["gaussian", "sinkhorn"])
def test_wide_blur_is_mean_matching(matching: str, device: torch.device) -> None:
    S = synthetic(device)
    expected = exact(device).gradient(0, features(device), S)
    actual = DistributionMatcher(exact(device), matching, 30.0).gradient(0, features(device), S)
    assert (actual - expected).norm() < 0.02 * expected.norm()


def test_columns_can_exclude_the_logits() -> None:
    """Without logits the classifier has no influence."""
    matcher, gradients = DistributionMatcher(exact(), "energy", 1.0, 24), []
    for factor in (1, 3):
        net = network()
        net.classifier.weight.mul_(factor)
        gradients.append(matcher.gradient(0, NetworkFeatures(net, 1.0, None), synthetic()))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("method", "matching", "norm"),
    [("feddm", "energy", "instance"), ("fedaf", "gaussian", "batch")],
)
def test_distribution_losses_run_only_without_privacy(
    method: str, matching: str, norm: str
) -> None:
    """With batch norm all segments share a pass."""
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


def test_eqs_8_and_12_average_over_holders_of_a_class() -> None:
    """Both clients hold class 0, only the second holds class 1, none holds class 2."""
    a, b = (
        torch.tensor([[2.0, 0, 0], [9, 9, 9], [9, 9, 9]]),
        torch.tensor([[4.0, 2, 0], [0, 6, 0], [9, 9, 9]]),
    )
    a[1], b[2] = math.nan, math.inf  # values of missing classes must not spread
    mean, has_holder = average_over_holders(
        [a, b], [torch.tensor([1, 0, 0]), torch.tensor([1, 1, 0])]
    )
    assert has_holder.tolist() == [True, True, False]
    assert mean.tolist() == [[3, 1, 0], [0, 6, 0], [0, 0, 0]]


def test_point_distance_is_the_expectation_over_directions() -> None:
    u = torch.randn(1, 10, generator=GENERATOR).double().requires_grad_()
    v = torch.randn(1, 10, generator=GENERATOR).double()
    directions = next(unit_directions(200_000, 10, GENERATOR)).double()
    point = collaborative_distance(u, v, torch.zeros(1), distance="point", directions_PC=directions)
    mean = (directions @ (u - v)[0]).abs().mean()
    assert point.item() == pytest.approx(mean.item(), rel=0.01)
    a, b = torch.autograd.grad(point, u)[0], torch.autograd.grad(mean, u)[0]
    assert (a - b).norm() < 0.02 * a.norm()


def test_rows_distance_equals_sorting_per_client() -> None:
    rng = np.random.default_rng(1)
    u, v, client = rng.normal(size=(5, 4)), rng.normal(size=(5, 4)), np.array([0, 0, 0, 1, 1])
    directions = next(unit_directions(7, 4, GENERATOR)).double()
    expected = 0.0
    for k in (0, 1):
        for theta in directions.numpy():
            u_sorted, v_sorted = (np.sort(w[client == k] @ theta) for w in (u, v))
            expected += np.abs(u_sorted - v_sorted).sum() / 7
    arguments = [torch.tensor(a) for a in (u, v, client)]
    actual = collaborative_distance(*arguments, distance="rows", directions_PC=directions)  # type: ignore[misc]
    assert float(actual) == pytest.approx(expected)
    # the sorted distance ignores the order of classes
    a, b = torch.tensor([[1.0, 2, 3]]), torch.tensor([[3.0, 1, 2]])
    directions = next(unit_directions(3, 3, GENERATOR))
    sorted_distance = collaborative_distance(
        a, b, torch.zeros(1), distance="sorted", directions_PC=directions
    )
    assert float(sorted_distance) == 0


@pytest.mark.parametrize("distance", DISTANCES)
def test_distance_gradients_are_finite_at_equality(distance: str, device: torch.device) -> None:
    """A detached term would have no gradient, a plain norm or POT's NaN at zero."""
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
    equal = v.clone().requires_grad_()
    (at_zero,) = torch.autograd.grad(loss(equal), equal)
    assert torch.isfinite(at_zero).all()
    assert float(loss(equal).detach()) == 0


def test_knowledge_matching_is_zero_at_equality_and_finite() -> None:
    v = torch.randn(3, 4, generator=GENERATOR).double()
    all_classes = torch.ones(3, dtype=torch.bool)
    leaf = v.clone().requires_grad_()
    loss = knowledge_matching(leaf, soft_labels(v, 1.5), all_classes, 1.5)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    assert gradient.abs().max() < 1e-12
    assert float(knowledge_matching(v, soft_labels(-v, 1.0), ~all_classes, 1.0)) == 0
    certain = torch.tensor([[1000.0, 0.0]]).requires_grad_()
    extreme = knowledge_matching(certain, torch.tensor([[0.0, 1.0]]), torch.tensor([True]), 1.0)
    (gradient,) = torch.autograd.grad(extreme, certain)
    assert torch.isfinite(extreme)
    assert torch.isfinite(gradient).all()
    assert torch.autograd.gradcheck(
        lambda t: knowledge_matching(t, soft_labels(v, 1.0), all_classes, 1.0), (leaf,)
    )
