"""What passes between a server and its clients, whatever carries it.

A server asks all clients to `join`, sends them the `Terms`, asks the clients of each round whether
they can take part (`prepare`), announces that it begins (`begin`), and asks for a step (`step`) in
each exchange of the round. `evaluate` and `facts` are questions of a simulation. A client that
cannot, or must not, answers with a `Refusal`.

Both sides have the run's settings: a client takes part by its own copy, caps included, and refuses
a server that has others (`agreement`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, Packed
from fedsynth.core.method import Method
from fedsynth.errors import MessageError
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.history import History

BUDGET, REQUEST = "budget", "request"
"""Why clients refuse: their privacy budget would be exceeded; the server's request is not sound."""


@dataclass(frozen=True)
class Joined:
    """What a client says when it joins.

    Args:
        client: its number.
        size: n_k; None with differential privacy: private.
        history: what its ledger holds, of earlier runs on the same records; None: it has no ledger.
    """

    client: int
    size: int | None = None
    history: History | None = None


@dataclass(frozen=True)
class Terms:
    """What a server tells all clients before the first round; all of it is public.

    Args:
        sizes: n_k of all clients; None with differential privacy.
        noise_multiplier: σ, with differential privacy. What each client is charged for follows from
            it and the client's own settings.
    """

    sizes: tuple[int, ...] | None = None
    noise_multiplier: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A client's answer in place of what it was asked for.

    Args:
        client: its number.
        reason: for people.
        kind: BUDGET, with which a run ends in order, or REQUEST, which is an error.
        spent: the client's name, its ε now, and its ε after one more round, where its budget would
            be exceeded and it is in this process.
    """

    client: int
    reason: str
    kind: str = BUDGET
    spent: tuple[str, float, float] | None = None


@dataclass(frozen=True)
class Total:
    """The sum of some clients' uploads, where nobody sees more.

    Args:
        message: whose fields are the sums.
        clients: whose, ascending.
        each: what stands for each one's upload, which nobody has seen.
    """

    message: Message
    clients: tuple[int, ...]
    each: Message


@dataclass(frozen=True)
class Replies:
    """Answers of a round's clients, by client number.

    Args:
        messages: uploads.
        refusals: of clients that refuse.
        lost: of clients that did not answer, or with an error, why.
        rejected: of clients whose answer is no message of the declared type, what is wrong.
        total: in place of messages, where the server sees their sum alone.
    """

    messages: Mapping[int, Message] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    total: Total | None = None


@dataclass(frozen=True)
class Evaluated:
    """How models do on one client's own test split: exact functions of private data.

    Args:
        client: its number.
        size: all its records, those that train and those that test.
        tested: examples of its test split.
        right: of each model, how many of them it gets right.
    """

    client: int
    size: int
    tested: int
    right: Mapping[str, int]


def shown(settings: RunSettings, context: RoundContext) -> tuple[int, ...]:
    """The clients whose data are in what is shown of a round: those that take part; without privacy
    everybody where all test splits are measured, or clients are drawn by their sizes."""
    measured = settings.partition.local_test > 0 or settings.sampling == "size"
    if settings.privacy is None and measured:
        return tuple(range(context.clients))
    return context.active


class Exchange(Protocol):
    """Carries requests to clients and brings their answers."""

    def join(self) -> Sequence[Joined]:
        """All clients, by number, ascending."""

    def start(self, terms: Terms) -> None:
        """Tells every client the terms."""

    def prepare(self, context: RoundContext) -> Sequence[Refusal]:
        """Asks the clients of a round whether they can take part, before any of them is charged."""

    def begin(self, context: RoundContext) -> None:
        """Tells the clients whose data the round shows (`shown`) that it begins, as nobody has
        refused."""

    def step(
        self,
        phase: str,
        message: Message,
        context: RoundContext,
        asked: Sequence[int],
    ) -> Replies:
        """Sends a request to clients of a round, and brings their replies.

        Args:
            phase: the exchange.
            message: the request.
            context: the round's, with all that take part by the schedule.
            asked: those of them that are still there, ascending.
        """

    def facts(self, context: RoundContext, asked: Sequence[int]) -> Sequence[Mapping[str, Any]]:
        """Returns what these clients of a round state for its metrics (`Method.client_facts`); who
        does not answer is left out."""

    def histories(self) -> Sequence[History]:
        """What the clients' ledgers hold now, by client number; empty: they have none."""

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> Sequence[Evaluated]:
        """Tests models by name on all clients' own test splits; for simulations alone."""


Side = Literal["downlink", "upload"]
MAX_FACTS_BYTES = 2**20
"""Size limit of the header of an answer to a step, whose values are few and small."""


@dataclass(frozen=True)
class Models(Packed):
    """One model to be tested: its parameters and buffers by name."""

    parameters: Mapping[str, Tensor]


def agreement(settings: RunSettings) -> str:
    """Returns a hash of all settings that both sides share.

    Where a party computes, and where a client keeps its ledgers, is its own.
    """
    shared = settings.to_mapping()
    for own in ("device", "memory_gb", "compile"):
        shared["run"].pop(own, None)
    shared["data"].pop("data_root", None)
    shared.get("privacy", {}).pop("ledger", None)
    if not shared.get("privacy", True):  # an open run in which one side keeps a ledger
        del shared["privacy"]
    text = json.dumps(shared, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def declared(method: Method, phase: str, side: Side) -> type[Message]:
    """Returns the type of the messages of one exchange of a round.

    Raises:
        MessageError: the method has no such exchange.
    """
    types = method.exchange_types(phase)
    expected = types.downlink if side == "downlink" else types.upload
    if expected is None:
        raise MessageError(f"{method.name} has no {phase} exchange")
    return expected
