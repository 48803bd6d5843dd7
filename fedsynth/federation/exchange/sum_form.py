"""How an upload whose sum alone may be seen is a vector of whole numbers, and what its sum needs:
both sides derive it from the run's settings, and neither takes it from the other.

A release whose noise is shared stands on its grid already (`fedsynth.privacy.grid`), so that its
words are exact. Without differential privacy a field is rounded to the finest grid for what its
rule allows.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import LENGTH_BYTES, Message, public
from fedsynth.core.method import Method
from fedsynth.core.uploads import Array
from fedsynth.errors import MessageError
from fedsynth.federation.exchange.protocol import declared
from fedsynth.federation.secure_sums.client import SumTerms
from fedsynth.federation.secure_sums.primitives import FixedPoint, SecureSumError, Words
from fedsynth.federation.terms.checks import fewest
from fedsynth.privacy.grid import finest

SUM = "sum"
"""A fact of the frames of a sum: what its server calls it."""
NAME_DIGITS = 32


@dataclass(frozen=True)
class Part:
    """One field of an upload.

    Args:
        name: of the field.
        shape: its tensor's.
        form: its numbers'.
    """

    name: str
    shape: tuple[int, ...]
    form: FixedPoint

    @property
    def length(self) -> int:
        """Coordinates."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SumForm:
    """An upload as words modulo 2^64, and sums of them as a message.

    Args:
        kind: the message's type.
        parts: its fields.
    """

    kind: type[Message]
    parts: tuple[Part, ...]

    @property
    def length(self) -> int:
        """Words of a vector."""
        return sum(part.length for part in self.parts)

    def encode(self, message: Message) -> Words:
        """An upload's words, uint64 [length].

        Raises:
            SecureSumError: a value is beyond what it may be.
        """
        words = [
            part.form.encode(getattr(message, part.name).detach().cpu().double().numpy().ravel())
            for part in self.parts
        ]
        return np.concatenate(words)

    def decode(self, words: Words, clients: int, device: torch.device) -> Message:
        """The message whose fields are the sums, float64.

        Args:
            words: the sum of the clients' words.
            clients: how many they are.
            device: where it is put.

        Raises:
            SecureSumError: the sum is beyond what so many clients may send.
        """
        found: dict[str, Any] = {}
        start = 0
        for part in self.parts:
            sums = part.form.decode(words[start : start + part.length])
            if not bool((np.abs(sums) <= clients * part.form.bound).all()):
                raise SecureSumError(f"the sum of {part.name} is beyond what its clients may send")
            found[part.name] = torch.from_numpy(sums).view(part.shape).to(device)
            start += part.length
        return self.kind(**found)


@dataclass(frozen=True)
class MaskedUpload(Message):
    """Of a masked vector how long it was: what a server keeps of it, for the volume of a round."""

    words: int = public("how long an upload is follows from the settings")

    @property
    def nbytes(self) -> int:
        return 8 * self.words

    @property
    def floats(self) -> int:
        return self.words


def sum_form(method: Method, phase: str, context: RoundContext) -> SumForm:
    """The form of an exchange's uploads; all of it is public.

    Args:
        method: one whose server sees sums alone.
        phase: the exchange.
        context: the round's, with the run's terms.

    Raises:
        SecureSumError: a field is no tensor of a known size.
    """
    rules = method.upload_rules(phase, 0, context)
    parts = []
    for name, plan in method.sum_releases(phase, context).items():
        rule = rules.get(name)
        if not isinstance(rule, Array) or None in rule.shape:
            raise SecureSumError(f"{name} has no known size, and cannot be added up unseen")
        largest = max(abs(rule.least), abs(rule.most))
        grid = context.grids.get(plan)
        private = grid is not None
        grid = grid or finest(largest, context.clients)
        form = FixedPoint(grid.bound, context.clients, grid.bits, wraps=private)
        parts.append(Part(name, tuple(size or 0 for size in rule.shape), form))
    return SumForm(declared(method, phase, "upload"), tuple(parts))


def sum_terms(
    method: Method, phase: str, context: RoundContext, name: str, agreed: str
) -> SumTerms:
    """What all parties of an exchange's sum know before; clients are known by their places among
    the round's.

    Args:
        method: one whose server sees sums alone.
        phase: the exchange.
        context: the round's, with the run's terms.
        name: what the server calls this sum; no other one of the run has it.
        agreed: the hash of the run's settings.

    Raises:
        SecureSumError: no name, or fewer clients take part than a sum needs.
    """
    if len(name) != NAME_DIGITS or set(name) - set("0123456789abcdef"):
        raise SecureSumError(f"a sum's name has {NAME_DIGITS} hexadecimal digits")
    taking = len(context.active)
    private = context.privacy is not None
    about = f"{agreed} {context.round} {phase} {name}"
    return SumTerms(
        hashlib.sha256(about.encode()).digest(),
        threshold=fewest(method, taking, context.clients, private=private),
        clients=taking,
        length=sum_form(method, phase, context).length,
        honest=method.noise_shares(context.clients),
    )


def with_parcel(parcel: bytes, message: bytes) -> bytes:
    """A step's payload: what others have closed for this client, and the request.

    >>> parted(with_parcel(b"shares", b"request"))
    (b'shares', b'request')
    """
    return len(parcel).to_bytes(LENGTH_BYTES, "little") + parcel + message


def parted(payload: bytes) -> tuple[bytes, bytes]:
    """The two parts of a step's payload.

    Raises:
        MessageError: it has none.
    """
    end = LENGTH_BYTES + int.from_bytes(payload[:LENGTH_BYTES], "little")
    if not LENGTH_BYTES < end <= len(payload):
        raise MessageError("the request of a sum is cut off")
    return payload[LENGTH_BYTES:end], payload[end:]
