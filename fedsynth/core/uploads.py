"""Validation of clients' uploads and the server's messages.

A method declares a rule for each upload field (`Method.upload_rules`). The rules determine both the
validation and the largest wire size. All rules are public, because they depend only on settings, on
the architecture and on what the clients declare when they join. Each rule checks one value of one
client. An upload that breaks a rule is therefore always the fault of the client that sent it.

The module also checks the server's messages. A client makes these checks before it computes on
private data. The privacy guarantee holds for every message, so these checks are a second line of
defence. An honest server never sends weights that are not finite, or larger than those of any
trained network. A malicious server could use such weights to amplify rounding errors
(docs/threat-model.md, "Malicious servers").
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.errors import RequestRefusedError, UploadRejectedError

# The largest magnitude of trained values and of sums over a client's examples. The weights of a
# network that learns stay below 1e3. With a bound of 1e6 no float32 sum or square over clients
# overflows.
LARGEST = 1e6
# The largest allowed value of a counter. float64 represents all integers up to this value exactly.
LARGEST_COUNT = 2.0**53

# The largest sizes in bytes of one tensor's entry in the header of a packed message (`NAME_BYTES`)
# and of the rest of the header.
HEADER_BYTES = 64 * 2**10
NAME_BYTES = 512
# The largest size in bytes of a field for which the method declares no rule.
FREE_BYTES = 64 * 2**20


class Rule(Protocol):
    """Base class for the rules that validate one field of an upload."""

    @property
    def nbytes(self) -> int:
        """The field's maximum size in a sent message, in bytes."""

    def check(self, name: str, value: Any) -> None:
        """Raises UploadRejectedError with the field's name if the value breaks the rule."""


