"""Training on resident data equals torch's own SGD, and stays in the ball."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedsynth.models.convnet import ConvNet
from fedsynth.models.flat import flatten
from fedsynth.synthesizer.training import SgdSettings, train_on


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        model = ConvNet((1, 8, 8), 4, width=4, depth=2)
        return model, torch.randn(30, 1, 8, 8), torch.randint(4, (30,))


def test_equals_torch_sgd_with_momentum_and_weight_decay() -> None:
    model, x, y = problem()
    oracle = copy.deepcopy(model)
    train_on(model, lambda i: x[i], y, SgdSettings(3, 8, 0.1, 0.9, 1e-2), torch.Generator().manual_seed(5))
    optimiser = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for part in torch.randperm(30, generator=generator).split(8):
            optimiser.zero_grad()
            nn.functional.cross_entropy(oracle(x[part]), y[part]).backward()
            optimiser.step()
    torch.testing.assert_close(flatten(model), flatten(oracle), atol=1e-5, rtol=1e-4)


def test_projection_holds_after_training() -> None:
    model, x, y = problem()
    start = flatten(model)
    train_on(model, lambda i: x[i], y, SgdSettings(20, 8, 0.5, radius=0.3), torch.Generator().manual_seed(5))
    distance = (flatten(model) - start).norm()
    assert 0.29 < distance <= 0.3 * (1 + 1e-5)


def test_no_examples_means_no_step() -> None:
    model, x, y = problem()
    start = flatten(model)
    train_on(model, lambda i: x[i], y[:0], SgdSettings(2, 8, 0.5), torch.Generator())
    assert torch.equal(flatten(model), start)


def test_batch_norm_statistics_come_back() -> None:
    _, x, y = problem()
    model = ConvNet((1, 8, 8), 4, width=4, depth=1, norm="batch")
    train_on(model, lambda i: x[i], y, SgdSettings(1, 8, 0.1), torch.Generator().manual_seed(0))
    assert int(model.get_buffer("features.1.num_batches_tracked")) == 4
