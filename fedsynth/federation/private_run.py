"""The clients' budgets of a run on one machine, and the plan that they share.

A simulation holds all clients, and so all budgets. Each is its client's own (`ClientBudget`); here
they are asked together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedsynth.core.method import RoundContext
from fedsynth.federation.client_budget import ClientBudget
from fedsynth.federation.clients import Clients
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.settings import RunSettings
from fedsynth.privacy.errors import BudgetExceededError
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import Ledger


class PrivateRun:
    """The privacy side of a simulated run.

    Args:
        plan: the run's.
        ledgers: the clients', in their order.

    Attributes:
        budgets: the clients', in their order.

    Raises:
        LedgerError: a ledger holds releases of another unit.
    """

    def __init__(self, plan: PrivacyPlan, ledgers: Sequence[Ledger]) -> None:
        self.plan = plan
        self.budgets = [ClientBudget(k, ledger, plan) for k, ledger in enumerate(ledgers)]

    @classmethod
    def of_clients(
        cls, settings: RunSettings, context: RoundContext, clients: Clients
    ) -> PrivateRun:
        """The privacy side of a run on these clients' data.

        Raises:
            PrivacyError: as `PrivacyPlan.make`.
            LedgerError: a kept ledger is for other records, or of another unit.
        """
        privacy = PrivacyPlan.checked(settings, context).privacy
        if privacy.ledger_folder is None:
            ledgers = clients.fresh_ledgers(None, settings)
        else:
            ledgers = clients.kept_ledgers(privacy.ledger_folder, settings)
        histories = [ledger.history() for ledger in ledgers]
        return cls(PrivacyPlan.make(settings, context, histories), ledgers)

    def keep_ledgers_in(self, folder: Path, clients: Clients) -> None:
        """Moves fresh ledgers, still empty, into files of the run folder; ledgers that
        `--dp-ledger` names stay where they are."""
        if self.plan.privacy.ledger_folder is None:
            moved = clients.fresh_ledgers(folder, self.plan.run)
            self.budgets = [
                ClientBudget(old.client, ledger, self.plan, old.secret)
                for old, ledger in zip(self.budgets, moved, strict=True)
            ]

    def histories(self) -> list[History]:
        """What the clients' ledgers hold now."""
        return [budget.history() for budget in self.budgets]

    @property
    def secret(self) -> bool:
        """Whether all clients' noise comes from the operating system's keys."""
        return all(budget.secret.is_secret for budget in self.budgets)

    def check_round(self, number: int) -> None:
        """Asks every client of a round, before anybody is charged.

        Raises:
            BudgetExceededError: some client's cap would be exceeded.
            LedgerError: some client's ledger cannot be written.
        """
        for client in self.plan.participation.in_round(number):
            self.budgets[client].check(number)

    def allows_round(self, number: int) -> bool:
        """Whether no client's cap would be exceeded in this round."""
        try:
            self.check_round(number)
        except BudgetExceededError:
            return False
        return True
