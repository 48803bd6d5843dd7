"""Whose noise protects pooled sums: each client's own, or that of several together.

With `aggregation="own"` every client adds all of the noise that is charged, and anybody may see its
upload. With "secure" each adds 1/√H of its deviation, H a public minimum of honest clients that
survive a round: the guarantee then holds for those who see the sum alone. A deployment's wire has to
see to that; a simulation assumes it. What is charged is the noise of H clients, however many
answered, and of a sum with fewer nothing is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.core.validation import check_choices, check_ranges
from fedsynth.errors import SettingError

OWN, SECURE = "own", "secure"


@dataclass(frozen=True)
class SharesNoise(Method):
    """A method whose server needs nothing of its clients' uploads but their sum.

    Args:
        aggregation: "own": every client adds all of the noise. "secure": each adds 1/√H of it, and
            the guarantee holds for those who see the sum alone, which a secure aggregation has to
            see to; a simulation executes none.
        honest: H, a public minimum of honest clients that survive a round; 0: all but one.
    """

    aggregation: str = OWN
    honest: int = 0

    def check_aggregation(self) -> None:
        """Refuses what is no way of adding up."""
        check_ranges(self, honest=(0, inf))
        check_choices(self, aggregation=(OWN, SECURE))

    def noise_shares(self, clients: int) -> int:
        """H; 1 where every client's noise is its own.

        Args:
            clients: K.

        Raises:
            SettingError: more honest clients than others.
        """
        if self.aggregation == OWN:
            return 1
        if self.honest >= clients:
            raise SettingError(
                "method",
                "honest",
                f"must be below the number of clients, {clients}: the one who is attacked does not "
                "count on itself",
                value=self.honest,
            )
        return self.honest or max(1, clients - 1)

    def pooled_deviation(self, plan: str, clients: int, context: RoundContext) -> float:
        """Standard deviation of the noise in a coordinate of the sum of so many clients' uploads;
        0 without differential privacy.

        Args:
            plan: the release's name.
            clients: how many answered.
            context: the round's.
        """
        each = context.noise.get(plan, 0.0) / sqrt(self.noise_shares(context.clients))
        return each * sqrt(clients)

    def note_aggregation(self, context: RoundContext) -> None:
        """Says in the first round what the guarantee assumes."""
        if context.round > 1 or context.privacy is None or self.aggregation == OWN:
            return
        context.note(
            "aggregation assumed, not executed: each client adds the noise of 1 of "
            f"{self.noise_shares(context.clients)}, and ε holds for those who see sums alone"
        )

    def enough(self, clients: int, context: RoundContext) -> bool:
        """Whether so many clients answered that the sum has all the noise that is charged; of a sum
        with less nothing is made, and people are told."""
        shares = self.noise_shares(context.clients)
        if context.privacy is None or clients >= shares:
            return True
        context.note(
            f"round {context.round}: {clients} clients answered, and the noise is that of {shares}: "
            "nothing is made of this round"
        )
        return False
