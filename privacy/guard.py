"""Caps on the ε of a client's ledger, and a check that refuses releases that would exceed a cap."""

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
"""The share of a budget that counts as nothing. If less than this share is left, a release would be
only noise. The calibration of σ leaves about half of this share unused."""


@dataclass(frozen=True)
class EpsilonCap:
    """The largest ε that a data owner allows at the owner's δ, which may differ from a run's δ."""

    epsilon: float
    delta: float


class BudgetEnforcer:
    """Charges a ledger for releases, and refuses a release that would exceed a cap on ε.

    It also writes the privacy unit into every row of the ledger.

    Args:
        ledger: the client's ledger.
        delta: the run's δ.
        cap: the largest ε at `delta`. None means that the run has no cap.
        adjacency: one of `ADJACENCIES`.
        unit: the privacy unit, one of `UNITS`.
        owner: the data owner's cap, which applies in addition. None if there is none.

    Raises:
        PrivacySettingError: δ, a cap or the adjacency is out of range.
        LedgerError: the ledger holds releases that protect another unit.
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
        """Checks that the planned releases fit into the budget, without charging them.

        Raises:
            BudgetExceededError: the releases in the ledger and the planned ones would together
                exceed a cap.
        """
        self.check_budget(self.ledger.releases, planned)

    def charge(self, release: Release) -> None:
        """Checks that a release fits into the budget, and charges it.

        If the ledger is a file, both happen under one lock.
        """
        self.ledger.charge(replace(release, unit=self.unit), self.check_budget)

    def check_budget(self, rows: Sequence[Release], planned: Sequence[Release]) -> None:
        """Does the same as `check`, with `rows` in place of the releases in the ledger."""
        self.check_unit(rows)
        for cap in self._caps:
            new_cost = epsilon([*rows, *planned], cap.delta, self.adjacency)
            if new_cost > cap.epsilon:
                cost = epsilon(rows, cap.delta, self.adjacency)
                raise BudgetExceededError(
                    f"the planned release would bring ε of client {self.ledger.client!r} from "
                    f"{format_epsilon(cost)} to {format_epsilon(new_cost)}, above the cap "
                    f"{cap.epsilon:g} (δ = {cap.delta:g})",
                    (self.ledger.client, cost, new_cost),
                )

    def check_unit(self, rows: Sequence[Release]) -> None:
        """Checks that all rows protect the same privacy unit as this run.

        A clip bounds the influence of either one record or one user. The costs of releases of both
        kinds cannot be combined into one ε.

        Raises:
            LedgerError: a row protects another unit.
        """
        for row in rows:
            if row.unaccounted is None and row.unit != self.unit:
                raise LedgerError(
                    f"the ledger of client {self.ledger.client!r} contains releases that protect "
                    f"a {row.unit}, but this run would protect a {self.unit}, and the two costs "
                    f"cannot be added: set privacy.unit={row.unit}"
                )
