"""Both sides of an exchange whose server sees only a sum of uploads: four questions instead of one,
and clients may be lost before each (`fedsynth.deployment.secure_aggregation`).

    keys      the client's keys for this sum
    shares    brings the others' keys; shares of the client's secrets, encrypted for each of them
    step      brings the others' shares; the step itself, charged as usual, and its masked upload
    unmask    one share of each client's secrets, depending on who is present

Each is answered once per sum, and a sum is for one exchange of one round: if the same upload could
be requested twice, with other clients present, the difference would reveal it. In between, the
server holds public keys, encrypted shares, masked vectors, and shares that remove masks. Only the
sum persists after the exchange."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import Method
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.secure_aggregation.client import Identities, SumClient
from fedsynth.deployment.secure_aggregation.messages import (
    Keys,
    Masked,
    Parcel,
    Present,
    Roster,
    Sealed,
    Shares,
)
from fedsynth.deployment.secure_aggregation.primitives import SecureSumError
from fedsynth.deployment.secure_aggregation.quantization import (
    NAME_DIGITS,
    SUM,
    MaskedUpload,
    sum_form,
    sum_terms,
    with_parcel,
)
from fedsynth.deployment.secure_aggregation.server import SumServer
from fedsynth.errors import MessageError
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.federation.protocol import Refusal, Total


class SumDesk:
    """Answers one client's frames of sums.

    Args:
        runtime: the client.
        agreed: the hash of the run's settings, from the client's own copy.
        identities: of all clients by index; None: the server is trusted to relay keys unchanged.
    """

    def __init__(
        self, runtime: ClientRuntime, agreed: str, identities: Identities | None = None
    ) -> None:
        self._runtime = runtime
        self._identities = identities
        self._agreed = agreed
        self._stated: Mapping[str, Any] | None = None
        self._client: SumClient | None = None

    @property
    def standing(self) -> Mapping[str, Any] | None:
        """The state of the current sum, with its secrets; None: there is none."""
        if self._client is not None:
            return self._client.to_json()
        return self._stated

    @standing.setter
    def standing(self, stated: Mapping[str, Any] | None) -> None:
        self._stated = stated
        self._client = None

    def keys(self, frame: Frame, phase: str, context: RoundContext) -> Frame:
        """Begins a sum; discards an unfinished one and its secrets."""
        terms = self._terms(frame, phase, context)
        client = SumClient(self._place(context), terms, self._known(context))
        answer = Frame("answer", {}, client.keys().to_bytes())
        self._client = client
        self._stated = None
        return answer

    def shares(self, frame: Frame, phase: str, context: RoundContext) -> Frame:
        """Returns shares of its secrets."""
        client = self._under_way(frame, phase, context)
        return Frame("answer", {}, client.share(Roster.from_bytes(frame.payload)).to_bytes())

    def receive(self, frame: Frame, phase: str, context: RoundContext, sealed: bytes) -> None:
        """Stores the others' shares. This precedes the step, so that the step is not charged if
        they are too few.
        """
        self._under_way(frame, phase, context).receive(Sealed.from_bytes(sealed))

    def masked(
        self,
        frame: Frame,
        phase: str,
        context: RoundContext,
        step: Callable[[], Message | Refusal],
    ) -> Frame | Refusal:
        """Returns the step's masked upload, or its refusal."""
        client = self._under_way(frame, phase, context)
        form = sum_form(self._runtime.method, phase, context)
        reply = step()
        if isinstance(reply, Refusal):
            return reply
        return Frame("answer", {}, client.masked(form.encode(reply)).to_bytes())

    def unmask(self, frame: Frame, phase: str, context: RoundContext) -> Frame:
        """Returns the shares that remove masks, and discards this client's part of the sum."""
        client = self._under_way(frame, phase, context)
        shares = client.unmask(Present.from_bytes(frame.payload))
        self.standing = None
        return Frame("answer", {}, shares.to_bytes())

    def _place(self, context: RoundContext) -> int:
        if self._runtime.number not in context.active:
            raise MessageError("this client takes no part in the round")
        return context.active.index(self._runtime.number)

    def _known(self, context: RoundContext) -> Identities | None:
        """Returns the identities of the round's clients, by their positions among them."""
        identities = self._identities
        if identities is None:
            return None
        places = enumerate(context.active)
        return Identities(
            identities.own, {p: identities.others[k] for p, k in places if k in identities.others}
        )

    def _terms(self, frame: Frame, phase: str, context: RoundContext) -> Any:
        if not self._runtime.method.sums_alone:
            raise MessageError(f"{self._runtime.method.name} sends its uploads as they are")
        name = str(frame.facts.get(SUM, ""))
        return sum_terms(self._runtime.method, phase, context, name, self._agreed)

    def _under_way(self, frame: Frame, phase: str, context: RoundContext) -> SumClient:
        """Returns the sum that the frame belongs to.

        Raises:
            SecureSumError: it was not begun here, or is another one.
        """
        terms = self._terms(frame, phase, context)
        if self._client is None and self._stated is not None:
            place = self._place(context)
            identities = self._known(context)
            self._client = SumClient.from_json(self._stated, place, terms, identities)
        if self._client is None or self._client.terms != terms:
            raise SecureSumError("this client takes no part in such a sum")
        return self._client


