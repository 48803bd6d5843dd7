"""Validation of uploads: a rule for each field of a message.

A method declares once what its clients may send (`Method.upload_rules`); the check of an upload and
its largest size on the wire both follow from that. All rules are public: they come from settings,
the architecture, and the clients' declarations at joining. A rule sees one value of one client, so
the client whose upload breaks a rule is at fault.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.errors import UploadRejectedError

LARGEST = 1e6
"""Largest magnitude of trained values and of sums over a client's examples. A learning network's
weights are below 1e3; with 1e6 no float32 sum or square over clients overflows."""
WHOLE = 2.0**53
"""Largest counter: float64 represents all integers up to it exactly."""
HEADER_BYTES = 64 * 2**10
NAME_BYTES = 512
"""Largest size of a packed message's header, and of each tensor's entry in it."""
FREE_BYTES = 64 * 2**20
"""Largest size of a field for which its method has no rule."""


class Rule(Protocol):
    """The rule for one field of an upload."""

    @property
    def nbytes(self) -> int:
        """Largest size of the field as sent, in bytes."""

    def check(self, name: str, value: Any) -> None:
        """Raises UploadRejectedError, which names the field, if the value breaks the rule."""


@dataclass(frozen=True)
class Number:
    """A plain number.

    Args:
        least, most: bounds of its closed range.
    """

    least: float = 0.0
    most: float = LARGEST
    nbytes: int = 8

    def check(self, name: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise UploadRejectedError(name, f"must be a number, got {type(value).__name__}")
        if not abs(value) <= sys.float_info.max:  # an int may exceed every float
            raise UploadRejectedError(name, "is not finite", diverged=True)
        if not self.least <= value <= self.most:
            raise UploadRejectedError(
                name, f"is {value:.6g}, but must be in [{self.least:g}, {self.most:g}]"
            )


@dataclass(frozen=True)
class Array:
    """A tensor.

    Args:
        shape: its sizes; if the first is None, it is at most `rows`.
        dtype: its type.
        least, most: bounds of the closed range of its values.
        rows: see `shape`.
        sums_to_one: whether rows are probabilities, up to rounding.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32
    least: float = -LARGEST
    most: float = LARGEST
    rows: int = 0
    sums_to_one: bool = False

    @classmethod
    def like(cls, tensor: Tensor) -> Array:
        """Returns the rule for a trained tensor of this shape and type; integers are counters."""
        if tensor.is_floating_point():
            return cls(tuple(tensor.shape), tensor.dtype)
        return cls(tuple(tensor.shape), tensor.dtype, least=0, most=WHOLE)

    @property
    def nbytes(self) -> int:
        sizes = [self.rows if size is None else size for size in self.shape]
        return math.prod(sizes) * self.dtype.itemsize

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise UploadRejectedError(name, f"must be a tensor, got {type(value).__name__}")
        if not _plain(value):
            raise UploadRejectedError(name, "has no plain memory")
        if value.dtype != self.dtype or not self._fits(value):
            raise UploadRejectedError(
                name,
                f"is {_short(value.dtype)} {list(value.shape)}, but must be "
                f"{_short(self.dtype)} {self._sizes()}",
            )
        if value.dtype == torch.bool or not value.numel():
            return
        check_values(name, value, self.least, self.most)
        if self.sums_to_one:
            off = float((value.double().sum(dim=-1) - 1).abs().max())
            if off > TOLERANCE:
                raise UploadRejectedError(name, f"has rows whose sums differ from 1 by {off:.3g}")

    def _fits(self, value: Tensor) -> bool:
        sizes = tuple(value.shape)
        if len(sizes) != len(self.shape):
            return False
        if self.shape and self.shape[0] is None:
            return sizes[0] <= self.rows and sizes[1:] == self.shape[1:]
        return sizes == self.shape

    def _sizes(self) -> str:
        sizes = [f"at most {self.rows}" if size is None else str(size) for size in self.shape]
        return f"[{', '.join(sizes)}]"


TOLERANCE = 1e-3
"""Tolerance of a sum of probabilities: float32's rounding is below 1e-5, half precision's at
1e-3."""


@dataclass(frozen=True)
class Named:
    """Named tensors.

    Args:
        arrays: each name's rule.
        partial: whether names may be missing.
    """

    arrays: Mapping[str, Array]
    partial: bool = False

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor]) -> Named:
        """Returns the rule for trained tensors of these names, shapes and types."""
        return cls({name: Array.like(tensor) for name, tensor in tensors.items()})

    @property
    def nbytes(self) -> int:
        return sum(rule.nbytes + NAME_BYTES for rule in self.arrays.values())

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise UploadRejectedError(
                name, f"must be a mapping of names, got {type(value).__name__}"
            )
        extra = sorted(map(str, value.keys() - self.arrays.keys()))
        if extra:
            raise UploadRejectedError(name, f"has {extra[0]!r:.80}, which was not requested")
        missing = [] if self.partial else sorted(self.arrays.keys() - value.keys())
        if missing:
            raise UploadRejectedError(name, f"lacks {missing[0]!r:.80}")
        for key, tensor in value.items():
            self.arrays[key].check(f"{name}.{key}", tensor)


