"""The server of a federation: a method and its state. The server sees messages, but no data of
clients.

In each exchange of a round it makes one request to all clients of the round, and computes its next
state from their replies, by client index.

`negotiate_terms` agrees on the run terms with the clients, and `run_round` runs a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from fedsynth.config.settings import QUORUM, RunSettings
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message
from fedsynth.core.method import Method
from fedsynth.core.uploads import check_fields, overlap
from fedsynth.errors import UploadRejectedError
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import (
    REQUEST,
    Exchange,
    Refusal,
    RunTerms,
    SecureSum,
    check_declared,
    check_finite,
    declared,
    diverged_error,
)
from fedsynth.privacy.errors import LedgerError, RequestRefusedError
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.plans import FIRST, PHASES


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
        method: the method, which defines the steps.
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
                    reason = f"must not share memory with the server's {shared[1]}"
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
        check_finite(state.parameters, "the server's model", context.round)
        self.state = self._next = state

    def end(self, context: RoundContext) -> None:
        """Finishes the state after the last round.

        Args:
            context: the context of the last completed round.
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
            check_finite(state.parameters, "the server's model", context.round)
            self.state = state

    def final_parameters(self) -> Mapping[str, Tensor]:
        """Returns the final model."""
        return self.method.final_parameters(self.state)


FIRST_EXCHANGE = "first exchange: "
"""The prefix of a rejection's reason, if the round continues without that client."""


@dataclass(frozen=True)
class NoQuorum:
    """The reason why the uploads of a round are discarded.

    Args:
        phase: the exchange with too few usable uploads.
        uploads: the number of usable uploads.
        needed: the number that is the quorum.
    """

    phase: str
    uploads: int
    needed: int


@dataclass(frozen=True)
class RoundResult:
    """The result of a round.

    Args:
        uploads: the uploads of the main exchange, by client.
        sent: all used messages of each client, in the order of the exchanges.
        refusal: the reason why the round did not take place, or None.
        lost: client -> why it did not answer.
        rejected: client -> why its upload could not be used.
        no_quorum: the reason why the round does not count, or None.
    """

    uploads: Mapping[int, Message] = field(default_factory=dict)
    sent: Mapping[int, tuple[Message, ...]] = field(default_factory=dict)
    refusal: Refusal | None = None
    lost: Mapping[int, str] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    no_quorum: NoQuorum | None = None

    @property
    def present(self) -> tuple[int, ...]:
        """Returns the clients that were present until the end, in ascending order."""
        return tuple(sorted(self.sent.keys() - self.lost.keys() - self.rejected.keys()))


@dataclass(frozen=True)
class Agreement:
    """The agreement between the server and its clients before the first round.

    Args:
        terms: the terms, which all clients receive.
        plan: each client's planned charges; None without differential privacy.
        context: the public context, with the terms.
    """

    terms: RunTerms
    plan: PrivacyPlan | None
    context: RoundContext


def negotiate_terms(
    settings: RunSettings,
    context: RoundContext,
    exchange: Exchange,
    planned: Callable[[Sequence[History]], PrivacyPlan] | None = None,
) -> Agreement:
    """Computes the terms that depend on the clients' join messages, and sends them to every client.
    They contain σ with differential privacy, otherwise the clients' sizes.

    Args:
        settings: the settings of the run.
        context: the public context of round 1.
        exchange: the exchange with the clients.
        planned: maps the clients' ledgers to the plan, if a resumed run has one; None: a new plan
            is made.

    Raises:
        PrivacyError: as `PrivacyPlan.make`, or the cap allows no round even with an unused budget.
    """
    joined = exchange.join()
    if settings.privacy is None:
        terms = RunTerms(sizes=tuple(info.size or 0 for info in joined))
        exchange.start(terms)
        return Agreement(terms, None, replace(context, sizes=terms.sizes))
    histories = [info.history for info in joined if info.history is not None]
    if len(histories) < context.clients:
        raise LedgerError(
            f"only {len(histories)} of {context.clients} clients have sent their ledgers"
        )
    if planned is None:
        plan = PrivacyPlan.make(settings, context, histories)
        plan.check_cap()
    else:
        plan = planned(histories)
    terms = RunTerms(noise_multiplier=plan.sigma)
    exchange.start(terms)
    return Agreement(terms, plan, plan.in_context(context))


def run_round(
    server: Server, exchange: Exchange, context: RoundContext, quorum: float = QUORUM
) -> RoundResult:
    """Runs one round up to the server's next state. The run ends if a client refuses.

    A client that is lost, or whose upload is rejected, is excluded from the rest of the round,
    which continues with the others. If they are fewer than the quorum, the server's state is
    unchanged.

    Args:
        server: makes the requests, and its next state.
        exchange: the exchange with the clients.
        context: the context of the round.
        quorum: the smallest share of the round's clients whose uploads make a round; at least one
            upload is needed.

    Raises:
        RequestRefusedError: a client refused the server's request as invalid.
        DivergedError: no client of the round has sent finite numbers, or the new model has none.
    """
    refusals = exchange.prepare(context)
    if refusals:
        return RoundResult(refusal=refusals[0])
    exchange.begin(context)
    sent: dict[int, tuple[Message, ...]] = dict.fromkeys(context.active, ())
    uploads: Mapping[int, Message] = {}
    lost: dict[int, str] = {}
    rejected: dict[int, str] = {}
    needed = needed_uploads(quorum, len(context.active))
    for phase in PHASES:
        request = server.request(phase, context)
        if request is None:
            continue
        present = sorted(sent.keys() - lost.keys() - rejected.keys())
        replies = exchange.step(phase, request, context, present)
        if replies.refusals:
            refusal = replies.refusals[0]
            if refusal.kind == REQUEST:
                raise RequestRefusedError(refusal.reason)
            return RoundResult(refusal=refusal)
        checked = server.check(phase, replies.messages, context)
        lost.update(replies.lost)
        prefix = FIRST_EXCHANGE if phase == FIRST else ""
        for client, reason in {**replies.rejected, **checked.rejected}.items():
            rejected[client] = f"{prefix}{reason}"
        usable = checked.accepted
        if replies.total is not None:
            usable = dict.fromkeys(replies.total.clients, replies.total.placeholder)
        for client, message in usable.items():
            sent[client] = (*sent[client], message)
        if len(usable) < needed:
            _refuse_divergence(checked, context)
            missed = NoQuorum(phase, len(usable), needed)
            return RoundResult({}, sent, lost=lost, rejected=rejected, no_quorum=missed)
        if replies.total is None:
            server.receive(phase, checked.accepted, context)
            uploads = checked.accepted
        else:
            server.receive_total(phase, replies.total, context)
    return RoundResult(uploads, sent, lost=lost, rejected=rejected)


def needed_uploads(quorum: float, clients: int) -> int:
    """Returns the smallest number of uploads that makes a round valid.

    >>> needed_uploads(0.5, 5), needed_uploads(0.0, 5), needed_uploads(0.6, 5)
    (3, 1, 3)
    """
    return max(1, math.ceil(quorum * clients - 1e-9))


def _refuse_divergence(checked: Checked, context: RoundContext) -> None:
    """Raises DivergedError if the uploads of all clients are not finite. Then the optimisation has
    diverged, and no single client is the cause."""
    diverged = [(client, error) for client, error in checked.rejected.items() if error.diverged]
    if len(diverged) == len(context.active):
        client, error = diverged[0]
        raise diverged_error(f"{error.field} of client {client}", context.round, error.reason)
