"""Checks of weights that are untrusted, or come from diverged training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsynth.errors import OutputError


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
