"""The privacy cost of a run, computed from settings and the public specification of a data set
before any data are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.data.load_folder import site_names
from fedsynth.data.partition_settings import EXPLICIT
from fedsynth.errors import SettingError
from fedsynth.federation.context import public_context
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.run_data import declared, planned_ledgers, specification, with_declared
from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.settings import needs_a_budget


@dataclass(frozen=True)
class MechanismCosts:
    """The plan of a run with one mechanism.

    Attributes:
        mechanism: its name.
        noise_multiplier: σ of the chief release.
        clip: its 𝒞.
        sample_rate: its q.
        releases: of a client in a round, all in all.
        epsilon: after each round (of more than 1,000 after `shown_rounds`), at `delta`.
        delta: δ.
        target: the budget that was asked for, if one was.
        rows: each thing that a client releases in a round, by `quantity`, with its own σ, clip, q
            and number; where the method names a public case, also the pooled sum's
            `signal_to_noise` (`ReleasePlan.signal_to_noise`).
    """

    mechanism: str
    noise_multiplier: float
    clip: float
    sample_rate: float
    releases: int
    epsilon: Mapping[int, float]
    delta: float
    target: float | None
    rows: tuple[Mapping[str, Any], ...]


def costs_of(plan: PrivacyPlan, target: float | None) -> MechanismCosts:
    """Returns the costs of a planned run."""
    rows = []
    for release in plan.plans:
        row: dict[str, Any] = {
            "quantity": release.quantity,
            "noise_multiplier": plan.sigma * release.relative_noise_multiplier,
            "clip": release.clip,
            "sample_rate": release.sample_rate,
            "releases": release.steps,
        }
        ratio = plan.signal_to_noise(release)
        if ratio is not None:
            row["signal_to_noise"] = ratio
        rows.append(row)
    chief = plan.chief
    return MechanismCosts(
        mechanism=chief.mechanism,
        noise_multiplier=plan.sigma,
        clip=chief.clip,
        sample_rate=chief.sample_rate,
        releases=plan.releases,
        epsilon=plan.planned_epsilon_by_round(),
        delta=plan.privacy.delta,
        target=target,
        rows=tuple(rows),
    )


def plan_of(settings: RunSettings) -> PrivacyPlan:
    """Returns the plan of the private run that `settings` describe. The function reads no data,
    only the contents of kept ledgers.

    Raises:
        DataError: the custom images have no declaration.
        LedgerError: a ledger cannot be read, or holds releases of another unit.
    """
    names = None
    if settings.folder is not None:
        declaration = declared(settings)
        settings = with_declared(settings, declaration)
        if settings.partition.kind == EXPLICIT:
            names = site_names(declaration.sites)
    context = public_context(settings, specification(settings), torch.device("cpu"))
    settings.method.check_model(context.architecture)
    privacy = PrivacyPlan.checked(settings, context).privacy
    ledgers = planned_ledgers(settings, privacy.ledger_folder, names)
    return PrivacyPlan.make(settings, context, [ledger.history() for ledger in ledgers])


def costs_by_mechanism(sections: Mapping[str, Mapping[str, Any]]) -> list[MechanismCosts]:
    """Returns the costs for each mechanism that can protect the method. If the settings name a
    mechanism, only its costs are returned.

    Args:
        sections: settings in the form that `resolve` takes.

    Raises:
        SettingError: the method has no private mechanism, or no budget and no σ is given. Others as
            in `resolve`.
    """
    privacy = dict(sections.get("privacy", {}))
    method = resolve({**sections, "privacy": {}}).method
    named = privacy.get("mechanism")
    if named is not None and not mechanism_facts(str(named)).guaranteed:
        reason = "has no guarantee, so there is nothing to plan"
        raise PrivacySettingError("privacy", "mechanism", reason, value=named)
    plans: list[MechanismCosts] = []
    for name in method.dp_mechanisms if named is None else (str(named),):
        if not mechanism_facts(name).guaranteed:
            continue
        settings = resolve({**sections, "privacy": {**privacy, "mechanism": name}})
        if settings.privacy is None:
            raise needs_a_budget()
        target = settings.privacy.epsilon
        if settings.privacy.noise_multiplier is not None:
            # a cap would only cut off the table: the plan shows how the budget is spent
            settings = replace(settings, privacy=replace(settings.privacy, epsilon=None))
        plans.append(costs_of(plan_of(settings), target))
    if not plans:
        reason = f"cannot run with differential privacy: {method.refusal}"
        raise SettingError("run", "method", reason, value=method.name)
    return plans
