"""A federation's server, which sees the clients' messages but not their data.

In each exchange of a round, the server sends one request to all clients of the round. It computes
its next state from the clients' replies.

`negotiate_terms` sends the run terms to the clients, and `run_round` runs a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, cast

from torch import Tensor

from fedsynth.config.settings import QUORUM, RunSettings
from fedsynth.core.capabilities import ImagesAtEnd, TwoExchanges, exchange_of
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message
from fedsynth.core.method import Method
from fedsynth.core.sums import SummedUploads
from fedsynth.core.uploads import check_fields, check_type, memory_spans
from fedsynth.errors import LedgerError, RequestRefusedError, UploadRejectedError
from fedsynth.federation import protocol
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.plans import EXCHANGES, FIRST
from fedsynth.seeding import forked_rng


class Server:
    """One federation's server, with the method's state.

    Args:
        method: the method, which defines the steps of the server.
        parameters: the parameters of the initial model, on the server's device.

    Attributes:
        state: the state of the method after the last completed round.
    """

    def __init__(self, method: Method, parameters: Mapping[str, Tensor]) -> None:
        self.method = method
        self.state: ServerState = method.initial_state(parameters)
        self._next = self.state

    @classmethod
    def begun(cls, method: Method, context: RoundContext) -> Self:
        """Creates a server for a new run, with the initial weights of `context.architecture`."""
        initial = context.architecture.state_dict()
        return cls(method, {name: t.to(context.device) for name, t in initial.items()})

    def request(self, exchange: str, context: RoundContext) -> Message | None:
        """Returns the server's request to a round's clients in one exchange.

        Returns None if the round does not have this exchange.

        Raises:
            TypeError: the method made a message of another type than it declares.
        """
        if exchange == FIRST:
            self._next = self.state
            if not isinstance(self.method, TwoExchanges):
                return None
        declared = exchange_of(self.method, exchange)
        message = declared.broadcast(self._next, context)
        if message is not None or exchange != FIRST:
            protocol.check_declared(self.method, message, declared.request)
        return message

    def check(
        self, exchange: str, replies: Mapping[int, Message], context: RoundContext
    ) -> tuple[dict[int, Message], dict[int, UploadRejectedError]]:
        """Checks the clients' replies against the method's upload rules.

        The rules are `Method.upload_rules` and `Method.check_upload`. A reply that shares memory
        with the server's state is rejected, too, because a client in the same process could change
        the state later.

        Returns:
            A mapping from client indices to valid uploads, and a mapping to the errors of the other
            uploads, both in ascending order.
        """
        accepted: dict[int, Message] = {}
        rejected: dict[int, UploadRejectedError] = {}
        expected = exchange_of(self.method, exchange).upload
        server_memory = memory_spans(self._next.arrays(), server=True)
        for client, reply in sorted(replies.items()):
            try:
                check_type(reply, expected)
                check_fields(
                    reply, self.method.upload_rules(exchange, client, context), server_memory
                )
                _check_device(reply, context.device.type)
                self.method.check_upload(exchange, reply, client, context)
            except UploadRejectedError as error:
                rejected[client] = error
            else:
                accepted[client] = reply
        return accepted, rejected

    def receive(
        self,
        exchange: str,
        replies: Mapping[int, Message] | protocol.SecureSum,
        context: RoundContext,
    ) -> None:
        """Computes the server's next state from validated replies.

        With secure aggregation, the server sees only the sum of the replies and no single reply.

        Raises:
            TypeError: a reply, the sum or the new state has another type than the method declares.
            DivergedError: the new model has numbers that are not finite.
        """
        with forked_rng(context.seed, "server layers", context.round, device=context.device):
            state = self._next_state(exchange, replies, context)
        if exchange != FIRST:
            protocol.check_finite(state.parameters, "the server's model", context.round)
            self.state = state
        self._next = state

    def _next_state(
        self,
        exchange: str,
        replies: Mapping[int, Message] | protocol.SecureSum,
        context: RoundContext,
    ) -> ServerState:
        """Returns the next state. Checks the types of the replies and of the state."""
        method, declared = self.method, exchange_of(self.method, exchange)
        if isinstance(replies, protocol.SecureSum):
            total, count = replies.message, len(replies.clients)
            protocol.check_declared(method, total, declared.upload)
            summed = cast(SummedUploads, method)
            state = summed.receive_sum(exchange, self._next, total, count, context)
        else:
            for reply in replies.values():
                protocol.check_declared(method, reply, declared.upload)
            state = declared.server_step(self._next, dict(sorted(replies.items())), context)
        if type(state) is not method.state:  # a checkpoint is read as this type
            raise TypeError(
                f"method {method.name}'s server step must return its declared `state` type "
                f"{method.state.__name__}, got {type(state).__name__}"
            )
        return state

    def end(self, context: RoundContext) -> None:
        """Completes the server's state after the last round, by the method's last step.

        Args:
            context: the context of the last completed round.
        """
        if isinstance(self.method, ImagesAtEnd):
            with forked_rng(context.seed, "last server layers", device=context.device):
                self.state = self._next = self.method.at_end(self.state, context)

    def final_parameters(self) -> Mapping[str, Tensor]:
        """Returns the final model's parameters."""
        return self.method.final_parameters(self.state)


