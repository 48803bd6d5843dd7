"""Methods whose servers need the sum of their clients' uploads alone, and whose noise protects it:
each client's own, or that of several together.

With `aggregation="own"` every client adds all of the noise that is charged, and anybody may see its
upload. With "secure" each adds 1/√H of its deviation, H a public minimum of honest clients that
survive a round: the guarantee then holds for those who see the sum alone. Over data owners' nodes
the sum is made so that nobody sees more (`fedsynth.federation.exchange.secure_exchange`); a simulation
assumes it. What is charged is the noise of H clients, however many answered. One of those who
answer may be who looks, and knows its own noise: of a sum of H clients or fewer nothing is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf, sqrt
from typing import TypeVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import Method, State, Up
from fedsynth.core.state import ServerState
from fedsynth.errors import SettingError
from fedsynth.privacy.grid import Addends
from fedsynth.privacy.plans import FIRST, MAIN, PrivatePlan
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import check_choices, check_ranges

OWN, SECURE = "own", "secure"
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Pool:
    """Sums over clients.

    Attributes:
        sums: [D], float64.
        deviation: of the noise in each coordinate.
        records: the public number of records behind them.
    """

    sums: Tensor
    deviation: float
    records: float


@dataclass(frozen=True)
class SharesNoise(Method):
    """A method whose server needs nothing of its clients' uploads but their sum: `from_sum` makes
    the next state of it, `sum_releases` says what its fields are.

    Args:
        aggregation: "own": every client adds all of the noise. "secure": each adds 1/√H of it, and
            the guarantee holds for those who see the sum alone. Over nodes they see no more; a
            simulation assumes it.
        honest: H, a public minimum of honest clients that survive a round, beside one who may be
            who looks; 0: all but one, so that nobody may be lost.
    """

    aggregation: str = OWN
    honest: int = 0

    def check_aggregation(self) -> None:
        """Refuses what is no way of adding up."""
        check_ranges(self, honest=(0, inf))
        check_choices(self, aggregation=(OWN, SECURE))

    @property
    def sums_alone(self) -> bool:
        return self.aggregation == SECURE

    def noise_shares(self, clients: int) -> int:
        """H; 1 where every client's noise is its own.

        Args:
            clients: K.

        Raises:
            SettingError: more honest clients than others.
        """
        if self.aggregation == OWN:
            return 1
        if self.honest and self.honest >= clients:
            raise SettingError(
                "method",
                "honest",
                f"must be below the number of clients, {clients}: one of them may be who looks, "
                "and knows its own noise",
                value=self.honest,
            )
        return self.honest or max(1, clients - 1)

    def added_up(
        self, plans: tuple[PrivatePlan, ...], privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """The plans with H, and whose releases are added up."""
        if self.aggregation == OWN:
            return plans
        records = context.spec.train_size if privacy.max_records is None else privacy.max_records
        addends = Addends(context.clients, records)
        shares = self.noise_shares(context.clients)
        return tuple(replace(plan, shares=shares, addends=addends) for plan in plans)

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

    def pooled(self, sums_D: Tensor, clients: int, plan: str, context: RoundContext) -> Pool:
        """The sum of so many clients' uploads, with its noise and the public number of records."""
        records = context.nominal_size * clients
        return Pool(sums_D, self.pooled_deviation(plan, clients, context), records)

    def sum_dtype(self, plan: str, context: RoundContext) -> torch.dtype:
        """Of an upload's field: float64 on a release's grid, else float32."""
        return torch.float64 if plan in context.grids else torch.float32

    def enough(self, clients: int, context: RoundContext) -> bool:
        """Whether so many clients answered that the sum has all the noise that is charged, without
        that of one who looks; of a sum with less nothing is made, and people are told."""
        shares = self.noise_shares(context.clients)
        shared = self.aggregation == SECURE and context.clients > 1
        if context.privacy is None or clients >= shares + shared:
            return True
        context.note(
            f"round {context.round}: {clients} clients answered, and the noise is that of {shares} "
            "beside one who may look: nothing is made of this round"
        )
        return False

    def first_aggregate(
        self, state: State, replies: Mapping[int, Up], context: RoundContext
    ) -> ServerState:
        """Of all replies' sum."""
        return self.from_sum(FIRST, state, total_of(replies), len(replies), context)

    def server_step(
        self, state: State, uploads: Mapping[int, Up], context: RoundContext
    ) -> ServerState:
        """Of all uploads' sum."""
        return self.from_sum(MAIN, state, total_of(uploads), len(uploads), context)


def total_of(uploads: Mapping[int, M]) -> M:
    """The uploads' sum, field by field, in float64.

    >>> from fedsynth.methods.fedstats import StatisticSums
    >>> total_of({0: StatisticSums(torch.ones(2)), 3: StatisticSums(torch.ones(2))}).sums.tolist()
    [2.0, 2.0]
    """
    some = list(uploads.values())
    added = {
        one.name: torch.stack([getattr(upload, one.name) for upload in some]).double().sum(dim=0)
        for one in fields(some[0])
    }
    return type(some[0])(**added)
