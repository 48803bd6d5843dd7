"""A generator in training and its Adam as named tensors: what a client, or a server, keeps of them
between rounds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

PREFIX = "generator."


def remembered(generator: nn.Module, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Weights, buffers and moments, to go on from."""
    weights = {PREFIX + name: value.clone() for name, value in generator.state_dict().items()}
    states: Mapping[int, Mapping[str, Tensor]] = adam.state_dict()["state"]
    return {
        **weights,
        **{
            f"adam.{i}.{name}": value.clone()
            for i, state in states.items()
            for name, value in state.items()
        },
    }


def restore(
    generator: nn.Module, adam: torch.optim.Adam | None, memory: Mapping[str, Tensor]
) -> None:
    """Goes on from what `remembered` gave; entries of other names are left alone."""
    generator.load_state_dict(
        {name.removeprefix(PREFIX): v for name, v in memory.items() if name.startswith(PREFIX)}
    )
    if adam is None:
        return
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in memory.items():
        if name.startswith("adam."):
            _, number, key = name.split(".")
            states.setdefault(int(number), {})[key] = value.clone()
    adam.load_state_dict({**adam.state_dict(), "state": states})
