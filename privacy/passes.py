"""Samples of privacy units, split into batches of constant length.

Libraries choose their kernels by the shapes of the tensors, and kernels round differently. If a
batch were as long as the sample of a step, an additional record could change how *other* records'
values are rounded. A malicious server can send weights that amplify this rounding until it is
visible (docs/threat-model.md, "Malicious servers"). Therefore the records of a step are split into
batches ("passes") whose length is computed only from public numbers. The last batch is padded with
zeros, and the values of the padding are discarded.

The value of a record must then be the same to the last bit, whatever its position in a batch and
whatever the other records are. Whether it is the same depends on the kernels. A trial before a run
checks it for the run's own shapes and device. Where bits move, a pass has only one record, whose
position and padding are then always the same (`pass_size`).

Code that computes values of records may raise on some of them. If a step failed because of one
record, the failure would reveal that the record is there. Therefore the value of such a record
becomes NaN, which clipping turns into a contribution of zero. The values of all other records are
the same as if it were not there.

The privacy unit is one record, or one user with all their records. Neighbouring data sets differ in
one unit. Therefore sampling selects units, and clipping bounds the influence of one unit. If
records are the units, this needs no extra work. If users are the units, each step Poisson-samples
users. A sampled user contributes the *mean* of their records' vectors in each group, and the means
of all groups together are clipped (`GaussianSumMechanism.add`). The influence of a user is then at
most the clip, however many records and classes they have. The mean is used instead of the sum so
that public constants keep their meaning. A divisor then counts users, and a clip that suits one
record's vector also suits the mean.

The number of records per user can also be limited beforehand. Then at most m records of each user
are kept. They are chosen by a hash of each record's bytes with a public seed, so the choice depends
only on that user's records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.products import Products


@dataclass(frozen=True)
class Sample:
    """The records that one training step draws from a client's data by Poisson sampling.

    Attributes:
        records: indices [N] into the client's data set. Records of the same user are contiguous.
        users: the user of each record [N], ascending. None if records are the units.
        shares: the weight of each record [N], which is 1 / (number of records of the same user).
            None if records are the units.
    """

    records: Tensor
    users: Tensor | None = None
    shares: Tensor | None = None

    def __len__(self) -> int:
        return len(self.records)

    def split(self, size: int) -> list[Sample]:
        """Splits the sample into non-empty pieces of at most `size` records.

        The records of one user may be in two or more pieces.
        """
        return [self.select(slice(i, i + size)) for i in range(0, len(self), size)]

    def select(self, indices: Tensor | slice) -> Sample:
        """Selects records by a boolean mask or a slice, and returns them as a sample."""
        if self.users is None or self.shares is None:
            return Sample(self.records[indices])
        return Sample(self.records[indices], self.users[indices], self.shares[indices])


class Units:
    """The privacy units of one client: its records, or its users with their records.

    All tensors are on the CPU.

    Args:
        records: the number of records of the client.
        users: the user of each record [records], as arbitrary integers. None if each record is a
            unit.

    >>> import torch
    >>> len(Units(5)), len(Units(5, torch.tensor([7, 3, 7, 7, 3])))
    (5, 2)
    """

    def __init__(self, records: int, users: Tensor | None = None) -> None:
        self._count = records
        self._order: Tensor | None = None
        if users is None:
            return
        unique, number = torch.unique(users, return_inverse=True)
        self._count = len(unique)
        self._order = torch.argsort(number, stable=True)
        self._sizes = torch.bincount(number)
        self._starts = self._sizes.cumsum(0) - self._sizes

    @property
    def grouped(self) -> bool:
        """True if users are the units."""
        return self._order is not None

    def __len__(self) -> int:
        """Returns the number of units, which is private."""
        return self._count

    def sample(self, mechanism: GaussianSumMechanism) -> Sample:
        """Starts a step of `mechanism`, draws a Poisson sample of units, and returns their
        records.
        """
        chosen = mechanism.sample(len(self))
        if self._order is None:
            return Sample(chosen)
        sizes = self._sizes[chosen]
        users = chosen.repeat_interleave(sizes)
        within = torch.arange(len(users)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        records = self._order[self._starts[users] + within]
        return Sample(records, users, 1.0 / sizes.repeat_interleave(sizes).to(torch.float64))


# A function that receives a line of text. The line may depend on private records, so only people
# who may see the records may read it.
Note = Callable[[str], None]

# The smallest number of records in a pass. In training mode, normalisation layers refuse a single
# record if their feature maps have 1×1 pixels.
MIN_LENGTH = 2


def power_of_two(bound: float) -> int:
    """Returns the largest power of two that is at most `bound`, or 1 if `bound` is below 1."""
    return 1 << max(0, int(bound).bit_length() - 1)


def pass_length(expected: float | None, start_over_row: float, limit: int) -> int:
    """Chooses the batch length (the number of records in a pass) from public numbers only.

    The result is a power of two.

    If a pass has a fixed cost of s records, then n records in passes of length p cost as much as
    n + (n/p)·s + p/2 records, because the last pass is half empty on average. The minimum is at
    p = √(2ns), where both extra terms are √(ns/2).

    Args:
        expected: n, the public expected number of records of a step (q times the nominal size).
            None if it was not declared. The passes then have the largest length.
        start_over_row: s, the fixed cost of a pass, divided by its cost per record.
        limit: the largest number of records that fits in memory. A pass has at least `MIN_LENGTH`.
    """
    longest = max(MIN_LENGTH, power_of_two(limit))
    if expected is None:
        return longest
    best = power_of_two(math.sqrt(2 * expected * start_over_row))
    return min(max(MIN_LENGTH, best), longest)


def pass_size(
    expected: float | None, start_over_row: float, limit: int, *, isolated: bool = False
) -> tuple[int, int]:
    """Returns the length of a pass (a padded batch), and the number of records in it.

    Args:
        expected, start_over_row, limit: see `pass_length`.
        isolated: whether a pass has only one record.
    """
    if isolated:
        return MIN_LENGTH, 1
    length = pass_length(expected, start_over_row, limit)
    return length, length


def padded(rows: Tensor, length: int, fill: int = 0) -> Tensor:
    """Pads `rows` [n, …] with `fill` to the shape [length, …]."""
    if len(rows) == length:
        return rows
    full = rows.new_full((length, *rows.shape[1:]), fill)
    full[: len(rows)] = rows
    return full


def values_of_each(compute: Callable[..., Tensor], records: Sequence[Tensor], note: Note) -> Tensor:
    """Computes one value per record. The value is NaN if `compute` raises an error for the record.

    If `compute` raises, it is called again with some of the records replaced by random images with
    label 0, until the records that cause the exception are found. All calls have N records, so that
    rounding stays the same.

    Args:
        compute: a function that returns one value for each record. Each value must depend on one
            record only. It is called as `compute(*records)`.
        records: images [N, …], and labels [N] (int64).
        note: a function that receives the reason why values are NaN.

    Raises:
        Exception: `compute` raises even if all images are random, so that no record is the cause.

    >>> def inverse(x):
    ...     if bool((x == 0).any()):
    ...         raise ZeroDivisionError
    ...     return 1 / x
    >>> values_of_each(inverse, [torch.tensor([4.0, 0.0, 2.0])], print)
    a record contributes nothing, because its value could not be computed: ZeroDivisionError()
    tensor([0.2500,    nan, 0.5000])
    """
    try:
        return _values(compute, records)
    except Exception as error:
        fillers = list(map(public_like, records))
        missing = torch.full_like(_values(compute, fillers)[:1], torch.nan)
        note(
            f"a record contributes nothing, because its value could not be computed: {error!r:.300}"
        )
        return _bisected(compute, records, fillers, missing, list(range(len(records[0]))))


def _bisected(
    compute: Callable[..., Tensor],
    records: Sequence[Tensor],
    fillers: Sequence[Tensor],
    missing: Tensor,
    positions: list[int],
) -> Tensor:
    """Computes the values of the records at the indices `positions`.

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
    except Exception:  # of user code, on records of which some are at fault
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
            f"the function must return one value for each of {len(records[0])} records, got "
            f"{len(values)}"
        )
    if values.is_complex():
        raise TypeError("the function must return real numbers, got complex ones")
    # a value may be replaced by NaN, which integers do not have
    return values if values.is_floating_point() else values.float()


