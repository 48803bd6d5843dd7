"""What a server does over any exchange: agree on the terms, and play a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.data.load import load_dataset
from fedsynth.data.proxy import NOISE, ProxyImages, noise_images
from fedsynth.federation.exchange.protocol import REQUEST, Exchange, Refusal, Terms
from fedsynth.federation.exchange.server import Server
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.errors import LedgerError, RequestRefusedError
from fedsynth.privacy.history import History
from fedsynth.privacy.plans import PHASES


@dataclass(frozen=True)
class Played:
    """What a round was.

    Args:
        uploads: of its main exchange, by client.
        sent: all messages of each client, in the order of the exchanges.
        refusal: why there was no round; None: there was one.
    """

    uploads: Mapping[int, Message] = field(default_factory=dict)
    sent: Mapping[int, tuple[Message, ...]] = field(default_factory=dict)
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Agreement:
    """What server and clients have agreed on before the first round.

    Args:
        terms: as all clients were told.
        plan: what each client will be charged for; None without differential privacy.
        context: public, with the terms.
    """

    terms: Terms
    plan: PrivacyPlan | None
    context: RoundContext


def agree(
    settings: RunSettings,
    context: RoundContext,
    exchange: Exchange,
    planned: Callable[[Sequence[History]], PrivacyPlan] | None = None,
) -> Agreement:
    """What follows from what the clients say when they join, which all of them are told: σ with
    differential privacy, without it the clients' sizes.

    Args:
        settings: the run's.
        context: public, of round 1.
        exchange: to the clients.
        planned: from what the clients' ledgers hold to the plan, where a run is resumed that has
            one; None: the plan is made now.

    Raises:
        PrivacyError: as `PrivacyPlan.make`, or the cap allows no round even where nothing was
            spent before.
    """
    joined = exchange.join()
    if settings.privacy is None:
        terms = Terms(sizes=tuple(one.size or 0 for one in joined))
        federation = replace(context.federation, sizes=terms.sizes)
        exchange.start(terms)
        return Agreement(terms, None, replace(context, federation=federation))
    histories = [one.history for one in joined if one.history is not None]
    if len(histories) < context.clients:
        raise LedgerError(
            f"{len(histories)} of {context.clients} clients have said what their ledgers hold"
        )
    if planned is not None:
        plan = planned(histories)
    else:
        plan = PrivacyPlan.make(settings, context, histories)
        plan.check_cap()
    terms = Terms(noise_multiplier=plan.sigma)
    exchange.start(terms)
    return Agreement(terms, plan, plan.in_context(context))


def play_round(server: Server, exchange: Exchange, context: RoundContext) -> Played:
    """One round, up to the server's next state; a client's refusal ends it.

    Raises:
        RequestRefusedError: a client refused the server's request as unsound.
    """
    refusals = exchange.prepare(context)
    if refusals:
        return Played(refusal=refusals[0])
    exchange.begin(context)
    sent: dict[int, tuple[Message, ...]] = {number: () for number in context.active}
    uploads: Mapping[int, Message] = {}
    for phase in PHASES:
        request = server.request(phase, context)
        if request is None:
            continue
        replies = exchange.step(phase, request, context)
        if replies.refusals:
            refusal = replies.refusals[0]
            if refusal.kind == REQUEST:
                raise RequestRefusedError(refusal.reason)
            return Played(refusal=refusal)
        server.receive(phase, replies.messages, context)
        uploads = replies.messages
        for client, message in uploads.items():
            sent[client] = (*sent[client], message)
    return Played(uploads, sent)


def with_proxy(
    context: RoundContext, settings: RunSettings, *, download: bool = False
) -> RoundContext:
    """The context with the public images that the method names, if it names any.

    Args:
        download: let torchvision fetch the data set if it is not there.
    """
    name = getattr(settings.method, "proxy", "")
    if not name:
        return context
    if name == NOISE:
        proxy = noise_images(context.spec, settings.seed)
    else:
        proxy, _ = load_dataset(name, settings.data_root, download=download)
    images = ProxyImages(proxy.to(context.device), context.spec)
    return replace(context, federation=replace(context.federation, proxy=images))
