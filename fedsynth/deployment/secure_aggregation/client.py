"""The client's side of a secure sum: encodes uploads, masks them and shares secrets.

Server and client both derive the encoding and the parameters of a sum from the run's settings, and
neither accepts them from the other.

If a release has noise to which several clients contribute, its values are already on a grid
(`fedsynth.privacy.randomness`), so that their encoding is exact. Without differential privacy, a
field is rounded to the finest grid that fits its range.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from fedsynth.config.checks import fewest
from fedsynth.core.capabilities import exchange_of
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.sums import SummedUploads
from fedsynth.core.uploads import Array
from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.primitives import (
    IN_HEX,
    KEY_BYTES,
    SHARE_BYTES,
    FixedPoint,
    Index,
    IntVector,
    Keys,
    Parcel,
    Present,
    Roster,
    Sealed,
    Secret,
    SecureSumError,
    Shares,
    split,
)
from fedsynth.errors import SettingError
from fedsynth.privacy.randomness import finest
from fedsynth.privacy.signing import read_private_key, read_public_key


@checked_dataclass(frozen=True, config=IN_HEX)
class SumTerms:
    """The parameters of a secure sum, which all parties know in advance.

    Args:
        name: the name of this sum. No other sum has the same name.
        threshold: the smallest number of clients in a sum. Shares from this many clients are enough
            to remove masks. It is more than half of the clients. A server that tells some clients
            that a client has failed, and others that it is present, then gets too few shares of one
            kind. If each client adds 1/H of the noise, the threshold is also above H in a private
            run of several clients (`fedsynth.config.checks.fewest`).
        clients: the indices of the clients that take part.
        length: the length of the clients' vectors.
    """

    name: bytes
    threshold: int
    clients: tuple[Index, ...]
    length: int

    def __post_init__(self) -> None:
        count = len(set(self.clients))
        if count < len(self.clients):
            raise SecureSumError(f"the secure sum lists a client twice: {self.clients}")
        if not count // 2 < self.threshold <= count:
            raise SecureSumError(
                f"the threshold must be over half of the {count} clients, got {self.threshold}"
            ).with_code("sums.threshold")


@dataclass(frozen=True)
class Identities:
    """The clients' identity keys, which are the same in all sums.

    With these keys, a client detects a server that has replaced the other clients' keys by keys of
    its choice.

    Args:
        private_key: the private identity key of this client.
        public_keys: the public identity keys of all clients, by index. The owners must have
            exchanged them in advance, without the server.
    """

    private_key: Ed25519PrivateKey
    public_keys: Mapping[int, Ed25519PublicKey]


class SumClient(Parcel):
    """The client's side of one secure sum: makes keys, secret shares and the masked vector.

    The methods are called once each, in the order `keys`, `share`, `receive`, `mask`, `unmask`.
    Between two methods, the client can be stored as bytes, from which another process continues.
    It contains secrets, so only the client may read its file.

    Args:
        number: the index of the client.
        terms: the parameters of the sum.
        mask_key: the client's private key for pairwise masks.
        channel_key: the client's private key for encrypted messages to other clients.
        seed: the seed of the client's self mask.
        step: the number of requests that the client has received.
        roster: the public keys of all clients.
        shares: the shares that this client holds, including those of its own secrets, by client.
    """

    number: Index
    terms: SumTerms
    mask_key: Secret
    channel_key: Secret
    seed: Secret
    step: int = 0
    roster: dict[Index, Keys] = Field(default={})
    shares: dict[Index, bytes] = Field(default={}, repr=False)

    @classmethod
    def begin(cls, number: int, terms: SumTerms) -> SumClient:
        """Starts a sum with newly drawn secrets."""
        names = ("mask_key", "channel_key", "seed")
        fresh: dict[str, Any] = {name: secrets.token_bytes(KEY_BYTES) for name in names}
        return cls(number=number, terms=terms, **fresh)

    @classmethod
    def stored(cls, content: bytes, number: int, terms: SumTerms) -> SumClient:
        """Restores the client's state in a sum, as stored by an earlier process.

        Raises:
            SecureSumError: if the bytes are damaged, or if they belong to another secure sum.
        """
        client = cls.from_bytes(content)
        if (client.number, client.terms) != (number, terms):
            raise SecureSumError(f"client {number}'s stored state belongs to another secure sum")
        return client

    def _next(self, step: int) -> None:
        """Checks that requests arrive in the right order, and none arrives twice.

        A second answer to a request could reveal a mask that the first answer did not reveal.
        """
        if self.step != step:
            raise SecureSumError(f"client {self.number} expected request {self.step}, got {step}")
        self.step += 1

    def keys(self, identities: Identities | None = None) -> Keys:
        """Returns the client's public keys for this sum.

        Args:
            identities: the identity keys of all clients. None: the server is trusted to pass on
                keys unchanged.
        """
        self._next(0)
        keys = Keys(
            client=self.number,
            mask=primitives.public(self.mask_key),
            channel=primitives.public(self.channel_key),
            commitment=hashlib.sha256(self.seed).digest(),
        )
        if identities is not None:
            keys.signature = identities.private_key.sign(keys.signed(self.terms.name))
        return keys

    def share(self, roster: Roster, identities: Identities | None = None) -> Sealed:
        """Splits the client's secrets, and returns an encrypted share for each other client.

        The server cannot read the shares.

        Raises:
            SecureSumError: if there are too few clients, if a key occurs twice, or if a client has
                not signed its keys.
        """
        self._next(1)
        self._check(roster.keys, identities)
        self.roster = dict(sorted(roster.keys.items()))
        holders = list(self.roster)
        key_shares = split(self.mask_key, holders, self.terms.threshold)
        seed_shares = split(self.seed, holders, self.terms.threshold)
        sealed = {}
        for k in holders:
            shares = key_shares[k] + seed_shares[k]
            if k == self.number:
                self.shares[k] = shares
            else:
                key, about = self._channel(k, self.number, k)
                sealed[k] = primitives.seal(key, shares, about)
        return Sealed(of=sealed)

    def _check(self, keys: Mapping[int, Keys], identities: Identities | None) -> None:
        clients = self.terms.clients
        if len(keys) < self.terms.threshold or not keys.keys() <= set(clients):
            raise SecureSumError(
                f"the server sent the keys of {len(keys)} clients, but the sum needs at least "
                f"{self.terms.threshold} of its {len(clients)} clients"
            ).with_code("sums.keys")
        if self.number not in keys or keys[self.number].mask != primitives.public(self.mask_key):
            raise SecureSumError(f"the server changed or omitted the keys of client {self.number}")
        public: set[bytes] = set()
        for k, keys_of in keys.items():
            if k != keys_of.client:
                raise SecureSumError(
                    f"the server assigned the public keys of client {keys_of.client} to client {k}"
                )
            public |= {keys_of.mask, keys_of.channel}
        if len(public) < 2 * len(keys):
            raise SecureSumError("the server sent the same key for two clients")
        if identities is None:
            return
        for k, keys_of in keys.items():
            try:
                signed = keys_of.signed(self.terms.name)
                identities.public_keys[k].verify(keys_of.signature, signed)
            except (InvalidSignature, KeyError):
                reason = f"client {k}'s keys are not signed with its identity key"
                raise SecureSumError(reason) from None

    def _channel(self, other: int, sender: int, receiver: int) -> tuple[bytes, bytes]:
        """Returns the encryption key for one message between two clients.

        The second value is the context to which the message is bound.
        """
        about = b"%s from %d to %d" % (self.terms.name, sender, receiver)
        key = primitives.common(
            self.channel_key, self.roster[other].channel, primitives.CHANNEL, about
        )
        return key, about

    def receive(self, received: Sealed) -> None:
        """Stores the secret shares received from the other clients.

        A client that sends no shares is excluded before any mask is computed.

        Args:
            received: the encrypted shares for this client, from the server.

        Raises:
            SecureSumError: if shares were changed, or if there are too few.
        """
        self._next(2)
        senders = sorted(received.of)
        if self.number in senders or not set(senders) <= set(self.roster):
            raise SecureSumError(f"secret shares arrived from clients without keys: {senders}")
        if len(senders) + 1 < self.terms.threshold:
            raise SecureSumError(
                f"only {len(senders) + 1} clients sent secret shares, but the sum needs "
                f"{self.terms.threshold}"
            ).with_code("sums.shares")
        for k in senders:
            key, about = self._channel(k, k, self.number)
            self.shares[k] = primitives.unseal(key, received.of[k], about)
            if len(self.shares[k]) != 2 * SHARE_BYTES:
                raise SecureSumError(
                    f"client {k}'s shares must have {2 * SHARE_BYTES} bytes, got "
                    f"{len(self.shares[k])}"
                )

    def mask(self, vector: IntVector) -> IntVector:
        """Adds pairwise masks and a self mask to the client's vector.

        The pairwise masks cancel in the sum of all vectors. The server removes the self masks.

        Args:
            vector: uint64 [n], as `FixedPoint.encode` returns it.

        Raises:
            SecureSumError: if the vector has the wrong length.
        """
        self._next(3)
        length = self.terms.length
        if vector.shape != (length,):
            raise SecureSumError(
                f"the vector for a secure sum must have the shape ({length},), got {vector.shape}"
            )
        self_mask = primitives.derived(self.seed, primitives.SELF_MASK, self.terms.name)
        masked = vector + primitives.mask(self_mask, length)
        for k in sorted(set(self.shares) - {self.number}):
            masked = masked + primitives.signed_mask(
                self.mask_key, self.roster[k].mask, self.terms.name, (self.number, k), length
            )
        return masked

    def unmask(self, present: Present) -> Shares:
        """Returns the secret shares that the server needs to remove the remaining masks.

        The result has one share for each client. The share of a present client belongs to its self
        mask. The share of a failed client belongs to the key of its pairwise masks.

        Raises:
            SecureSumError: if too few clients are present, or if a client is listed that never took
                part. The masks are then not removed.
        """
        self._next(4)
        clients = set(present.clients)
        if len(clients) < self.terms.threshold or not clients <= set(self.shares):
            raise SecureSumError(
                f"the server lists {len(clients)} clients with masked vectors, but the sum needs "
                f"at least {self.terms.threshold} of the clients that sent secret shares"
            ).with_code("sums.survivors")
        if self.number not in clients:
            raise SecureSumError(
                f"the server asks client {self.number} for secret shares, but lists it as absent"
            )
        shares = self.shares
        return Shares(
            seeds={k: share[SHARE_BYTES:] for k, share in shares.items() if k in clients},
            keys={k: share[:SHARE_BYTES] for k, share in shares.items() if k not in clients},
        )


def read_identities(private_key: Path, folder: Path) -> Identities:
    """Reads a client's private identity key, and the public identity keys of all clients.

    Args:
        private_key: a PEM file with an Ed25519 private key.
        folder: a folder of Ed25519 public keys named client-NNN.pem. The client's public key may be
            among them.

    Raises:
        SettingError: if the folder contains no such file, or a file whose name has no client
            number.
        SigningError: if a file does not contain such a key, or if `cryptography` is not installed.
    """
    public_keys: dict[int, Ed25519PublicKey] = {}
    for path in folder.glob("client-*.pem"):
        number = path.stem.removeprefix("client-")
        if not number.isdecimal():
            raise SettingError(
                None,
                str(path),
                "is not named after a client's number. Rename it to client-NNN.pem, such as "
                "client-000.pem",
            )
        public_keys[int(number)] = read_public_key(path)
    if not public_keys:
        raise SettingError(
            None,
            str(folder),
            "contains no public keys named client-NNN.pem. Add one for each client",
        )
    return Identities(read_private_key(private_key), public_keys)


NAME_DIGITS = 32


@dataclass(frozen=True)
class UploadLayout:
    """Encodes uploads of one type as vectors of integers modulo 2^64, and decodes sums of these
    vectors.

    Args:
        kind: the type of the message.
        fields: maps the name of each field to the shape of its tensor and to its fixed-point
            encoding.
    """

    kind: type[Message]
    fields: dict[str, tuple[tuple[int, ...], FixedPoint]]

    @property
    def length(self) -> int:
        """The encoded vector's length."""
        return sum(math.prod(shape) for shape, _ in self.fields.values())

    def encode(self, message: Message) -> IntVector:
        """Encodes an upload as a vector, uint64 [length].

        Raises:
            SecureSumError: if a value is out of its range.
        """
        vectors = []
        for name, (_, form) in self.fields.items():
            values = getattr(message, name).detach().cpu().double()
            vectors.append(form.encode(values.numpy().ravel()))
        return np.concatenate(vectors)

    def decode(self, encoded: IntVector, clients: int, device: torch.device) -> Message:
        """Decodes the sum of the clients' vectors.

        Each field of the returned message is the sum of the clients' fields, float64.

        Args:
            encoded: the sum of the clients' vectors.
            clients: the number of clients in the sum.
            device: the device of the message.

        Raises:
            SecureSumError: if the sum is out of the range for this number of clients.
        """
        tensors: dict[str, Any] = {}
        start = 0
        for name, (shape, form) in self.fields.items():
            end = start + math.prod(shape)
            sums = form.decode(encoded[start:end])
            if not bool((np.abs(sums) <= clients * form.grid.bound).all()):
                raise SecureSumError(
                    f"the sum of the upload field {name} is outside the range of its encoding"
                )
            tensors[name] = torch.from_numpy(sums).view(shape).to(device)
            start = end
        return self.kind(**tensors)


