"""Charges clients for a method's step outside a run, in benchmarks, tests and custom pipelines.

In a run, each client's budget (`fedsynth.federation.client_budget`) charges the client according to
the run's plan.
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
    """Charges each client for what it releases in one exchange of the method.

    Args:
        method: the method, which plans the releases.
        context: the round's context. Its privacy settings must have a noise multiplier.
        clients: the clients' indices.
        guards: each client's ledger and budget cap, in the order of `clients`.
        secrets: each client's secret random generator, in the same order.
        phase: the exchange, "first" or "main".

    Raises:
        SettingError: the context has no privacy settings or no noise multiplier, or a planned
            mechanism has no privacy guarantee.
        BudgetExceededError: the charge would exceed a client's cap. The clients before this client
            stay charged.
    """
    privacy = context.privacy
    if privacy is None or privacy.noise_multiplier is None:
        raise SettingError("privacy", "noise_multiplier", "must be set for private clients")
    plans = method.round_plans(method.release_plans(privacy, context), context.round)
    if not all(mechanism_facts(plan.mechanism).guaranteed for plan in plans):
        reason = "must guarantee differential privacy, because only then can clients be charged"
        raise SettingError("privacy", "mechanism", reason)
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
