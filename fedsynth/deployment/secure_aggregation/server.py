"""The server's side of a secure sum. The server sees only public keys, encrypted shares, masked
vectors and the final sum.

`SumServer` computes the sum from the clients' messages. `SecureStep` asks the clients for these
messages. The exchange has four requests instead of one (`fedsynth.deployment.secure_aggregation`),
and clients may fail before each request:

    keys      The client answers with its public keys for this sum.
    shares    The request contains the other clients' keys. The client answers with shares of its
              secrets, encrypted for each other client.
    step      The request contains the other clients' shares. The client computes the step, which
              is charged as usual, and answers with its masked upload.
    unmask    The request lists the clients whose uploads have arrived. The client answers with
              one share for each client, with which the server removes the masks.

Each request is answered once per sum, and a sum belongs to one exchange of one round. If the server
could request an upload twice with different clients present, the difference of the two sums would
reveal the upload. During the exchange, the server holds public keys, encrypted shares, masked
vectors, and shares that remove masks. It keeps only the sum.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.sums import SummedUploads
from fedsynth.deployment import frames
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.client import (
    NAME_DIGITS,
    SumTerms,
    sum_terms,
    upload_layout,
)
from fedsynth.federation.protocol import SecureSum

T = TypeVar("T")


class SumServer:
    """Collects the clients' messages in one secure sum, and computes the sum.

    The methods are called in the order `roster`, `relay`, `present`, `sum`. Clients may fail before
    each call. A client with an invalid message is excluded from the sum.

    Args:
        terms: the parameters of the sum.

    Attributes:
        masked: the received vectors, by client.
        rejected: maps each client whose message cannot be used to the reason.
    """

    def __init__(self, terms: SumTerms) -> None:
        self.terms = terms
        self._keys: dict[int, primitives.Keys] = {}
        self._sealed: dict[int, primitives.Sealed] = {}
        self.masked: dict[int, primitives.IntVector] = {}
        self.rejected: dict[int, str] = {}

    def _usable(
        self, received: Mapping[int, T], is_valid: Callable[[int, T], bool], name: str
    ) -> dict[int, T]:
        """Returns the valid messages, and excludes clients that sent invalid messages.

        The messages are in the order of the clients.
        """
        usable: dict[int, T] = {}
        for client, message in sorted(received.items()):
            if is_valid(client, message):
                usable[client] = message
            else:
                self.rejected[client] = f"the client sent invalid {name}"
        if len(usable) < self.terms.threshold:
            raise primitives.SecureSumError(
                f"only {len(usable)} clients sent {name}, but the sum needs {self.terms.threshold}"
            ).with_code("sums.clients")
        return usable

    def roster(self, keys: Mapping[int, primitives.Keys]) -> primitives.Roster:
        """Combines all clients' keys into one message, to be sent to each client.

        A client that states the index of another client is excluded.

        Raises:
            SecureSumError: if too few clients have sent usable keys.
        """
        self._keys = self._usable(
            keys, lambda k, message: message.client == k in self.terms.clients, "keys"
        )
        return primitives.Roster(keys=self._keys)

    def relay(self, sealed: Mapping[int, primitives.Sealed]) -> dict[int, primitives.Sealed]:
        """Sorts the clients' encrypted shares by receiver, for forwarding.

        A client that has not made a share for every other client is excluded, because the masks
        would not cancel.

        Raises:
            SecureSumError: if too few clients have made shares.
        """
        members = self._keys.keys()
        self._sealed = self._usable(
            sealed, lambda k, message: k in members and message.of.keys() == members - {k}, "shares"
        )
        relayed: dict[int, primitives.Sealed] = {}
        for client in self._sealed:
            senders = self._sealed.keys() - {client}
            relayed[client] = primitives.Sealed(of={k: self._sealed[k].of[client] for k in senders})
        return relayed

    def present(self, masked: Mapping[int, primitives.IntVector]) -> primitives.Present:
        """Returns the list of clients with valid masked vectors, as a message.

        A client is excluded if its vector has the wrong length.

        Raises:
            SecureSumError: if too few vectors can be used.
        """
        shape = (self.terms.length,)
        self.masked = self._usable(
            masked, lambda k, vector: k in self._sealed and vector.shape == shape, "vectors"
        )
        return primitives.Present(clients=tuple(self.masked))

    def sum(self, shares: Mapping[int, primitives.Shares]) -> primitives.IntVector:
        """Removes the masks, and returns the sum of the present clients' vectors, uint64 [n].

        Raises:
            SecureSumError: if there are too few shares, or if they do not match a client's
                commitment or public key. The sum is then not computed.
        """
        answers = self._usable(shares, lambda k, _: k in self.masked, "shares of masks")
        total = np.zeros(self.terms.length, np.uint64)
        for client, vector in self.masked.items():
            seed = self._secret(client, {k: message.seeds for k, message in answers.items()})
            if hashlib.sha256(seed).digest() != self._keys[client].commitment:
                raise primitives.SecureSumError(
                    f"the shares of client {client}'s self mask do not give the seed that the "
                    "client committed to. Repeat the round"
                ).with_code("sums.self_mask")
            self_mask = primitives.derived(seed, primitives.SELF_MASK, self.terms.name)
            total = total + vector - primitives.mask(self_mask, self.terms.length)
        for client in self._sealed.keys() - self.masked.keys():
            key = self._secret(client, {k: message.keys for k, message in answers.items()})
            if primitives.public(key) != self._keys[client].mask:
                raise primitives.SecureSumError(
                    "the received secret shares reconstruct a mask key that does not match the "
                    f"public key of client {client}"
                ).with_code("sums.mask_key")
            for other in self.masked:
                # the mask that the other one has added
                total = total - primitives.signed_mask(
                    key, self._keys[other].mask, self.terms.name, (other, client), len(total)
                )
        return total

    def _secret(self, client: int, shares: Mapping[int, Mapping[int, bytes]]) -> bytes:
        """Reconstructs a client's secret from the shares of other clients.

        `shares` maps each holder to the shares that it has sent, by client.
        """
        of_client = {holder: of[client] for holder, of in shares.items() if client in of}
        return primitives.combine(of_client, self.terms.threshold)


# The maximum size of a short message in bytes. A message that contains something for each client
# may have this size for each client.
PARCEL_BYTES = 4096

# A function that maps (each client's request, the size limit of an answer) to the received
# answers.
Ask = Callable[[Mapping[int, Frame], int], Mapping[int, Frame]]


@dataclass
class SecureStep:
    """Asks the clients for one step, and computes the secure sum of their uploads.

    Args:
        method: a method whose server sees only sums of uploads.
        exchange: the exchange of the round, "first" or "main".
        context: the context of the round.
        facts: the header fields that all requests in this exchange contain.
        agreement: the hash of the run's settings.
        ask: a function that sends requests to the clients and returns their answers.

    Attributes:
        server: the server of the secure sum, which also collects the reasons why answers of clients
            cannot be used.
    """

    method: SummedUploads
    exchange: str
    context: RoundContext
    facts: Mapping[str, Any]
    agreement: str
    ask: Ask

    def __post_init__(self) -> None:
        name = secrets.token_hex(NAME_DIGITS // 2)
        self.facts = {**self.facts, "sum": name}
        self._layout = upload_layout(self.method, self.exchange, self.context)
        terms = sum_terms(self.method, self.exchange, self.context, name, self.agreement)
        self.server = SumServer(terms)

    def run(self, clients: Sequence[int], request: Message) -> SecureSum | None:
        """Computes the sum of all uploads that arrive.

        Returns None if too few clients remain. The server then learns nothing about the uploads.

        Args:
            clients: the clients that are asked.
            request: the server's message.
        """
        total = None
        try:
            total = self._run(clients, request)
        except primitives.SecureSumError as error:
            # the faulty client is unknown, or the sum lacks clients; either way there is no sum
            for client in clients:
                self.server.rejected.setdefault(client, f"cannot compute the secure sum: {error}")
        return total

    def _run(self, clients: Sequence[int], request: Message) -> SecureSum:
        long = PARCEL_BYTES * (1 + len(self.context.active))
        questions = dict.fromkeys(clients, b"")
        keys = self._answers(frames.KEYS, questions, primitives.Keys.from_bytes, PARCEL_BYTES)
        roster = self.server.roster(keys)
        questions = dict.fromkeys(roster.keys, roster.to_bytes())
        sealed = self._answers(frames.SHARES, questions, primitives.Sealed.from_bytes, long)
        relayed = self.server.relay(sealed)
        questions = dict.fromkeys(relayed, request.to_bytes())
        limit = 8 * self._layout.length + PARCEL_BYTES
        masked = self._answers(frames.STEP, questions, primitives.to_vector, limit, relayed)
        present = self.server.present(masked)
        questions = dict.fromkeys(present.clients, present.to_bytes())
        encoded = self.server.sum(
            self._answers(frames.UNMASK, questions, primitives.Shares.from_bytes, long)
        )
        total = self._layout.decode(encoded, len(present.clients), self.context.device)
        return SecureSum(total, present.clients)

    def _answers(
        self,
        kind: str,
        payloads: Mapping[int, bytes],
        decode: Callable[[bytes], T],
        max_bytes: int,
        relayed: Mapping[int, primitives.Sealed] | None = None,
    ) -> dict[int, T]:
        """Sends one kind of request to the clients, and returns the valid answers."""
        questions = {}
        for client, payload in payloads.items():
            facts = dict(self.facts)
            if relayed is not None:
                facts["sealed"] = relayed[client].to_bytes().decode()
            questions[client] = Frame(kind, facts, payload)
        answers: dict[int, T] = {}
        for client, answer in self.ask(questions, max_bytes).items():
            try:
                answers[client] = decode(answer.payload)
            except primitives.SecureSumError as error:
                self.server.rejected[client] = str(error)
        return answers
