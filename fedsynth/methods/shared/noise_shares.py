"""Methods whose servers need only the sum of their clients' uploads. Its noise comes from each
client separately, or from several together.

With `aggregation="own"` every client adds all of the noise that is charged, and its upload may be
public. With "secure" each adds 1/√H of its standard deviation, where H is a public minimum of
honest clients that survive a round. The guarantee then holds for parties that see only the sum.
Over data owners' nodes secure aggregation ensures this
(`fedsynth.deployment.secure_exchange`); a simulation assumes it. The noise of H clients is
charged, however many answered. One responding client may be the adversary, which knows its own
noise: a sum of H clients or fewer is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import TypeVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message
from fedsynth.core.method import Method, State, Upload
from fedsynth.errors import SettingError
from fedsynth.privacy.grid import Addends
from fedsynth.privacy.plans import FIRST, MAIN, ReleasePlan
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import in_range, one_of

SECURE = "secure"
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Pool:
    """Sums over clients.

    Attributes:
        sums: [D], float64.
        noise_std: standard deviation of the noise in each coordinate.
        records: the public number of records behind them.
    """

    sums: Tensor
    noise_std: float
    records: float


@dataclass(frozen=True)
class DistributedNoise(Method):
    """A method whose server needs only the sum of its clients' uploads: `from_sum` computes the
    next state from it, `sum_releases` maps its fields to releases.

    Args:
        aggregation: "own": every client adds all of the noise. "secure": each adds 1/√H of it, and
            the guarantee holds for parties that see only the sum. Over nodes this is enforced; a
            simulation assumes it.
        honest: H, a public minimum of honest clients that survive a round, besides one that may be
            the adversary; 0: all but one, so that no client may drop out.
    """

    aggregation: str = one_of("own", SECURE)
    honest: int = in_range(0, 0)

    @property
    def requires_secure_sum(self) -> bool:
        return self.aggregation == SECURE

    def noise_shares(self, clients: int) -> int:
        """Returns H; 1 if every client adds all of the noise.

        Args:
            clients: K.

        Raises:
            SettingError: `honest` is not below the number of clients.
        """
        if not self.requires_secure_sum:
            return 1
        if self.honest and self.honest >= clients:
            raise SettingError(
                "method",
                "honest",
                f"must be below the number of clients, {clients}: one client may be the "
                "attacker, who knows its own noise",
                value=self.honest,
            )
        return self.honest or max(1, clients - 1)

    def sum_over_clients(
        self, plans: tuple[ReleasePlan, ...], privacy: PrivacySettings, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        """Returns the plans with H and the bounds of the addends, as their releases are summed."""
        if not self.requires_secure_sum:
            return plans
        records = privacy.max_records
        if records is None:
            records = context.spec.train_size
        addends = Addends(context.clients, records)
        shares = self.noise_shares(context.clients)
        return tuple(replace(plan, shares=shares, addends=addends) for plan in plans)

    def pooled_deviation(self, plan: str, clients: int, context: RoundContext) -> float:
        """Returns the standard deviation of the noise per coordinate of a sum of uploads; 0 without
        differential privacy.

        Args:
            plan: the release's name.
            clients: how many answered.
            context: the round's.
        """
        client_deviation = context.noise.get(plan, 0.0) / sqrt(self.noise_shares(context.clients))
        return client_deviation * sqrt(clients)

    def pooled(self, sums_D: Tensor, clients: int, plan: str, context: RoundContext) -> Pool:
        """Returns a sum of `clients` uploads with its noise and the public number of records."""
        records = context.nominal_size * clients
        return Pool(sums_D, self.pooled_deviation(plan, clients, context), records)

    def sum_dtype(self, plan: str, context: RoundContext) -> torch.dtype:
        """Returns the dtype of an upload's field: float64 on a release's grid, else float32."""
        return torch.float64 if plan in context.grids else torch.float32

    def has_enough_noise(self, clients: int, context: RoundContext) -> bool:
        """Returns whether the sum of `clients` uploads has all the noise that is charged, without
        that of one adversarial client; if not, notes that the round is discarded."""
        shares = self.noise_shares(context.clients)
        attackers = int(self.requires_secure_sum and context.clients > 1)
        if context.privacy is None or clients >= shares + attackers:
            return True
        context.note(
            f"round {context.round}: only {clients} clients answered, but the noise must "
            f"come from {shares} clients besides a possible attacker: this round is discarded"
        )
        return False

    def first_aggregate(
        self, state: State, replies: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        """Computes the next state from the sum of all replies."""
        return self.from_sum(FIRST, state, summed(replies), len(replies), context)

    def server_step(
        self, state: State, uploads: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        """Computes the next state from the sum of all uploads."""
        return self.from_sum(MAIN, state, summed(uploads), len(uploads), context)


def summed(uploads: Mapping[int, M]) -> M:
    """Returns the uploads' sum, field by field, in float64.

    >>> from fedsynth.methods.statistics.settings import StatisticSums
    >>> summed({0: StatisticSums(torch.ones(2)), 3: StatisticSums(torch.ones(2))}).sums.tolist()
    [2.0, 2.0]
    """
    first = next(iter(uploads.values()))
    sums: dict[str, Tensor] = {}
    for f in fields(first):
        values = [getattr(upload, f.name) for upload in uploads.values()]
        sums[f.name] = torch.stack(values).double().sum(dim=0)
    return type(first)(**sums)
