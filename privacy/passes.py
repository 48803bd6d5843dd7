"""Passes over private records have a constant length, so that no kernel's shape depends on the
number of records.

Libraries choose their kernels by shape, and kernels round differently. If a pass were as long as
the sample, an additional record could change the features of *other* records. Only their rounding
would change, but a server can send weights that cancel everything else and amplify it
(docs/threat-model.md, "Malicious servers"). Therefore the records of a step are split into passes
of a public length, which depends only on public numbers. The last pass is padded with zeros, whose
results are discarded.

The kernels must ensure that a row's bits depend neither on its position in a pass nor on its
neighbours. The tests check this for every architecture, mechanism and precision, on the device on
which they run.

Code that computes on records may raise on some of them. If a step failed because of one record, the
failure would reveal that the record is there. Therefore the record's value becomes NaN, which every
clip turns into a contribution of zero, and the other records' values stay the same as without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Note = Callable[[str], None]
"""Receives a line that depends on private records, and that only people who may see these may
read."""

MIN_LENGTH = 2
"""Normalisation layers of 1×1 maps refuse a single record in training mode."""


def power_of_two(bound: float) -> int:
    """Returns the largest power of two that is at most `bound`, and at least 1."""
    return 1 << max(0, int(bound).bit_length() - 1)


def pass_length(expected: float | None, start_over_row: float, limit: int) -> int:
    """Returns the number of records in a pass: a power of two that does not depend on the data.

    If a pass has a fixed cost of s rows, n records in passes of p cost n + (n/p)·s + p/2 rows, as
    the last pass is half empty on average. The minimum is at p = √(2ns), where both extra terms are
    √(ns/2).

    Args:
        expected: n, the public expected number of records of a step (q times the nominal size);
            None if undeclared, which gives the longest passes.
        start_over_row: s, the fixed cost of a pass, in rows.
        limit: the largest number that memory allows.
    """
    longest = power_of_two(limit)
    if expected is None:
        return longest
    best = power_of_two(math.sqrt(2 * expected * start_over_row))
    return min(max(MIN_LENGTH, best), longest)


def padded(rows: Tensor, length: int, fill: int = 0) -> Tensor:
    """Returns `rows` [n, …] padded with rows of `fill` to [length, …]."""
    if len(rows) == length:
        return rows
    full = rows.new_full((length, *rows.shape[1:]), fill)
    full[: len(rows)] = rows
    return full


def values_of_each(compute: Callable[..., Tensor], records: Sequence[Tensor], note: Note) -> Tensor:
    """Returns `compute(*records)` [N, …], with NaN for the records on which it raises.

    All calls have N records, so that rounding stays the same: random images with label 0 replace
    the omitted ones.

    Args:
        compute: a function each of whose values depends on one record only.
        records: images [N, …], and labels [N] (int64).
        note: receives the reason why values are missing.

    Raises:
        Exception: `compute` raises even if all images are random, so that no record is the cause.

    >>> def inverse(x):
    ...     if bool((x == 0).any()):
    ...         raise ZeroDivisionError
    ...     return 1 / x
    >>> values_of_each(inverse, [torch.tensor([4.0, 0.0, 2.0])], print)
    the contribution of an image (or of the blank padding of a pass) could not be computed: ZeroDivisionError()
    tensor([0.2500,    nan, 0.5000])
    """
    try:
        return _values(compute, records)
    except Exception as error:
        fillers = list(map(_public_like, records))
        missing = torch.full_like(_values(compute, fillers)[:1], torch.nan)
        note(
            "the contribution of an image (or of the blank padding of a pass) could not be "
            f"computed: {error!r:.300}"
        )
        return _bisected(compute, records, fillers, missing, list(range(len(records[0]))))


def _bisected(
    compute: Callable[..., Tensor],
    records: Sequence[Tensor],
    fillers: Sequence[Tensor],
    missing: Tensor,
    positions: list[int],
) -> Tensor:
    """Returns the values at some positions; bisects them if `compute` raises."""
    trial = []
    for filler, record in zip(fillers, records, strict=True):
        mixed = filler.clone()
        mixed[positions] = record[positions]
        trial.append(mixed)
    try:
        return _values(compute, trial)[positions]
    except Exception:
        half = len(positions) // 2
        if half == 0:
            return missing
        first = _bisected(compute, records, fillers, missing, positions[:half])
        second = _bisected(compute, records, fillers, missing, positions[half:])
        return torch.cat([first, second])


def _values(compute: Callable[..., Tensor], records: Sequence[Tensor]) -> Tensor:
    values = compute(*map(torch.clone, records))  # user code may change its inputs in place
    if len(values) != len(records[0]):
        raise ValueError(f"{len(values)} values were computed for {len(records[0])} records")
    return values


def _public_like(tensor: Tensor) -> Tensor:
    """Returns random images, or labels of 0, of the same shape, type and device."""
    if tensor.dtype == torch.int64:
        return torch.zeros_like(tensor)
    # drawn by NumPy, as a trial of `compute` watches torch's random draws
    images = torch.from_numpy(np.random.default_rng(0).random(tensor.shape))
    if not tensor.is_floating_point():
        images *= 255
    return images.to(tensor)
