"""Passes over private records have one constant length, so that no kernel's shape depends on how
many records there are.

Libraries choose their kernels by shape, and kernels round differently. If a pass were as long as
the sample, one record more could move the *others'* features: by rounding only, but a server can
send weights that cancel all but the rounding and amplify that (docs/privacy.md, "Active servers").
So the records of a step are cut into passes of a public length, the last one is filled up with rows
of zeros, and what comes out of those is thrown away. The length follows from public numbers alone.

That a row's bits do not depend on its place in a pass, nor on its neighbours, is the kernels' part:
the tests check it for every architecture, mechanism and precision, on whatever device they run.

Code that computes on records may raise on some of them. If a step failed because of one record, the
failure would show that the record is there. So the record's value is NaN, which every clip turns
into a contribution of zero, and the other records' values are what they are without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Note = Callable[[str], None]
"""Takes a line that depends on private records: for those who may see these, and nobody else."""

LEAST = 2
"""Normalisation layers of 1×1 maps refuse a single record in training mode."""


def power_of_two(bound: float) -> int:
    """The largest power of two that is at most `bound`; 1 for anything below 2."""
    return 1 << max(0, int(bound).bit_length() - 1)


def pass_length(expected: float | None, start_over_row: float, most: int) -> int:
    """How many records a pass holds: a power of two, the same whatever the data are.

    With a start as dear as s rows, n records in passes of p cost n + (n/p)·s + p/2 rows, as the
    last pass is half empty on average: least at p = √(2ns), where both extras are √(ns/2).

    Args:
        expected: n, the public expected number of records of a step (q times the nominal size);
            None where nothing is declared, which gives the longest passes.
        start_over_row: s, what a pass costs by itself, in rows.
        most: what memory allows.
    """
    longest = power_of_two(most)
    if expected is None:
        return longest
    best = power_of_two(math.sqrt(2 * expected * start_over_row))
    return min(max(LEAST, best), longest)


def padded(rows: Tensor, length: int, fill: int = 0) -> Tensor:
    """`rows` [n, …] with rows of `fill` after them: [length, …]."""
    if len(rows) == length:
        return rows
    full = rows.new_full((length, *rows.shape[1:]), fill)
    full[: len(rows)] = rows
    return full


def values_of_each(compute: Callable[..., Tensor], records: Sequence[Tensor], note: Note) -> Tensor:
    """Returns `compute(*records)` [N, …], with NaN for the records on which it raises.

    All calls have N records, so that rounding stays the same: random images with label 0 take the
    place of those that are left out.

    Args:
        compute: its values depend on one record each.
        records: images [N, …], and labels [N] (int64).
        note: receives why values are missing.

    Raises:
        Exception: what `compute` raises on random images only, which is no record's fault.

    >>> def inverse(x):
    ...     if bool((x == 0).any()):
    ...         raise ZeroDivisionError
    ...     return 1 / x
    >>> values_of_each(inverse, [torch.tensor([4.0, 0.0, 2.0])], print)
    an image (or a blank one, which fills up a pass) contributes nothing: ZeroDivisionError()
    tensor([0.2500,    nan, 0.5000])
    """
    try:
        return _values(compute, records)
    except Exception as error:
        others = [_public_like(one) for one in records]
        missing = torch.full_like(_values(compute, others)[:1], torch.nan)
        note(
            f"an image (or a blank one, which fills up a pass) contributes nothing: {error!r:.300}"
        )
        return _among(compute, records, others, missing, list(range(len(records[0]))))


def _among(
    compute: Callable[..., Tensor],
    records: Sequence[Tensor],
    others: Sequence[Tensor],
    missing: Tensor,
    positions: list[int],
) -> Tensor:
    """Returns the values at some positions, by halving where `compute` raises."""
    trial = [other.clone() for other in others]
    for one, record in zip(trial, records, strict=True):
        one[positions] = record[positions]
    try:
        return _values(compute, trial)[positions]
    except Exception:
        half = len(positions) // 2
        if half == 0:
            return missing
        parts = (positions[:half], positions[half:])
        return torch.cat([_among(compute, records, others, missing, part) for part in parts])


def _values(compute: Callable[..., Tensor], records: Sequence[Tensor]) -> Tensor:
    values = compute(*records)
    if len(values) != len(records[0]):
        raise ValueError(f"{len(values)} values were computed of {len(records[0])} records")
    return values


def _public_like(tensor: Tensor) -> Tensor:
    """Returns random images, or labels of 0, of the same shape, type and device."""
    if tensor.dtype == torch.int64:
        return torch.zeros_like(tensor)
    # drawn by NumPy, as a trial of `compute` watches what it draws by torch
    images = torch.from_numpy(np.random.default_rng(0).random(tensor.shape))
    return (images if tensor.is_floating_point() else 255 * images).to(tensor)
