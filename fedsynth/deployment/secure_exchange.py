"""The server's side of an exchange of which it sees only the sum of the uploads: four questions
instead of one, and clients may be lost before each (`fedsynth.deployment.secure_aggregation`).

    keys      the client's keys for this sum
    shares    brings the others' keys; shares of the client's secrets, encrypted for each of them
    step      brings the others' shares; the step itself, charged as usual, and its masked upload
    unmask    one share of each client's secrets, depending on who is present

Each is answered once per sum, and a sum is for one exchange of one round: if the same upload could
be requested twice, with other clients present, the difference would reveal it. In between, the
server holds public keys, encrypted shares, masked vectors, and shares that remove masks. Only the
sum persists after the exchange.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import Method
from fedsynth.deployment import frames
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.secure_aggregation.messages import Keys, Masked, Sealed, Shares
from fedsynth.deployment.secure_aggregation.primitives import SecureSumError
from fedsynth.deployment.secure_aggregation.quantization import (
    NAME_DIGITS,
    MaskedUpload,
    sum_terms,
    upload_layout,
)
from fedsynth.deployment.secure_aggregation.server import SumServer
from fedsynth.federation.protocol import SecureSum

PARCEL_BYTES = 4096
"""The size of a small parcel, and of each client's part in one that grows with their number."""
P = TypeVar("P", Keys, Sealed, Masked, Shares)

Ask = Callable[[Mapping[int, Frame], int], Mapping[int, Frame]]
"""(each client's question, the size limit of an answer) -> the answers received."""


@dataclass
class SecureStep:
    """One exchange.

    Args:
        method: one whose server sees only sums.
        phase: the exchange.
        context: the round's.
        facts: those of a question in this exchange.
        agreement: the hash of the run's settings.
        ask: asks clients.

    Attributes:
        rejected: client -> why its answer cannot be used.
        server: of the sum.
    """

    method: Method
    phase: str
    context: RoundContext
    facts: Mapping[str, Any]
    agreement: str
    ask: Ask
    rejected: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = secrets.token_hex(NAME_DIGITS // 2)
        self.facts = {**self.facts, "sum": name}
        self._layout = upload_layout(self.method, self.phase, self.context)
        terms = sum_terms(self.method, self.phase, self.context, name, self.agreement)
        self.server = SumServer(terms)

    def run(self, clients: Sequence[int], request: Message) -> SecureSum | None:
        """Returns the sum over the remaining clients, or None if too few remain; then nothing is
        revealed.

        Args:
            clients: the clients that are asked.
            request: the server's message.
        """
        total = None
        try:
            total = self._run(clients, request)
        except SecureSumError as error:
            # the faulty client is unknown, or the sum lacks clients; either way there is no sum
            for client in clients:
                self.rejected.setdefault(client, f"the sum was not computed: {error}")
        for position, reason in self.server.rejected.items():
            self.rejected[self.context.active[position]] = reason
        return total

    def _run(self, clients: Sequence[int], request: Message) -> SecureSum:
        active = self.context.active
        long = PARCEL_BYTES * (1 + len(active))
        positions = [active.index(client) for client in clients]
        keys = self._answers(frames.KEYS, dict.fromkeys(positions, b""), Keys, PARCEL_BYTES)
        roster = self.server.roster(keys)
        questions = dict.fromkeys(roster.keys, roster.to_bytes())
        sealed = self._answers(frames.SHARES, questions, Sealed, long)
        relayed = self.server.relay(sealed)
        questions = dict.fromkeys(relayed, request.to_bytes())
        limit = 8 * self._layout.length + PARCEL_BYTES
        masked = self._answers(frames.STEP, questions, Masked, limit, relayed)
        present = self.server.present(masked)
        questions = dict.fromkeys(present.clients, present.to_bytes())
        encoded = self.server.sum(self._answers(frames.UNMASK, questions, Shares, long))
        counted = tuple(active[position] for position in present.clients)
        total = self._layout.decode(encoded, len(counted), self.context.device)
        return SecureSum(total, counted, MaskedUpload(self._layout.length))

    def _answers(
        self,
        kind: str,
        payloads: Mapping[int, bytes],
        expected: type[P],
        max_bytes: int,
        relayed: Mapping[int, Sealed] | None = None,
    ) -> dict[int, P]:
        """Asks clients a question, and returns the received answers; both by position.

        Args:
            kind: of the question.
            payloads: of each client's question.
            expected: the type of the answers.
            max_bytes: the size limit of an answer.
            relayed: the others' shares for each client, if the question brings them.
        """
        active = self.context.active
        questions = {}
        for position, payload in payloads.items():
            facts = dict(self.facts)
            if relayed is not None:
                facts["sealed"] = relayed[position].to_bytes().decode()
            questions[active[position]] = Frame(kind, facts, payload)
        answers: dict[int, P] = {}
        for client, answer in self.ask(questions, max_bytes).items():
            try:
                answers[active.index(client)] = expected.from_bytes(answer.payload)
            except SecureSumError as error:
                self.rejected[client] = str(error)
        return answers
