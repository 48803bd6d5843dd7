"""The server of a federation: a method and its state. The server sees messages, but no data of
clients.

In each exchange of a round it makes one request to all clients of the round, and computes its next
state from their replies, by client index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message
from fedsynth.core.method import Method
from fedsynth.core.uploads import check_fields, overlap
from fedsynth.errors import UploadRejectedError
from fedsynth.federation.protocol import SecureSum, check_declared, check_finite, declared
from fedsynth.privacy.plans import FIRST


@dataclass(frozen=True)
class Checked:
    """The uploads of an exchange that have been checked.

    Attributes:
        accepted: the valid uploads, by client, ascending.
        rejected: client -> what is wrong with its upload.
    """

    accepted: Mapping[int, Message]
    rejected: Mapping[int, UploadRejectedError]


class Server:
    """The server of one federation.

    Args:
        method: its steps.
        parameters: the initial model, on the server's device.

    Attributes:
        state: after the last completed round.
    """

    def __init__(self, method: Method, parameters: Mapping[str, Tensor]) -> None:
        self.method = method
        self.state: ServerState = method.initial_state(parameters)
        self._next = self.state

    @classmethod
    def begun(cls, method: Method, context: RoundContext) -> Self:
        """Returns a server whose model has the initial weights of the context's architecture."""
        initial = context.architecture.state_dict()
        return cls(method, {name: t.to(context.device) for name, t in initial.items()})

    def request(self, phase: str, context: RoundContext) -> Message | None:
        """Returns the request for the clients of a round in this exchange, or None if the round
        does not have this exchange.

        Raises:
            TypeError: the method made another message than it declares.
        """
        if phase == FIRST:
            self._next = self.state
            message = self.method.first_request(self._next, context)
            if message is None:
                return None
        else:
            message = self.method.broadcast(self._next, context)
        check_declared(self.method, message, declared(self.method, phase, "downlink"))
        return message

    def check(self, phase: str, replies: Mapping[int, Message], context: RoundContext) -> Checked:
        """Checks each reply against the method's rules for its client, before the reply is used
        (`Method.upload_rules`, `Method.check_upload`).

        A reply that shares memory with the server's state is rejected, too: a client in the same
        process could change the state later.
        """
        accepted: dict[int, Message] = {}
        rejected: dict[int, UploadRejectedError] = {}
        for client, reply in sorted(replies.items()):
            try:
                self._check(phase, client, reply, context)
                shared = overlap(reply.arrays(), self._next.arrays())
                if shared is not None:
                    reason = f"shares memory with the server's {shared[1]}"
                    raise UploadRejectedError(shared[0], reason)
            except UploadRejectedError as error:
                rejected[client] = error
            else:
                accepted[client] = reply
        return Checked(accepted, rejected)

    def _check(self, phase: str, client: int, reply: Message, context: RoundContext) -> None:
        expected = declared(self.method, phase, "upload")
        if type(reply) is not expected:
            raise UploadRejectedError(
                "the message", f"is a {type(reply).__name__}, but must be a {expected.__name__}"
            )
        check_fields(reply, self.method.upload_rules(phase, client, context))
        for name, tensor in reply.arrays():
            if tensor.device.type != context.device.type:
                raise UploadRejectedError(
                    name, f"is on {tensor.device.type}, but the server is on {context.device.type}"
                )
        self.method.check_upload(phase, reply, client, context)

    def receive(self, phase: str, replies: Mapping[int, Message], context: RoundContext) -> None:
        """Computes the next server state from checked replies, given by client index.

        Raises:
            TypeError: a reply of another type than the method declares.
            DivergedError: the new model is not finite.
        """
        for reply in replies.values():
            check_declared(self.method, reply, declared(self.method, phase, "upload"))
        ordered = dict(sorted(replies.items()))
        if phase == FIRST:
            self._next = self.method.first_aggregate(self._next, ordered, context)
            return
        state = self.method.server_step(self._next, ordered, context)
        check_finite(state.parameters, "server's model", context.round)
        self.state = self._next = state

    def end(self, context: RoundContext) -> None:
        """Finishes the state after the last round.

        Args:
            context: of the last completed round.
        """
        self.state = self._next = self.method.at_end(self.state, context)

    def receive_total(self, phase: str, total: SecureSum, context: RoundContext) -> None:
        """Computes the next server state from the sum of the replies. The server has not seen any
        single reply.

        Raises:
            TypeError: a sum of other messages than the method declares.
            DivergedError: the new model is not finite.
        """
        check_declared(self.method, total.message, declared(self.method, phase, "upload"))
        count = len(total.clients)
        state = self.method.from_sum(phase, self._next, total.message, count, context)
        self._next = state
        if phase != FIRST:
            check_finite(state.parameters, "server's model", context.round)
            self.state = state

    def final_parameters(self) -> Mapping[str, Tensor]:
        """Returns the final model."""
        return self.method.final_parameters(self.state)
