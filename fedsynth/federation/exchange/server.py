"""The server of a federation: a method and its state. It sees messages, and no client's data.

In each exchange of a round it makes one request to all clients of the round, and makes its next
state from their replies, which it knows by the clients' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import Method
from fedsynth.core.state import ServerState
from fedsynth.federation.exchange.checks import check_declared, check_finite
from fedsynth.privacy.plans import FIRST


class Server:
    """One federation's server.

    Args:
        method: its steps.
        parameters: the initial model, on the server's device.

    Attributes:
        state: after the last whole round.
    """

    def __init__(self, method: Method, parameters: Mapping[str, Tensor]) -> None:
        self.method = method
        self.state: ServerState = method.initial_state(parameters)
        self._next = self.state

    def request(self, phase: str, context: RoundContext) -> Message | None:
        """What the clients of the round are asked in this exchange; None: the round has none such.

        Raises:
            TypeError: the method made another message than it declares.
        """
        if phase == FIRST:
            self._next = self.state
            made = self.method.first_request(self._next, context)
            if made is None:
                return None
        else:
            made = self.method.broadcast(self._next, context)
        check_declared(self.method, made, self.method.exchange_types(phase).downlink)
        return made

    def receive(self, phase: str, replies: Mapping[int, Message], context: RoundContext) -> None:
        """Makes the next state from the replies by client number.

        Raises:
            TypeError: a reply of another type than the method declares.
            DivergedError: a reply, or the new model, is not finite.
        """
        declared = self.method.exchange_types(phase).upload
        for client, reply in replies.items():
            check_declared(self.method, reply, declared)
            check_finite(dict(reply.arrays()), f"client {client}", context.round)
        ordered = dict(sorted(replies.items()))
        if phase == FIRST:
            self._next = self.method.first_aggregate(self._next, ordered, context)
            return
        made = self.method.server_step(self._next, ordered, context)
        check_finite(made.parameters, "server's model", context.round)
        self.state = self._next = made

    def final_parameters(self) -> Mapping[str, Tensor]:
        """The model that the federation ends with."""
        return self.method.final_parameters(self.state)
