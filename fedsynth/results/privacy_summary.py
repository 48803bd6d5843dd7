"""The statements about privacy that a private run makes at its start and in its summary.

The statements follow from the public plan and from the contents of the clients' ledgers. This
module never reads data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fedsynth.data.registry import DatasetSpec
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import USER
from fedsynth.privacy.report.figures import LedgerStart, Promise, RunStart, Start
from fedsynth.privacy.report.formatting import format_epsilon

NEIGHBOURS = {
    "add-remove": "added or removed",
    "zero-out": "blanked out",
    "replace-one": "replaced by any other",
}
WEAK = 10.0
"""The value of ε above which the headline contains a warning."""


def headline(plan: PrivacyPlan, *, simulated: bool = True) -> list[str]:
    """Returns lines that describe the privacy of the planned run. The first line states ε.

    Args:
        plan: the run's plan.
        simulated: True if all clients are in one process, False if each client runs where its data
            are.
    """
    facts = plan.facts
    delta = plan.privacy.delta
    if not facts.guaranteed:
        return [f"no differential privacy guarantee: {facts.reasons[0]}"]
    chief = plan.chief
    reasons = plan.reasons(plan.histories)
    if reasons:
        reason = f"a ledger in {plan.privacy.ledger} contains {reasons[0]}"
        noise = f"mechanism {chief.mechanism} adds noise (σ = {plan.sigma:.4g})"
        return [
            f"no differential privacy guarantee: {reason}",
            f"  {noise}, but no ε can be stated",
        ]
    planned = plan.planned_epsilon()
    sampling = "all records at each step"
    if chief.sample_rate < 1:
        sampling = f"Poisson sampling at q = {chief.sample_rate:.3g}"
    rounds = pluralize(plan.run.rounds, "round")
    if plan.run.participation < 1:
        rounds += f" (each client takes part in at most {plan.most_rounds()})"
    unit = "one example"
    if plan.privacy.unit == USER:
        unit = f"one {plan.run.report.person or 'person'} with all examples"
    noise = f"σ = {plan.sigma:.4g}, clip {chief.clip:.4g}"
    if not plan.run.method.same_releases_every_round:
        noise = f"σ = {plan.sigma:.4g} for all releases together, and more for each one"
    lines = [
        f"privacy: ε = {format_epsilon(planned)} at δ = {delta:g} for each client over {rounds}, "
        f"{unit} {NEIGHBOURS[plan.privacy.adjacency]}",
        f"  mechanism {chief.mechanism} ({noise}), {sampling}, {schedule(plan)}",
    ]
    if chief.shares > 1:
        aggregation = "masked values are sent"
        if simulated:
            aggregation = "aggregation assumed, not executed"
        lines.append(
            f"  {aggregation}: each client adds only 1/{chief.shares} of the noise variance, so ε "
            "holds only against parties that see nothing but the sums over clients"
        )
    spent = plan.epsilon(plan.histories)
    if spent > 0:
        lines.append(
            f"  earlier runs in the ledgers have spent ε = {format_epsilon(spent)} of this"
        )
    return lines + _noise_warnings(plan) + _cap_warnings(plan, planned)


def _noise_warnings(plan: PrivacyPlan) -> list[str]:
    """Returns a warning if even the best possible signal of a release is smaller than its noise."""
    drowned = []
    for release in plan.plans:
        ratio = plan.signal_to_noise(release)
        if ratio is not None and ratio < 1:
            drowned.append((ratio, release.quantity))
    if not drowned:
        return []
    ratio, quantity = min(drowned)
    return [
        f"  warning: the noise exceeds the signal of the releases (S/N {ratio:.2g}: {quantity}); "
        "run `fedsynth privacy plan` to see the effect of more records, clients or a larger ε"
    ]


def schedule(plan: PrivacyPlan) -> str:
    """Returns the number of noisy releases in words, such as "2 releases a round"."""
    if plan.run.method.same_releases_every_round:
        return f"{pluralize(plan.releases, 'release')} a round"
    return f"{pluralize(plan.all_releases, 'release')} in all"


def _cap_warnings(plan: PrivacyPlan, planned: float) -> list[str]:
    """Returns a warning if the run will end early, or if ε is large and has no limit."""
    cap = plan.privacy.epsilon
    if cap is None and planned > WEAK:
        return [
            f"  warning: ε = {format_epsilon(planned)} is a weak guarantee: one example may "
            f"change the odds of any outcome by a factor of e^{planned:.0f}. To limit ε, set "
            "privacy.epsilon instead of privacy.noise_multiplier"
        ]
    if cap is not None and planned > cap * (1 + 1e-9):
        return [f"  the run will end before the round that would exceed the limit ε = {cap:g}"]
    return []


def start(
    plan: PrivacyPlan,
    histories: Sequence[History],
    test: str,
    began: RunStart,
    warnings: Sequence[str] = (),
    *,
    simulated: bool,
) -> Start:
    """Returns the public facts that are fixed when the run begins.

    They are written to a file at the start, so that a report can be made even if the run is killed.

    Args:
        plan: the run's plan.
        histories: the contents of the ledgers that the run will charge, as they are when it begins.
        test: the kind of test images: "public", "private" or "none".
        began: the run's identifier and start date.
        warnings: the warnings to include in the report.
        simulated: True if all clients are in one process, False if each client runs where its data
            are.
    """
    return Start(
        schema_version=4,
        noise_multiplier=plan.privacy.noise_multiplier,
        data_set=as_json(plan.spec),
        test_images=test,  # type: ignore[arg-type]  # checked, as all of it is
        ledgers={
            history.client: LedgerStart(rows=len(history.releases), chain=history.chain)
            for history in histories
        },
        run=began,
        simulated=simulated,
        warnings=list(warnings),
    )


def summary(plan: PrivacyPlan, histories: Sequence[History], *, simulated: bool = True) -> Promise:
    """Returns the privacy section of summary.json.

    Args:
        plan: the run's plan.
        histories: the current contents of the clients' ledgers.
        simulated: True if all clients were in one process, False if each client ran where its data
            are.
    """
    promise = Promise(
        guarantee=plan.guaranteed(histories),
        noise_multiplier=plan.privacy.noise_multiplier,
        mechanism=plan.chief.mechanism,
    )
    if not promise.guarantee:
        return promise
    aggregation = None
    if plan.chief.shares > 1:
        aggregation = "assumed, not executed" if simulated else "executed"
    epsilon = plan.epsilon(histories)
    facts = {"epsilon": epsilon, "delta": plan.privacy.delta, "aggregation": aggregation}
    return promise.model_copy(update=facts)


def as_json(spec: DatasetSpec) -> dict[str, Any]:
    """Returns the specification of a data set as JSON types, with lists in place of tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(spec)))
    return plain


def pluralize(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 round" or "3 rounds"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
