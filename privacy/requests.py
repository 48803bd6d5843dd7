"""The checks that a client makes on a server's message before it answers with private data.

The guarantee holds for every message, so these checks are a second line of defence: weights that
are not finite, or larger than any trained network's, only serve a malicious server that amplifies
rounding residue (docs/threat-model.md, "Malicious servers").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedsynth.privacy.errors import RequestRefusedError


def check_numbers(arrays: Iterable[tuple[str, Tensor]], max_norm: float | None) -> None:
    """Refuses a message with a non-finite number or with a norm above the declared one.

    Args:
        arrays: the message's tensors and numbers with their names (`Message.numbers`).
        max_norm: the public bound on the L2 norm of all of them together; None: no bound.

    Raises:
        RequestRefusedError: names the tensor, or the norm.

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
            raise RequestRefusedError(f"the server's message has complex numbers in {name}")
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
            f"{max_norm:g}; the request was rejected and nothing was charged"
        )


def check_tensor(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuses a tensor of a server's message that has the wrong shape or type.

    Args:
        name: the field's name.
        value: the tensor that was sent.
        shape, dtype: the expected ones.

    Raises:
        RequestRefusedError: names the field.

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
    """Refuses named tensors whose names, shapes or types differ from those of `expected`.

    Args:
        name: the field's name.
        sent: the tensors that were sent; an empty mapping is accepted: nothing was sent.
        expected: tensors of the expected names, shapes and types; their values are ignored.

    Raises:
        RequestRefusedError: names the field and the tensor.
    """
    if not sent:
        return
    odd = sorted(set(sent) ^ set(expected))
    if odd:
        raise RequestRefusedError(f"the server's {name} has another architecture: {odd[0]!r:.80}")
    for key, reference in expected.items():
        check_tensor(f"{name} {key}", sent[key], tuple(reference.shape), reference.dtype)
