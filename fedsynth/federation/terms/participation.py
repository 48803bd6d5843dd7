"""Which clients take part in a round: m = max(1, round(C·K)) of them, drawn anew each round from
the run's seed.

The draw is public, so it is no source of privacy: a client's ε counts the rounds that it takes part
in, without any amplification. Draws by size, as FedProx has them, show n_k and are refused with
differential privacy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedsynth.errors import SettingError
from fedsynth.seeding import numpy_generator

Counts = npt.NDArray[np.int64]


def active_clients(clients: int, share: float) -> int:
    """How many of the clients take part in a round (`Participation` refuses less than one)."""
    return max(1, round(share * clients))


@dataclass(frozen=True)
class Participation:
    """Of `clients` clients the share `share` (C) takes part in each round; `sizes`: drawn in
    proportion to n_k, else all alike."""

    seed: int
    clients: int
    share: float
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if round(self.share * self.clients) < 1:
            raise SettingError(
                "run",
                "participation",
                f"{self.share:g} of {self.clients} clients is not one: it must be at least "
                f"{1 / self.clients:.3g}",
            )

    def in_round(self, number: int) -> tuple[int, ...]:
        """Clients of the round with this number (1, 2, …), ascending."""
        if self.share >= 1:
            return tuple(range(self.clients))
        return tuple(sorted(self._drawn(number).tolist()))

    def _drawn(self, number: int) -> Counts:
        """Clients of the round in the order of the draw, where not all take part."""
        count = active_clients(self.clients, self.share)
        weights = None
        if self.sizes is not None and sum(n > 0 for n in self.sizes) >= count:
            weights = [n / sum(self.sizes) for n in self.sizes]
        return numpy_generator(self.seed, "participants", number).choice(
            self.clients, count, replace=False, p=weights
        )

    def rounds_of(self, client: int, rounds: int) -> tuple[int, ...]:
        """The rounds among the first `rounds` that a client takes part in."""
        everything = range(1, rounds + 1)
        return (
            tuple(everything)
            if self.share >= 1
            else tuple(n for n in everything if client in self.in_round(n))
        )

    def most_rounds(self, groups: Sequence[int], after: Sequence[int]) -> Counts:
        """How many of the first n rounds the busiest client of each group takes part in, each n of
        `after`.

        Args:
            groups: of each client the number of its group (0, 1, …).
            after: numbers of rounds n ≥ 0, ascending. Every round up to the last is drawn, once.

        Returns:
            int64 [len(after), number of groups].
        """
        return _most_rounds(self, tuple(groups), tuple(after))


@lru_cache(maxsize=4)  # a plan asks several times, and a draw is 20 µs
def _most_rounds(
    participation: Participation, groups: tuple[int, ...], after: tuple[int, ...]
) -> Counts:
    kinds = max(groups) + 1
    if participation.share >= 1:
        return np.repeat(np.array(after, dtype=np.int64)[:, None], kinds, axis=1)
    most = np.zeros((len(after), kinds), dtype=np.int64)
    where = np.array(groups)
    for row, counts in enumerate(_attendance(participation, after)):
        np.maximum.at(most[row], where, counts)
    return most


def _attendance(participation: Participation, after: Sequence[int]) -> Iterator[Counts]:
    """In how many of the first n rounds each client takes part, for each n of `after`."""
    counts = np.zeros(participation.clients, dtype=np.int64)
    done = 0
    for last in after:
        for number in range(done + 1, last + 1):
            counts[participation._drawn(number)] += 1
        done = last
        yield counts
