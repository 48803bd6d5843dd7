"""A server's side of an exchange of which it sees the sum alone: four questions in place of one,
and clients may be lost before each (`fedsynth.federation.secure_sums`).

What it holds on the way are public keys, closed shares, masked vectors, shares that take masks
away, and the sum. Nothing of it outlives the exchange but the sum.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedsynth.core.context import RoundContext
from fedsynth.core.frames import Frame
from fedsynth.core.messages import Message
from fedsynth.core.method import Method
from fedsynth.federation.exchange.protocol import Total
from fedsynth.federation.exchange.sum_form import (
    NAME_DIGITS,
    SUM,
    MaskedUpload,
    sum_form,
    sum_terms,
    with_parcel,
)
from fedsynth.federation.secure_sums.errors import SecureSumError
from fedsynth.federation.secure_sums.parcels import Keys, Masked, Parcel, Sealed, Shares
from fedsynth.federation.secure_sums.server import SumServer

KEYS, SHARES, STEP, UNMASK = "keys", "shares", "step", "unmask"
QUESTIONS = (KEYS, SHARES, STEP, UNMASK)
PARCEL_BYTES = 4096
"""Of a small parcel, and of each client's part in one that grows with them."""
P = TypeVar("P", bound=Parcel)

Ask = Callable[[Mapping[int, Frame], int], Mapping[int, bytes]]
"""(each client's question, the most bytes of an answer) -> the answers of those that answer."""


@dataclass
class SecureStep:
    """One exchange.

    Args:
        method: one whose server sees sums alone.
        phase: the exchange.
        context: the round's.
        where: facts that say which exchange it is.
        agreed: the hash of the run's settings.
        ask: asks clients.

    Attributes:
        rejected: of clients whose answer cannot be used, what is wrong with it.
        server: of the sum.
    """

    method: Method
    phase: str
    context: RoundContext
    where: Mapping[str, Any]
    agreed: str
    ask: Ask
    rejected: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = secrets.token_hex(NAME_DIGITS // 2)
        self._facts = {**self.where, "phase": self.phase, SUM: name}
        self._form = sum_form(self.method, self.phase, self.context)
        terms = sum_terms(self.method, self.phase, self.context, name, self.agreed)
        self.server = SumServer(terms)
        self._places = {client: place for place, client in enumerate(self.context.active)}

    def run(self, clients: Sequence[int], request: Message) -> Total | None:
        """The sum over those of the clients that stay; None: these are too few, and nothing was
        learned.

        Args:
            clients: who is asked.
            request: the server's message.
        """
        try:
            return self._run(clients, request)
        except SecureSumError as error:
            # whose fault it is cannot be told, or the sum lacks clients: without those it is none
            for client in clients:
                self.rejected.setdefault(client, f"there is no sum: {error}")
            return None

    def _run(self, clients: Sequence[int], request: Message) -> Total:
        size = PARCEL_BYTES * (1 + len(self._places))
        keys = self._answers(dict.fromkeys(clients, Frame(KEYS, self._facts)), Keys, PARCEL_BYTES)
        keys = self._sound(keys, lambda place, one: one.client == place, "says that it is another")
        roster = self.server.roster(keys).to_bytes()
        told = {self._client(place): Frame(SHARES, self._facts, roster) for place in keys}
        sealed = self._answers(told, Sealed, size)
        others = set(keys)
        sealed = self._sound(
            sealed, lambda place, one: set(one.of) == others - {place}, "shares not with all others"
        )
        passed = self.server.passed_on(sealed)
        sent = request.to_bytes()
        steps = {
            self._client(place): Frame(STEP, self._facts, with_parcel(one.to_bytes(), sent))
            for place, one in passed.items()
        }
        masked = self._answers(steps, Masked, 8 * self._form.length + PARCEL_BYTES)
        shape = (self._form.length,)
        masked = self._sound(
            masked, lambda place, one: one.words.shape == shape, "sends a vector of another length"
        )
        present = self.server.present(masked)
        asked = Frame(UNMASK, self._facts, present.to_bytes())
        shares = self._answers({self._client(place): asked for place in masked}, Shares, size)
        words = self.server.sum(shares)
        total = self._form.decode(words, len(masked), self.context.device)
        there = tuple(sorted(self._client(place) for place in masked))
        return Total(total, there, MaskedUpload(self._form.length))

    def _client(self, place: int) -> int:
        return self.context.active[place]

    def _answers(self, questions: Mapping[int, Frame], kind: type[P], longest: int) -> dict[int, P]:
        """What those that answer have sent, by place."""
        found: dict[int, P] = {}
        for client, answer in self.ask(questions, longest).items():
            try:
                found[self._places[client]] = kind.from_bytes(answer)
            except SecureSumError as error:
                self.rejected[client] = str(error)
        return found

    def _sound(
        self, found: Mapping[int, P], right: Callable[[int, P], bool], why: str
    ) -> dict[int, P]:
        """Those that are what they should be; the others are out of the sum."""
        wrong = [place for place, one in found.items() if not right(place, one)]
        self.rejected |= {self._client(place): why for place in wrong}
        return {place: one for place, one in found.items() if place not in wrong}
