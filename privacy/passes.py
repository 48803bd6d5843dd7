"""Batches of a constant length for computations on private records.

Libraries choose their kernels by the shapes of the tensors, and kernels round differently. If a
batch were as long as the sample of a step, an additional record could change the rounding of the
values of *other* records. A malicious server can send weights that amplify this rounding until it
is visible (docs/threat-model.md, "Malicious servers"). Therefore the records of a step are split
into batches ("passes") whose length is computed only from public numbers. The last batch is padded
with zeros, and the values of the padding are discarded.

The value of a record must then be the same to the last bit, whatever its position in a batch and
whatever the other records are. This depends on the kernels. The tests check it for every
architecture, mechanism and precision, on the device on which they run.

Code that computes values of records may raise on some of them. If a step failed because of one
record, the failure would reveal that the record is there. Therefore the value of such a record
becomes NaN, which clipping turns into a contribution of zero. The values of all other records are
the same as if it were not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Note = Callable[[str], None]
"""A function that receives a line of text. The line may depend on private records, so only people
who may see the records may read it."""

MIN_LENGTH = 2
"""The smallest length of a pass. In training mode, normalisation layers refuse a single record if
their feature maps have 1×1 pixels."""


def power_of_two(bound: float) -> int:
    """Returns the largest power of two that is at most `bound`, or 1 if `bound` is below 1."""
    return 1 << max(0, int(bound).bit_length() - 1)


def pass_length(expected: float | None, start_over_row: float, limit: int) -> int:
    """Chooses the number of records in a pass, a power of two that does not depend on the data.

    If a pass has a fixed cost of s records, then n records in passes of length p cost as much as
    n + (n/p)·s + p/2 records, because the last pass is half empty on average. The minimum is at
    p = √(2ns), where both extra terms are √(ns/2).

    Args:
        expected: n, the public expected number of records of a step (q times the nominal size).
            None if it was not declared. The passes then have the largest length.
        start_over_row: s, the fixed cost of a pass, divided by its cost per record.
        limit: the largest number of records that fits in memory.
    """
    longest = power_of_two(limit)
    if expected is None:
        return longest
    best = power_of_two(math.sqrt(2 * expected * start_over_row))
    return min(max(MIN_LENGTH, best), longest)


def padded(rows: Tensor, length: int, fill: int = 0) -> Tensor:
    """Pads `rows` [n, …] at the end with rows of the value `fill`, and returns [length, …]."""
    if len(rows) == length:
        return rows
    full = rows.new_full((length, *rows.shape[1:]), fill)
    full[: len(rows)] = rows
    return full


def values_of_each(compute: Callable[..., Tensor], records: Sequence[Tensor], note: Note) -> Tensor:
    """Returns `compute(*records)` [N, …], with NaN as the value of each record on which it raises.

    If `compute` raises, it is called again with some of the records replaced by random images with
    label 0, until the records that cause the exception are found. All calls have N records, so that
    rounding stays the same.

    Args:
        compute: a function that returns one value for each record. Each value must depend on one
            record only.
        records: images [N, …], and labels [N] (int64).
        note: a function that receives the reason why values are NaN.

    Raises:
        Exception: `compute` raises even if all images are random, so that no record is the cause.

    >>> def inverse(x):
    ...     if bool((x == 0).any()):
    ...         raise ZeroDivisionError
    ...     return 1 / x
    >>> values_of_each(inverse, [torch.tensor([4.0, 0.0, 2.0])], print)
    the contribution of a record (or of padding) is left out, because it could not be computed: ZeroDivisionError()
    tensor([0.2500,    nan, 0.5000])
    """
    try:
        return _values(compute, records)
    except Exception as error:
        fillers = list(map(_public_like, records))
        missing = torch.full_like(_values(compute, fillers)[:1], torch.nan)
        note(
            "the contribution of a record (or of padding) is left out, because it could not "
            f"be computed: {error!r:.300}"
        )
        return _bisected(compute, records, fillers, missing, list(range(len(records[0]))))


def _bisected(
    compute: Callable[..., Tensor],
    records: Sequence[Tensor],
    fillers: Sequence[Tensor],
    missing: Tensor,
    positions: list[int],
) -> Tensor:
    """Returns the values of the records at some positions.

    If `compute` raises, the positions are halved recursively. A single record on which it raises
    gets the value `missing`.
    """
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
        raise ValueError(
            f"the function returned {len(values)} values for {len(records[0])} records, but must "
            "return one for each record"
        )
    return values


def _public_like(tensor: Tensor) -> Tensor:
    """Returns public values in place of private ones, with the same shape, type and device.

    int64 tensors are labels and are replaced with zeros. Other tensors are images and are replaced
    with random numbers.
    """
    if tensor.dtype == torch.int64:
        return torch.zeros_like(tensor)
    # drawn by NumPy, as a trial of `compute` watches torch's random draws
    images = torch.from_numpy(np.random.default_rng(0).random(tensor.shape))
    if not tensor.is_floating_point():
        images *= 255
    return images.to(tensor)
