"""The server of one secure sum: it holds public keys, sealed shares, masked vectors, and at the end
the sum.
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
    SecureSumError,
    Words,
    combine,
    require_cryptography,
)

T = TypeVar("T")


class SumServer:
    """The server of one sum: four exchanges, in this order. Clients may be lost before each, and
    those whose messages cannot be used are.

    Args:
        terms: of the sum.

    Attributes:
        masked: the received vectors, by client.
        rejected: client -> why its message cannot be used.
    """

    def __init__(self, terms: SumTerms) -> None:
        require_cryptography()
        self.terms = terms
        self._keys: dict[int, Keys] = {}
        self._sealed: dict[int, Sealed] = {}
        self.masked: dict[int, Words] = {}
        self.rejected: dict[int, str] = {}

    def _usable(
        self, sent: Mapping[int, T], right: Callable[[int, T], bool], what: str
    ) -> dict[int, T]:
        """Returns the usable messages, in the order of the clients.

        Raises:
            SecureSumError: too few.
        """
        usable = {k: one for k, one in sorted(sent.items()) if right(k, one)}
        self.rejected |= dict.fromkeys(sent.keys() - usable.keys(), f"sends no usable {what}")
        self._enough(len(usable), what, self.terms.least)
        return usable

    def _enough(self, clients: int, what: str, needed: int) -> None:
        if clients < needed:
            raise SecureSumError(
                f"{clients} clients have sent {what}, but {needed} are required: the sum was "
                "not computed, and the server has learned nothing"
            )

    def roster(self, keys: Mapping[int, Keys]) -> Roster:
        """Returns all keys, for all clients; a client that claims to be another one is lost.

        Raises:
            SecureSumError: too few.
        """
        self._keys = self._usable(keys, lambda k, one: one.client == k, "keys")
        return Roster(self._keys)

    def passed_on(self, sealed: Mapping[int, Sealed]) -> dict[int, Sealed]:
        """Returns the message to each client: the shares that the others have made for it. A client
        that has no share for another is lost: masks would not cancel.

        Raises:
            SecureSumError: too few have made shares.
        """
        self._sealed = self._usable(
            sealed,
            lambda k, one: k in self._keys and one.of.keys() == self._keys.keys() - {k},
            "shares",
        )
        senders = self._sealed.items()
        return {k: Sealed({j: one.of[k] for j, one in senders if j != k}) for k in self._sealed}

    def present(self, masked: Mapping[int, Masked]) -> Present:
        """Returns the clients whose vectors are present, for all of them; one with a vector of
        another length is lost.

        Raises:
            SecureSumError: too few vectors.
        """
        shape = (self.terms.length,)
        usable = self._usable(
            masked, lambda k, one: k in self._sealed and one.words.shape == shape, "vector"
        )
        self.masked = {k: one.words for k, one in usable.items()}
        return Present(tuple(self.masked))

    def sum(self, shares: Mapping[int, Shares]) -> Words:
        """Returns the sum of the vectors of the present clients, uint64 [n].

        Raises:
            SecureSumError: too few or wrong shares: there is no sum.
        """
        answers = {k: one for k, one in shares.items() if k in self.masked}
        threshold = self.terms.threshold
        self._enough(len(answers), "shares of masks", threshold)
        total = np.zeros(self.terms.length, np.uint64)
        name = self.terms.name
        for k, words in self.masked.items():
            parts = {j: one.own[k] for j, one in answers.items() if k in one.own}
            seed = combine(parts, threshold)
            if hashlib.sha256(seed).digest() != self._keys[k].commitment:
                raise SecureSumError(f"the shares of client {k}'s own mask were changed")
            own = primitives.derived(seed, primitives.OWN, name)
            total = total + words - primitives.mask(own, self.terms.length)
        for k in self._sealed.keys() - self.masked.keys():
            parts = {j: one.keys[k] for j, one in answers.items() if k in one.keys}
            key = primitives.key_of(combine(parts, threshold))
            if primitives.public(key) != self._keys[k].mask:
                raise SecureSumError(f"the shares of client {k}'s mask key were changed")
            for j in self.masked:
                stream = primitives.pair_mask(key, self._keys[j].mask, name, (k, j), len(total))
                total = total + stream if k < j else total - stream
        return total
