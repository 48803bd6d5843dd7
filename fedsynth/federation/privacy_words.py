"""What is said of a private run's privacy: before it begins, in its summary, and in its report.

All of it follows from the public plan and from what clients' ledgers hold; nothing here sees data.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from fedsynth.core.messages import privacy_of_fields
from fedsynth.data.partition import clients_or_groups
from fedsynth.data.registry import is_published
from fedsynth.errors import Setting, Text
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.settings import RunSettings
from fedsynth.privacy import disclosure
from fedsynth.privacy.history import History
from fedsynth.privacy.randomness import DESCRIPTION
from fedsynth.privacy.releases import RECORD, USER
from fedsynth.privacy.report import SCHEMA_VERSION, PrivateAccess, ReportContext, as_lists
from fedsynth.privacy.report_schema import LedgerStart, Promise, Start
from fedsynth.privacy.report_text import up
from fedsynth.version import __version__

NEIGHBOURS = {
    "add-remove": "added or removed",
    "zero-out": "blanked out",
    "replace-one": "replaced by any other",
}
ONE = {RECORD: "one example", USER: "one user with all examples"}
COUNTED = {RECORD: "records", USER: "users"}
PUBLIC, PRIVATE, NO_TEST = "public", "private", "none"  # what a run's test images are
FOUR_SUMS = (
    "; each value is the sum of four Gaussians, halved: a mitigation of one floating-point attack, "
    "not a proof"
)
WEAK = 10.0
"""ε above which the headline warns."""


# ----------------------------------------------------------------------------- before the run begins


def headline(plan: PrivacyPlan) -> list[str]:
    """What the run is about to do, ε first."""
    facts, delta = plan.facts, plan.privacy.delta
    if not facts.guaranteed:
        return [f"no differential privacy guarantee: {facts.reasons[0]}"]
    chief = plan.chief
    reasons = plan.reasons(plan.histories)
    if reasons:
        return [
            "no differential privacy guarantee: a ledger in "
            f"{plan.privacy.ledger} holds {reasons[0]}",
            f"  mechanism {chief.mechanism} adds noise (σ = {plan.sigma:.4g}); no ε can be stated",
        ]
    planned = plan.planned_epsilon()
    sampling = "all records at each step"
    if chief.sample_rate < 1:
        sampling = f"Poisson sampling at q = {chief.sample_rate:.3g}"
    rounds = _many(plan.run.rounds, "round")
    if plan.run.participation < 1:
        rounds += f" (it takes part in {plan.most_rounds()} at most)"
    lines = [
        f"privacy: ε = {up(planned, 3)} at δ = {delta:g} for each client over {rounds}, "
        f"{ONE[plan.privacy.unit]} {NEIGHBOURS[plan.privacy.adjacency]}",
        f"  mechanism {chief.mechanism} (σ = {plan.sigma:.4g}, clip {chief.clip:.4g}), {sampling}, "
        f"{_many(plan.releases, 'release')} a round",
    ]
    spent = plan.epsilon(plan.histories)
    if spent > 0:
        lines.append(f"  of this, ε = {up(spent, 3)} stands in the ledgers from earlier runs")
    return lines + _of_the_cap(plan, planned)


def _of_the_cap(plan: PrivacyPlan, planned: float) -> list[str]:
    """That the run will end early, or that nothing bounds a weak guarantee."""
    cap = plan.privacy.epsilon
    if cap is None:
        if planned <= WEAK:
            return []
        return [
            Text(
                f"  warning: ε = {up(planned, 3)} is a weak guarantee: one example may change the "
                f"odds of any outcome by a factor of e^{planned:.0f}; a smaller one: ",
                Setting("privacy", "epsilon", "8"),
                " in place of ",
                Setting("privacy", "noise_multiplier"),
            )
        ]
    if planned <= cap * (1 + 1e-9):
        return []
    return [
        f"  the cap ε = {cap:g} is below that: the run ends, in order, before the round that would "
        "exceed it"
    ]


def start(plan: PrivacyPlan, histories: Sequence[History], test: str) -> Start:
    """What is public and fixed when the run begins: written down then, so that a run that is
    killed can still be reported.

    Args:
        plan: the run's.
        histories: of the ledgers that the run charges, as they stand when it begins.
        test: what the test images are: "public", "private" or "none".
    """
    return Start(
        schema_version=SCHEMA_VERSION,
        noise_multiplier=plan.privacy.noise_multiplier,
        data_set=as_lists(asdict(plan.spec)),
        test_images=test,  # type: ignore[arg-type]  # checked, as all of it is
        ledgers={
            one.client: LedgerStart(rows=len(one.releases), chain=one.chain) for one in histories
        },
    )


# ------------------------------------------------------------------------------ when it has ended


def summary(plan: PrivacyPlan, histories: Sequence[History]) -> Promise:
    """What summary.json says of the run's privacy.

    Args:
        plan: the run's.
        histories: what the ledgers hold now.
    """
    sigma, mechanism = plan.privacy.noise_multiplier, plan.chief.mechanism
    if not plan.guaranteed(histories):
        return Promise(guarantee=False, noise_multiplier=sigma, mechanism=mechanism)
    return Promise(
        guarantee=True,
        epsilon=plan.epsilon(histories),
        delta=plan.privacy.delta,
        noise_multiplier=sigma,
        mechanism=mechanism,
    )


def report_context(
    plan: PrivacyPlan,
    rounds_done: int,
    deviations: Sequence[str],
    *,
    test: str,
    secret: bool = True,
    abandoned: bool = False,
) -> ReportContext:
    """What the report says beside the ledgers.

    Args:
        plan: the run's.
        rounds_done: how many rounds have ended.
        deviations: what went otherwise than planned.
        test: what the test images are: "public", "private" or "none".
        secret: whether all clients' noise came from the operating system's keys.
        abandoned: the run did not finish.
    """
    privacy, facts = plan.privacy, plan.facts
    randomness = DESCRIPTION + (FOUR_SUMS if privacy.four_sums else "")
    return ReportContext(
        method=plan.run.method.name,
        mechanism=plan.chief.mechanism,
        delta=privacy.delta,
        max_records=plan.max_records,
        adjacency=privacy.adjacency,
        unit=privacy.unit,
        user_records=privacy.user_records,
        epsilon_cap=privacy.epsilon,
        planned_rounds=plan.run.rounds,
        rounds_done=rounds_done,
        public_items=public_items(plan),
        no_guarantee=facts.reasons,
        deviations=tuple(deviations),
        fresh_ledger=privacy.ledger_folder is None,
        no_ledger=_why_no_ledger(plan),
        randomness=facts.randomness or randomness,
        published=_published(plan),
        accesses=accesses(plan, test),
        test_only_randomness=not secret,
        provenance=provenance(plan.run),
        noise_multiplier=privacy.noise_multiplier,
        data_set=asdict(plan.spec),
        rows_before={one.client: len(one.releases) for one in plan.histories},
        abandoned=abandoned,
    )


def public_items(plan: PrivacyPlan) -> dict[str, str]:
    """What was fixed before any data were read, and why it is public."""
    spec, run = plan.spec, plan.run
    items = {
        "data set": _data_set(plan),
        "classes and image shape": (
            f"{spec.classes} classes, {spec.channels}×{spec.height}×{spec.width}"
        ),
        "normalisation": (
            f"constants of the specification {spec.name!r}: mean {spec.mean}, std {spec.std}"
        ),
        "architecture and initial weights": f"{run.model}, drawn from the run's seed",
        "hyper-parameters": json.dumps(run.to_mapping()["method"]),
        "bound on all records": f"{plan.max_records} (δ is checked against it)",
        "schedule": (
            f"{_many(run.rounds, 'round')} of {_many(plan.releases, 'release')}, fixed before data "
            "are read"
        ),
    }
    if run.participation < 1:
        count = len(plan.participation.in_round(1))
        items["participation"] = (
            f"{count} of {run.partition.clients} clients a round, drawn from the run's seed: no "
            "amplification is claimed"
        )
    items["what the server does"] = (
        "training, averaging, distillation and measurements from the uploads and public values "
        "alone: post-processing, at no cost"
    )
    if proxy := getattr(run.method, "proxy", ""):
        items["proxy images"] = f"the training images of {proxy}, declared public"
    if plan.facts.guaranteed:
        items |= _items_of_a_guarantee(plan)
    return items


def _items_of_a_guarantee(plan: PrivacyPlan) -> dict[str, str]:
    """What is public of the releases that are accounted for."""
    items = {
        "sample rate q": f"{plan.chief.sample_rate:.6g}, from public sizes",
        f"nominal {COUNTED[plan.privacy.unit]} of a client": (
            f"{plan.nominal_size:g} ({_nominal_size(plan)}); divisors use it or released counts, "
            "never the true number"
        ),
    }
    for name, (kind, reason) in privacy_of_fields(plan.run.method.upload).items():
        if kind == "public":
            items[f"upload field {name!r}"] = reason
    return items


def _nominal_size(plan: PrivacyPlan) -> str:
    """Where the nominal size of a client comes from."""
    if plan.privacy.nominal_size:
        return "declared"
    split = plan.run.partition
    over = "writers or devices that are published"
    if clients_or_groups(split, plan.spec) == split.clients:
        over = "clients"
    words = f"the size that the data set's specification declares, over the number of {over}"
    if split.subset < 1:
        words += f", times the share {split.subset:g} that is used"
    if split.local_test:
        words += f", times the share {1 - split.local_test:g} that trains"
    return words


def _why_no_ledger(plan: PrivacyPlan) -> str:
    if is_published(plan.spec):
        return f"{plan.spec.name} is a published data set"
    return f"the user declares that the data set {plan.spec.name!r} is public"


def _data_set(plan: PrivacyPlan) -> str:
    """Which data set it is, and what is public of it."""
    spec = plan.spec
    if is_published(spec):
        return f"{spec.name}, published: {spec.source}"
    if plan.privacy.ledger_folder is None:
        return f"{spec.name}: the user's own, declared public by the user"
    return f"{spec.name}: the user's own; its specification is public, its records are not"


def accesses(plan: PrivacyPlan, test: str) -> tuple[PrivateAccess, ...]:
    """Everything that touches private data.

    Args:
        plan: the run's.
        test: what the test images are: "public", "private" or "none".
    """
    facts = plan.facts
    found = [
        PrivateAccess(
            f"{one.quantity}: {one.clipped}",
            facts.status,
            f"mechanism {one.mechanism}, {_many(one.steps, 'release')} a round",
        )
        for one in plan.plans
    ]
    found += [PrivateAccess(what, disclosure.UNACCOUNTED, note) for what, note in facts.accesses]
    if plan.privacy.ledger_folder is not None:
        found.append(COMPARED_RECORDS)
    if plan.run.partition.local_test:
        found.append(_simulated("clients' own test splits, and accuracies on them"))
    found.append(_simulated("partition into clients, true counts, seconds"))
    if test == PRIVATE:
        found.append(_simulated("test set, and accuracies on it"))
    if test == PUBLIC:
        whose = f"of the published data set {plan.spec.name}"
        if not is_published(plan.spec):
            whose = "declared public by the user"
        note = f"{whose}; test accuracy is computed from released models"
        found.append(PrivateAccess("test set", disclosure.PUBLIC, note))
    return tuple(found)


COMPARED_RECORDS = PrivateAccess(
    "records, compared with those of the ledgers",
    disclosure.SIMULATION_ONLY,
    "by a keyed hash that stays with the ledgers; it decides whether the run begins",
)


def _simulated(what: str) -> PrivateAccess:
    """What only a simulation may show."""
    return PrivateAccess(
        what,
        disclosure.SIMULATION_ONLY,
        "folder simulation_only, and the message of a partition that cannot be made; outside the "
        "guarantee",
    )


def _published(plan: PrivacyPlan) -> tuple[Mapping[str, str], ...]:
    """The figure that a paper prints for these settings, beside why it differs."""
    if not plan.facts.guaranteed or plan.run.method.name != "feddm":
        return ()
    claim = 2 * math.log(1 / plan.privacy.delta) / plan.sigma**2
    return (
        {
            "source": "FedDM (arXiv 2207.09653), Sec. 4.4: σ ≥ sqrt(2 log(1/δ)/ε)",
            "published": f"ε = {claim:.3g}",
            "why it differs": (
                "the formula counts neither steps nor rounds, and its conditions (Poisson "
                "sampling, Tq² ≤ ε/2) are not met"
            ),
        },
    )


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def provenance(run: RunSettings) -> dict[str, str]:
    """Versions, and a hash of the resolved settings."""
    config: Any = json.dumps(run.to_mapping(), sort_keys=True)
    packages = ("torch", "opacus", "dp-accounting", "numpy", "randomgen")
    return {
        "config": hashlib.blake2b(config.encode(), digest_size=16).hexdigest(),
        "python": platform.python_version(),
        "fedsynth": __version__,  # also where it runs from a folder, without being installed
        **{name: version(name) for name in packages},
    }
