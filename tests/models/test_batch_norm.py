"""Batch norm in condensation: statistics per group, batch statistics against torch's, and memory
formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.core.client import ExactClientView
from fedsynth.data.images import ImageData
from fedsynth.models.convnet import ConvNet, channels_last
from fedsynth.models.flat import flatten, load_flat
from fedsynth.models.layers import (
    SharedStatistics,
    batch_statistics,
    with_grouped_statistics,
)
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.synthesizer.condensation.matching import (
    ExactMatcher,
    NetworkFeatures,
)
from fedsynth.synthesizer.condensation.sets import BatchIndices
from tests.digits import digits

N, IPC = 60, 3


def data() -> ImageData:
    return digits(np.arange(N) % 10)


def batch_norm_network() -> ConvNet:
    net = ConvNet((1, 8, 8), 10, width=6, depth=2, norm="batch").requires_grad_(False)
    load_flat(net, torch.randn(len(flatten(net)), generator=torch.Generator().manual_seed(0)) * 0.3)
    return net


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm2d, (7, 4, 5, 5)), (nn.BatchNorm1d, (7, 4))]
)
def test_groups_are_normalised_separately(kind: Any, shape: tuple[int, ...]) -> None:
    """Compares torch's batch norm in training mode per group, for interleaved groups of different
    sizes, with gradients; also for vectors, as in AlexNet's hidden layers."""
    layer, draws = kind(4), torch.Generator().manual_seed(0)
    for p in layer.parameters():
        p.data.normal_(generator=draws)
    group = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    grouped = with_grouped_statistics(nn.Sequential(layer))
    SharedStatistics.of(grouped).assign(group, 3)
    x = (torch.randn(shape, generator=draws) * 3 + 10).requires_grad_()
    expected = torch.empty(shape)
    for g in range(3):
        expected[group == g] = layer(x[group == g])
    actual = grouped(x)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    v = torch.randn(shape, generator=draws)
    (dx,), (dx_torch,) = (torch.autograd.grad(output, x, v) for output in (actual, expected))
    torch.testing.assert_close(dx, dx_torch, atol=1e-3, rtol=1e-3)


