"""A network whose parameters are views of one flat vector, so that perturbing, projecting and
averaging are single operations.

Checks of weights that are untrusted, or come from diverged training.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsynth.errors import OutputError


def flatten(model: nn.Module) -> Tensor:
    """Returns a copy of all parameters as one vector [P]."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def flatten_named(values: Mapping[str, Tensor], model: nn.Module) -> Tensor:
    """Returns values named like a model's parameters as one vector [P], in the order of `flatten`;
    ignores other names."""
    return torch.cat([values[name].detach().reshape(-1) for name, _ in model.named_parameters()])


class FlatNetwork:
    """A copy of `model` on `device` whose parameters are views of `self.flat` [P]; writing into
    `flat` changes the network.

    Args:
        requires_grad: False freezes the weights (condensation needs no weight gradients), and
            `grad` is empty; True makes them trainable, with gradients that are views of `self.grad`
            [P].
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
    """Copies the vector [P] into the parameters of `model`."""
    offset = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()


def restore(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads untrusted weights into a network.

    Raises:
        ValueError: they do not fit the network, are complex, or are not finite.
    """
    for name, current in network.state_dict().items():
        value = weights.get(name, current)
        if (value.is_floating_point(), value.is_complex()) != (current.is_floating_point(), False):
            raise ValueError(
                f"{name} has values of type {value.dtype}, but should have {current.dtype}"
            )
        if not torch.isfinite(value.to(current.dtype)).all():
            raise ValueError(f"{name} has values that are not finite")
    try:
        network.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def require_finite(network: nn.Module) -> None:
    """Raises OutputError if a weight is not finite, because training has diverged."""
    for name, value in network.state_dict().items():
        if not torch.isfinite(value).all():
            raise OutputError(
                f"the network's training has diverged: {name} has values that are not finite"
            )
