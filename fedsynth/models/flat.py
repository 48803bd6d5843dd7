"""Stores the parameters of a network as one vector, and checks weights before they are used.

With all parameters in one vector, perturbing, projecting and averaging a network are single
operations. The checks refuse untrusted weights that do not fit, and weights that are not finite.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsynth.errors import OutputError


def flatten(model: nn.Module) -> Tensor:
    """Copies all parameters of a network into one new vector [P]."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def flatten_named(values: Mapping[str, Tensor], model: nn.Module) -> Tensor:
    """Joins named tensors into one vector [P], in the order of the model's parameters.

    Names that are not parameters of the model are ignored.
    """
    return torch.cat([values[name].detach().reshape(-1) for name, _ in model.named_parameters()])


class FlatNetwork:
    """A copy of a network whose parameters are views of one vector.

    The vector is `self.flat` [P], and writing to it changes the network.

    Args:
        model: the network to copy.
        device: the device of the copy. None keeps the device of `model`.
        requires_grad: whether the weights can be trained. If true, their gradients are views of
            `self.grad` [P]. If false, the weights are frozen, as in condensation, and `self.grad`
            is empty.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None = None,
        *,
        requires_grad: bool = False,
    ) -> None:
        self.module = copy.deepcopy(model)
        if device is not None:
            self.module.to(device)
        self.flat = flatten(self.module)
        self.grad = torch.zeros_like(self.flat) if requires_grad else self.flat.new_empty(0)
        offset = 0
        for parameter in self.module.parameters():
            view = slice(offset, offset + parameter.numel())
            parameter.data = self.flat[view].view_as(parameter)
            parameter.requires_grad_(requires_grad)
            if requires_grad:
                parameter.grad = self.grad[view].view_as(parameter)
            offset += parameter.numel()


def load_flat(model: nn.Module, flat: Tensor) -> None:
    """Copies a vector [P] into the parameters of a network."""
    offset = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()


def restore(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads untrusted weights into a network.

    Raises:
        ValueError: the weights do not fit the network, are complex, or are not finite.
    """
    for name, current in network.state_dict().items():
        value = weights.get(name, current)
        if (value.is_floating_point(), value.is_complex()) != (current.is_floating_point(), False):
            raise ValueError(f"the tensor {name} must be {current.dtype}, got {value.dtype}")
        if not torch.isfinite(value.to(current.dtype)).all():
            raise ValueError(f"the tensor {name} must be finite")
    try:
        network.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def require_finite(network: nn.Module) -> None:
    """Raises an error if a weight is not finite.

    Raises:
        OutputError: a weight is NaN or infinite, because training has diverged.
    """
    for name, value in network.state_dict().items():
        if not torch.isfinite(value).all():
            raise OutputError(f"the training has diverged, because the tensor {name} is not finite")
