"""The encoding of an upload as a vector of integers, for an exchange whose server may see only the
sum, and the terms of that sum. Both sides derive them from the run's settings, and neither takes
them from the other.

A release whose noise is shared is already on its grid (`fedsynth.privacy.grid`), so that its words
are exact. Without differential privacy a field is rounded to the finest grid for the range of its
rule.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedsynth.config.checks import fewest
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, public
from fedsynth.core.method import Method
from fedsynth.core.uploads import Array
from fedsynth.deployment.secure_aggregation.client import SumTerms
from fedsynth.deployment.secure_aggregation.primitives import FixedPoint, SecureSumError, Words
from fedsynth.federation.protocol import declared
from fedsynth.privacy.grid import finest

NAME_DIGITS = 32


@dataclass(frozen=True)
class Part:
    """One field of an upload.

    Args:
        name: of the field.
        shape: of its tensor.
        form: the fixed-point form of its numbers.
    """

    name: str
    shape: tuple[int, ...]
    form: FixedPoint

    @property
    def length(self) -> int:
        """The number of coordinates."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SumForm:
    """The encoding of an upload as words modulo 2^64, and of their sums as a message.

    Args:
        kind: the message's type.
        parts: its fields.
    """

    kind: type[Message]
    parts: tuple[Part, ...]

    @property
    def length(self) -> int:
        """The number of words of a vector."""
        return sum(part.length for part in self.parts)

    def encode(self, message: Message) -> Words:
        """Returns an upload's words, uint64 [length].

        Raises:
            SecureSumError: a value is out of its range.
        """
        parts = [
            part.form.encode(getattr(message, part.name).detach().cpu().double().numpy().ravel())
            for part in self.parts
        ]
        return np.concatenate(parts)

    def decode(self, encoded: Words, clients: int, device: torch.device) -> Message:
        """Returns the message whose fields are the sums, float64.

        Args:
            encoded: the sum of the clients' words.
            clients: the number of clients.
            device: the message's device.

        Raises:
            SecureSumError: the sum is out of the range for this number of clients.
        """
        fields: dict[str, Any] = {}
        start = 0
        for part in self.parts:
            sums = part.form.decode(encoded[start : start + part.length])
            if not bool((np.abs(sums) <= clients * part.form.bound).all()):
                raise SecureSumError(
                    f"the sum of {part.name} is out of the range that its clients may send"
                )
            fields[part.name] = torch.from_numpy(sums).view(part.shape).to(device)
            start += part.length
        return self.kind(**fields)


@dataclass(frozen=True)
class MaskedUpload(Message):
    """The length of a masked vector, which the server keeps for the volume of a round."""

    words: int = public("the settings determine the size of an upload")

    @property
    def nbytes(self) -> int:
        return 8 * self.words

    @property
    def floats(self) -> int:
        return self.words


def sum_form(method: Method, phase: str, context: RoundContext) -> SumForm:
    """Returns the form of an exchange's uploads; all of it is public.

    Args:
        method: one whose server sees only sums.
        phase: the exchange.
        context: the round's, with the run's terms.

    Raises:
        SecureSumError: a field is not a tensor of a known size.
    """
    rules = method.upload_rules(phase, 0, context)
    parts = []
    for name, plan in method.sum_releases(phase, context).items():
        rule = rules.get(name)
        if not isinstance(rule, Array) or None in rule.shape:
            raise SecureSumError(f"{name} has no known size, so it cannot be summed securely")
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
    """Returns the terms of an exchange's sum, which all parties know; clients are identified by
    their positions among the round's.

    Args:
        method: one whose server sees only sums.
        phase: the exchange.
        context: the round's, with the run's terms.
        name: the server's unique name of this sum.
        agreed: the hash of the run's settings.

    Raises:
        SecureSumError: an invalid name, or fewer clients take part than a sum needs.
    """
    if len(name) != NAME_DIGITS or set(name) - set("0123456789abcdef"):
        raise SecureSumError(f"the name of a sum must have {NAME_DIGITS} hexadecimal digits")
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