def upload_layout(method: SummedUploads, exchange: str, context: RoundContext) -> UploadLayout:
    """Returns the fixed-point format in which clients encode their uploads before masking.

    Args:
        method: a method whose server sees only sums of uploads.
        exchange: the exchange of the round, "first" or "main".
        context: the context of the round, with the settings that were agreed once all clients had
            joined.

    Raises:
        SecureSumError: if a field is not a tensor of known size.
    """
    rules = method.upload_rules(exchange, 0, context)
    fields = {}
    for name, plan in method.sum_releases(exchange, context).items():
        rule = rules.get(name)
        if not isinstance(rule, Array) or None in rule.shape:
            raise SecureSumError(
                f"the upload field {name} has no fixed size, but a secure sum requires one. Set "
                "method.aggregation=own"
            )
        largest = max(abs(rule.low), abs(rule.high))
        private = plan in context.grids
        grid = context.grids[plan] if private else finest(largest, context.clients)
        fields[name] = (tuple(size or 0 for size in rule.shape), FixedPoint(grid, wraps=private))
    return UploadLayout(exchange_of(method, exchange).upload, fields)


def sum_terms(
    method: SummedUploads, exchange: str, context: RoundContext, name: str, agreed: str
) -> SumTerms:
    """Returns the parameters of the secure sum in one exchange.

    All parties compute these parameters themselves.

    Args:
        method: a method whose server sees only sums of uploads.
        exchange: the exchange of the round, "first" or "main".
        context: the context of the round, with the settings that were agreed once all clients had
            joined.
        name: the server's unique name for this sum.
        agreed: the hash of the run's settings.

    Raises:
        SecureSumError: if the name is invalid, or if fewer clients take part than a sum needs.
    """
    if len(name) != NAME_DIGITS or set(name) - set("0123456789abcdef"):
        raise SecureSumError(
            f"the name of a secure sum must have {NAME_DIGITS} hex digits, got {name!r:.40}"
        )
    clients = context.active
    private = context.privacy is not None
    about = f"{agreed} {context.round} {exchange} {name}"
    return SumTerms(
        hashlib.sha256(about.encode()).digest(),
        threshold=fewest(method, len(clients), context.clients, private=private),
        clients=clients,
        length=upload_layout(method, exchange, context).length,
    )
