"""Batch norm in condensation: each group's own statistics, the same as with the group alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.core.client import ExactClientView
from fedsynth.data.images import ImageData
from fedsynth.models.convnet import ConvNet
from fedsynth.models.flat import flatten
from fedsynth.models.layers import (
    SharedStatistics,
    has_batch_norm,
    with_grouped_statistics,
)
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
    net = ConvNet((1, 8, 8), 10, width=6, depth=2, norm="batch")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return net.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm2d, (7, 4, 5, 5)), (nn.BatchNorm1d, (7, 4))]
)
def test_each_group_is_normalised_separately(kind: Any, shape: tuple[int, ...]) -> None:
    """Against torch's batch norm in training mode, group by group, interleaved and of different
    sizes; gradients too. Of vectors, as AlexNet's hidden layers are, too."""
    layer, draws = kind(4), torch.Generator().manual_seed(0)
    for p in layer.parameters():
        p.data.normal_(generator=draws)
    group = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    ours = with_grouped_statistics(nn.Sequential(layer))
    SharedStatistics.of(ours).assign(group, 3)
    x = (torch.randn(shape, generator=draws) * 3 + 10).requires_grad_()
    expected = torch.empty(shape)
    for g in range(3):
        expected[group == g] = layer(x[group == g])
    actual = ours(x)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    v = torch.randn(shape, generator=draws)
    (mine,), (theirs,) = (torch.autograd.grad(made, x, v) for made in (actual, expected))
    torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_conversion_preserves_parameters_and_the_original() -> None:
    net = batch_norm_network()
    converted = with_grouped_statistics(net)
    assert has_batch_norm(net)
    assert not has_batch_norm(converted)
    assert torch.equal(flatten(net), flatten(converted))
    with pytest.raises(ValueError, match="no grouped batch norm"):
        SharedStatistics.of(net)


def features(net: nn.Module, statistics: list[int]) -> NetworkFeatures:
    return NetworkFeatures(
        with_grouped_statistics(net), 0.7, None, statistics_S=torch.tensor(statistics)
    )


def test_real_and_synthetic_images_never_share_statistics() -> None:
    """Two clients with two classes each, by plain torch: one training-mode pass for each client's
    real images, one for its synthetic."""
    net, S = batch_norm_network(), torch.randn(4, IPC, 1, 8, 8)
    clients = ExactClientView(
        [0, 1], data(), [torch.tensor([0, 10, 20, 1, 11]), torch.tensor([30, 31, 41, 51])]
    )
    segments = clients.segments(1)
    matcher = ExactMatcher(clients, BatchIndices(clients, segments, 9, 1, seed=0, round=1))
    actual = matcher.gradient(0, features(net, segments.position.tolist()), S)
    expected = []
    net.train()
    for position, (zeros, ones) in enumerate((([0, 10, 20], [1, 11]), ([30], [31, 41, 51]))):

        def u(x: Tensor) -> Tensor:
            h = net.embed(x)
            return torch.cat([h, 0.7 * net.classifier(h)], dim=1)

        real = u(clients.images(torch.tensor(zeros + ones)))
        leaf = S[2 * position : 2 * position + 2].clone().requires_grad_()
        fake = u(leaf.flatten(0, 1)).view(2, IPC, -1).mean(dim=1)
        loss = (fake[0] - real[: len(zeros)].mean(0)).square().sum() + (
            fake[1] - real[len(zeros) :].mean(0)
        ).square().sum()
        expected.append(torch.autograd.grad(loss, leaf)[0])
    torch.testing.assert_close(actual, torch.cat(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_batched_clients_make_the_same_images_as_separate_clients(precision: torch.dtype) -> None:
    net, parts = batch_norm_network(), list(torch.arange(N).tensor_split(3))
    running = [b.clone() for b in net.buffers()]
    converted = with_grouped_statistics(net)

    def images(ids: list[int]) -> Tensor:
        clients = ExactClientView(ids, data(), [parts[k] for k in ids])
        segments = clients.segments(1)
        batches = BatchIndices(clients, segments, 2, 3, seed=0, round=1)
        start = torch.arange(float(IPC)).view(1, -1, 1, 1, 1).expand(len(segments), IPC, 1, 8, 8)
        seen = NetworkFeatures(precision=precision, statistics_S=segments.position)
        seen.use(converted)
        matcher, S = ExactMatcher(clients, batches), start.clone()
        for step in range(3):
            S -= matcher.gradient(step, seen, S)
        return S

    tolerance = 1e-4 if precision == torch.float32 else 0.05
    alone = torch.cat([images([k]) for k in range(3)])
    torch.testing.assert_close(images([0, 1, 2]), alone, atol=tolerance, rtol=tolerance)
    assert all(torch.equal(a, b) for a, b in zip(running, net.buffers(), strict=True))
