"""Distribution losses against NumPy and POT, in the limit where they match means, and through FedDM
and FedAF."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import ot
import pytest
import torch
from torch import Tensor

from fedsynth.core.client import OpenClients
from fedsynth.data.images import from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.resolve import resolve
from fedsynth.methods.fedaf import FedAF
from fedsynth.methods.feddm import FedDM
from fedsynth.models.convnet import ConvNet
from fedsynth.synthesizer.condensation.distributions import MATCHINGS, DistributionMatcher
from fedsynth.synthesizer.condensation.loop import NetworkFeatures
from fedsynth.synthesizer.condensation.matchers import ExactMatcher
from fedsynth.synthesizer.condensation.real_batches import BatchIndices

SPEC = dataset_spec("digits")
LABELS = np.array([0, 0, 0, 0, 0, 1, 1, 2, 0, 1])
PARTS = [torch.arange(8), torch.arange(8, 10)]
IPC, WIDTH = 3, 6 * 4 + 10
Array = npt.NDArray[np.float64]


def network() -> ConvNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        return ConvNet((1, 8, 8), 10, width=6, depth=2).requires_grad_(False)


def exact(device: torch.device) -> tuple[ExactMatcher, BatchIndices, OpenClients]:
    images = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8)).astype(np.uint8)
    clients = OpenClients([0, 1], from_arrays(images, LABELS, SPEC).to(device), PARTS)
    batches = BatchIndices(clients, clients.segments(1), 100, 1, small_class="all", seed=0, round=1)
    return ExactMatcher(clients, batches), batches, clients


def start(device: torch.device) -> Tensor:
    return torch.randn(5, IPC, 1, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)


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
    squared norm."""
    matcher, _batches, clients = exact(device)
    net, blur, S = network().to(device), 0.5, start(device)
    gradient = DistributionMatcher(matcher, matching, blur).gradient(
        0, NetworkFeatures(net, 1.0, None), S
    )
    segments = clients.segments(1)

    def value(images: Tensor) -> float:
        total = 0.0
        for i, (k, c) in enumerate(
            zip(segments.position.tolist(), segments.label.tolist(), strict=True)
        ):
            clouds = []
            for part in (images[i], clients.images(clients.examples(k, c))):
                h = net.double().embed(part.double())
                clouds.append((torch.cat([h, net.classifier(h)], 1) / WIDTH**0.5).cpu().numpy())
            total += oracle(clouds[0], clouds[1], blur)
        return total

    with torch.no_grad():
        step = 1e-4 / float(gradient.norm())
        slope = (value(S.double() + step * gradient) - value(S.double() - step * gradient)) / (
            2 * step
        )
    # geomloss stops its Sinkhorn iterations early, so its gradient is an approximation
    assert slope == pytest.approx(
        float(gradient.double().square().sum()), rel=5e-2 if matching == "sinkhorn" else 1e-3
    )


@pytest.mark.parametrize("matching", ["gaussian", "sinkhorn"])
def test_for_wide_blur_it_is_mean_matching(matching: str, device: torch.device) -> None:
    matcher, *_ = exact(device)
    features, S = NetworkFeatures(network().to(device), 1.0, None), start(device)
    expected = matcher.gradient(0, features, S)
    actual = DistributionMatcher(matcher, matching, 30.0).gradient(0, features, S)
    assert (actual - expected).norm() < 0.02 * expected.norm()


def test_columns_leave_the_logits_out() -> None:
    """Without logits the classifier has no influence."""
    matcher, *_ = exact(torch.device("cpu"))
    net, other = network(), network()
    other.classifier.weight.mul_(3)
    gradients = [
        DistributionMatcher(matcher, "energy", 1.0, 24).gradient(
            0, NetworkFeatures(n, 1.0, None), start(torch.device("cpu"))
        )
        for n in (net, other)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("method", ["feddm", "fedaf"])
@pytest.mark.parametrize("matching", MATCHINGS)
def test_each_loss_runs_and_is_refused_with_privacy_but_for_the_mean(
    method: str, matching: str
) -> None:
    fast = {
        "ipc": 2,
        "iterations": 3,
        "image_lr": 1.0,
        "server_epochs": 20,
        "server_lr": 0.05,
        "matching": matching,
    }
    sections = {"run": {"method": method, "rounds": 1}, "model": {"width": 8}, "method": fast}
    assert simulate(resolve(sections)).accuracy > 0.2
    if matching != "mean":
        with pytest.raises(SettingError, match="each example's features"):
            simulate(resolve({**sections, "privacy": {"epsilon": 10.0}}))


@pytest.mark.parametrize("method", [FedDM, FedAF])
def test_settings_are_checked(method: Any) -> None:
    with pytest.raises(UnknownNameError, match="did you mean sinkhorn"):
        method(matching="sinkhor")
    with pytest.raises(SettingError, match="blur"):
        method(blur=0.0)


def test_with_batch_norm_all_segments_go_together() -> None:
    fast = {"ipc": 2, "iterations": 2, "server_epochs": 2, "matching": "gaussian"}
    sections = {
        "run": {"method": "fedaf", "rounds": 1},
        "model": {"width": 8, "norm": "batch"},
        "method": fast,
    }
    assert simulate(resolve(sections)).accuracy > 0


@pytest.mark.parametrize("matching", ["gaussian", "energy", "sinkhorn"])
def test_a_clients_gradient_does_not_depend_on_its_neighbours(matching: str) -> None:
    """Catches: a Sinkhorn schedule that starts from the spread of all segments together."""
    gradients = []
    for ids, where in (([0, 1], slice(0, 3)), ([0], slice(0, 3))):
        images = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8)).astype(np.uint8)
        images[8:] = 255  # far from the others
        group = OpenClients(ids, from_arrays(images, LABELS, SPEC), [PARTS[k] for k in ids])
        batches = BatchIndices(group, group.segments(1), 100, 1, small_class="all", seed=0, round=1)
        matcher = DistributionMatcher(ExactMatcher(group, batches), matching, 0.25)
        S = start(torch.device("cpu"))[: len(group.segments(1))]
        gradients.append(matcher.gradient(0, NetworkFeatures(network(), 1.0, None), S)[where])
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