def public_like(tensor: Tensor) -> Tensor:
    """Returns a tensor of public values with the shape, type and device of a private tensor.

    int64 tensors are labels and are replaced with zeros. Other tensors are images and are replaced
    with random numbers.
    """
    if tensor.dtype == torch.int64:
        return torch.zeros_like(tensor)
    # drawn by NumPy, as a trial of `compute` watches torch's random draws
    images = torch.from_numpy(np.random.default_rng(0).random(tensor.shape))
    if not tensor.is_floating_point():
        images *= 255
    return images.to(tensor, non_blocking=True)


# Parts of samples that are computed in one pass, each with the position of its owner.
Parts = list[tuple[int, Sample]]
# The values of the records of a part: vectors [n, D] with the group of each, or products.
Values = tuple[Tensor, Tensor] | Products
# A function that is called with the samples of a step, and returns a function that computes the
# values of each part of a pass.
Prepare = Callable[[list[Sample]], Callable[[Parts], Sequence[Values]]]


def passes_of(samples: Sequence[Sample], count: int) -> Iterator[Parts]:
    """Divides the records of all samples, in order, into passes of `count` records.

    >>> [len(parts) for parts in passes_of([Sample(torch.arange(3)), Sample(torch.arange(2))], 4)]
    [2, 1]
    """
    parts: Parts = []
    free = count
    for position, sample in enumerate(samples):
        start = 0
        while start < len(sample):
            part = sample.select(slice(start, start + free))
            parts.append((position, part))
            start += len(part)
            free -= len(part)
            if free == 0:
                yield parts
                parts, free = [], count
    if parts:
        yield parts


