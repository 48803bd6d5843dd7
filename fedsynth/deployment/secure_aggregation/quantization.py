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
from fedsynth.deployment.secure_aggregation.primitives import FixedPoint, IntVector, SecureSumError
from fedsynth.federation.protocol import declared
from fedsynth.privacy.grid import finest

NAME_DIGITS = 32


@dataclass(frozen=True)
class UploadLayout:
    """The encoding of an upload as integers modulo 2^64, and of their sums as a message.

    Args:
        kind: the message's type.
        fields: name -> shape of the tensor, and the fixed-point form of its numbers.
    """

    kind: type[Message]
    fields: dict[str, tuple[tuple[int, ...], FixedPoint]]

    @property
    def length(self) -> int:
        """The number of coordinates."""
        return sum(math.prod(shape) for shape, _ in self.fields.values())

    def encode(self, message: Message) -> IntVector:
        """Returns an upload as a vector, uint64 [length].

        Raises:
            SecureSumError: a value is out of its range.
        """
        vectors = []
        for name, (_, form) in self.fields.items():
            values = getattr(message, name).detach().cpu().double()
            vectors.append(form.encode(values.numpy().ravel()))
        return np.concatenate(vectors)

    def decode(self, encoded: IntVector, clients: int, device: torch.device) -> Message:
        """Returns the message whose fields are the sums, float64.

        Args:
            encoded: the sum of the clients' vectors.
            clients: the number of clients.
            device: the message's device.

        Raises:
            SecureSumError: the sum is out of the range for this number of clients.
        """
        tensors: dict[str, Any] = {}
        start = 0
        for name, (shape, form) in self.fields.items():
            end = start + math.prod(shape)
            sums = form.decode(encoded[start:end])
            if not bool((np.abs(sums) <= clients * form.bound).all()):
                raise SecureSumError(f"the sum of {name} is out of its clients' range")
            tensors[name] = torch.from_numpy(sums).view(shape).to(device)
            start = end
        return self.kind(**tensors)


@dataclass(frozen=True)
class MaskedUpload(Message):
    """The length of a masked vector, which the server keeps for the volume of a round."""

    length: int = public("the settings determine the size of an upload")

    @property
    def nbytes(self) -> int:
        return 8 * self.length

    @property
    def floats(self) -> int:
        return self.length


def upload_layout(method: Method, phase: str, context: RoundContext) -> UploadLayout:
    """Returns the form of an exchange's uploads; all of it is public.

    Args:
        method: one whose server sees only sums.
        phase: the exchange.
        context: the round's, with the run's terms.

    Raises:
        SecureSumError: a field is not a tensor of a known size.
    """
    rules = method.upload_rules(phase, 0, context)
    fields = {}
    for name, plan in method.sum_releases(phase, context).items():
        rule = rules.get(name)
        if not isinstance(rule, Array) or None in rule.shape:
            raise SecureSumError(f"{name} has no known size, so it cannot be summed securely")
        largest = max(abs(rule.low), abs(rule.high))
        private = plan in context.grids
        grid = context.grids[plan] if private else finest(largest, context.clients)
        form = FixedPoint(grid.bound, context.clients, grid.bits, wraps=private)
        fields[name] = (tuple(size or 0 for size in rule.shape), form)
    return UploadLayout(declared(method, phase, "upload"), fields)


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
        length=upload_layout(method, phase, context).length,
    )
