"""The server's side of an exchange in which it sees only the sum of the clients' uploads.

The exchange has four questions instead of one (`fedsynth.deployment.secure_aggregation`), and
clients may fail before each question:

    keys      The client answers with its public keys for this sum.
    shares    The question brings the other clients' keys. The client answers with shares of its
              secrets, encrypted for each other client.
    step      The question brings the other clients' shares. The client computes the step, which is
              charged as usual, and answers with its masked upload.
    unmask    The question lists the clients whose uploads have arrived. The client answers with
              one share for each client, with which the server removes the masks.

Each question is answered once per sum, and a sum belongs to one exchange of one round. If the same
upload could be requested twice with different clients present, the difference of the two sums would
reveal it. During the exchange, the server holds public keys, encrypted shares, masked vectors, and
shares that remove masks. It keeps only the sum.
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
"""The maximum size of a short message in bytes. A message that contains something for each client
may have this size for each client.
"""
P = TypeVar("P", Keys, Sealed, Masked, Shares)

Ask = Callable[[Mapping[int, Frame], int], Mapping[int, Frame]]
"""A function that maps (each client's question, the size limit of an answer) to the received
answers.
"""


@dataclass
class SecureStep:
    """One exchange with a secure sum.

    Args:
        method: a method whose server sees only sums of uploads.
        phase: the exchange of the round, "first" or "main".
        context: the context of the round.
        facts: the header fields of all questions in this exchange.
        agreement: the hash of the run's settings.
        ask: asks the clients.

    Attributes:
        rejected: maps each client whose answer cannot be used to the reason.
        server: the server of the secure sum.
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
        """Computes the sum over the remaining clients. Returns None if too few clients remain, and
        reveals nothing in this case.

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
                self.rejected.setdefault(client, f"the secure sum was not computed: {error}")
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
        """Asks the clients a question, and returns the received answers.

        Questions and answers are indexed by the clients' positions in the round.

        Args:
            kind: the kind of the question.
            payloads: the payload of each client's question.
            expected: the type of the answers.
            max_bytes: the size limit of an answer.
            relayed: the other clients' shares for each client, if the question brings them.
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
