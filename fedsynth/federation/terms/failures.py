"""Clients that fail on purpose: who, when and how, drawn from the run's seed.

Every client of a round fails with the same probability, whatever others do. It is a third each:

- `crashed`: it stops before its step: nothing is computed, released or charged;
- `timed out`: it hangs in its step: what the step releases is charged, its memory stays as it was;
- `too late`: its step is done and charged and its memory moves on, and its answer comes when the
  server waits no more.

In a round of two exchanges it fails in one of them, and is out for the rest of the round. Who fails
is public, so that a private run's plan knows which rows the ledgers lack.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.seeding import numpy_generator

CRASHED, TIMED_OUT, LATE = "crashed", "timed out", "too late"
KINDS = (CRASHED, TIMED_OUT, LATE)


@dataclass(frozen=True)
class Failure:
    """Of one client in one round.

    Attributes:
        kind: one of `KINDS`.
        phase: the exchange, of a round that has two; of another round it is the main one.
    """

    kind: str
    phase: str


@dataclass(frozen=True)
class Failures:
    """Of `share` of the clients of each round, on average.

    >>> failures = Failures(seed=0, share=0.3)
    >>> failing = [failures.of(1, client) for client in range(1000)]
    >>> 250 < sum(failure is not None for failure in failing) < 350
    True
    """

    seed: int
    share: float

    def of(self, number: int, client: int) -> Failure | None:
        """How this client fails in the round with this number; None: it does not."""
        if not self.share:
            return None
        draws = numpy_generator(self.seed, "client failures", number, client)
        if draws.random() >= self.share:
            return None
        kind = KINDS[int(draws.integers(len(KINDS)))]
        return Failure(kind, (FIRST, MAIN)[int(draws.integers(2))])

    def released(self, number: int, client: int, phase: str, *, two: bool) -> bool:
        """Whether the client takes its step in this exchange, and so is charged for it.

        Args:
            number: of the round.
            client: its number.
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