def noisy_sums(
    mechanisms: Sequence[GaussianSumMechanism],
    units: Sequence[Units],
    count: int,
    prepare: Prepare,
) -> list[Released]:
    """Samples each owner's units, and releases noisy sums of the sampled records' values.

    All methods, local trainings and `DataOwner`s make their private releases here.

    Args:
        mechanisms: one charged mechanism for each owner.
        units: the privacy units of each owner.
        count: the number of records in a pass, which may belong to several owners.
        prepare: computes the values of the sampled records.
    """
    samples = [unit.sample(mechanism) for unit, mechanism in zip(units, mechanisms, strict=True)]
    compute = prepare(samples)
    for parts in passes_of(samples, count):
        for (position, part), values in zip(parts, compute(parts), strict=True):
            if isinstance(values, Products):
                mechanisms[position].add_products(values, part)
            else:
                mechanisms[position].add(*values, part)
    return [mechanism.release() for mechanism in mechanisms]


def class_values(
    inputs: Callable[[Parts], tuple[Tensor, Tensor]],
    rows: Callable[[Tensor, Tensor], Tensor],
    classes: int,
    length: int,
    note: Note,
) -> Prepare:
    """Returns a function that `noisy_sums` calls to compute one value per record.

    Args:
        inputs: returns the records of a pass, padded to `length`, and the labels [n] on the CPU.
        rows: computes the vector of each record from the padded records, and from the indices of
            their pairs, which are the position of the owner times `classes` plus the label. The
            index of padding is −1.
        classes: the number of classes.
        length: the length of a pass.
        note: see `values_of_each`.
    """

    def compute(parts: Parts) -> Sequence[Values]:
        sizes = [len(part) for _, part in parts]
        x, labels = inputs(parts)
        owners = torch.tensor([position for position, _ in parts])
        pairs = classes * owners.repeat_interleave(torch.tensor(sizes)) + labels
        vectors = values_of_each(rows, (x, padded(pairs, length, fill=-1)), note)[: len(labels)]
        groups = labels.to(vectors.device, non_blocking=True)
        return list(zip(vectors.split(sizes), groups.split(sizes), strict=True))

    return lambda samples: compute
