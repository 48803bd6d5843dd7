"""Passes over private records have one constant length, so that no kernel's shape depends on how
many records there are.

Libraries choose their kernels by shape, and kernels round differently. If a pass were as long as
the sample, one record more could move the *others'* features: by rounding only, but a server can
send weights that cancel all but the rounding and amplify that (docs/privacy.md, "Active servers").
So the records of a step are cut into passes of a public length, the last one is filled up with rows
of zeros, and what comes out of those is thrown away. The length follows from public numbers alone.

That a row's bits do not depend on its place in a pass, nor on its neighbours, is the kernels' part:
the tests check it for every architecture, mechanism and precision, on whatever device they run.
"""

from __future__ import annotations

import math

from torch import Tensor

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
