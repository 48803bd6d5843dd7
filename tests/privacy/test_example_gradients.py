"""DP-SGD's rows are each example's own gradient, whatever the network and its order in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedsynth.models.layout import channels_last
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.dpsgd import example_gradients
from fedsynth.seeding import forked_rng

SHAPES = ((1, 28, 28), (3, 32, 32))
NETWORKS: list[tuple[str, dict[str, str]]] = [
    ("convnet", {}),
    ("lenet5", {}),
    ("cnn1", {"norm": "group"}),
    ("cnn2", {"norm": "group"}),
    ("resnet8", {}),
    ("linear", {}),
    ("mlp", {}),
]


def one_by_one(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """[N, P]: autograd's, of one example after another."""
    weights = [p.requires_grad_() for p in network.train().parameters()]
    rows = []
    for k in range(len(x)):
        loss = nn.functional.cross_entropy(network(x[k : k + 1]), y[k : k + 1])
        gradients = torch.autograd.grad(loss, weights)
        rows.append(torch.cat([g.reshape(-1) for g in gradients]))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "more"), NETWORKS)
def test_each_row_is_that_examples_gradient(
    name: str, more: dict[str, str], shape: tuple[int, int, int]
) -> None:
    """Catches: Opacus unfolding channels-last inputs by the strides of plain ones."""
    network = build_model(ModelSettings(name, width=8, **more), shape, 10, seed=0)
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(4)
    expected = one_by_one(network, x, y)
    torch.testing.assert_close(example_gradients(network, x, y), expected, atol=1e-5, rtol=1e-4)


def test_a_network_of_ones_own_may_work_channels_last() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.again = nn.Conv2d(4, 5, 3)
            self.classifier = nn.Linear(5, 10)

        def forward(self, x: Tensor) -> Tensor:
            h = self.again(torch.relu(self.conv(channels_last(x))))
            z: Tensor = self.classifier(h.mean(dim=(2, 3)))
            return z

    with forked_rng(0, "a network of one's own"):
        network = Own()
        x = torch.randn(4, 3, 8, 8)
    y = torch.arange(4)
    torch.testing.assert_close(
        example_gradients(network, x, y), one_by_one(network, x, y), atol=1e-5, rtol=1e-4
    )
