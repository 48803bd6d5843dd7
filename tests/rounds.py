"""Rounds between a server and clients without an engine, and steps of optimisers."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from fedsynth.core.capabilities import exchange_of
from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext
from fedsynth.core.method import ClientState
from fedsynth.federation.server import Server
from fedsynth.privacy.plans import EXCHANGES


def play_round(
    server: Server,
    groups: Sequence[Group] | Callable[[str], Sequence[Group]],
    client_states: MutableMapping[int, ClientState],
    context: RoundContext,
) -> dict[int, Any]:
    """Plays one round, with its first exchange if it has one, and returns the uploads by number.

    Changes the server's state and the client states. The steps of each group are taken together;
    `groups` is a function of the exchange where clients are charged for each exchange.
    """
    replies: dict[int, Any] = {}
    for exchange in EXCHANGES:
        request = server.request(exchange, context)
        if request is None:
            continue
        replies = {}
        for group in groups(exchange) if callable(groups) else groups:
            step = exchange_of(server.method, exchange).client_step
            group_states = [client_states.get(k, {}) for k in group.ids]
            results = step(request, group, group_states, context)
            for k, (message, client_state) in zip(group.ids, results, strict=True):
                replies[k], client_states[k] = message, client_state
        assert server.check(exchange, replies, context)[1] == {}
        server.receive(exchange, replies, context)
    return replies


def take_step(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Steps along the gradient of the loss."""
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
