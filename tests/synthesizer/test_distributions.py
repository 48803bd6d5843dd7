"""Distribution losses against NumPy and POT, in the limit where they match means, and through FedDM
and FedAF."""

from __future__ import annotations

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
from fedsynth.synthesizer.condensation.losses import DistributionMatcher
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
