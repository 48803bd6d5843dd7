"""Copies of networks are what `copy.deepcopy` makes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fedsynth.copies import copied
from fedsynth.models.registry import ModelSettings, build_model, model_names


def attributes(module: nn.Module) -> list[Any]:
    """Everything of a tree of modules but its tensors, in a form that compares."""
    found: list[Any] = []
    for name, one in module.named_modules():
        plain = {
            key: value
            for key, value in vars(one).items()
            if key not in ("_parameters", "_buffers", "_modules")
        }
        found.append((name, type(one), sorted(plain), repr(sorted(plain.items()))))
    return found


def test_a_copy_is_deepcopys_and_shares_nothing() -> None:
    for name in model_names():
        network = build_model(ModelSettings(name), (1, 64, 64), 10, 0).eval()
        next(iter(network.parameters())).requires_grad_(False)
        made = copied(network)
        assert attributes(made) == attributes(copy.deepcopy(network))
        state = network.state_dict()
        assert list(made.state_dict()) == list(state)
        for key, value in made.state_dict().items():
            assert torch.equal(value, state[key])
            assert value.stride() == state[key].stride()
            assert value.data_ptr() != state[key].data_ptr() or not value.numel()
        trained = [p.requires_grad for p in network.parameters()]
        assert [p.requires_grad for p in made.parameters()] == trained


class _Odd(nn.Module):
    """Tied weights, a list of its own layers, a tensor and a reference to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.layers = [self.first, self.second]
        self.scale = torch.ones(3)
        self.__dict__["myself"] = self
        self.sizes = (3, [3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layers[1](self.layers[0](x)) * self.scale)


def test_what_is_shared_within_a_network_stays_so_within_its_copy() -> None:
    network = _Odd()
    made = copied(network)
    assert isinstance(made, _Odd)
    assert made.first.weight is made.second.weight
    assert made.layers[0] is made.first
    assert made.layers[1] is made.second
    assert made.__dict__["myself"] is made
    assert made.scale is not network.scale
    assert made.sizes[1] is not network.sizes[1]
    assert torch.equal(made(torch.ones(2, 3)), network(torch.ones(2, 3)))
