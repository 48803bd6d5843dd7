"""Encodes uploads as vectors of integers for secure sums, and defines the parameters of each sum.

Server and client both derive the encoding and the parameters from the run's settings, and neither
accepts them from the other.

If a release has noise to which several clients contribute, its values are already on a grid
(`fedsynth.privacy.randomness`), so that their encoding is exact. Without differential privacy, a
field is rounded to the finest grid that fits its range.
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
from fedsynth.privacy.randomness import finest

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
        """The number of integers in the vector."""
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
        """Decodes the sum of the clients' vectors to a message whose fields are sums, float64.

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
            if not bool((np.abs(sums) <= clients * form.bound).all()):
                raise SecureSumError(f"the sum of the field {name} is out of range")
            tensors[name] = torch.from_numpy(sums).view(shape).to(device)
            start = end
        return self.kind(**tensors)


@dataclass(frozen=True)
class MaskedUpload(Message):
    """A placeholder for an upload that the server has seen only with masks.

    The object contains the length of the vector, from which the server computes the data volume of
    a round.
    """

    length: int = public("the settings determine the size of an upload")

    @property
    def nbytes(self) -> int:
        return 8 * self.length

    @property
    def floats(self) -> int:
        return self.length


def upload_layout(method: Method, phase: str, context: RoundContext) -> UploadLayout:
    """Returns the public encoding of the uploads in one exchange of a round.

    Args:
        method: a method whose server sees only sums of uploads.
        phase: the exchange of the round, "first" or "main".
        context: the context of the round, with the settings that were agreed once all clients had
            joined.

    Raises:
        SecureSumError: if a field is not a tensor of known size.
    """
    rules = method.upload_rules(phase, 0, context)
    fields = {}
    for name, plan in method.sum_releases(phase, context).items():
        rule = rules.get(name)
        if not isinstance(rule, Array) or None in rule.shape:
            raise SecureSumError(f"the field {name} must have a fixed size in a secure sum")
        largest = max(abs(rule.low), abs(rule.high))
        private = plan in context.grids
        grid = context.grids[plan] if private else finest(largest, context.clients)
        form = FixedPoint(grid.bound, context.clients, grid.bits, wraps=private)
        fields[name] = (tuple(size or 0 for size in rule.shape), form)
    return UploadLayout(declared(method, phase, "upload"), fields)


def sum_terms(
    method: Method, phase: str, context: RoundContext, name: str, agreed: str
) -> SumTerms:
    """Returns the parameters of the secure sum in one exchange.

    All parties compute these parameters themselves.

    Clients are identified by their positions among the clients of the round.

    Args:
        method: a method whose server sees only sums of uploads.
        phase: the exchange of the round, "first" or "main".
        context: the context of the round, with the settings that were agreed once all clients had
            joined.
        name: the server's unique name for this sum.
        agreed: the hash of the run's settings.

    Raises:
        SecureSumError: if the name is invalid, or if fewer clients take part than a sum needs.
    """
    if len(name) != NAME_DIGITS or set(name) - set("0123456789abcdef"):
        raise SecureSumError(f"the name of a secure sum must have {NAME_DIGITS} hexadecimal digits")
    taking = len(context.active)
    private = context.privacy is not None
    about = f"{agreed} {context.round} {phase} {name}"
    return SumTerms(
        hashlib.sha256(about.encode()).digest(),
        threshold=fewest(method, taking, context.clients, private=private),
        clients=taking,
        length=upload_layout(method, phase, context).length,
    )
