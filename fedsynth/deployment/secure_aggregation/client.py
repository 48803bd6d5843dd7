"""A client of one secure sum: it gives the server a masked vector, and shares of secrets."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

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
    IntVector,
    SecureSumError,
    split,
)
from fedsynth.errors import SettingError
from fedsynth.privacy.signing import read_private_key, read_public_key


@dataclass(frozen=True)
class SumTerms:
    """The terms of a sum, which all parties know in advance.

    Args:
        name: of this sum only.
        threshold: the smallest number of clients in a sum, and the number that is enough to remove
            masks. It is above half of the clients: a server that claims to some that a client is
            lost, and to others that it is present, then lacks shares of one kind. Where each client
            adds the noise of 1 of H, it is above H (`fedsynth.config.checks.fewest`).
        clients: the number of clients; their indices start at 0.
        length: of vectors.
    """

    name: bytes
    threshold: int
    clients: int
    length: int

    def __post_init__(self) -> None:
        if not self.clients // 2 < self.threshold <= self.clients:
            raise SecureSumError("the threshold must be above half of the clients")


@dataclass(frozen=True)
class Identities:
    """Long-lived keys, by which a client detects that a server has replaced others' keys by its
    own.

    Args:
        private_key: this client's.
        public_keys: every client's, by index; exchanged in advance, and not by the server.
    """

    private_key: Ed25519PrivateKey
    public_keys: Mapping[int, Ed25519PublicKey]


class SumClient:
    """One client of one sum. Its answers are requested in this order, each once: `keys`, `share`,
    `receive`, `mask`, `unmask`. It can resume in another process (`state`).

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
        self.number = number
        self.terms = terms
        self._identities = identities
        if state is None:
            names = ("mask_key", "channel_key", "seed")
            fresh: dict[str, Any] = {name: secrets.token_bytes(KEY_BYTES) for name in names}
            state = SumState(number=number, terms=repr(terms), **fresh)
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
        keys = Keys(
            client=self.number,
            mask=primitives.public(self._mask_key),
            channel=primitives.public(self._channel_key),
            commitment=hashlib.sha256(self.state.seed).digest(),
        )
        if self._identities is not None:
            keys.signature = self._identities.private_key.sign(keys.signed(self.terms.name))
        return keys

    def share(self, roster: Roster) -> Sealed:
        """Returns shares of its secrets for each other client, which the server cannot read.

        Raises:
            SecureSumError: too few clients, a repeated key, or one that its client has not signed.
        """
        self._next(1)
        self._check(roster)
        self.state.keys = dict(sorted(roster.keys.items()))
        holders = list(self.state.keys)
        key_shares = split(self.state.mask_key, holders, self.terms.threshold)
        seed_shares = split(self.state.seed, holders, self.terms.threshold)
        sealed = {}
        for k in holders:
            shares = key_shares[k] + seed_shares[k]
            if k == self.number:
                self.state.shares[k] = shares
            else:
                key, about = self._channel(k, self.number, k)
                sealed[k] = primitives.seal(key, shares, about)
        return Sealed(of=sealed)

    def _check(self, roster: Roster) -> None:
        keys = roster.keys
        if len(keys) < self.terms.threshold or max(keys) >= self.terms.clients:
            raise SecureSumError(f"{len(keys)} clients are too few for a sum")
        if self.number not in keys or keys[self.number].mask != primitives.public(self._mask_key):
            raise SecureSumError("the server has other keys of this client")
        public: set[bytes] = set()
        for k, keys_of in keys.items():
            if k != keys_of.client:
                raise SecureSumError(f"the keys of client {k} belong to client {keys_of.client}")
            public |= {keys_of.mask, keys_of.channel}
        if len(public) < 2 * len(keys):
            raise SecureSumError("two clients have the same key")
        if self._identities is None:
            return
        for k, keys_of in keys.items():
            try:
                signed = keys_of.signed(self.terms.name)
                self._identities.public_keys[k].verify(keys_of.signature, signed)
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
        if len(senders) + 1 < self.terms.threshold:
            raise SecureSumError(f"{len(senders) + 1} clients are too few for a sum")
        for k in senders:
            key, about = self._channel(k, k, self.number)
            self.state.shares[k] = primitives.unseal(key, received.of[k], about)
            if len(self.state.shares[k]) != 2 * SHARE_BYTES:
                raise SecureSumError(f"client {k} has sent data that are not shares")

    def mask(self, vector: IntVector) -> Masked:
        """Returns its vector under all masks.

        Args:
            vector: uint64 [n], as `FixedPoint.encode` makes it.

        Raises:
            SecureSumError: a wrong length.
        """
        self._next(3)
        length = self.terms.length
        if vector.shape != (length,):
            raise SecureSumError(f"a vector has {length} numbers, not {vector.shape}")
        self_mask = primitives.derived(self.state.seed, primitives.SELF_MASK, self.terms.name)
        masked = vector + primitives.mask(self_mask, length)
        for k in sorted(set(self.state.shares) - {self.number}):
            masked = masked + primitives.signed_mask(
                self._mask_key, self.state.keys[k].mask, self.terms.name, (self.number, k), length
            )
        return Masked(masked)

    def unmask(self, present: Present) -> Shares:
        """Returns one share for each client: of its own mask if it is present, otherwise of its
        mask key.

        Raises:
            SecureSumError: too few are present, or some that never took part: the masks stay.
        """
        self._next(4)
        clients = set(present.clients)
        if len(clients) < self.terms.threshold or not clients <= set(self.state.shares):
            raise SecureSumError(f"{len(clients)} clients are too few for a sum")
        if self.number not in clients:
            raise SecureSumError("the server claims that this client's vector is missing")
        shares = self.state.shares
        return Shares(
            seeds={k: share[SHARE_BYTES:] for k, share in shares.items() if k in clients},
            keys={k: share[:SHARE_BYTES] for k, share in shares.items() if k not in clients},
        )


def read_identities(private_key: Path, folder: Path) -> Identities:
    """Returns a client's own key, and all clients' public ones.

    Args:
        private_key: an Ed25519 private key, PEM.
        folder: client-NNN.pem, Ed25519 public keys; the client's own may be among them.

    Raises:
        SettingError: the folder has no such file, or one of another name.
        SigningError: a file is not such a key, or `cryptography` is not installed.
    """
    public_keys: dict[int, Ed25519PublicKey] = {}
    for path in folder.glob("client-*.pem"):
        number = path.stem.removeprefix("client-")
        if not number.isdecimal():
            raise SettingError(None, str(path), "must be client-NNN.pem, with the client's number")
        public_keys[int(number)] = read_public_key(path)
    if not public_keys:
        raise SettingError(None, str(folder), "has no client-NNN.pem, the other clients' keys")
    return Identities(read_private_key(private_key), public_keys)
