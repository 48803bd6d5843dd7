"""The privacy unit: one record, or one user with all their records.

Neighbouring data sets differ in one unit. Therefore sampling selects units, and clipping bounds the
influence of one unit. If records are the units, this needs no extra work. If users are the units,
each step Poisson-samples users. A sampled user contributes the *mean* of their records' vectors in
each group, and the means of all groups together are clipped (`GaussianSumMechanism.add`). The
influence of a user is then at most the clip, however many records and classes they have. The mean
is used instead of the sum so that public constants keep their meaning. A divisor then counts users,
and a clip that suits one record's vector also suits the mean.

The number of records per user can also be limited beforehand. Then at most m records of each user
are kept. They are chosen by a hash of each record's bytes with a public seed, so the choice depends
only on that user's records.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsynth.privacy.mechanisms import GaussianSumMechanism


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
        return [self.part(first, first + size) for first in range(0, len(self), size)]

    def part(self, first: int, stop: int) -> Sample:
        """Returns the sample's records from position `first` up to, but without, `stop`."""
        return self.select(slice(first, stop))

    def select(self, indices: Tensor | slice) -> Sample:
        """Returns the part of the sample that a boolean mask or a slice selects."""
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

    def sample(self, series: GaussianSumMechanism) -> Sample:
        """Starts a step of `series`, draws a Poisson sample of units, and returns their records."""
        chosen = series.sample(len(self))
        if self._order is None:
            return Sample(chosen)
        sizes = self._sizes[chosen]
        users = chosen.repeat_interleave(sizes)
        within = torch.arange(len(users)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        records = self._order[self._starts[users] + within]
        return Sample(records, users, 1.0 / sizes.repeat_interleave(sizes).to(torch.float64))
