"""The messages of a secure sum, and a client's state between them: JSON with bytes in hexadecimal,
and vectors. All received bytes are untrusted.
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
    """A message that checks its fields."""

    model_config = ConfigDict(
        strict=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex"
    )

    def to_bytes(self) -> bytes:
        """Returns its bytes."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, sent: bytes) -> Self:
        """Returns the message in received bytes.

        Raises:
            SecureSumError: it is another kind of message, or damaged.
        """
        try:
            return cls.model_validate_json(sent)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise SecureSumError(f"no {cls.__name__} of a secure sum: {first:.120}") from None


class Keys(Parcel):
    """A client's public keys for one sum.

    Args:
        client: its index.
        mask: for masks that it shares with others.
        channel: for messages from others through the server.
        commitment: SHA-256 of the seed of its own mask.
        signature: by its long-lived key, if the parties know these; otherwise empty.
    """

    client: Index
    mask: Key
    channel: Key
    commitment: Key
    signature: Annotated[bytes, Field(max_length=64)] = b""

    def signed(self, sum_name: bytes) -> bytes:
        """Returns the signed bytes."""
        return b"fedsynth keys %s %d " % (sum_name, self.client) + (
            self.mask + self.channel + self.commitment
        )


class Roster(Parcel):
    """All clients' keys, from the server.

    Args:
        keys: of each client, by number.
    """

    keys: dict[Index, Keys]


class Sealed(Parcel):
    """Sealed bytes by client: for each receiver, or from each sender.

    Args:
        of: sealed shares, by client.
    """

    of: dict[Index, bytes]


class Present(Parcel):
    """The clients whose masked vectors the server has; it asks for shares to remove the masks.

    Args:
        clients: their numbers, ascending.
    """

    clients: tuple[Index, ...]


class Shares(Parcel):
    """A client's shares that remove masks: one for each other client, and never two.

    Args:
        seeds: of own masks' seeds, of present clients.
        keys: of mask keys, of lost clients.
    """

    seeds: dict[Index, bytes]
    keys: dict[Index, bytes]


class SumState(Parcel):
    """A client's state in one sum, with its secrets: for a file that only the client reads.

    Args:
        number: the client's index.
        terms: the sum's name and sizes.
        mask_key: its private key for masks.
        channel_key: its private key for the channel.
        seed: of its own mask.
        step: the number of questions that it was asked.
        keys: all clients' public keys.
        shares: others' and its own, by client.
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
    """A client's masked vector.

    Args:
        vector: uint64 [n].
    """

    def __init__(self, vector: IntVector) -> None:
        self.vector = vector

    def to_bytes(self) -> bytes:
        """Returns its bytes."""
        return self.vector.astype("<u8").tobytes()

    @classmethod
    def from_bytes(cls, sent: bytes) -> Self:
        """Returns the vector in received bytes.

        Raises:
            SecureSumError: its last number is cut off.
        """
        try:
            return cls(np.frombuffer(sent, "<u8").astype(np.uint64))
        except ValueError:
            raise SecureSumError("no Masked of a secure sum: its numbers are cut off") from None
