"""The server's side of a run: agreeing on the run terms with clients, and running the rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedsynth.config.settings import QUORUM, RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import REQUEST, Exchange, Refusal, RunTerms, diverged_error
from fedsynth.federation.server import Checked, Server
from fedsynth.privacy.errors import LedgerError, RequestRefusedError
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.plans import FIRST, PHASES

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
        uploads: of its main exchange, by client.
        sent: all used messages of each client, in the order of the exchanges.
        refusal: why there was no round; None: there was one.
        lost: client -> why it did not answer.
        rejected: client -> why its upload could not be used.
        no_quorum: why the round does not count; None: it does.
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
        terms: as sent to all clients.
        plan: each client's planned charges; None without differential privacy.
        context: public, with the terms.
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
        settings: the run's.
        context: public, of round 1.
        exchange: to the clients.
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
            f"only {len(histories)} of {context.clients} clients have sent the totals of their "
            "ledgers"
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
        exchange: to the clients.
        context: the round's.
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
        raise diverged_error(f"{error.field} of the client {client}", context.round, error.reason)
