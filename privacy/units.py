"""Who is protected: one record, or one user with all records of theirs.

A unit is what is added or removed under adjacency, so it is also what is sampled and what is
clipped. With records as units nothing is to be done. With users as units, a step's Poisson sample
is one of users; a sampled user contributes the *mean* of their records' vectors, by group, and that
is clipped with all its groups together (`GaussianSums.add`). A user's influence is then at most the
clip however many records they have, and of however many classes. The mean rather than the sum, so
that public constants keep their meaning: a divisor counts users, and a clip that suits one record's
vector suits their mean.

Contributions can be bounded before that: at most m records of a user are kept, chosen by a keyed
hash of each record's own bytes, so that the choice depends on that user's records alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsynth.privacy.mechanisms import GaussianSums


@dataclass(frozen=True)
class Sample:
    """A step's sample of one client.

    Attributes:
        records: positions [N] in the client's data set, a user's next to each other.
        users: whose they are [N], ascending; None where records are the units.
        shares: what each counts [N], one over its user's records; None where records are the units.
    """

    records: Tensor
    users: Tensor | None = None
    shares: Tensor | None = None

    def __len__(self) -> int:
        return len(self.records)

    def split(self, size: int) -> list[Sample]:
        """The sample in pieces of at most `size` records, none of them empty; a user may be cut in
        two."""
        return [self.part(first, first + size) for first in range(0, len(self), size)]

    def part(self, first: int, stop: int) -> Sample:
        """Returns the records from `first` up to `stop`."""
        return self.where(slice(first, stop))

    def where(self, taken_N: Tensor | slice) -> Sample:
        """Returns the records at which `taken_N` (bool) is set, or of a slice."""
        if self.users is None or self.shares is None:
            return Sample(self.records[taken_N])
        return Sample(self.records[taken_N], self.users[taken_N], self.shares[taken_N])


class Units:
    """One client's records, divided into units; on the CPU.

    Args:
        records: how many the client has.
        users: whose each record is [records], any integers; None: records are the units.

    >>> import torch
    >>> len(Units(5)), len(Units(5, torch.tensor([7, 3, 7, 7, 3])))
    (5, 2)
    """

    def __init__(self, records: int, users: Tensor | None = None) -> None:
        self._records = records
        self._order: Tensor | None = None
        if users is None:
            return
        _, number = torch.unique(users, return_inverse=True)
        self._order = torch.argsort(number, stable=True)
        self._sizes = torch.bincount(number)
        self._starts = self._sizes.cumsum(0) - self._sizes

    @property
    def grouped(self) -> bool:
        """Whether users are the units."""
        return self._order is not None

    def __len__(self) -> int:
        """How many units there are: private."""
        return self._records if self._order is None else len(self._sizes)

    def sample(self, series: GaussianSums) -> Sample:
        """Starts a step of `series`: all records of the units in its Poisson sample."""
        chosen = series.sample(len(self))
        if self._order is None:
            return Sample(chosen)
        sizes = self._sizes[chosen]
        users = chosen.repeat_interleave(sizes)
        within = torch.arange(len(users)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        records = self._order[self._starts[users] + within]
        return Sample(records, users, 1.0 / sizes.repeat_interleave(sizes).to(torch.float64))
