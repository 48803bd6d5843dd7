"""A client of one secure sum: it gives the server a masked vector, and shares of secrets."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.messages import (
    Keys,
    Masked,
    Present,
    Roster,
    Sealed,
    Shares,
)
from fedsynth.deployment.secure_aggregation.primitives import (
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
                f"{self.honest} honest clients and {self.colluders} colluders are not among "
                f"{self.clients}"
            )
        if not (self.clients + self.colluders) // 2 < self.threshold <= self.clients:
            raise SecureSumError(
                f"the threshold must be above half of the {self.clients} clients and "
                f"{self.colluders} colluders, and at most all clients, got {self.threshold}"
            )
        if self.length < 1 or not self.name:
            raise SecureSumError("a sum has a name, and vectors of at least one coordinate")

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
    `mask` (or `receive` and `masked`), `unmask`. It can resume in another process (`to_json`).

    Args:
        number: the client's index.
        terms: of the sum.
        identities: None: the server is trusted to relay keys unchanged.
    """

    def __init__(self, number: int, terms: SumTerms, identities: Identities | None = None) -> None:
        require_cryptography()
        self.number = number
        self.terms = terms
        self._identities = identities
        self._mask_key = primitives.new_key()
        self._channel_key = primitives.new_key()
        self._seed = secrets.token_bytes(32)
        self._roster: Mapping[int, Keys] = {}
        self._shares: dict[int, bytes] = {}
        self._step = 0

    def _next(self, step: int) -> None:
        """Checks the order: a second answer could remove a mask that the first has left."""
        if self._step != step:
            raise SecureSumError(f"client {self.number} was asked out of order")
        self._step += 1

    def keys(self) -> Keys:
        """Returns its public keys."""
        self._next(0)
        unsigned = Keys(
            self.number,
            primitives.public(self._mask_key),
            primitives.public(self._channel_key),
            hashlib.sha256(self._seed).digest(),
        )
        if self._identities is None:
            return unsigned
        signature = self._identities.own.sign(unsigned.signed(self.terms.name))
        return Keys(
            unsigned.client, unsigned.mask, unsigned.channel, unsigned.commitment, signature
        )

    def share(self, roster: Roster) -> Sealed:
        """Returns shares of its secrets for each other client, which the server cannot read.

        Raises:
            SecureSumError: too few clients, a repeated key, or one that its client has not signed.
        """
        self._next(1)
        self._check(roster)
        self._roster = dict(sorted(roster.keys.items()))
        holders = list(self._roster)
        mask_secret = self._mask_key.private_bytes_raw()
        of_key = split(mask_secret, holders, self.terms.threshold)
        of_seed = split(self._seed, holders, self.terms.threshold)
        self._shares[self.number] = of_key[self.number] + of_seed[self.number]
        sealed = {}
        for k in holders:
            if k != self.number:
                key, about = self._channel(k, self.number, k)
                sealed[k] = primitives.seal(key, of_key[k] + of_seed[k], about)
        return Sealed(sealed)

    def _check(self, roster: Roster) -> None:
        keys = roster.keys
        if len(keys) < self.terms.least or max(keys) >= self.terms.clients:
            raise SecureSumError(f"{len(keys)} clients are no sum of {self.terms.least}")
        own_keys = keys.get(self.number)
        if own_keys is None or own_keys.mask != primitives.public(self._mask_key):
            raise SecureSumError("the server has other keys of this client")
        public = [
            client_keys
            for keys_of in keys.values()
            for client_keys in (keys_of.mask, keys_of.channel)
        ]
        if len(set(public)) < len(public) or any(
            k != client_keys.client for k, client_keys in keys.items()
        ):
            raise SecureSumError("two clients have the same key")
        if self._identities is None:
            return
        from cryptography.exceptions import InvalidSignature

        for k, client_keys in keys.items():
            try:
                self._identities.others[k].verify(
                    client_keys.signature, client_keys.signed(self.terms.name)
                )
            except (InvalidSignature, KeyError):
                raise SecureSumError(f"client {k} has not signed its keys") from None

    def _channel(self, other: int, sender: int, receiver: int) -> tuple[bytes, bytes]:
        """Returns the key of one message between two clients, and the context that it is bound
        to.
        """
        about = b"%s from %d to %d" % (self.terms.name, sender, receiver)
        key = primitives.common(
            self._channel_key, self._roster[other].channel, primitives.CHANNEL, about
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
        if self.number in senders or not set(senders) <= set(self._roster):
            raise SecureSumError("shares of clients that have no keys")
        if len(senders) + 1 < self.terms.least:
            raise SecureSumError(
                f"{len(senders) + 1} clients are left, and {self.terms.least} are needed"
            )
        for k in senders:
            key, about = self._channel(k, k, self.number)
            self._shares[k] = primitives.unseal(key, received.of[k], about)
            if len(self._shares[k]) != 2 * SHARE_BYTES:
                raise SecureSumError(f"client {k} has sent other things than shares")

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
        total = vector + primitives.mask(
            primitives.derived(self._seed, primitives.OWN, self.terms.name), self.terms.length
        )
        for k in sorted(set(self._shares) - {self.number}):
            common = primitives.common(
                self._mask_key,
                self._roster[k].mask,
                primitives.MASK,
                primitives.about_pair(self.terms.name, self.number, k),
            )
            stream = primitives.mask(common, self.terms.length)
            total = total + stream if self.number < k else total - stream
        return Masked(total)

    def unmask(self, present: Present) -> Shares:
        """Returns one share for each client: of its own mask if it is present, otherwise of its
        mask key.

        Raises:
            SecureSumError: too few are present, or some that never took part: the masks stay.
        """
        self._next(4)
        present_clients = set(present.clients)
        if len(present_clients) < self.terms.least or not present_clients <= set(self._shares):
            raise SecureSumError(
                f"{len(present_clients)} clients are present, and {self.terms.least} are needed"
            )
        if self.number not in present_clients:
            raise SecureSumError("the server says that this client's vector is not there")
        seeds = {
            k: share[SHARE_BYTES:] for k, share in self._shares.items() if k in present_clients
        }
        keys = {
            k: share[:SHARE_BYTES] for k, share in self._shares.items() if k not in present_clients
        }
        return Shares(seeds, keys)

    @staticmethod
    def _sizes(terms: SumTerms) -> list[int]:
        return [terms.threshold, terms.clients, terms.length, terms.honest, terms.colluders]

    def to_json(self) -> dict[str, Any]:
        """Returns its state, with its secrets: for a file that only the client reads."""
        return {
            "name": self.terms.name.hex(),
            "number": self.number,
            "terms": self._sizes(self.terms),
            "step": self._step,
            "mask_key": self._mask_key.private_bytes_raw().hex(),
            "channel_key": self._channel_key.private_bytes_raw().hex(),
            "seed": self._seed.hex(),
            "roster": Roster(self._roster).to_bytes().hex(),
            "shares": {str(k): share.hex() for k, share in self._shares.items()},
        }

    @classmethod
    def from_json(
        cls, stated: Mapping[str, Any], number: int, terms: SumTerms, identities: Identities | None
    ) -> SumClient:
        """Returns the client with a saved state.

        Raises:
            SecureSumError: it is the state of another sum.
            KeyError, TypeError, ValueError: it is not a state.
        """
        identity = bytes.fromhex(stated["name"]), stated["number"], stated["terms"]
        if identity != (terms.name, number, cls._sizes(terms)):
            raise SecureSumError(f"client {number} takes part in another sum")
        client = cls(number, terms, identities)
        client._step = int(stated["step"])
        client._mask_key = primitives.key_of(bytes.fromhex(stated["mask_key"]))
        client._channel_key = primitives.key_of(bytes.fromhex(stated["channel_key"]))
        client._seed = bytes.fromhex(stated["seed"])
        client._roster = Roster.from_bytes(bytes.fromhex(stated["roster"])).keys
        client._shares = {int(k): bytes.fromhex(share) for k, share in stated["shares"].items()}
        return client


_NAME = re.compile(r"client-([0-9]{3,9})\.pem")


def read_identities(key_file: Path, keys_folder: Path) -> Identities:
    """Returns a client's own key, and all clients' public ones.

    Args:
        key_file: an Ed25519 private key, PEM.
        keys_folder: a folder of client-NNN.pem, Ed25519 public keys; the client's own may be among
            them.

    Raises:
        SettingError: the folder has no such file.
        SigningError: a file is not such a key, or `cryptography` is not installed.
    """
    matches = [
        match for path in sorted(keys_folder.glob("*")) if (match := _NAME.fullmatch(path.name))
    ]
    if not matches:
        raise SettingError(None, str(keys_folder), "has no client-NNN.pem, the other clients' keys")
    public = {int(match[1]): read_public_key(keys_folder / match[0]) for match in matches}
    return Identities(read_private_key(key_file), public)