def _check_device(reply: Message, device_type: str) -> None:
    """Raises UploadRejectedError if a tensor is not on the same type of device as the server."""
    for name, tensor in reply.arrays():
        if tensor.device.type != device_type:
            reason = f"must be on a {device_type!r} device like the server, got "
            raise UploadRejectedError(name, f"{reason}{tensor.device.type!r}")


# The beginning of the reason why a client's upload was rejected in the first exchange.
FIRST_EXCHANGE = "first exchange: "


@dataclass(frozen=True)
class NoQuorum:
    """The facts about a round that was skipped because too few clients sent valid uploads.

    Args:
        exchange: the exchange with too few usable uploads.
        uploads: the number of usable uploads.
        needed: the smallest number of usable uploads with which the round would count (the quorum).
    """

    exchange: str
    uploads: int
    needed: int


@dataclass(frozen=True)
class RoundResult:
    """The result of a round.

    Args:
        uploads: a mapping from client indices to the uploads of the main exchange.
        sent: a mapping from client indices to all usable uploads of the client, in the order of the
            exchanges.
        refusal: the refusal of a client, because of which the round was not completed. None if no
            client refused.
        lost: a mapping from the index of each client that did not answer to the reason.
        rejected: a mapping from the index of each client whose upload could not be used to the
            reason.
        no_quorum: the facts about a round that does not count. None if the round counts.
    """

    uploads: Mapping[int, Message] = field(default_factory=dict)
    sent: Mapping[int, tuple[Message, ...]] = field(default_factory=dict)
    refusal: protocol.Refusal | None = None
    lost: Mapping[int, str] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    no_quorum: NoQuorum | None = None


def negotiate_terms(
    settings: RunSettings,
    context: RoundContext,
    backend: protocol.Backend,
    planned: Callable[[Sequence[History]], PrivacyPlan] | None = None,
) -> tuple[PrivacyPlan | None, RoundContext]:
    """Asks the clients to join, computes the run terms, and sends them to every client.

    With differential privacy, the terms contain the noise multiplier σ. Otherwise they contain the
    numbers of the clients' training records.

    Args:
        settings: the settings of the run.
        context: the public context of round 1.
        backend: the connection to the clients.
        planned: a function that returns the original plan of a resumed run, given the contents of
            the clients' ledgers. None makes a new plan.

    Returns:
        The privacy plan of the run, or None without differential privacy. The public context with
        the run terms.

    Raises:
        PrivacyError: no plan can be made (`PrivacyPlan.make`), a client has no ledger, or the cap
            does not allow a single round.
    """
    joined = backend.join()
    if settings.privacy is None:
        terms = protocol.RunTerms(sizes=tuple(info.size or 0 for info in joined))
        backend.start(terms)
        return None, replace(context, sizes=terms.sizes)
    histories = [info.history for info in joined if info.history is not None]
    if len(histories) < context.clients:
        raise LedgerError(
            f"only {len(histories)} of {context.clients} clients have sent a ledger, but a "
            "private run needs all of them. Start the missing nodes"
        ).with_code("ledger.clients")
    if planned is None:
        plan = PrivacyPlan.make(settings, context, histories)
        plan.check_cap()
    else:
        plan = planned(histories)
    backend.start(protocol.RunTerms(noise_multiplier=plan.sigma))
    return plan, plan.in_context(context)


