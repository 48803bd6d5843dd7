"""One client's budget: its ledger, the guard of its cap, and its secret.

It belongs to the client. It holds the public plan, its own ledger and its own secret, and knows
nothing of other clients; whoever asks, it refuses what its cap does not allow.
"""

from __future__ import annotations

from typing import Any

from fedsynth.core.context import RoundContext
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.privacy.guard import Cap
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.plans import Allowance, MakeSeries, UnaccountedNoise, authorise
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release


class ClientBudget:
    """What a client of a private run may still release, and what charges it.

    Args:
        client: its number in the federation, which says what the plan has for it.
        ledger: its own.
        plan: the run's.
        secret: its own; None makes one with a fresh key.
        cap: what the client's owner allows, beside the run's own cap; None: no other.

    Attributes:
        plan: the run's.
        make_series: what charges and makes its series; an audit watches them.

    Raises:
        LedgerError: the ledger holds releases of another unit.
    """

    def __init__(
        self,
        client: int,
        ledger: Ledger,
        plan: PrivacyPlan,
        secret: SecretGenerator | None = None,
        cap: Cap | None = None,
    ) -> None:
        self.client = client
        self.ledger = ledger
        self.secret = secret or SecretGenerator(four_sums=plan.privacy.four_sums)
        self.make_series: MakeSeries = GaussianSums
        self.plan = plan
        self._guard = plan.guard(ledger, cap)

    @property
    def guaranteed(self) -> bool:
        """Whether the run's mechanism guarantees anything."""
        return self.plan.facts.guaranteed

    def history(self) -> History:
        """What the ledger holds now."""
        return self.ledger.history()

    def check(self, number: int) -> None:
        """Asks whether the round with this number can be charged; before anybody is charged for
        it, else some would pay for a round that releases nothing.

        Raises:
            BudgetExceededError: it would exceed the cap.
            LedgerError: the ledger cannot be written.
        """
        if self.guaranteed:
            self._guard.check(self.plan.planned([number]))
        self.ledger.check_writable()

    def charge(self, context: RoundContext, phase: str) -> Allowance[Any]:
        """Charges the ledger for all that this client releases in one exchange of a round.

        A mechanism without any guarantee is recorded as such: from then on the ledger's ε is
        infinite.

        Raises:
            BudgetExceededError: the cap would be exceeded: another run has charged the ledger
                since `check`. What was charged before it stays charged.
        """
        plans = self.plan.client_plans(self.client, context)
        if self.guaranteed:
            return authorise(
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
        return Allowance(phase, granted, [plan for plan in plans if plan.phase != phase])


class OpenBudget:
    """The kept ledger of a client in a run without differential privacy.

    Args:
        ledger: its own.
        method: the name of the run's method.
    """

    def __init__(self, ledger: Ledger, method: str) -> None:
        self.ledger = ledger
        self._method = method

    def record(self, number: int) -> None:
        """Records a round before it runs: from then on the ledger's ε is infinite.

        Nothing is clipped or noised, so that sensitivity and dimension say nothing.
        """
        self.ledger.charge(
            Release(
                round=number,
                quantity=f"a round of {self._method}",
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
