"""Which clients take part in a round: m = max(1, round(C·K)) of them, drawn anew each round from the run's seed.

The draw is public, so it is no source of privacy: a client's ε counts the rounds that it takes part in, without any amplification. Draws by
size, as FedProx has them, show n_k and are refused with differential privacy.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsynth.core.random import numpy_generator


@dataclass(frozen=True)
class Participation:
    """Of `clients` clients the share `share` (C) takes part in each round; `sizes`: drawn in proportion to n_k, else all alike."""

    seed: int
    clients: int
    share: float
    sizes: tuple[int, ...] | None = None

    def in_round(self, number: int) -> tuple[int, ...]:
        """Clients of the round with this number (1, 2, …), ascending."""
        if self.share >= 1:
            return tuple(range(self.clients))
        count = max(1, round(self.share * self.clients))
        weights = None
        if self.sizes is not None and sum(n > 0 for n in self.sizes) >= count:
            weights = [n / sum(self.sizes) for n in self.sizes]
        drawn = numpy_generator(self.seed, "participants", number).choice(
            self.clients, count, replace=False, p=weights
        )
        return tuple(sorted(drawn.tolist()))

    def rounds_of(self, client: int, rounds: int) -> tuple[int, ...]:
        """The rounds among the first `rounds` that a client takes part in."""
        everything = range(1, rounds + 1)
        return (
            tuple(everything)
            if self.share >= 1
            else tuple(n for n in everything if client in self.in_round(n))
        )
