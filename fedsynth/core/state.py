"""A method's server state between rounds: frozen dataclasses that are packed like messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedsynth.core.messages import Packed


@dataclass(frozen=True)
class ServerState(Packed):
    """The global model and, in a method's subclass, the rest of its server's state.

    A subclass gives each further field a default, its value before the first round: {}, a number,
    or None.

    Args:
        parameters: the model's parameters and buffers by name, on the run's device.

    >>> import torch
    >>> @dataclass(frozen=True)
    ... class Averaged(ServerState):
    ...     rounds: int = 0
    >>> state = Averaged({"weight": torch.ones(2, 3)}, rounds=4)
    >>> Averaged.from_bytes(state.to_bytes()).rounds
    4
    """

    parameters: Mapping[str, Tensor]