@dataclass(frozen=True)
class Free:
    """Any finite values: the rule for a custom method's field that declares no other."""

    nbytes: int = FREE_BYTES

    def check(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.check(f"{name}.{key}", item)
        elif isinstance(value, Tensor):
            size = value.numel() * value.element_size()
            if not _plain(value):
                raise UploadRejectedError(name, "has no plain memory")
            if size > self.nbytes:
                raise UploadRejectedError(
                    name, f"has {size} bytes, above the limit of {self.nbytes}"
                )
            if value.dtype != torch.bool and value.numel():
                check_values(name, value, -math.inf, math.inf)
        elif value is not None:
            Number(-math.inf, math.inf).check(name, value)


def most_examples(client: int, context: RoundContext) -> float:
    """Returns the largest number of training examples that this client may report: n_k as declared
    when it joined; 1 with differential privacy, where all clients have equal weight."""
    if context.privacy is not None:
        return 1.0
    return WHOLE if context.sizes is None else float(context.sizes[client])


def model_rules(client: int, context: RoundContext) -> dict[str, Rule]:
    """Returns the rules of `ModelParameters`: this client's architecture, and a weight."""
    state = context.architecture_of(client).state_dict()
    return {
        "parameters": Named.like(state),
        "weight": Number(0.0, most_examples(client, context)),
    }


def check_values(name: str, value: Tensor, minimum: float, maximum: float) -> None:
    """Checks in one pass that all values are finite and in a closed range.

    Raises:
        UploadRejectedError: they are not; names the tensor.
    """
    if value.is_complex():
        raise UploadRejectedError(name, "is complex")
    low, high = (float(end) for end in torch.aminmax(value.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UploadRejectedError(name, "is not finite", diverged=True)
    if low < minimum or high > maximum:
        worst = low if low < minimum else high
        raise UploadRejectedError(
            name,
            f"holds {worst:.6g}, but must be in [{minimum:g}, {maximum:g}]",
            diverged=value.is_floating_point(),
        )


def check_fields(upload: Message, rules: Mapping[str, Rule]) -> None:
    """Checks each field against its rule, and that no two entries share memory.

    Raises:
        UploadRejectedError: names the field.
    """
    for f in fields(upload):
        rules.get(f.name, FREE).check(f.name, getattr(upload, f.name))
    shared = overlap(upload.arrays())
    if shared is not None:
        raise UploadRejectedError(shared[0], f"shares memory with {shared[1]}")


FREE = Free()


def most_bytes(kind: type[Message], rules: Mapping[str, Rule]) -> int:
    """Returns the largest size of a packed upload of this type in bytes, header included."""
    sizes = [rules.get(f.name, FREE).nbytes + NAME_BYTES for f in fields(kind)]
    return HEADER_BYTES + sum(sizes)


def overlap(
    tensors: Iterable[tuple[str, Tensor]], other_tensors: Iterable[tuple[str, Tensor]] | None = None
) -> tuple[str, str] | None:
    """Returns the names of two tensors that share memory; None: no two do.

    Adjacent slices of one storage share none.

    Args:
        tensors: named tensors.
        other_tensors: named tensors that one of the two must come from; None: both come from
            `tensors`.
    """
    groups = (tensors,) if other_tensors is None else (tensors, other_tensors)
    spans = sorted(
        (_span(tensor), number, name)
        for number, group in enumerate(groups)
        for name, tensor in group
        if tensor.numel()
    )
    furthest: dict[int, tuple[_Span, str]] = {}  # the furthest-reaching span of each group so far
    for span, number, name in spans:
        previous = furthest.get(number if other_tensors is None else 1 - number)
        if (
            previous is not None
            and span.device == previous[0].device
            and span.start < previous[0].end
        ):
            pair = (name, previous[1]) if number == 0 else (previous[1], name)
            return pair
        current = furthest.get(number)
        if current is None or (span.device, span.end) > (current[0].device, current[0].end):
            furthest[number] = (span, name)
    return None


class _Span(NamedTuple):
    """A tensor's memory, from its first byte to the byte after its last."""

    device: str
    start: int
    end: int


def _span(tensor: Tensor) -> _Span:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in sizes)
    start = tensor.data_ptr()
    return _Span(str(tensor.device), start, start + (reach + 1) * tensor.element_size())


def _plain(tensor: Tensor) -> bool:
    """Returns whether the tensor is strided and has data: neither sparse nor meta."""
    return tensor.layout == torch.strided and not tensor.is_meta


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
