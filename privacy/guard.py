"""Caps on a data set's ε, and the guard that refuses a release before it exceeds one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.errors import BudgetExceededError, LedgerError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.releases import (
    ADD_REMOVE,
    RECORD,
    Release,
    check_adjacency,
    check_delta,
    require,
)
from fedsynth.privacy.report.formatting import format_epsilon

NOTHING_LEFT = 2e-3
"""The share of a budget with which a release would be only noise. Calibration leaves about half of
it."""


@dataclass(frozen=True)
class EpsilonCap:
    """A data owner's cap: the largest ε at this δ, independent of a run's δ."""

    epsilon: float
    delta: float


class BudgetEnforcer:
    """Refuses a release in advance if ε at `delta` would exceed `cap` (None: no cap), or if ε at
    the owner's δ would exceed the owner's cap.

    It also writes the protected unit into every row.

    Raises:
        PrivacySettingError: δ, the cap or the adjacency is out of range.
        LedgerError: the ledger holds releases of another unit.
    """

    def __init__(
        self,
        ledger: Ledger,
        delta: float,
        cap: float | None,
        adjacency: str = ADD_REMOVE,
        unit: str = RECORD,
        owner: EpsilonCap | None = None,
    ) -> None:
        check_delta(delta, None)
        check_adjacency(adjacency)
        self._caps = []
        if cap is not None:
            self._caps.append(EpsilonCap(cap, delta))
        if owner is not None:
            self._caps.append(owner)
        for limit in self._caps:
            check_delta(limit.delta, None)
            valid = limit.epsilon > 0 and math.isfinite(limit.epsilon)
            rule = "as a cap must be a finite number above 0"
            require(valid, "epsilon", rule, limit.epsilon, "privacy")
        self.ledger = ledger
        self.adjacency = adjacency
        self.unit = unit
        self.check_unit(ledger.releases)

    def check(self, planned: Sequence[Release]) -> None:
        """Raises BudgetExceededError if the ledger's rows and `planned` together exceed the cap.
        Charges nothing."""
        self.check_budget(self.ledger.releases, planned)

    def charge(self, release: Release) -> None:
        """Checks and charges a release in one step (under one lock if the ledger is a file)."""
        self.ledger.charge(replace(release, unit=self.unit), self.check_budget)

    def check_budget(self, rows: Sequence[Release], planned: Sequence[Release]) -> None:
        """Does the same as `check`, with `rows` instead of the ledger's rows."""
        self.check_unit(rows)
        for cap in self._caps:
            new_cost = epsilon([*rows, *planned], cap.delta, self.adjacency)
            if new_cost > cap.epsilon:
                cost = epsilon(rows, cap.delta, self.adjacency)
                raise BudgetExceededError(
                    f"client {self.ledger.client!r}: ε is {format_epsilon(cost)} now and would be "
                    f"{format_epsilon(new_cost)} with the planned release, above the cap "
                    f"{cap.epsilon:g} (δ = {cap.delta:g})",
                    (self.ledger.client, cost, new_cost),
                )

    def check_unit(self, rows: Sequence[Release]) -> None:
        """Refuses rows of another unit: a clip bounds either one record's influence or one user's,
        and rows of both kinds do not compose into one ε."""
        for row in rows:
            if row.unaccounted is None and row.unit != self.unit:
                raise LedgerError(
                    f"the ledger of client {self.ledger.client!r} contains releases that protect "
                    f"a {row.unit}, but this run would protect a {self.unit}: their costs cannot "
                    f"be added; protect the same unit (privacy.unit={row.unit})"
                )
