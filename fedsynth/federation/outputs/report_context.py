"""What a private run's report says beside the ledgers: public items, accesses, versions.

All of it follows from the public plan; nothing here sees data.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedsynth.core.messages import privacy_of_fields
from fedsynth.data.partition_settings import clients_or_groups
from fedsynth.data.registry import is_published
from fedsynth.federation.outputs.privacy_words import how_many
from fedsynth.federation.terms.given_data import NO_TEST, PRIVATE, PUBLIC
from fedsynth.federation.terms.participation import active_clients
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.federation.terms.sums import fewest
from fedsynth.models.registry import feature_facts, has_given_weights
from fedsynth.privacy import disclosure
from fedsynth.privacy.files import file_hash
from fedsynth.privacy.first_page import FILES
from fedsynth.privacy.history import History
from fedsynth.privacy.plans import PrivatePlan
from fedsynth.privacy.randomness import DESCRIPTION
from fedsynth.privacy.releases import RECORD, USER
from fedsynth.privacy.report_inputs import PrivateAccess, ReportContext
from fedsynth.privacy.report_schema import Began, RunFacts
from fedsynth.version import __version__

COUNTED = {RECORD: "records", USER: "users"}
FOUR_SUMS = (
    "; each value is the sum of four Gaussians, halved: a mitigation of one floating-point attack, "
    "not a proof"
)


def report_context(
    plan: PrivacyPlan,
    rounds_done: int,
    deviations: Sequence[str],
    *,
    test: str,
    secret: bool = True,
    abandoned: bool = False,
    began: Began,
    warnings: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    simulated: bool = True,
    first: int = 0,
) -> ReportContext:
    """What the report says beside the ledgers.

    Args:
        plan: the run's.
        rounds_done: how many rounds have ended.
        deviations: what went otherwise than planned.
        test: what the test images are: "public", "private" or "none".
        secret: whether all clients' noise came from the operating system's keys.
        abandoned: the run did not finish.
        began: which run it is, and when it began.
        warnings: what the run wants its report to warn of.
        files: file → SHA-256, of those that the run hands over.
        simulated: all clients were in one process; else each was where its data are.
        first: the number of the plan's first client.
    """
    privacy = plan.privacy
    facts = plan.facts
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
        public_items=public_items(plan, simulated=simulated),
        no_guarantee=facts.reasons,
        deviations=tuple(deviations),
        fresh_ledger=simulated and privacy.ledger_folder is None,
        no_ledger=_why_no_ledger(plan) if simulated else "",
        randomness=facts.randomness or randomness,
        published=_published(plan),
        accesses=accesses(plan, test, simulated=simulated),
        test_only_randomness=not secret,
        provenance=provenance(plan.run),
        noise_multiplier=privacy.noise_multiplier,
        data_set=asdict(plan.spec),
        rows_before={one.client: len(one.releases) for one in plan.histories},
        abandoned=abandoned,
        shares=plan.chief.shares,
        fewest=0 if simulated else fewest_in_a_sum(plan),
        own_code=plan.run.own_code,
        run=_run_facts(plan, began, first),
        files=files or {},
        warnings=tuple(warnings),
    )


def fewest_in_a_sum(plan: PrivacyPlan) -> int:
    """Of fewer clients' uploads a server that sees sums alone gets none; 0: it sees them all."""
    run = plan.run
    if not run.method.sums_alone:
        return 0
    taking = active_clients(run.partition.clients, run.participation)
    return fewest(run.method, taking, run.partition.clients, private=True)


def owner_context(
    plan: PrivacyPlan,
    number: int,
    history: History,
    rounds: int,
    *,
    secret: bool,
    began: Began,
    warnings: Sequence[str],
) -> ReportContext:
    """What a data owner's own report says beside its ledger.

    Args:
        plan: the run's.
        number: the client's.
        history: what the owner's ledger held when the client joined.
        rounds: that have ended, as the server says; charges are the ledger's.
        secret: whether the noise came from the operating system's keys.
        began: which run it is, and when it began.
        warnings: what the run wants its report to warn of.
    """
    own = replace(plan, histories=(history,))
    done = min(rounds, plan.run.rounds)
    return report_context(
        own,
        done,
        (),
        test=NO_TEST,
        secret=secret,
        began=began,
        warnings=warnings,
        simulated=False,
        first=number,
    )


def _run_facts(plan: PrivacyPlan, began: Began, first: int) -> RunFacts:
    said = plan.run.report
    return RunFacts(
        id=began.id,
        date=began.date,
        responsible=said.responsible or None,
        purpose=said.purpose or None,
        sites=said.site_names([one.client for one in plan.histories], first),
    )


def handed_over(folder: Path) -> dict[str, str]:
    """The files of a run folder that its report vouches for, with their SHA-256.

    Raises:
        OSError: one cannot be read.
    """
    there = [name for name in FILES if (folder / name).is_file()]
    return {name: file_hash(folder / name) for name in there}


