"""The privacy unit: one record, or one user with all their records.

A unit is what adjacency adds or removes, so units are also sampled and clipped. If records are the
units, this needs no extra work. If users are the units, each step Poisson-samples users. A sampled
user contributes the *mean* of their records' vectors in each group, clipped over all groups
together (`GaussianSumMechanism.add`). A user's influence is then at most the clip, however many records and
classes they have. The mean is used instead of the sum so that public constants keep their meaning:
a divisor counts users, and a clip that suits one record's vector also suits the mean.

Contributions can also be bounded first: at most m records of a user are kept, chosen by a keyed
hash of each record's bytes, so that the choice depends only on that user's records.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsynth.privacy.mechanisms import GaussianSumMechanism


@dataclass(frozen=True)
class Sample:
    """A step's Poisson sample of one client.

    Attributes:
        records: indices [N] into the client's data set; a user's records are contiguous.
        users: the user of each record [N], ascending; None if records are the units.
        shares: the weight of each record [N], 1 / (number of its user's records); None if records
            are the units.
    """

    records: Tensor
    users: Tensor | None = None
    shares: Tensor | None = None

    def __len__(self) -> int:
        return len(self.records)

    def split(self, size: int) -> list[Sample]:
        """Returns the sample in non-empty pieces of at most `size` records; a piece may end within
        a user."""
        return [self.part(first, first + size) for first in range(0, len(self), size)]

    def part(self, first: int, stop: int) -> Sample:
        """Returns the records from `first` up to `stop`."""
        return self.select(slice(first, stop))

    def select(self, indices: Tensor | slice) -> Sample:
        """Returns the records that a mask (bool) or a slice selects."""
        if self.users is None or self.shares is None:
            return Sample(self.records[indices])
        return Sample(self.records[indices], self.users[indices], self.shares[indices])


class Units:
    """One client's records, divided into units; on the CPU.

    Args:
        records: the number of the client's records.
        users: the user of each record [records], any integers; None: records are the units.

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

    def sample(self, series: GaussianSumMechanism) -> Sample:
        """Starts a step of `series` and returns all records of the units in its Poisson sample."""
        chosen = series.sample(len(self))
        if self._order is None:
            return Sample(chosen)
        sizes = self._sizes[chosen]
        users = chosen.repeat_interleave(sizes)
        within = torch.arange(len(users)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        records = self._order[self._starts[users] + within]
        return Sample(records, users, 1.0 / sizes.repeat_interleave(sizes).to(torch.float64))