def run_round(
    server: Server, backend: protocol.Backend, context: RoundContext, quorum: float = QUORUM
) -> RoundResult:
    """Runs one round, and updates the server's state.

    If a client refuses to take part, the round is not completed. If a client does not answer or its
    upload is rejected, the round continues without this client. If too few clients are left, the
    round does not count, and the state of the server is not changed.

    Args:
        server: the server.
        backend: the connection to the clients.
        context: the context of the round.
        quorum: the share of the round's clients that must send a usable upload, so that the round
            counts. At least one upload is always needed.

    Raises:
        RequestRefusedError: a client refused the server's request as invalid.
        DivergedError: the uploads of all clients, or the new model, have numbers that are not
            finite.
    """
    refusals = backend.prepare(context)
    if refusals:
        return RoundResult(refusal=refusals[0])
    backend.begin(context)
    sent: dict[int, tuple[Message, ...]] = dict.fromkeys(context.active, ())
    uploads: Mapping[int, Message] = {}
    lost: dict[int, str] = {}
    rejected: dict[int, str] = {}
    needed = needed_uploads(quorum, len(context.active))
    for exchange in EXCHANGES:
        request = server.request(exchange, context)
        if request is None:
            continue
        present = sorted(sent.keys() - lost.keys() - rejected.keys())
        replies = backend.step(exchange, request, context, present)
        if replies.refusals:
            refusal = replies.refusals[0]
            if refusal.kind == protocol.REQUEST:
                raise RequestRefusedError(refusal.reason)
            return RoundResult(refusal=refusal)
        usable, invalid = server.check(exchange, replies.messages, context)
        uploads = usable
        lost.update(replies.lost)
        prefix = FIRST_EXCHANGE if exchange == FIRST else ""
        for client, reason in {**replies.rejected, **invalid}.items():
            rejected[client] = f"{prefix}{reason}"
        if replies.total is not None:
            usable = dict.fromkeys(replies.total.clients, replies.total.message)
        for client, message in usable.items():
            sent[client] = (*sent[client], message)
        if len(usable) < needed:
            _refuse_divergence(invalid, context)
            missed = NoQuorum(exchange, len(usable), needed)
            return RoundResult({}, sent, lost=lost, rejected=rejected, no_quorum=missed)
        server.receive(exchange, replies.total or usable, context)
    return RoundResult(uploads, sent, lost=lost, rejected=rejected)


def needed_uploads(quorum: float, clients: int) -> int:
    """Returns the minimum number of valid uploads in a round.

    >>> needed_uploads(0.5, 5), needed_uploads(0.0, 5), needed_uploads(0.6, 5)
    (3, 1, 3)
    """
    return max(1, math.ceil(quorum * clients - 1e-9))


def _refuse_divergence(rejected: Mapping[int, UploadRejectedError], context: RoundContext) -> None:
    """Raises an error if all of a round's clients sent non-finite numbers.

    Raises:
        DivergedError: the numbers of all clients are not finite. The training has diverged then,
            and no single client is the cause.
    """
    diverged = [(client, error) for client, error in rejected.items() if error.diverged]
    if len(diverged) == len(context.active):
        client, error = diverged[0]
        owned = f"{error.field} of client {client}"
        raise protocol.diverged_error(owned, context.round, error.reason)
