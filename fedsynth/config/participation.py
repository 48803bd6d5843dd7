"""Chooses the clients that take part in each round, and simulates failures.

The module also selects the rounds after which a privacy plan states ε.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedsynth.errors import SettingError
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.seeding import numpy_generator

Counts = npt.NDArray[np.int64]


def active_clients(clients: int, share: float) -> int:
    """Returns the number of clients that are selected for each round.

    `Participation` refuses a share that selects less than one client.
    """
    return max(1, round(share * clients))


@dataclass(frozen=True)
class Participation:
    """Selects the clients of each round at random, based on the run's seed.

    Each round has m = max(1, round(C·K)) clients. The selected clients are public, so the
    selection does not amplify privacy: a client's ε counts each round in which the client takes
    part. Draws in proportion to size (FedProx) reveal n_k and are therefore refused with
    differential privacy.

    Attributes:
        seed: the seed of the run.
        clients: K, the number of clients.
        share: C, the share of the clients in a round.
        sizes: the sizes n_k of the clients' data, if clients are drawn in proportion to their
            sizes. With None, all clients are equally likely.
    """

    seed: int
    clients: int
    share: float
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if round(self.share * self.clients) < 1:
            reason = (
                f"is {self.share:g}, which selects none of {self.clients} clients. Set it to at "
                f"least {1 / self.clients:.3g}"
            )
            raise SettingError("run", "participation", reason)

    def in_round(self, number: int) -> tuple[int, ...]:
        """Returns the indices of the clients that take part in a round, in ascending order. Rounds
        are numbered from 1.
        """
        if self.share >= 1:
            return tuple(range(self.clients))
        return tuple(sorted(self._drawn(number).tolist()))

    def _drawn(self, number: int) -> Counts:
        """Draws the clients of a round, in random order."""
        count = active_clients(self.clients, self.share)
        weights = None
        if self.sizes is not None and np.count_nonzero(self.sizes) >= count:
            weights = np.array(self.sizes) / sum(self.sizes)
        return numpy_generator(self.seed, "participants", number).choice(
            self.clients, count, replace=False, p=weights
        )

    def rounds_of(self, client: int, rounds: int) -> tuple[int, ...]:
        """Returns the rounds, out of the first `rounds`, in which a client takes part."""
        if self.share >= 1:
            return tuple(range(1, rounds + 1))
        return tuple(n for n in range(1, rounds + 1) if client in self.in_round(n))


@lru_cache(maxsize=4)  # a plan asks several times, and a draw takes 20 µs
def most_rounds(
    participation: Participation, groups: tuple[int, ...], rounds: tuple[int, ...]
) -> Counts:
    """Counts the rounds of the most active client in each group.

    Each number n in `rounds` gives one row of counts, which covers the first n rounds.

    Args:
        participation: the schedule of the clients.
        groups: the group index of each client (0, 1, …).
        rounds: numbers of rounds n ≥ 0, in ascending order.

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
    """A simulated failure of one client in one round.

    Attributes:
        kind: one of `KINDS`.
        exchange: the exchange in which the client fails, if a round has two exchanges. Otherwise
            the client fails in the main exchange.
    """

    kind: str
    exchange: str


@dataclass(frozen=True)
class Failures:
    """Simulates the failure of random clients, based on the run's seed.

    Every client in a round fails with probability `share`. There are three kinds of failure, with
    equal probability. `crashed`: the client stops before its step, so nothing is computed, released
    or charged. `timed out`: the client hangs in its step. The step's releases are charged, and the
    client's state is unchanged. `too late`: the client completes its step, is charged for it and
    updates its state, but the server no longer waits for its answer. In a round of two exchanges,
    the client fails in one of them and is absent for the rest of the round. Failures are public, so
    the plan of a private run knows which entries are missing in ledgers.

    >>> failures = Failures(seed=0, share=0.3)
    >>> failing = [failures.of(1, client) for client in range(1000)]
    >>> 250 < sum(failure is not None for failure in failing) < 350
    True
    """

    seed: int
    share: float

    def of(self, number: int, client: int) -> Failure | None:
        """Returns the failure of a client in a round, or None if the client does not fail."""
        if not self.share:
            return None
        draws = numpy_generator(self.seed, "client failures", number, client)
        if draws.random() >= self.share:
            return None
        kind = KINDS[int(draws.integers(len(KINDS)))]
        return Failure(kind, (FIRST, MAIN)[int(draws.integers(2))])

    def released(self, number: int, client: int, exchange: str, *, two: bool) -> bool:
        """Returns True if a client computes its upload in an exchange.

        The client is charged for the upload, even if the server does not receive it.

        Args:
            number: the number of the round.
            client: the index of the client.
            exchange: the exchange of the round.
            two: whether the round has two exchanges.
        """
        failure = self.of(number, client)
        if failure is None:
            return True
        failing = failure.exchange if two else MAIN
        if exchange != failing:
            return exchange == FIRST  # before it has failed
        return failure.kind != CRASHED


ALL_SHOWN = 1000  # the maximum number of rounds for which a privacy plan states ε after every round


def shown_rounds(rounds: int) -> tuple[int, ...]:
    """Returns the rounds for which a privacy plan reports ε, in ascending order.

    If the run has at most `ALL_SHOWN` rounds, all rounds are returned. Otherwise, the result
    consists of the rounds 1, 2, 5, 10, 20, 50, …, of the rounds at each fifth of the run, and of
    the last round.
    """
    if rounds <= ALL_SHOWN:
        return tuple(range(1, rounds + 1))
    numbers = {*range(rounds // 5, rounds, rounds // 5), rounds}
    for exponent in range(len(str(rounds))):
        numbers.update((10**exponent, 2 * 10**exponent, 5 * 10**exponent))
    return tuple(sorted(number for number in numbers if number <= rounds))
