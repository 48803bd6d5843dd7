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
from typing import Any, Protocol

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.errors import UploadRejectedError

LARGEST = 1e6
"""Largest magnitude of trained values and of sums over a client's examples. A learning network's
weights are below 1e3; with 1e6 no float32 sum or square over clients overflows."""
LARGEST_COUNT = 2.0**53
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
        low, high: bounds of its closed range.
    """

    low: float = 0.0
    high: float = LARGEST
    nbytes: int = 8

    def check(self, name: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise UploadRejectedError(name, f"must be a number, got {type(value).__name__}")
        if not abs(value) <= sys.float_info.max:  # an int may exceed every float
            raise UploadRejectedError(name, "is not finite", diverged=True)
        if not self.low <= value <= self.high:
            reason = f"is {value:.6g}, but must be in [{self.low:g}, {self.high:g}]"
            raise UploadRejectedError(name, reason)


@dataclass(frozen=True)
class Array:
    """A tensor.

    Args:
        shape: its sizes; if the first is None, it is at most `rows`.
        dtype: its type.
        low, high: bounds of the closed range of its values.
        rows: see `shape`.
        sums_to_one: whether rows are probabilities, up to rounding.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32
    low: float = -LARGEST
    high: float = LARGEST
    rows: int = 0
    sums_to_one: bool = False

    @classmethod
    def like(cls, tensor: Tensor) -> Array:
        """Returns the rule for a trained tensor of this shape and type; integers are counters."""
        if tensor.is_floating_point():
            return cls(tuple(tensor.shape), tensor.dtype)
        return cls(tuple(tensor.shape), tensor.dtype, low=0, high=LARGEST_COUNT)

    @property
    def nbytes(self) -> int:
        sizes = list(self.shape)
        if None in sizes:
            sizes[0] = self.rows
        return math.prod(sizes) * self.dtype.itemsize  # type: ignore[arg-type]

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
        check_values(name, value, self.low, self.high)
        if self.sums_to_one:
            error = float((value.double().sum(dim=-1) - 1).abs().max())
            if error > TOLERANCE:
                raise UploadRejectedError(name, f"has rows whose sums differ from 1 by {error:.3g}")

    def _fits(self, value: Tensor) -> bool:
        sizes = tuple(value.shape)
        if self.shape[:1] != (None,):
            return sizes == self.shape
        same_rows = len(sizes) == len(self.shape) and sizes[1:] == self.shape[1:]
        return same_rows and sizes[0] <= self.rows

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
        missing = sorted(self.arrays.keys() - value.keys())
        if missing and not self.partial:
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
            if not _plain(value):
                raise UploadRejectedError(name, "has no plain memory")
            if value.nbytes > self.nbytes:
                reason = f"has {value.nbytes} bytes, above the limit of {self.nbytes}"
                raise UploadRejectedError(name, reason)
            if value.dtype != torch.bool and value.numel():
                check_values(name, value, -math.inf, math.inf)
        elif value is not None:
            Number(-math.inf, math.inf).check(name, value)


def most_examples(client: int, context: RoundContext) -> float:
    """Returns the largest number of training examples that this client may report: n_k as declared
    when it joined; 1 with differential privacy, where all clients have equal weight."""
    if context.privacy is not None:
        return 1.0
    if context.sizes is None:
        return LARGEST_COUNT
    return float(context.sizes[client])


def model_rules(client: int, context: RoundContext) -> dict[str, Rule]:
    """Returns the rules of `ModelParameters`: this client's architecture, and a weight."""
    state = context.architecture_of(client).state_dict()
    return {"parameters": Named.like(state), "weight": Number(0.0, most_examples(client, context))}


def check_values(name: str, value: Tensor, minimum: float, maximum: float) -> None:
    """Checks in one pass that all values are finite and in a closed range.

    Raises:
        UploadRejectedError: they are not; names the tensor.
    """
    if value.is_complex():
        raise UploadRejectedError(name, "is complex")
    for bound in torch.aminmax(value.detach()):
        extreme = float(bound)
        if not math.isfinite(extreme):
            raise UploadRejectedError(name, "is not finite", diverged=True)
        if not minimum <= extreme <= maximum:
            reason = f"holds {extreme:.6g}, but must be in [{minimum:g}, {maximum:g}]"
            raise UploadRejectedError(name, reason, diverged=value.is_floating_point())


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
    spans = [(*_span(tensor), 0, name) for name, tensor in tensors if tensor.numel()]
    if other_tensors is not None:
        spans += [(*_span(tensor), 1, name) for name, tensor in other_tensors if tensor.numel()]
    spans.sort()
    for i, (device, _, end, group, name) in enumerate(spans):
        for j in range(i + 1, len(spans)):
            other_device, start, _, other_group, other_name = spans[j]
            if device != other_device or start >= end:
                break
            if other_tensors is None or group < other_group:
                return name, other_name
            if group > other_group:
                return other_name, name
    return None


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Returns a tensor's device, and its memory from the first byte to the byte after the last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in sizes)
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (reach + 1) * tensor.element_size()


def _plain(tensor: Tensor) -> bool:
    """Returns whether the tensor is strided and has data: neither sparse nor meta."""
    return tensor.layout == torch.strided and not tensor.is_meta


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
