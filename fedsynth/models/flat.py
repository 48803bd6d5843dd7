"""Networks with all parameters in one vector, and checks of weights before use.

Perturbing, projecting and averaging a network are then single operations. The checks refuse
untrusted weights that do not fit or are not finite.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fedsynth.errors import OutputError


def flatten(model: nn.Module) -> Tensor:
    """Copies a network's parameters into a new vector [P]."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def flatten_named(values: Mapping[str, Tensor], model: nn.Module) -> Tensor:
    """Joins named tensors into one vector [P], in the model's parameter order.

    Other names are ignored.
    """
    return torch.cat([values[name].detach().reshape(-1) for name, _ in model.named_parameters()])


def replicator(model: nn.Module) -> Callable[[Tensor], nn.Module]:
    """Returns a function from a vector [P] to a copy of the network with these parameters.

    The parameters are views of the vector. The network must have no buffers. Copies of PyTorch's
    and fedsynth's layers share all else with `model`, and are made much faster than by
    `copy.deepcopy`. Other layers are copied deeply, because their attributes may hold layers.
    """
    parameters = list(model.parameters())
    sizes = list(map(Tensor.numel, parameters))
    modules = [type(part).__module__ for part in model.modules()]
    is_known = all(module.startswith(("torch.nn.", "fedsynth.")) for module in modules)

    def copied(module: nn.Module, new: Mapping[int, nn.Parameter]) -> nn.Module:
        result: nn.Module = object.__new__(type(module))
        direct, parts = module._parameters.items(), module._modules.items()
        result.__dict__.update(
            module.__dict__,
            _parameters={name: p if p is None else new[id(p)] for name, p in direct},
            _modules={name: part if part is None else copied(part, new) for name, part in parts},
        )
        return result

    def replica(flat: Tensor) -> nn.Module:
        new, parts = {}, flat.split_with_sizes(sizes)
        if not is_known:
            network = copy.deepcopy(model)
            for p, part in zip(network.parameters(), parts, strict=True):
                p.data = part.view_as(p)
            return network
        for p, part in zip(parameters, parts, strict=True):
            new[id(p)] = nn.Parameter(part.view_as(p), p.requires_grad)
        return copied(model, new)

    return replica


class FlatNetwork:
    """A network whose parameters are views of one vector.

    Args:
        module: the network, which is changed.
        requires_grad: whether the network is trained, with gradients as views of `grad`. Otherwise,
            the weights are frozen, and the network is in evaluation mode.

    Attributes:
        flat: all parameters, [P]. Writing to `flat` changes the network.
        grad: all gradients, [P], or an empty tensor for frozen weights.
    """

    def __init__(self, module: nn.Module, *, requires_grad: bool = False) -> None:
        self.module = module
        self._parameters = list(module.parameters())
        self._sizes = list(map(Tensor.numel, self._parameters))
        flat = flatten(module)
        self.grad = torch.zeros_like(flat) if requires_grad else flat.new_empty(0)
        self.use(flat)
        module.requires_grad_(requires_grad).train(requires_grad)
        if requires_grad:
            for parameter, part in self._parts(self.grad):
                parameter.grad = part

    def use(self, flat: Tensor) -> None:
        """Makes the parameters views of a new vector [P]. The previous vector keeps its values."""
        self.flat = flat
        for parameter, part in self._parts(flat):
            parameter.data = part

    def _parts(self, vector: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        parts = vector.split_with_sizes(self._sizes)
        for parameter, part in zip(self._parameters, parts, strict=True):
            yield parameter, part.view_as(parameter)


def restore(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Checks untrusted weights, and loads them into a network.

    Raises:
        ValueError: the weights do not fit the network, are complex, or are not finite.
    """
    for name, current in network.state_dict().items():
        value = weights.get(name, current)
        if (value.is_floating_point(), value.is_complex()) != (current.is_floating_point(), False):
            reason = f"must be {current.dtype}, got {value.dtype}. Convert the tensor"
            raise ValueError(f"the tensor {name} {reason}")
        if not torch.isfinite(value.to(current.dtype)).all():
            raise ValueError(
                f"the tensor {name} contains NaN or infinite values. Use finite weights"
            )
    try:
        network.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def require_finite(network: nn.Module) -> None:
    """Checks that all weights are finite.

    Raises:
        OutputError: a weight is NaN or infinite, because training has diverged.
    """
    for name, value in network.state_dict().items():
        if not torch.isfinite(value).all():
            raise OutputError(
                f"training diverged: the tensor {name} is not finite. Lower the learning rate"
            )
