"""A network in training and its optimiser as named tensors: what a client or a server keeps of them
between rounds, or inside of one. Without more words, a generator and its Adam."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

PREFIX = "generator."


def remembered(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    prefix: str = PREFIX,
    rule: str = "adam.",
) -> dict[str, Tensor]:
    """Weights, buffers and moments, to go on from.

    Args:
        prefix: of the network's names.
        rule: of the optimiser's.
    """
    weights = {prefix + name: value.clone() for name, value in network.state_dict().items()}
    states: Mapping[int, Mapping[str, Tensor | None]] = optimiser.state_dict()["state"]
    return {
        **weights,
        **{
            f"{rule}{i}.{name}": value.clone()
            for i, state in states.items()
            for name, value in state.items()
            if value is not None
        },
    }


def restore(
    network: nn.Module,
    optimiser: torch.optim.Optimizer | None,
    memory: Mapping[str, Tensor],
    prefix: str = PREFIX,
    rule: str = "adam.",
) -> None:
    """Goes on from what `remembered` gave; entries of other names are left alone."""
    network.load_state_dict(
        {name.removeprefix(prefix): v for name, v in memory.items() if name.startswith(prefix)}
    )
    if optimiser is None:
        return
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in memory.items():
        if name.startswith(rule):
            number, key = name.removeprefix(rule).split(".")
            states.setdefault(int(number), {})[key] = value.clone()
    optimiser.load_state_dict({**optimiser.state_dict(), "state": states})