@dataclass(frozen=True)
class Number:
    """A validation rule for a number field.

    Args:
        low, high: the smallest and the largest allowed value.
        is_whole: whether the value must be a whole number.
    """

    low: float = 0.0
    high: float = LARGEST
    is_whole: bool = False
    nbytes: int = 8

    def check(self, name: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise UploadRejectedError(name, f"must be a number, got {type(value).__name__}")
        if not abs(value) <= sys.float_info.max:  # an int may exceed every float
            raise UploadRejectedError(name, "is not finite", diverged=True)
        if not self.low <= value <= self.high:
            reason = f"must be between {self.low:g} and {self.high:g}, got {value:.6g}"
            raise UploadRejectedError(name, reason)
        if self.is_whole and value != int(value):
            raise UploadRejectedError(name, f"must be a whole number, got {value:.6g}")


@dataclass(frozen=True)
class Array:
    """A validation rule for a tensor field.

    Args:
        shape: the required shape. If the first size is None, it may be anything up to `rows`.
        dtype: the required dtype.
        low, high: the smallest and the largest allowed value.
        rows: the largest first size, if `shape` starts with None.
        sums_to_one: whether the values along the last dimension must sum to 1, up to rounding, as
            probabilities do.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32
    low: float = -LARGEST
    high: float = LARGEST
    rows: int = 0
    sums_to_one: bool = False

    @classmethod
    def like(cls, tensor: Tensor) -> Array:
        """Creates the rule for an uploaded tensor with the shape and dtype of `tensor`.

        Integer tensors are treated as counters.
        """
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
        require_dense(name, value)
        if value.dtype != self.dtype or not self._fits(value):
            raise UploadRejectedError(
                name,
                f"must be a {_short(self.dtype)} tensor of shape {self._sizes()}, got "
                f"{_short(value.dtype)} of shape {list(value.shape)}",
            )
        check_values(name, value, self.low, self.high)
        if self.sums_to_one and value.numel():
            error = float((value.double().sum(dim=-1) - 1).abs().max())
            if error > TOLERANCE:
                raise UploadRejectedError(
                    name,
                    "must contain rows that sum to 1, but a row's sum differs from 1 by "
                    f"{error:.3g}",
                )

    def _fits(self, value: Tensor) -> bool:
        sizes = value.shape
        if self.shape[:1] != (None,):
            return sizes == self.shape
        same_rows = len(sizes) == len(self.shape) and sizes[1:] == self.shape[1:]
        return same_rows and sizes[0] <= self.rows

    def _sizes(self) -> str:
        sizes = [f"at most {self.rows}" if size is None else str(size) for size in self.shape]
        return f"[{', '.join(sizes)}]"


# The tolerance for the sum of probabilities. The rounding error is below 1e-5 for float32, and
# about 1e-3 for half precision.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Named:
    """A validation rule for a field of named tensors.

    Args:
        arrays: the rule for each name.
        partial: whether names may be missing.
    """

    arrays: Mapping[str, Array]
    partial: bool = False

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor]) -> Named:
        """Creates the rule for uploaded tensors with given names, shapes and dtypes."""
        return cls({name: Array.like(tensor) for name, tensor in tensors.items()})

    @property
    def nbytes(self) -> int:
        return sum(rule.nbytes + NAME_BYTES for rule in self.arrays.values())

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise UploadRejectedError(
                name, f"must be a mapping of names to tensors, got {type(value).__name__}"
            )
        if value.keys() != self.arrays.keys():
            extra = sorted(map(str, value.keys() - self.arrays.keys()))
            if extra:
                raise UploadRejectedError(name, f"contains the unknown entry {extra[0]!r:.80}")
            missing = sorted(self.arrays.keys() - value.keys())
            if not self.partial:
                raise UploadRejectedError(name, f"is missing the entry {missing[0]!r:.80}")
        for key, tensor in value.items():
            self.arrays[key].check(f"{name}.{key}", tensor)


@dataclass(frozen=True)
class Free:
    """A validation rule that allows all finite values.

    It applies to the fields of a custom method that declares no rule for them.
    """

    nbytes: int = FREE_BYTES

    def check(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.check(f"{name}.{key}", item)
        elif isinstance(value, Tensor):
            require_dense(name, value)
            if value.nbytes > self.nbytes:
                reason = f"must have at most {self.nbytes} bytes, got {value.nbytes}"
                raise UploadRejectedError(name, reason)
            check_values(name, value, -math.inf, math.inf)
        elif value is not None:
            Number(-math.inf, math.inf).check(name, value)


def most_examples(client: int, context: RoundContext) -> float:
    """Returns the maximum number of training examples that a client may report.

    This is the number n_k that the client declared when it joined. With differential privacy it is
    1, because all clients have the same weight.
    """
    if context.privacy is not None:
        return 1.0
    if context.sizes is None:
        return LARGEST_COUNT
    return float(context.sizes[client])


def model_rules(client: int, context: RoundContext) -> dict[str, Rule]:
    """Returns the rules for the fields of a client's `ModelParameters` upload.

    The parameters must match the client's architecture, and the weight must not exceed
    `most_examples`. With differential privacy, it is 0 or 1.
    """
    parameters = _rule_of(context.architecture_of(client))
    is_private = context.privacy is not None
    weight = Number(0.0, most_examples(client, context), is_whole=is_private)
    return {"parameters": parameters, "weight": weight}


@lru_cache(maxsize=4)  # a server calls it for each client's upload
def _rule_of(network: nn.Module) -> Named:
    return Named.like(network.state_dict())


def check_values(name: str, value: Tensor, minimum: float, maximum: float) -> None:
    """Checks that all values of a tensor are finite and within a closed range.

    The tensor is read only once.

    Raises:
        UploadRejectedError: a value is not finite or outside the range. The error names the tensor.
    """
    if value.dtype == torch.bool or not value.numel():
        return
    if value.is_complex():
        raise UploadRejectedError(name, "must be real, got complex numbers")
    low, high = torch.aminmax(value.detach())
    for extreme in (low.item(), high.item()):
        if not math.isfinite(extreme):
            raise UploadRejectedError(name, "is not finite", diverged=True)
        if not minimum <= extreme <= maximum:
            reason = f"must have values between {minimum:g} and {maximum:g}, got {extreme:.6g}"
            raise UploadRejectedError(name, reason, diverged=value.is_floating_point())


def check_type(upload: object, kind: type) -> None:
    """Raises UploadRejectedError if an upload has another type than `kind`."""
    if type(upload) is not kind:
        reason = f"must have the type {kind.__name__}, got {type(upload).__name__}"
        raise UploadRejectedError("the message", reason)


def check_fields(
    upload: Message, rules: Mapping[str, Rule], server_memory: Iterable[Span] = ()
) -> None:
    """Checks each field of an upload against a rule. Tensors that share memory are refused.

    Args:
        upload: the upload.
        rules: a rule for each field.
        server_memory: the memory of the server's tensors (`memory_spans`).

    Raises:
        UploadRejectedError: a field breaks its rule, or a tensor shares memory with another tensor
            of the upload or with `server_memory`. The error names the field.
    """
    for f in fields(upload):
        rules.get(f.name, FREE).check(f.name, getattr(upload, f.name))
    shared = overlap(upload.arrays(), server_memory)
    if shared is not None:
        raise UploadRejectedError(shared[0], f"shares memory with {shared[1]}. Send a copy")


FREE = Free()


def most_bytes(kind: type[Message], rules: Mapping[str, Rule]) -> int:
    """Returns the largest number of bytes that a valid upload can have, with the header."""
    sizes = [rules.get(f.name, FREE).nbytes + NAME_BYTES for f in fields(kind)]
    return HEADER_BYTES + sum(sizes)


# The memory of a tensor: its device, the address of its first byte, the address after its last
# byte, whether it is the server's, and the tensor's name.
Span = tuple[str, int, int, bool, str]


def memory_spans(tensors: Iterable[tuple[str, Tensor]], *, server: bool = False) -> list[Span]:
    """Returns the memory range of each named tensor, except for empty tensors."""
    return [
        (str(t.device), start := t.data_ptr(), start + _reach(t), server, name)
        for name, t in tensors
        if t.numel()
    ]


def overlap(
    tensors: Iterable[tuple[str, Tensor]], server_memory: Iterable[Span] = ()
) -> tuple[str, str] | None:
    """Finds two tensors that share memory, and returns their names or None.

    The second name starts with its owner, the server or the same upload. Adjacent slices of one
    storage do not share memory.

    Args:
        tensors: named tensors of a client.
        server_memory: the memory of the server's tensors. These may share memory with each other.
    """
    spans = sorted([*memory_spans(tensors), *server_memory])
    for i, (device, _, end, server, name) in enumerate(spans):
        for j in range(i + 1, len(spans)):
            other_device, start, _, other_server, other_name = spans[j]
            if device != other_device or start >= end:
                break
            if server and not other_server:
                return other_name, f"the server's {name}"
            if not server:
                owner = "the server's" if other_server else "the field"
                return name, f"{owner} {other_name}"
    return None


def _reach(tensor: Tensor) -> int:
    """Returns the bytes of memory that a tensor spans, including gaps between its values."""
    if tensor.is_contiguous():
        return tensor.nbytes
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in sizes) + 1) * tensor.element_size()


def require_dense(name: str, tensor: Tensor) -> None:
    """Raises UploadRejectedError for sparse, meta, nested and quantised tensors."""
    is_plain = tensor.layout == torch.strided and not tensor.is_meta
    if not is_plain or tensor.is_nested or tensor.is_quantized:
        raise UploadRejectedError(
            name, "must be a dense tensor, got a sparse, meta, nested or quantised tensor"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_numbers(arrays: Iterable[tuple[str, Tensor]], max_norm: float | None) -> None:
    """Raises an error if a server's message has a non-finite number or too large a norm.

    Args:
        arrays: the message's tensors and numbers with their names (`Message.numbers`).
        max_norm: the public bound on the L2 norm of all these numbers together. None means that
            there is no bound.

    Raises:
        RequestRefusedError: a number is complex or not finite, or the norm is above the bound. The
            message names the tensor or states the norm.

    >>> import torch
    >>> check_numbers([("parameters.weight", torch.ones(4))], max_norm=2.0)
    >>> check_numbers([("parameters.weight", torch.ones(9))], max_norm=2.0)
    Traceback (most recent call last):
    ...
    fedsynth.errors.RequestRefusedError: the server's message has norm ...
    """
    squared = 0.0
    for name, value in arrays:
        if value.is_complex():
            raise RequestRefusedError(f"the server's field {name} must be real, got {value.dtype}")
        if not value.is_floating_point():
            continue  # masks and counters, whose names and types are checked (`check_tensor`)
        if not bool(torch.isfinite(value).all()):
            raise RequestRefusedError(
                f"field {name} of the server's message contains NaN or infinite values"
            ).with_code("request.finite")
        squared += float(value.to(torch.float64).square().sum())
    norm = math.sqrt(squared)
    if max_norm is not None and norm > max_norm:
        raise RequestRefusedError(
            f"the server's message has norm {norm:.4g}, but max_request_norm={max_norm:g}. The "
            "client refused it and spent no budget. Ask the server's operator for the reason, or "
            "raise max_request_norm"
        ).with_code("request.norm")


def check_tensor(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises an error if a tensor in a server's message has the wrong shape or type.

    Args:
        name: the name of the message's field.
        value: the tensor that was sent.
        shape, dtype: the expected shape and type.

    Raises:
        RequestRefusedError: the shape or type is wrong. The message names the field.

    >>> import torch
    >>> check_tensor("known", torch.ones(3, 3), (3,), torch.bool)
    Traceback (most recent call last):
    ...
    fedsynth.errors.RequestRefusedError: field known of the server's message must be ...
    """
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise RequestRefusedError(
            f"field {name} of the server's message must be a {dtype} tensor of shape "
            f"{list(shape)}, got {value.dtype} of shape {list(value.shape)}"
        ).with_code("request.tensor")


def check_named(name: str, sent: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises an error if the named tensors in a server's message are not the expected ones.

    Args:
        name: the name of the message's field.
        sent: the tensors that were sent, by name. An empty mapping is accepted.
        expected: tensors with the expected names, shapes and types. Their values are ignored.

    Raises:
        RequestRefusedError: a name, shape or type differs. The message names the field and the
            tensor.
    """
    if not sent:
        return
    odd = sorted(set(sent) ^ set(expected))
    if odd:
        raise RequestRefusedError(
            f"field {name} of the server's message does not match the client's network, because "
            f"the tensor {odd[0]!r:.80} is missing or unexpected"
        ).with_code("request.names")
    for key, reference in expected.items():
        check_tensor(f"{name} {key}", sent[key], tuple(reference.shape), reference.dtype)