def public_items(plan: PrivacyPlan, *, simulated: bool = True) -> dict[str, str]:
    """What was fixed before any data were read, and why it is public."""
    spec = plan.spec
    run = plan.run
    items = {
        "data set": _data_set(plan, simulated=simulated),
        "classes and image shape": (
            f"{spec.classes} classes, {spec.channels}×{spec.height}×{spec.width}"
        ),
        "normalisation": (
            f"constants of the specification {spec.name!r}: mean {spec.mean}, std {spec.std}"
        ),
        "architecture and initial weights": _architecture(run),
        "hyper-parameters": json.dumps(run.to_mapping()["method"]),
        "bound on all records": f"{plan.max_records} (δ is checked against it)",
        "schedule": (f"{_rounds(plan)}, fixed before data are read"),
        **feature_facts(run.model, spec),
        **run.method.public_facts(spec),
    }
    if run.participation < 1:
        count = len(plan.participation.in_round(1))
        items["participation"] = (
            f"{count} of {run.partition.clients} clients a round, drawn from the run's seed: no "
            "amplification is claimed"
        )
    if run.client_failures:
        items["clients that fail"] = (
            f"on purpose, each with probability {run.client_failures:g} in a round, drawn from the "
            "run's seed; what a client computed is charged, also where nothing arrived"
        )
    items["what the server does"] = (
        "training, averaging, distillation and measurements from the uploads and public values "
        "alone: post-processing, at no cost"
    )
    if proxy := run.method.public_images():
        items["proxy images"] = f"the training images of {proxy}, declared public"
    if plan.facts.guaranteed:
        items |= _items_of_a_guarantee(plan)
    return items


def _architecture(run: RunSettings) -> str:
    if not run.method.takes_model:
        return "the method's own: no setting of models decides it"
    return f"{run.model}, {_weights(run)}"


def _weights(run: RunSettings) -> str:
    if has_given_weights(run.model):
        return "with the weights of a module that the user gave, declared public by the user"
    return "drawn from the run's seed"


def _rounds(plan: PrivacyPlan) -> str:
    """The rounds and their releases."""
    rounds = how_many(plan.run.rounds, "round")
    if plan.run.method.even_rounds:
        return f"{rounds} of {how_many(plan.releases, 'release')}"
    return f"{rounds}, {how_many(plan.all_releases, 'release')} in all"


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


def _data_set(plan: PrivacyPlan, *, simulated: bool) -> str:
    """Which data set it is, and what is public of it."""
    spec = plan.spec
    if is_published(spec):
        return f"{spec.name}, published: {spec.source}"
    if not simulated:
        return f"{spec.name}: the data owners'; its specification is public, its records are not"
    if plan.privacy.ledger_folder is None:
        return f"{spec.name}: the user's own, declared public by the user"
    return f"{spec.name}: the user's own; its specification is public, its records are not"


def accesses(plan: PrivacyPlan, test: str, *, simulated: bool = True) -> tuple[PrivateAccess, ...]:
    """Everything that touches private data.

    Args:
        plan: the run's.
        test: what the test images are: "public", "private" or "none".
        simulated: all clients were in one process, which sees more.
    """
    facts = plan.facts
    found = [
        PrivateAccess(
            f"{one.quantity}: {one.clipped}",
            facts.status,
            f"mechanism {one.mechanism}, {_how_often(plan, one)}",
        )
        for one in plan.plans
    ]
    found += [PrivateAccess(what, disclosure.UNACCOUNTED, note) for what, note in facts.accesses]
    if plan.privacy.ledger_folder is not None or not simulated:
        found.append(COMPARED_RECORDS)
    if not simulated:
        found.append(TIMING)
    elif plan.run.partition.local_test:
        found.append(_simulated("clients' own test splits, and accuracies on them"))
    if simulated:
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


def _how_often(plan: PrivacyPlan, one: PrivatePlan) -> str:
    """In how many releases a quantity leaves a client."""
    if plan.run.method.even_rounds:
        return f"{how_many(one.steps, 'release')} a round"
    rounds = [n for n in range(1, plan.run.rounds + 1) if one in plan.round_plans(n)]
    return f"{how_many(one.steps * len(rounds), 'release')} in all"


TIMING = PrivateAccess(
    "how long a client takes to answer, and whether it does",
    disclosure.SIMULATION_ONLY,
    "whoever carries the messages sees it; outside the guarantee",
)
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
    if not plan.facts.guaranteed:
        return ()
    printed = plan.run.method.printed_epsilon(plan.privacy.delta, plan.sigma)
    return (printed,) if printed else ()


def _without_paths(run: RunSettings) -> dict[str, dict[str, Any]]:
    """The settings; of one's own images without the folders, whose names a hash would let guess."""
    sections = run.to_mapping()
    if run.folder is None:
        return sections
    for section, keys in {
        "data": ("folder", "test_folder", "declaration", "data_root"),
        "privacy": ("ledger",),
    }.items():
        for key in keys:
            sections.get(section, {}).pop(key, None)
    return sections


def provenance(run: RunSettings) -> dict[str, str]:
    """Versions, and a hash of the resolved settings."""
    config: Any = json.dumps(_without_paths(run), sort_keys=True)
    packages = ("torch", "opacus", "dp-accounting", "numpy", "randomgen")
    return {
        "config": hashlib.blake2b(config.encode(), digest_size=16).hexdigest(),
        "python": platform.python_version(),
        "fedsynth": __version__,  # also where it runs from a folder, without being installed
        **{name: version(name) for name in packages},
    }
