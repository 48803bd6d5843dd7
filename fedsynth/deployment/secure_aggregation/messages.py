"""The messages of a secure sum, and the state that a client stores between them.

Masked vectors are sent as raw numbers, and all other messages as JSON with bytes in hexadecimal.
All received bytes are untrusted.
"""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsynth.deployment.secure_aggregation.primitives import KEY_BYTES, IntVector, SecureSumError

Index = Annotated[int, Field(ge=0, lt=10**9)]
Key = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Secret = Annotated[Key, Field(repr=False)]


class Parcel(BaseModel):
    """A message whose fields are checked when it is created."""

    model_config = ConfigDict(
        strict=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex"
    )

    def to_bytes(self) -> bytes:
        """Encodes the message as JSON bytes."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, sent: bytes) -> Self:
        """Decodes a message from received bytes.

        Raises:
            SecureSumError: if the bytes are damaged, or are another kind of message.
        """
        try:
            return cls.model_validate_json(sent)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise SecureSumError(
                f"received bytes that are not a {cls.__name__} message of a secure sum: "
                f"{first:.120}"
            ) from None


class Keys(Parcel):
    """A client's public keys for one secure sum.

    Args:
        client: the index of the client.
        mask: the public key for pairwise masks.
        channel: the public key for encrypted messages that the server passes on between clients.
        commitment: the SHA-256 hash of the seed of the client's self mask.
        signature: the signature with the client's identity key. It is empty if the parties use no
            identity keys.
    """

    client: Index
    mask: Key
    channel: Key
    commitment: Key
    signature: Annotated[bytes, Field(max_length=64)] = b""

    def signed(self, sum_name: bytes) -> bytes:
        """Returns the bytes that the signature covers."""
        return b"fedsynth keys %s %d " % (sum_name, self.client) + (
            self.mask + self.channel + self.commitment
        )


class Roster(Parcel):
    """The public keys of all clients, which the server sends to each client.

    Args:
        keys: the public keys, by client.
    """

    keys: dict[Index, Keys]


class Sealed(Parcel):
    """Encrypted shares, either one for each receiver or one from each sender.

    Args:
        of: the encrypted shares, by client.
    """

    of: dict[Index, bytes]


class Present(Parcel):
    """The clients whose masked vectors have arrived. With this message, the server asks for shares
    that remove the masks.

    Args:
        clients: the indices of the clients, ascending.
    """

    clients: tuple[Index, ...]


class Shares(Parcel):
    """The shares that one client sends so that the server can remove masks. For each client it
    contains one share, never both kinds.

    Args:
        seeds: for each present client, a share of the seed of its self mask.
        keys: for each failed client, a share of the key of its pairwise masks.
    """

    seeds: dict[Index, bytes]
    keys: dict[Index, bytes]


class SumState(Parcel):
    """A client's state in one secure sum. It contains secrets, so its file may be read only by the
    client.

    Args:
        number: the index of the client.
        terms: the name and the sizes of the sum.
        mask_key: the client's private key for pairwise masks.
        channel_key: the client's private key for encrypted messages to other clients.
        seed: the seed of the client's self mask.
        step: the number of questions that the client has received.
        keys: the public keys of all clients.
        shares: the shares that this client holds, including those of its own secrets, by client.
    """

    number: Index
    terms: str
    mask_key: Secret
    channel_key: Secret
    seed: Secret
    step: int = 0
    keys: dict[Index, Keys] = {}
    shares: dict[Index, bytes] = Field(default={}, repr=False)


class Masked:
    """The masked vector of a client.

    Args:
        vector: uint64 [n].
    """

    def __init__(self, vector: IntVector) -> None:
        self.vector = vector

    def to_bytes(self) -> bytes:
        """Encodes the vector as bytes."""
        return self.vector.astype("<u8").tobytes()

    @classmethod
    def from_bytes(cls, sent: bytes) -> Self:
        """Decodes a vector from received bytes.

        Raises:
            SecureSumError: if the last number is incomplete.
        """
        try:
            return cls(np.frombuffer(sent, "<u8").astype(np.uint64))
        except ValueError:
            raise SecureSumError(
                "received a masked vector whose last number is incomplete"
            ) from None
