"""The messages between clients and server in a secure sum: JSON facts and words, as frames
(`fedsynth.deployment.frames`). All received bytes are untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from fedsynth.deployment.frames import Frame
from fedsynth.deployment.secure_aggregation.primitives import SecureSumError, Words
from fedsynth.errors import MessageError


class Parcel:
    """A message; subclasses define its facts and payload."""

    kind = ""

    def to_bytes(self) -> bytes:
        """Returns its bytes."""
        facts, payload = self._parts()
        return Frame(self.kind, facts, payload).to_bytes()

    @classmethod
    def from_bytes(cls, sent: bytes) -> Self:
        """Returns the message in received bytes.

        Raises:
            SecureSumError: it is another kind of message, or damaged.
        """
        try:
            frame = Frame.from_bytes(sent)
            if frame.kind != cls.kind:
                raise MessageError(f"it is {frame.kind!r:.40}")
            return cls._of(frame.facts, frame.payload)
        except (MessageError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise SecureSumError(f"no {cls.kind} of a secure sum: {error!s:.120}") from None

    def _parts(self) -> tuple[Mapping[str, Any], bytes]:
        raise NotImplementedError  # abstract

    @classmethod
    def _of(cls, facts: Mapping[str, Any], payload: bytes) -> Self:
        raise NotImplementedError  # abstract


@dataclass(frozen=True)
class Keys(Parcel):
    """A client's public keys for one sum.

    Args:
        client: its index.
        mask: for masks that it shares with others, 32 bytes.
        channel: for messages from others through the server, 32 bytes.
        commitment: SHA-256 of the seed of its own mask.
        signature: by its long-lived key, if the parties know these; otherwise empty.
    """

    kind = "keys"
    client: int
    mask: bytes
    channel: bytes
    commitment: bytes
    signature: bytes = b""

    def signed(self, sum_name: bytes) -> bytes:
        """Returns the signed bytes."""
        return b"fedsynth keys %s %d " % (sum_name, self.client) + (
            self.mask + self.channel + self.commitment
        )

    def _parts(self) -> tuple[Mapping[str, Any], bytes]:
        return {"client": self.client}, (
            self.mask + self.channel + self.commitment + self.signature
        )

    @classmethod
    def _of(cls, facts: Mapping[str, Any], payload: bytes) -> Self:
        if len(payload) not in (96, 160):
            raise ValueError("keys have 96 bytes, and 64 of a signature")
        client = _number(facts["client"])
        return cls(client, payload[:32], payload[32:64], payload[64:96], payload[96:])


@dataclass(frozen=True)
class Roster(Parcel):
    """All clients' keys, from the server.

    Args:
        keys: of each client, by number.
    """

    kind = "roster"
    keys: Mapping[int, Keys]

    def _parts(self) -> tuple[Mapping[str, Any], bytes]:
        return _hex({k: client_keys.to_bytes() for k, client_keys in self.keys.items()}), b""

    @classmethod
    def _of(cls, facts: Mapping[str, Any], payload: bytes) -> Self:
        return cls({k: Keys.from_bytes(packed) for k, packed in _bytes(facts).items()})


@dataclass(frozen=True)
class Sealed(Parcel):
    """Sealed bytes by client: for each receiver, or from each sender.

    Args:
        of: sealed shares, by client.
    """

    kind = "sealed"
    of: Mapping[int, bytes]

    def _parts(self) -> tuple[Mapping[str, Any], bytes]:
        return _hex(self.of), b""

    @classmethod
    def _of(cls, facts: Mapping[str, Any], payload: bytes) -> Self:
        return cls(_bytes(facts))


@dataclass(frozen=True, eq=False)
class Masked(Parcel):
    """A client's masked vector.

    Args:
        words: uint64 [n].
    """

    kind = "masked"
    words: Words

    def _parts(self) -> tuple[Mapping[str, Any], bytes]:
        return {}, self.words.astype("<u8").tobytes()

    @classmethod
    def _of(cls, facts: Mapping[str, Any], payload: bytes) -> Self:
        return cls(np.frombuffer(payload, "<u8").astype(np.uint64))


@dataclass(frozen=True)
class Present(Parcel):
    """The clients whose masked vectors the server has; it asks for shares to remove the masks.

    Args:
        clients: their numbers, ascending.
    """

    kind = "present"
    clients: tuple[int, ...]

    def _parts(self) -> tuple[Mapping[str, Any], bytes]:
        return {"clients": list(self.clients)}, b""

    @classmethod
    def _of(cls, facts: Mapping[str, Any], payload: bytes) -> Self:
        return cls(tuple(_number(client) for client in facts["clients"]))


@dataclass(frozen=True)
class Shares(Parcel):
    """A client's shares that remove masks: one for each other client, and never two.

    Args:
        own: of own masks' seeds, of present clients.
        keys: of mask keys, of lost clients.
    """

    kind = "shares"
    own: Mapping[int, bytes]
    keys: Mapping[int, bytes]

    def _parts(self) -> tuple[Mapping[str, Any], bytes]:
        return {"own": _hex(self.own), "keys": _hex(self.keys)}, b""

    @classmethod
    def _of(cls, facts: Mapping[str, Any], payload: bytes) -> Self:
        return cls(_bytes(facts["own"]), _bytes(facts["keys"]))


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a client's number, got {value!r:.40}")
    return value


def _hex(of: Mapping[int, bytes]) -> dict[str, str]:
    """Returns bytes by client in JSON form."""
    return {str(client): content.hex() for client, content in of.items()}


def _bytes(facts: Mapping[str, Any]) -> dict[int, bytes]:
    """Returns the inverse of `_hex`."""
    return {_numbered(client): bytes.fromhex(content) for client, content in facts.items()}


def _numbered(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(f"a client's number, got {text!r:.40}")
    return int(text)
