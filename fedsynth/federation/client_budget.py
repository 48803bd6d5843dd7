"""The privacy budget of one client: its ledger, its cap on ε, and its secret key.

It belongs to the client. It holds the public plan, its own ledger and its own secret, and no data
of other clients. It refuses every request that its cap does not allow.
"""

from __future__ import annotations

from typing import Any

from fedsynth.core.context import RoundContext
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.privacy.guard import EpsilonCap
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.plans import MakeSeries, ReleaseBudget, UnaccountedNoise, charge_round
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release


class ClientBudget:
    """The budget of one client in a private run. It charges the client's releases to a ledger.

    Args:
        client: its index in the federation, which selects its part of the plan.
        ledger: its own.
        plan: the run's.
        secret: its own; None makes one with a fresh key.
        cap: its owner's cap, in addition to the run's own; None: no other.

    Attributes:
        plan: the run's.
        make_series: charges and makes its series; an audit observes them.

    Raises:
        LedgerError: the ledger holds releases of another unit.
    """

    def __init__(
        self,
        client: int,
        ledger: Ledger,
        plan: PrivacyPlan,
        secret: SecretGenerator | None = None,
        cap: EpsilonCap | None = None,
    ) -> None:
        self.client = client
        self.ledger = ledger
        self.secret = secret or SecretGenerator(four_sums=plan.privacy.four_sums)
        self.make_series: MakeSeries = GaussianSumMechanism
        self.plan = plan
        self._guard = plan.guard(ledger, cap)

    @property
    def guaranteed(self) -> bool:
        """Returns whether the run's mechanism has a privacy guarantee."""
        return self.plan.facts.guaranteed

    def history(self) -> History:
        """Returns the current content of the client's ledger."""
        return self.ledger.history()

    def check(self, number: int) -> None:
        """Checks that this client can be charged for a round. The check runs for all clients before
        any of them is charged, so that no client pays for a round that releases nothing.

        Raises:
            BudgetExceededError: it would exceed the cap.
            LedgerError: the ledger cannot be written.
        """
        if self.guaranteed:
            self._guard.check(self.plan.planned([number]))
        self.ledger.check_writable()

    def charge(self, context: RoundContext, phase: str) -> ReleaseBudget[Any]:
        """Charges the ledger for everything that this client releases in one exchange of a round.

        A mechanism without a guarantee is recorded as such: from then on the ledger's ε is
        infinite.

        Raises:
            BudgetExceededError: the cap would be exceeded, because another run has charged the
                ledger since `check`. Earlier charges remain.
        """
        plans = self.plan.client_plans(self.client, context)
        if self.guaranteed:
            return charge_round(
                plans,
                context.round,
                self.plan.sigma,
                self._guard,
                self.secret,
                phase=phase,
                make_series=self.make_series,
            )
        rows = self.plan.client_rows(self.client, context)
        granted = []
        for plan, row in zip(plans, rows, strict=True):
            if plan.phase == phase:
                self.ledger.charge(row)
                granted.append((plan, UnaccountedNoise(row, self.secret)))
        return ReleaseBudget(phase, granted)


def record_open_round(ledger: Ledger, method: str, number: int) -> None:
    """Records in a kept ledger that a round without differential privacy is about to run. From then
    on, the ε of this ledger is infinite.

    Nothing is clipped or noised, so the sensitivity and dimension are placeholders.
    """
    ledger.charge(
        Release(
            round=number,
            quantity=f"a round of {method}",
            mechanism="none",
            clipped="nothing",
            noise_multiplier=0.0,
            sensitivity=1.0,
            sample_rate=1.0,
            sampler="full",
            steps=1,
            dimension=1,
            unaccounted="a run on the same data without differential privacy",
        )
    )
