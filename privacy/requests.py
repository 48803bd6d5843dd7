"""Checks of a server's message, which a client makes before it computes on private data.

The privacy guarantee holds for every message, so these checks are a second line of defence. An
honest server never sends weights that are not finite, or larger than those of any trained network.
A malicious server could use such weights to amplify rounding errors (docs/threat-model.md,
"Malicious servers").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedsynth.privacy.errors import RequestRefusedError


def check_numbers(arrays: Iterable[tuple[str, Tensor]], max_norm: float | None) -> None:
    """Refuses a server's message if a number in it is not finite or if its norm is too large.

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
    fedsynth.privacy.errors.RequestRefusedError: the server's message has norm 3, above ...
    """
    squared = 0.0
    for name, value in arrays:
        if value.is_complex():
            raise RequestRefusedError(
                f"the server's message has complex numbers in {name}; only real numbers are allowed"
            )
        if not value.is_floating_point():
            continue  # masks and counters, whose names and types are checked (`check_tensor`)
        if not bool(torch.isfinite(value).all()):
            raise RequestRefusedError(
                f"the server's message has numbers in {name} that are not finite"
            )
        squared += float(value.to(torch.float64).square().sum())
    norm = math.sqrt(squared)
    if max_norm is not None and norm > max_norm:
        raise RequestRefusedError(
            f"the server's message has norm {norm:.4g}, above the declared max_request_norm "
            f"{max_norm:g}; the client did not answer it, and no privacy budget was spent"
        )


def check_tensor(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuses a tensor in a server's message if it has the wrong shape or type.

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
    fedsynth.privacy.errors.RequestRefusedError: the server's known is torch.float32 [3, 3], ...
    """
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise RequestRefusedError(
            f"the server's {name} is {value.dtype} {list(value.shape)}, but should be "
            f"{dtype} {list(shape)}"
        )


def check_named(name: str, sent: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuses named tensors in a server's message if they do not match the expected ones.

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
            f"the server's {name} has another architecture than this client's: the tensor "
            f"{odd[0]!r:.80} is missing or unexpected"
        )
    for key, reference in expected.items():
        check_tensor(f"{name} {key}", sent[key], tuple(reference.shape), reference.dtype)
