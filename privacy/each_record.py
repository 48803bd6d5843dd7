"""Values of records by code that may raise on some of them.

If a step failed because of one record, the failure would show that the record is there. So the
record's value is NaN, which every clip turns into a contribution of zero, and the other records'
values are what they are without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Note = Callable[[str], None]
"""Takes a line that depends on private records: for those who may see these, and nobody else."""


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
