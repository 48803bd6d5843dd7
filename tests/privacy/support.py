"""Releases, guards, charged series and the facts of a report for tests."""

from __future__ import annotations

from typing import Any

from fedsynth.privacy.audit import epsilon_lower_bound
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import RECORD, Release
from fedsynth.privacy.report.figures import ReportFacts


def release(**values: Any) -> Release:
    """Returns a ledger's row; its sampler follows from its rate."""
    fields = {
        "round": 1,
        "quantity": "sums",
        "mechanism": "test",
        "clipped": "rows",
        "noise_multiplier": 1.0,
        "sensitivity": 2.0,
        "sample_rate": 1.0,
        "steps": 1,
        "dimension": 12,
        **values,
    }
    return Release(sampler="full" if fields["sample_rate"] == 1 else "poisson", **fields)


def guard(ledger: Ledger | None = None, unit: str = RECORD) -> BudgetEnforcer:
    """Returns a guard without a cap."""
    return BudgetEnforcer(ledger or Ledger("c"), 1e-5, None, unit=unit)


def series(
    groups: int = 1, secret: SecretGenerator | None = None, unit: str = RECORD, **values: Any
) -> GaussianSumMechanism:
    """Returns a charged series of `release(**values)`."""
    return GaussianSumMechanism(
        release(**values), groups, guard(unit=unit), secret or SecretGenerator()
    )


def facts(**values: Any) -> ReportFacts:
    """Returns the public facts of a private run of two rounds."""
    stated = {
        "method": "feddm",
        "mechanism": "residual",
        "delta": 1e-5,
        "max_records": 1000,
        "planned_rounds": 2,
        "rounds_done": 2,
        **values,
    }
    return ReportFacts(**stated)


def audit(**values: Any) -> dict[str, Any]:
    """Returns an audit's part of a report."""
    counts = {
        "command": "fedsynth privacy audit --method feddm --canaries 1000",
        "method": "feddm",
        "mechanism": "residual",
        "canaries": 1000,
        "guesses": 400,
        "correct": 260,
        "confidence": 0.999,
        "delta": 1e-5,
    }
    bound = epsilon_lower_bound(260, 400, 1000, 1e-5, 0.999)
    return {**counts, "epsilon_lower_bound": bound, **values}