def test_real_and_synthetic_images_never_share_statistics() -> None:
    """In plain torch, each of two clients has a pass in training mode for its real images and one
    for its synthetic images."""
    net, S = batch_norm_network(), torch.randn(4, IPC, 1, 8, 8)
    clients = ExactClientView(
        [0, 1], data(), [torch.tensor([0, 10, 20, 1, 11]), torch.tensor([30, 31, 41, 51])]
    )
    segments = clients.segments(1)
    matcher = ExactMatcher(clients, BatchIndices(clients, segments, 9, 1, seed=0, round=1))
    maps = NetworkFeatures(with_grouped_statistics(net), 0.7, None, statistics_S=segments.position)
    actual = matcher.gradient(0, maps, S)
    expected = []
    net.train()
    for position, (zeros, ones) in enumerate((([0, 10, 20], [1, 11]), ([30], [31, 41, 51]))):

        def u(x: Tensor) -> Tensor:
            h = net.embed(x)
            return torch.cat([h, 0.7 * net.classifier(h)], dim=1)

        real = u(clients.images(torch.tensor(zeros + ones)))
        leaf = S[2 * position : 2 * position + 2].clone().requires_grad_()
        fake = u(leaf.flatten(0, 1)).view(2, IPC, -1).mean(dim=1)
        means = torch.stack([real[: len(zeros)].mean(0), real[len(zeros) :].mean(0)])
        expected.append(torch.autograd.grad((fake - means).square().sum(), leaf)[0])
    torch.testing.assert_close(actual, torch.cat(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_batched_clients_equal_separate_clients(precision: torch.dtype) -> None:
    net, parts = batch_norm_network(), list(torch.arange(N).tensor_split(3))
    running = [b.clone() for b in net.buffers()]
    converted = with_grouped_statistics(net)

    def images(ids: list[int]) -> Tensor:
        clients = ExactClientView(ids, data(), [parts[k] for k in ids])
        segments = clients.segments(1)
        batches = BatchIndices(clients, segments, 2, 3, seed=0, round=1)
        start = torch.arange(float(IPC)).view(1, -1, 1, 1, 1).expand(len(segments), IPC, 1, 8, 8)
        features = NetworkFeatures(precision=precision, statistics_S=segments.position)
        features.use(converted)
        matcher, S = ExactMatcher(clients, batches), start.clone()
        for step in range(3):
            S -= matcher.gradient(step, features, S)
        return S

    tolerance = 1e-4 if precision == torch.float32 else 0.05
    separate = torch.cat([images([k]) for k in range(3)])
    torch.testing.assert_close(images([0, 1, 2]), separate, atol=tolerance, rtol=tolerance)
    assert all(torch.equal(a, b) for a, b in zip(running, net.buffers(), strict=True))


def nonlinear_sum(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Returns a function that is nonlinear in both arguments."""
    weights = torch.arange(1.0, len(mean) + 1, device=mean.device, dtype=mean.dtype)
    return (weights * mean**3).sum() + (variance / weights).square().sum()


@pytest.mark.parametrize(("shape", "last"), [((5, 3), False), ((4, 3, 2, 5), True)])
def test_statistics_equal_torch(shape: tuple[int, ...], last: bool, device: torch.device) -> None:
    """Compares features and feature maps, in both memory formats."""
    draws = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=draws, dtype=torch.float64) * 2 + 1).to(device)
    if last:
        x = channels_last(x)
    leaf, reference_leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    mean, variance = batch_statistics(leaf)
    axes = [0, *range(2, x.dim())]
    true_variance, true_mean = torch.var_mean(reference_leaf, dim=axes, unbiased=False)
    torch.testing.assert_close((mean, variance), (true_mean, true_variance))
    nonlinear_sum(mean, variance).backward()
    nonlinear_sum(true_mean, true_variance).backward()
    torch.testing.assert_close(leaf.grad, reference_leaf.grad)


def test_half_precision_is_summed_in_float32() -> None:
    """The statistics of bfloat16 values are float32 and exact."""
    draws = torch.Generator().manual_seed(1)
    x = (torch.randn(64, 3, 8, 8, generator=draws) + 4).bfloat16().requires_grad_()
    mean, variance = batch_statistics(x)
    assert mean.dtype == variance.dtype == torch.float32
    true_variance, true_mean = torch.var_mean(x.float(), dim=[0, 2, 3], unbiased=False)
    torch.testing.assert_close(mean, true_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, true_variance, rtol=1e-4, atol=1e-4)
    nonlinear_sum(mean, variance).backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_keeps_values(channels: int) -> None:
    """Also checks vmap over examples, which per-example gradients need."""
    x = torch.arange(2.0 * channels * 6).view(2, channels, 2, 3).requires_grad_()
    converted = channels_last(x)
    assert torch.equal(converted, x)
    assert converted.stride() == (channels * 6, 1, 3 * channels, channels)
    assert channels_last(converted).data_ptr() == converted.data_ptr()  # no second copy
    assert channels_last(x[:0]).shape == (0, channels, 2, 3)
    assert torch.equal(torch.vmap(channels_last)(x[None]), x[None])
    (gradient,) = torch.autograd.grad((converted * x.detach()).sum(), x)
    assert torch.equal(gradient, x)


@pytest.mark.parametrize(("name", "channels"), [("lenet5", 1), ("cnn1", 3)])
def test_max_pool_networks_equal_the_usual_order(
    name: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares logits and gradients with ReLU before the pool, as in papers."""
    network = build_model(ModelSettings(name), (channels, 28, 28), 10, seed=0).double().train()
    x = torch.randn(5, channels, 28, 28, generator=torch.Generator().manual_seed(1)).double()
    actual = logits_and_gradients(network, x)
    monkeypatch.setattr("fedsynth.models.small.channels_last", lambda x_NCHW: x_NCHW)
    for layer in network.modules():
        if isinstance(layer, torch.nn.MaxPool2d):
            layer.register_forward_pre_hook(lambda _, inputs: (torch.relu(inputs[0]),))
    torch.testing.assert_close(actual, logits_and_gradients(network, x))


def logits_and_gradients(network: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns logits, and the gradients of weights and images."""
    x = x.clone().requires_grad_()
    logits = network(x)
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(x)))
    return [logits, *torch.autograd.grad(loss, [x, *network.parameters()])]
