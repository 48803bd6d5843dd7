"""The server's side of a secure sum. The server sees public keys, encrypted shares, masked vectors,
and in the end the sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.client import SumTerms
from fedsynth.deployment.secure_aggregation.messages import (
    Keys,
    Masked,
    Present,
    Roster,
    Sealed,
    Shares,
)
from fedsynth.deployment.secure_aggregation.primitives import (
    IntVector,
    SecureSumError,
    combine,
)

T = TypeVar("T")


class SumServer:
    """The server of one secure sum.

    The methods are called in the order `roster`, `relay`, `present`, `sum`. Clients may fail before
    each of these exchanges. A client whose message cannot be used is excluded from the sum.

    Args:
        terms: the parameters of the sum.

    Attributes:
        masked: the received vectors, by client.
        rejected: maps each client whose message cannot be used to the reason.
    """

    def __init__(self, terms: SumTerms) -> None:
        self.terms = terms
        self._keys: dict[int, Keys] = {}
        self._sealed: dict[int, Sealed] = {}
        self.masked: dict[int, IntVector] = {}
        self.rejected: dict[int, str] = {}

    def _usable(
        self, received: Mapping[int, T], is_valid: Callable[[int, T], bool], name: str
    ) -> dict[int, T]:
        """Returns the usable messages, in the order of the clients.

        Raises:
            SecureSumError: if there are too few usable messages.
        """
        usable: dict[int, T] = {}
        for client, message in sorted(received.items()):
            if is_valid(client, message):
                usable[client] = message
            else:
                self.rejected[client] = f"sent no usable {name}"
        if len(usable) < self.terms.threshold:
            raise SecureSumError(
                f"only {len(usable)} clients have sent usable {name}, but the secure sum needs "
                f"{self.terms.threshold}"
            )
        return usable

    def roster(self, keys: Mapping[int, Keys]) -> Roster:
        """Collects the keys of all clients into one message for all clients. A client that states
        the index of another client is excluded.

        Raises:
            SecureSumError: if too few clients have sent usable keys.
        """
        self._keys = self._usable(keys, lambda k, message: message.client == k, "keys")
        return Roster(keys=self._keys)

    def relay(self, sealed: Mapping[int, Sealed]) -> dict[int, Sealed]:
        """Returns for each client the shares that the other clients have made for it.

        A client that has not made a share for every other client is excluded, because the masks
        would not cancel.

        Raises:
            SecureSumError: if too few clients have made shares.
        """
        members = self._keys.keys()

        def is_complete(client: int, message: Sealed) -> bool:
            return client in members and message.of.keys() == members - {client}

        self._sealed = self._usable(sealed, is_complete, "shares")
        relayed: dict[int, Sealed] = {}
        for client in self._sealed:
            senders = self._sealed.keys() - {client}
            relayed[client] = Sealed(of={k: self._sealed[k].of[client] for k in senders})
        return relayed

    def present(self, masked: Mapping[int, Masked]) -> Present:
        """Returns a message that lists the clients whose masked vectors can be used. A client is
        excluded if its vector has the wrong length.

        Raises:
            SecureSumError: if too few vectors can be used.
        """
        shape = (self.terms.length,)

        def is_valid(client: int, message: Masked) -> bool:
            return client in self._sealed and message.vector.shape == shape

        usable = self._usable(masked, is_valid, "vector")
        self.masked = {client: message.vector for client, message in usable.items()}
        return Present(clients=tuple(self.masked))

    def sum(self, shares: Mapping[int, Shares]) -> IntVector:
        """Removes the masks, and returns the sum of the present clients' vectors, uint64 [n].

        Raises:
            SecureSumError: if there are too few shares, or wrong ones. The sum is then not
                computed.
        """
        answers = self._usable(shares, lambda k, _: k in self.masked, "shares of masks")
        total = np.zeros(self.terms.length, np.uint64)
        for client, vector in self.masked.items():
            seed = self._secret(client, {k: message.seeds for k, message in answers.items()})
            if hashlib.sha256(seed).digest() != self._keys[client].commitment:
                raise SecureSumError(
                    f"the secret shares of the mask of client {client} have been altered"
                )
            self_mask = primitives.derived(seed, primitives.SELF_MASK, self.terms.name)
            total = total + vector - primitives.mask(self_mask, self.terms.length)
        for client in self._sealed.keys() - self.masked.keys():
            secret = self._secret(client, {k: message.keys for k, message in answers.items()})
            key = primitives.key_of(secret)
            if primitives.public(key) != self._keys[client].mask:
                raise SecureSumError(f"the shares of the mask key of client {client} were changed")
            for other in self.masked:
                # the mask that the other one has added
                total = total - primitives.signed_mask(
                    key, self._keys[other].mask, self.terms.name, (other, client), len(total)
                )
        return total

    def _secret(self, client: int, shares: Mapping[int, Mapping[int, bytes]]) -> bytes:
        """Reconstructs a client's secret from shares, given as {holder: {client: share}}."""
        of_client = {holder: of[client] for holder, of in shares.items() if client in of}
        return combine(of_client, self.terms.threshold)
