"""Rounds between a server and clients without an engine, and steps of optimisers."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Memory
from fedsynth.federation.server import Server
from fedsynth.privacy.plans import FIRST, PHASES


def play_round(
    server: Server,
    groups: Sequence[Group] | Callable[[str], Sequence[Group]],
    memories: MutableMapping[int, Memory],
    context: RoundContext,
) -> dict[int, Any]:
    """Plays one round, with its first exchange if it has one, and returns the uploads by number.

    Changes the server's state and the memories. The steps of each group are taken together;
    `groups` is a function of the phase where clients are charged for each exchange.
    """
    replies: dict[int, Any] = {}
    for phase in PHASES:
        request = server.request(phase, context)
        if request is None:
            continue
        replies = {}
        for group in groups(phase) if callable(groups) else groups:
            step = server.method.first_step if phase == FIRST else server.method.client_step
            group_memories = [memories.get(k, {}) for k in group.ids]
            results = step(request, group, group_memories, context)
            for k, (message, memory) in zip(group.ids, results, strict=True):
                replies[k], memories[k] = message, memory
        assert server.check(phase, replies, context)[1] == {}
        server.receive(phase, replies, context)
    return replies


def take_step(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Steps along the gradient of the loss."""
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
