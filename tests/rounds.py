"""Rounds between a server and clients without an engine, and steps of optimisers."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import Memory, Results
from fedsynth.federation.server import Server
from fedsynth.privacy.plans import FIRST, PHASES


def uploads_of(clients: Group, results: Results) -> dict[int, Message]:
    """Returns the messages of a group's step by client number."""
    return {k: message for k, (message, _) in zip(clients.ids, results, strict=True)}


def play_round(
    server: Server,
    groups: Sequence[Group] | Callable[[str], Sequence[Group]],
    memories: MutableMapping[int, Memory],
    context: RoundContext,
) -> dict[int, Any]:
    """Plays one round, with its first exchange if it has one.

    Args:
        server: its state is the next one afterwards.
        groups: the clients of the round; the steps of each group are taken together. A function of
            the phase where clients are charged for each exchange.
        memories: of the clients by number ({} where missing); replaced by the new ones.

    Returns:
        The uploads by client number, of the types that the method declares.
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
            replies.update(uploads_of(group, results))
            memories.update(zip(group.ids, (memory for _, memory in results), strict=True))
        assert server.check(phase, replies, context)[1] == {}
        server.receive(phase, replies, context)
    return replies


def take_step(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Steps along the gradient of the loss."""
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
