"""What passes between a server and its clients, whatever carries it.

A server asks all clients to `join`, tells them the `Terms`, asks the clients of each round whether
they can take part (`prepare`), says that it begins (`begin`), and asks for a step (`step`) in each
exchange of the round. `evaluate` and `facts` are a simulation's questions. A client that cannot, or
must not, answers with a `Refusal`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
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
        asked: Sequence[int] | None = None,
    ) -> Replies:
        """Sends a request to clients of a round, and brings their replies.

        Args:
            phase: the exchange.
            message: the request.
            context: the round's, with all that take part by the schedule.
            asked: those of them that are still there, ascending; None: all.
        """

    def facts(
        self, context: RoundContext, asked: Sequence[int] | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """What clients of a round say for its row of metrics (`Method.client_facts`); of those
        that are `asked` (None: all) who answers."""

    def histories(self) -> Sequence[History]:
        """What the clients' ledgers hold now, by client number; empty: they have none."""

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> Sequence[Evaluated]:
        """Tests models by name on all clients' own test splits; for simulations alone."""
