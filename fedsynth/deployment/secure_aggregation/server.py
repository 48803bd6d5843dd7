"""The server of one secure sum: it holds public keys, sealed shares, masked vectors, and at the end
the sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

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
    SecureSumError,
    Words,
    combine,
    require_cryptography,
)


class SumServer:
    """The server of one sum: four exchanges, in this order. Clients may be lost before each.

    Args:
        terms: of the sum.

    Attributes:
        masked: the received vectors, by client.
    """

    def __init__(self, terms: SumTerms) -> None:
        require_cryptography()
        self.terms = terms
        self._keys: dict[int, Keys] = {}
        self._sealed: dict[int, Sealed] = {}
        self.masked: dict[int, Words] = {}

    def _enough(self, clients: int, what: str, minimum: int | None = None) -> None:
        needed = self.terms.least if minimum is None else minimum
        if clients < needed:
            raise SecureSumError(
                f"{clients} clients have sent {what}, and {needed} are needed: "
                "there is no sum, and the server has learned nothing"
            )

    def roster(self, keys: Mapping[int, Keys]) -> Roster:
        """Returns all keys, for all clients.

        Raises:
            SecureSumError: too few, or a client that claims to be another one.
        """
        for k, client_keys in keys.items():
            if client_keys.client != k:
                raise SecureSumError(f"client {k} says that it is {client_keys.client}")
        self._enough(len(keys), "keys")
        self._keys = dict(sorted(keys.items()))
        return Roster(self._keys)

    def passed_on(self, sealed: Mapping[int, Sealed]) -> dict[int, Sealed]:
        """Returns the message to each client: the shares that the others have made for it.

        Raises:
            SecureSumError: too few have made shares, or one lacks a share for another: masks would
                not cancel.
        """
        for k, shares in sealed.items():
            if k not in self._keys or set(shares.of) != set(self._keys) - {k}:
                raise SecureSumError(f"client {k} has not made a share for each other client")
        self._enough(len(sealed), "shares")
        self._sealed = dict(sealed)
        return {
            k: Sealed({j: shares.of[k] for j, shares in sealed.items() if j != k}) for k in sealed
        }

    def present(self, masked: Mapping[int, Masked]) -> Present:
        """Returns the clients whose vectors are present, for all of them.

        Raises:
            SecureSumError: too few vectors, or one of another length.
        """
        for k, upload in masked.items():
            if k not in self._sealed or upload.words.shape != (self.terms.length,):
                raise SecureSumError(f"client {k} has sent another vector than it may")
        self._enough(len(masked), "vectors")
        self.masked = {k: upload.words for k, upload in sorted(masked.items())}
        return Present(tuple(self.masked))

    def sum(self, shares: Mapping[int, Shares]) -> Words:
        """Returns the sum of the vectors of the present clients, uint64 [n].

        Raises:
            SecureSumError: too few or wrong shares: there is no sum.
        """
        answers = {k: client_shares for k, client_shares in shares.items() if k in self.masked}
        self._enough(len(answers), "what takes the masks away", self.terms.threshold)
        total = sum(self.masked.values(), start=next(iter(self.masked.values())) * 0)
        name = self.terms.name
        for k in self.masked:
            seed = self._combined(
                {
                    j: client_shares.own[k]
                    for j, client_shares in answers.items()
                    if k in client_shares.own
                }
            )
            if hashlib.sha256(seed).digest() != self._keys[k].commitment:
                raise SecureSumError(f"the shares of client {k}'s own mask are not what it shared")
            total = total - primitives.mask(
                primitives.derived(seed, primitives.OWN, name), self.terms.length
            )
        for k in set(self._sealed) - set(self.masked):
            secret = self._combined(
                {
                    j: client_shares.keys[k]
                    for j, client_shares in answers.items()
                    if k in client_shares.keys
                }
            )
            key = primitives.key_of(secret)
            if primitives.public(key) != self._keys[k].mask:
                raise SecureSumError(f"the shares of client {k}'s mask key are not what it shared")
            for j in self.masked:
                about = primitives.about_pair(name, j, k)
                stream = primitives.mask(
                    primitives.common(key, self._keys[j].mask, primitives.MASK, about),
                    self.terms.length,
                )
                total = total - stream if j < k else total + stream
        return total

    def _combined(self, shares: Mapping[int, bytes]) -> bytes:
        return combine(shares, self.terms.threshold)
