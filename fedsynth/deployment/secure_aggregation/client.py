"""A client of one secure sum: it gives the server a masked vector, and shares of secrets."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.messages import (
    Keys,
    Masked,
    Present,
    Roster,
    Sealed,
    Shares,
    SumState,
)
from fedsynth.deployment.secure_aggregation.primitives import (
    KEY_BYTES,
    SHARE_BYTES,
    SecureSumError,
    Words,
    require_cryptography,
    split,
)
from fedsynth.errors import SettingError
from fedsynth.privacy.signing import read_private_key, read_public_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )


@dataclass(frozen=True)
class SumTerms:
    """The terms of a sum, which all parties know in advance.

    Args:
        name: of this sum only.
        threshold: the number of clients that is needed, and is enough, to remove masks. It is above
            half of clients and colluders: a server that claims to some that a client is lost, and
            to others that it is present, then lacks shares of one kind.
        clients: the number of clients; their indices start at 0.
        length: of vectors.
        honest: H, the least number of honest clients' vectors in a sum: where each adds the noise
            of 1 of H, a sum of fewer has less noise than the guarantee needs.
        colluders: the number of clients that may collude with the server, besides the honest ones.
    """

    name: bytes
    threshold: int
    clients: int
    length: int
    honest: int = 1
    colluders: int = 0

    def __post_init__(self) -> None:
        if self.honest < 1 or self.colluders < 0 or self.honest + self.colluders > self.clients:
            raise SecureSumError(
                f"{self.honest} honest clients and {self.colluders} colluders are not "
                f"possible among {self.clients} clients"
            )
        if not (self.clients + self.colluders) // 2 < self.threshold <= self.clients:
            raise SecureSumError(
                f"the threshold must be above half of the {self.clients} clients and "
                f"{self.colluders} colluders, and at most all clients, got {self.threshold}"
            )
        if self.length < 1 or not self.name:
            raise SecureSumError("a sum needs a name and vectors of at least one coordinate")

    @property
    def least(self) -> int:
        """The smallest number of clients in a sum: the threshold, or H and the colluders."""
        return max(self.threshold, self.honest + self.colluders)


def usual_threshold(clients: int) -> int:
    """Returns two thirds of the clients, plus one: enough even if a third of them collude with a
    malicious server (Bonawitz et al., Sec. 6.2).

    >>> [usual_threshold(n) for n in (2, 3, 5, 10)]
    [2, 3, 4, 7]
    """
    return min(clients, 2 * clients // 3 + 1)


@dataclass(frozen=True)
class Identities:
    """Long-lived keys, by which a client detects that a server has replaced others' keys by its
    own.

    Args:
        own: this client's.
        others: every client's public key, by index; exchanged in advance, and not by the server.
    """

    own: Ed25519PrivateKey
    others: Mapping[int, Ed25519PublicKey]


class SumClient:
    """One client of one sum. Its answers are requested in this order, each once: `keys`, `share`,
    `mask` (or `receive` and `masked`), `unmask`. It can resume in another process (`state`).

    Args:
        number: the client's index.
        terms: of the sum.
        identities: None: the server is trusted to relay keys unchanged.
        state: what an earlier process has left of the same sum; None: the sum begins.

    Raises:
        SecureSumError: it is the state of another sum.
    """

    def __init__(
        self,
        number: int,
        terms: SumTerms,
        identities: Identities | None = None,
        state: SumState | None = None,
    ) -> None:
        require_cryptography()
        self.number = number
        self.terms = terms
        self._identities = identities
        if state is None:
            mask_key, channel_key, seed = (secrets.token_bytes(KEY_BYTES) for _ in range(3))
            state = SumState(number, repr(terms), mask_key, channel_key, seed, 0, {}, {})
        if (state.number, state.terms) != (number, repr(terms)):
            raise SecureSumError(f"client {number} takes part in another sum")
        self.state = state
        self._mask_key = primitives.key_of(state.mask_key)
        self._channel_key = primitives.key_of(state.channel_key)

    def _next(self, step: int) -> None:
        """Checks the order: a second answer could remove a mask that the first has left."""
        if self.state.step != step:
            raise SecureSumError(f"client {self.number} received requests out of order")
        self.state.step += 1

    def keys(self) -> Keys:
        """Returns its public keys."""
        self._next(0)
        found = Keys(
            self.number,
            primitives.public(self._mask_key),
            primitives.public(self._channel_key),
            hashlib.sha256(self.state.seed).digest(),
        )
        if self._identities is None:
            return found
        signature = self._identities.own.sign(found.signed(self.terms.name))
        return Keys(found.client, found.mask, found.channel, found.commitment, signature)

    def share(self, roster: Roster) -> Sealed:
        """Returns shares of its secrets for each other client, which the server cannot read.

        Raises:
            SecureSumError: too few clients, a repeated key, or one that its client has not signed.
        """
        self._next(1)
        self._check(roster)
        self.state.keys = dict(sorted(roster.keys.items()))
        holders = list(self.state.keys)
        of_key = split(self.state.mask_key, holders, self.terms.threshold)
        of_seed = split(self.state.seed, holders, self.terms.threshold)
        self.state.shares[self.number] = of_key[self.number] + of_seed[self.number]
        sealed = {}
        for k in holders:
            if k != self.number:
                key, about = self._channel(k, self.number, k)
                sealed[k] = primitives.seal(key, of_key[k] + of_seed[k], about)
        return Sealed(sealed)

    def _check(self, roster: Roster) -> None:
        keys = roster.keys
        if len(keys) < self.terms.least or max(keys) >= self.terms.clients:
            raise SecureSumError(
                f"{len(keys)} clients are too few for a sum, which needs {self.terms.least}"
            )
        own = keys.get(self.number)
        if own is None or own.mask != primitives.public(self._mask_key):
            raise SecureSumError("the server has other keys of this client")
        public = [one for keys_of in keys.values() for one in (keys_of.mask, keys_of.channel)]
        if len(set(public)) < len(public) or any(k != one.client for k, one in keys.items()):
            raise SecureSumError("two clients have the same key")
        if self._identities is None:
            return
        from cryptography.exceptions import InvalidSignature

        for k, one in keys.items():
            try:
                self._identities.others[k].verify(one.signature, one.signed(self.terms.name))
            except (InvalidSignature, KeyError):
                raise SecureSumError(f"client {k} has not signed its keys") from None

    def _channel(self, other: int, sender: int, receiver: int) -> tuple[bytes, bytes]:
        """Returns the key of one message between two clients, and the context that it is bound
        to.
        """
        about = b"%s from %d to %d" % (self.terms.name, sender, receiver)
        key = primitives.common(
            self._channel_key, self.state.keys[other].channel, primitives.CHANNEL, about
        )
        return key, about

    def mask(self, vector: Words, received: Sealed) -> Masked:
        """Calls `receive` and `masked`: returns its vector under all masks."""
        self.receive(received)
        return self.masked(vector)

    def receive(self, received: Sealed) -> None:
        """Stores the others' shares: a client that sends none is lost before any mask is made.

        Args:
            received: for this client, from the server.

        Raises:
            SecureSumError: shares that were changed, or too few.
        """
        self._next(2)
        senders = sorted(received.of)
        if self.number in senders or not set(senders) <= set(self.state.keys):
            raise SecureSumError("shares of clients that have no keys")
        if len(senders) + 1 < self.terms.least:
            raise SecureSumError(
                f"{len(senders) + 1} clients are left, but {self.terms.least} are required"
            )
        for k in senders:
            key, about = self._channel(k, k, self.number)
            self.state.shares[k] = primitives.unseal(key, received.of[k], about)
            if len(self.state.shares[k]) != 2 * SHARE_BYTES:
                raise SecureSumError(f"client {k} has sent data that are not shares")

    def masked(self, vector: Words) -> Masked:
        """Returns its vector under all masks.

        Args:
            vector: uint64 [n], as `FixedPoint.encode` makes it.

        Raises:
            SecureSumError: a wrong length.
        """
        self._next(3)
        if vector.shape != (self.terms.length,):
            raise SecureSumError(f"a vector has {self.terms.length} numbers, not {vector.shape}")
        words = vector + primitives.mask(
            primitives.derived(self.state.seed, primitives.OWN, self.terms.name), self.terms.length
        )
        for k in sorted(set(self.state.shares) - {self.number}):
            other = self.state.keys[k].mask
            pair = (self.number, k)
            stream = primitives.pair_mask(
                self._mask_key, other, self.terms.name, pair, self.terms.length
            )
            words = words + stream if self.number < k else words - stream
        return Masked(words)

    def unmask(self, present: Present) -> Shares:
        """Returns one share for each client: of its own mask if it is present, otherwise of its
        mask key.

        Raises:
            SecureSumError: too few are present, or some that never took part: the masks stay.
        """
        self._next(4)
        there = set(present.clients)
        if len(there) < self.terms.least or not there <= set(self.state.shares):
            raise SecureSumError(
                f"{len(there)} clients are present, but {self.terms.least} are required"
            )
        if self.number not in there:
            raise SecureSumError("the server claims that this client's vector is missing")
        own = {k: one[SHARE_BYTES:] for k, one in self.state.shares.items() if k in there}
        keys = {k: one[:SHARE_BYTES] for k, one in self.state.shares.items() if k not in there}
        return Shares(own, keys)


_NAME = re.compile(r"client-([0-9]{3,9})\.pem")


def read_identities(own: Path, others: Path) -> Identities:
    """Returns a client's own key, and all clients' public ones.

    Args:
        own: an Ed25519 private key, PEM.
        others: a folder of client-NNN.pem, Ed25519 public keys; the client's own may be among them.

    Raises:
        SettingError: the folder has no such file.
        SigningError: a file is not such a key, or `cryptography` is not installed.
    """
    found = [match for path in sorted(others.glob("*")) if (match := _NAME.fullmatch(path.name))]
    if not found:
        raise SettingError(None, str(others), "has no client-NNN.pem, the other clients' keys")
    public = {int(match[1]): read_public_key(others / match[0]) for match in found}
    return Identities(read_private_key(own), public)