KEYS, SHARES, STEP, UNMASK = "keys", "shares", "step", "unmask"
QUESTIONS = (KEYS, SHARES, STEP, UNMASK)
PARCEL_BYTES = 4096
"""The size of a small parcel, and of each client's part in one that grows with their number."""
P = TypeVar("P", bound=Parcel)

Ask = Callable[[Mapping[int, Frame], int], Mapping[int, bytes]]
"""(each client's question, the size limit of an answer) -> the answers received."""


@dataclass
class SecureStep:
    """One exchange.

    Args:
        method: one whose server sees only sums.
        phase: the exchange.
        context: the round's.
        where: facts that identify the exchange.
        agreed: the hash of the run's settings.
        ask: asks clients.

    Attributes:
        rejected: client -> why its answer cannot be used.
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
        """Returns the sum over the remaining clients, or None if too few remain; then nothing is
        revealed.

        Args:
            clients: the clients that are asked.
            request: the server's message.
        """
        try:
            return self._run(clients, request)
        except SecureSumError as error:
            # the faulty client is unknown, or the sum lacks clients; either way there is no sum
            for client in clients:
                self.rejected.setdefault(client, f"there is no sum: {error}")
            return None

    def _run(self, clients: Sequence[int], request: Message) -> Total:
        size = PARCEL_BYTES * (1 + len(self._places))
        keys = self._answers(dict.fromkeys(clients, Frame(KEYS, self._facts)), Keys, PARCEL_BYTES)
        keys = self._sound(
            keys, lambda place, item: item.client == place, "says that it is another"
        )
        roster = self.server.roster(keys).to_bytes()
        roster_messages = {
            self._client(place): Frame(SHARES, self._facts, roster) for place in keys
        }
        sealed = self._answers(roster_messages, Sealed, size)
        participants = set(keys)
        sealed = self._sound(
            sealed,
            lambda place, item: set(item.of) == participants - {place},
            "shares not with all others",
        )
        passed = self.server.passed_on(sealed)
        sent = request.to_bytes()
        steps = {
            self._client(place): Frame(STEP, self._facts, with_parcel(item.to_bytes(), sent))
            for place, item in passed.items()
        }
        masked = self._answers(steps, Masked, 8 * self._form.length + PARCEL_BYTES)
        shape = (self._form.length,)
        masked = self._sound(
            masked,
            lambda place, item: item.words.shape == shape,
            "sends a vector of another length",
        )
        present = self.server.present(masked)
        request_unmask = Frame(UNMASK, self._facts, present.to_bytes())
        shares = self._answers(
            {self._client(place): request_unmask for place in masked}, Shares, size
        )
        total_words = self.server.sum(shares)
        total = self._form.decode(total_words, len(masked), self.context.device)
        present_clients = tuple(sorted(self._client(place) for place in masked))
        return Total(total, present_clients, MaskedUpload(self._form.length))

    def _client(self, place: int) -> int:
        return self.context.active[place]

    def _answers(self, questions: Mapping[int, Frame], kind: type[P], longest: int) -> dict[int, P]:
        """Returns the received answers, by position."""
        answers: dict[int, P] = {}
        for client, answer in self.ask(questions, longest).items():
            try:
                answers[self._places[client]] = kind.from_bytes(answer)
            except SecureSumError as error:
                self.rejected[client] = str(error)
        return answers

    def _sound(
        self, answers: Mapping[int, P], right: Callable[[int, P], bool], why: str
    ) -> dict[int, P]:
        """Returns the valid answers; the other clients are excluded from the sum."""
        wrong = [place for place, answer in answers.items() if not right(place, answer)]
        self.rejected |= {self._client(place): why for place in wrong}
        return {place: answer for place, answer in answers.items() if place not in wrong}
