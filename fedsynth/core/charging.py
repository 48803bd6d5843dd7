"""Charges clients for a method's step outside a run: for benchmarks, tests and custom pipelines.

In a run each client's budget does this (`fedsynth.federation.client_budget`), from the
run's plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.errors import SettingError
from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.privacy.guard import BudgetEnforcer
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.plans import MAIN, ReleaseBudget, charge_round
from fedsynth.privacy.randomness import SecretGenerator


def charge_for(
    method: Method,
    context: RoundContext,
    clients: Sequence[int],
    guards: Sequence[BudgetEnforcer],
    secrets: Sequence[SecretGenerator],
    phase: str = MAIN,
) -> list[ReleaseBudget[GaussianSumMechanism]]:
    """Charges each client for what one exchange of the method releases.

    Args:
        method: plans the releases.
        context: the round's, with privacy settings that have a noise multiplier.
        clients: their indices.
        guards: their ledgers and caps.
        secrets: their secret generators.
        phase: the exchange.

    Raises:
        SettingError: no privacy settings, no noise multiplier, or a mechanism without a guarantee.
        BudgetExceededError: a client's cap would be exceeded; clients before it stay charged.
    """
    privacy = context.privacy
    if privacy is None or privacy.noise_multiplier is None:
        raise SettingError("privacy", "noise_multiplier", "must be set for private clients")
    plans = method.round_plans(method.release_plans(privacy, context), context.round)
    if not all(mechanism_facts(plan.mechanism).guaranteed for plan in plans):
        raise SettingError("privacy", "mechanism", "has no guarantee: no mechanism can be charged")
    sigma = privacy.noise_multiplier
    return [
        charge_round(
            method.client_plans(plans, client, context),
            context.round,
            sigma,
            guard,
            secret,
            phase=phase,
        )
        for client, guard, secret in zip(clients, guards, secrets, strict=True)
    ]
