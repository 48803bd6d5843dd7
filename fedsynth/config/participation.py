"""Determines the clients of each round, the clients that fail, and the rounds after which a plan
states ε.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from fedsynth.errors import SettingError
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.seeding import numpy_generator

Counts = npt.NDArray[np.int64]


def active_clients(clients: int, share: float) -> int:
    """Returns the number of clients in a round (`Participation` refuses less than one)."""
    return max(1, round(share * clients))


@dataclass(frozen=True)
class Participation:
    """Draws m = max(1, round(C·K)) clients for each round, from the run's seed.

    The draw is public, so it is no source of privacy: a client's ε counts the rounds that it takes
    part in, without amplification. Draws by size (FedProx) show n_k and are refused with
    differential privacy.

    Attributes:
        seed: the run's.
        clients: K.
        share: C.
        sizes: draws in proportion to n_k; None: uniform.
    """

    seed: int
    clients: int
    share: float
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if round(self.share * self.clients) < 1:
            reason = (
                f"{self.share:g} of {self.clients} clients is less than one client: it must "
                f"be at least {1 / self.clients:.3g}"
            )
            raise SettingError("run", "participation", reason)

    def in_round(self, number: int) -> tuple[int, ...]:
        """Returns the clients of the round with this number (1, 2, …), ascending."""
        if self.share >= 1:
            return tuple(range(self.clients))
        return tuple(sorted(self._drawn(number).tolist()))

    def _drawn(self, number: int) -> Counts:
        """Returns the clients of a round in the order of the draw, if not all take part."""
        count = active_clients(self.clients, self.share)
        weights = None
        if self.sizes is not None and np.count_nonzero(self.sizes) >= count:
            weights = np.array(self.sizes) / sum(self.sizes)
        return numpy_generator(self.seed, "participants", number).choice(
            self.clients, count, replace=False, p=weights
        )

    def rounds_of(self, client: int, rounds: int) -> tuple[int, ...]:
        """Returns the rounds, among the first `rounds`, in which a client takes part."""
        if self.share >= 1:
            return tuple(range(1, rounds + 1))
        return tuple(n for n in range(1, rounds + 1) if client in self.in_round(n))


@lru_cache(maxsize=4)  # a plan asks several times, and a draw takes 20 µs
def most_rounds(
    participation: Participation, groups: tuple[int, ...], rounds: tuple[int, ...]
) -> Counts:
    """Returns the number of the first n rounds in which the busiest client of each group takes
    part, for each n in `rounds`.

    Args:
        participation: the schedule.
        groups: the group index of each client (0, 1, …).
        rounds: numbers of rounds n ≥ 0, ascending. Every round up to the last is drawn, once.

    Returns:
        int64 [len(rounds), number of groups].
    """
    num_groups = max(groups) + 1
    if participation.share >= 1:
        return np.repeat(np.array(rounds, dtype=np.int64)[:, None], num_groups, axis=1)
    maxima = np.zeros((len(rounds), num_groups), dtype=np.int64)
    counts = np.zeros(participation.clients, dtype=np.int64)
    start = 1
    for row, stop in enumerate(rounds):
        for number in range(start, stop + 1):
            counts[participation._drawn(number)] += 1
        start = stop + 1
        np.maximum.at(maxima[row], np.array(groups), counts)
    return maxima


CRASHED, TIMED_OUT, LATE = "crashed", "timed out", "too late"
KINDS = (CRASHED, TIMED_OUT, LATE)


@dataclass(frozen=True)
class Failure:
    """The failure of one client in one round.

    Attributes:
        kind: one of `KINDS`.
        phase: the exchange in which it fails, if the round has two; otherwise it is the main one.
    """

    kind: str
    phase: str


@dataclass(frozen=True)
class Failures:
    """Simulated client failures: the clients, rounds and kinds, drawn from the run's seed.

    Every client of a round fails with probability `share`, in one of three ways with equal
    probability. `crashed`: it stops before its step, so nothing is computed, released or charged.
    `timed out`: it hangs in its step; the step's releases are charged, its memory is unchanged.
    `too late`: its step is done and charged and its memory is updated, but the server no longer
    waits for its answer. In a round of two exchanges it fails in one of them and is absent for the
    rest of the round. Failures are public, so a private run's plan knows which rows are missing in
    ledgers.

    >>> failures = Failures(seed=0, share=0.3)
    >>> failing = [failures.of(1, client) for client in range(1000)]
    >>> 250 < sum(failure is not None for failure in failing) < 350
    True
    """

    seed: int
    share: float

    def of(self, number: int, client: int) -> Failure | None:
        """Returns the failure of this client in the round with this number, or None."""
        if not self.share:
            return None
        draws = numpy_generator(self.seed, "client failures", number, client)
        if draws.random() >= self.share:
            return None
        kind = KINDS[int(draws.integers(len(KINDS)))]
        return Failure(kind, (FIRST, MAIN)[int(draws.integers(2))])

    def released(self, number: int, client: int, phase: str, *, two: bool) -> bool:
        """Returns whether the client takes its step in this exchange, and so is charged for it.

        Args:
            number: the round number.
            client: the client index.
            phase: the exchange.
            two: whether the round has a first exchange.
        """
        failure = self.of(number, client)
        if failure is None:
            return True
        failing = failure.phase if two else MAIN
        if phase != failing:
            return phase == FIRST  # before it has failed
        return failure.kind != CRASHED


ALL_SHOWN = 1000
"""Maximum number of rounds for which a plan states ε after each round."""


def shown_rounds(rounds: int) -> tuple[int, ...]:
    """Returns the rounds after which a plan of `rounds` rounds states ε, ascending; a public
    choice.

    All of them, if there are at most `ALL_SHOWN`. Otherwise 1, 2, 5, 10, 20, 50, …, every fifth of
    the run, and the last.
    """
    if rounds <= ALL_SHOWN:
        return tuple(range(1, rounds + 1))
    numbers = {*range(rounds // 5, rounds, rounds // 5), rounds}
    for exponent in range(len(str(rounds))):
        numbers.update((10**exponent, 2 * 10**exponent, 5 * 10**exponent))
    return tuple(sorted(number for number in numbers if number <= rounds))


class PlannedEpsilon(Mapping[int, float]):
    """A lazy mapping from a round number to ε after that round.

    A value costs a composition, up to a second with subsampling, so each is computed at its first
    access.

    Args:
        rounds: the keys, ascending.
        epsilon_after: maps a position in `rounds` to ε.
    """

    def __init__(self, rounds: Sequence[int], epsilon_after: Callable[[int], float]) -> None:
        self._positions = {number: position for position, number in enumerate(rounds)}
        self._epsilon_after = cache(epsilon_after)

    def __getitem__(self, number: int) -> float:
        return self._epsilon_after(self._positions[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)
