"""Releases, guards, charged mechanism and the facts of a report for tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import Any, TypeVar

from hypothesis import strategies as st

from fedsynth.errors import PrivacyError
from fedsynth.privacy.audit_bounds import epsilon_lower_bound
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.plans import ReleasePlan
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import RECORD, Release
from fedsynth.privacy.report.figures import ReportFacts

T = TypeVar("T")
HOSTILE = [0.0, 1e-30, 1.0, -3.0, 1e20, 3e38, float("nan"), float("inf"), -float("inf")]
# Numbers of an unchecked row.
NUMBERS = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from(HOSTILE))


SUMS = Release(1, "sums", "test", "rows", 1.0, 2.0, 1.0, "full", steps=1, dimension=12)


def release(**values: Any) -> Release:
    """Returns a row of a ledger; its sampler follows from its rate."""
    sampler = "full" if values.get("sample_rate", 1) == 1 else "poisson"
    return replace(SUMS, sampler=sampler, **values)


# The plan of one release of sums.
plan = partial(
    ReleasePlan,
    **dict.fromkeys(("name", "quantity", "mechanism", "clipped"), "sums"),
    clip=2.0,
    sample_rate=1.0,
    steps=1,
    dimension=18,
    groups=3,
)


def guard(ledger: Ledger | None = None, unit: str = RECORD) -> BudgetEnforcer:
    """Returns a guard without a cap."""
    return BudgetEnforcer(ledger or Ledger("c"), unit=unit)


def mechanism(groups: int = 1, unit: str = RECORD, **values: Any) -> GaussianSumMechanism:
    """Returns a charged mechanism of `release(**values)`."""
    return GaussianSumMechanism(release(**values), groups, guard(unit=unit), SecretGenerator())


def in_threads(work: Callable[[], T], count: int = 4) -> list[T]:
    """Returns the results of threads that start together and switch often, without refusals."""
    together = Barrier(count)
    results: list[T] = []

    def run() -> None:
        together.wait()
        with suppress(PrivacyError):
            results.append(work())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            for future in [pool.submit(run) for _ in range(count)]:
                future.result()
    finally:
        sys.setswitchinterval(interval)
    return results


# The public facts of a private run of two rounds.
facts = partial(
    ReportFacts,
    method="feddm",
    mechanism="residual",
    delta=1e-5,
    max_records=1000,
    planned_rounds=2,
    rounds_done=2,
)
# The audit section of a report.
audit = partial(
    dict[str, Any],
    command="fedsynth privacy audit --method feddm --canaries 1000",
    method="feddm",
    mechanism="residual",
    canaries=1000,
    guesses=400,
    correct=260,
    confidence=0.999,
    delta=1e-5,
    epsilon_lower_bound=epsilon_lower_bound(260, 400, 1000, 1e-5, 0.999),
)
