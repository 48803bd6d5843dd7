"""Methods whose server needs only the sum of the clients' uploads.

With `aggregation="own"`, every client adds all of the charged noise, and its upload may be public.

With `aggregation="secure"`, every client adds noise with 1/√H of that standard deviation, where H
is a public lower bound on the number of honest clients that complete a round. The guarantee then
holds against parties that see only the sum. Between the nodes of data owners, secure aggregation
ensures this (`fedsynth.deployment.secure_aggregation.server`). A simulation assumes it. The charge
is for the noise of H clients, however many clients answer. One of the clients that answer may be
the attacker, who knows the noise of that client. A sum of H clients or fewer is therefore
discarded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message
from fedsynth.core.method import Method, State, Upload
from fedsynth.errors import SettingError
from fedsynth.privacy.plans import FIRST, MAIN, Plans
from fedsynth.privacy.randomness import Addends
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import in_range, one_of

SECURE = "secure"
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Pool:
    """The sum of one release over several clients.

    Attributes:
        sums: the sums [D], float64.
        noise_std: the standard deviation of the noise in each coordinate.
        records: the public number of records over which the sums are taken.
    """

    sums: Tensor
    noise_std: float
    records: float


@dataclass(frozen=True)
class SummedUploads(Method):
    """A method whose server needs only the sum of the clients' uploads.

    A subclass defines `from_sum` and `sum_releases`, and its `release_plans` end with
    `sum_over_clients`. `from_sum` is called once in an exchange, with a sum that has all of the
    charged noise. This class comes before `TwoExchanges` in a list of bases.

    Args:
        aggregation: who adds the noise. With "own", every client adds all of the noise. With
            "secure", every client adds 1/√H of the noise, and the guarantee holds against parties
            that see only the sum. Between nodes, secure aggregation enforces this. A simulation
            assumes it.
        honest: H, a public lower bound on the number of honest clients that complete a round, in
            addition to one client that may be the attacker. With 0, H is the number of all clients
            but one, so that no client may drop out.
    """

    aggregation: str = one_of("own", SECURE)
    honest: int = in_range(0, 0)

    @property
    def requires_secure_sum(self) -> bool:
        return self.aggregation == SECURE

    def noise_shares(self, clients: int) -> int:
        """Returns the number of clients whose combined noise is the noise of one release.

        This is H, or 1 if every client adds all of the noise.

        Args:
            clients: K, the number of clients.

        Raises:
            SettingError: `honest` is not below the number of clients.
        """
        if not self.requires_secure_sum:
            return 1
        if self.honest and self.honest >= clients:
            reason = (
                f"must be below {clients}, the number of clients, because one client may be the "
                f"attacker. Set method.honest to at most {clients - 1}"
            )
            raise SettingError("method", "honest", reason, value=self.honest)
        return self.honest or max(1, clients - 1)

    def sum_over_clients(
        self, plans: Plans, privacy: PrivacySettings, context: RoundContext
    ) -> Plans:
        """Adds the parameters of secure aggregation to the release plans.

        These are H, and public limits on the numbers of clients and records. With
        `aggregation="own"`, the plans do not change.
        """
        if not self.requires_secure_sum:
            return plans
        records = privacy.max_records
        if records is None:
            records = context.spec.train_size
        addends = Addends(context.clients, records)
        shares = self.noise_shares(context.clients)
        return tuple(replace(plan, shares=shares, addends=addends) for plan in plans)

    def pooled_deviation(self, plan: str, clients: int, context: RoundContext) -> float:
        """Returns the standard deviation of the noise in each coordinate of a summed upload.

        The result is 0 without differential privacy.

        Args:
            plan: the name of the release.
            clients: number of clients that answered.
            context: the context of the round.
        """
        client_deviation = context.noise.get(plan, 0.0) / sqrt(self.noise_shares(context.clients))
        return client_deviation * sqrt(clients)

    def pooled(self, sums_D: Tensor, clients: int, plan: str, context: RoundContext) -> Pool:
        """Returns the `Pool` for a sum of uploads."""
        records = context.nominal_size * clients
        return Pool(sums_D, self.pooled_deviation(plan, clients, context), records)

    def sum_dtype(self, plan: str, context: RoundContext) -> torch.dtype:
        """Returns the dtype of a field after the uploads are added.

        The dtype is float64 for a release that is rounded to a grid, and float32 otherwise.
        """
        return torch.float64 if plan in context.grids else torch.float32

    def receive_sum(
        self, exchange: str, state: State, total: Upload, clients: int, context: RoundContext
    ) -> ServerState:
        """Returns the result of `from_sum`, or the old state if the sum has too little noise.

        The noise of one client does not count, because this client may be the attacker. A note
        states that the round is discarded.
        """
        shares = self.noise_shares(context.clients)
        attackers = int(self.requires_secure_sum and context.clients > 1)
        if context.privacy is None or clients >= shares + attackers:
            return self.from_sum(exchange, state, total, clients, context)
        context.note(
            f"round {context.round} is discarded, because only {clients} clients answered, but "
            f"enough noise in the sum requires {shares + attackers}"
        )
        return state

    @abstractmethod
    def sum_releases(self, exchange: str, context: RoundContext) -> Mapping[str, str]:
        """Returns the name of the release plan for each upload field that the server adds up.

        The keys are the names of the fields, and the values are the names of the plans.
        """

    @abstractmethod
    def from_sum(
        self, exchange: str, state: State, total: Upload, clients: int, context: RoundContext
    ) -> ServerState:
        """Computes the server's next state from the sum of all uploads in an exchange.

        Args:
            exchange: the exchange, "first" or "main".
            state: the server's state before the exchange.
            total: a message whose fields are the sums of the uploads' fields, float64.
            clients: the number of uploads that were added.
            context: the round's context.
        """

    def first_aggregate(
        self, state: State, replies: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        """Computes the next state from the sum of the first exchange's uploads."""
        return self.receive_sum(FIRST, state, summed(replies), len(replies), context)

    def server_step(
        self, state: State, uploads: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        """Computes the next state from the sum of all uploads."""
        return self.receive_sum(MAIN, state, summed(uploads), len(uploads), context)


def sums_securely(method: Method) -> TypeGuard[SummedUploads]:
    """Returns True if the server sees only the sum of the clients' uploads."""
    return isinstance(method, SummedUploads) and method.requires_secure_sum


def summed(uploads: Mapping[int, M]) -> M:
    """Adds the uploads field by field, in float64.

    >>> from fedsynth.methods.fedstats import StatisticSums
    >>> upload = StatisticSums(torch.ones(2), principal=torch.ones(0))
    >>> summed({0: upload, 3: upload}).sums.tolist()
    [2.0, 2.0]
    """
    first = next(iter(uploads.values()))
    sums: dict[str, Tensor] = {}
    for f in fields(first):
        values = [getattr(upload, f.name) for upload in uploads.values()]
        sums[f.name] = torch.stack(values).double().sum(dim=0)
    return type(first)(**sums)
