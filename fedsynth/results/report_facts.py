"""Collects the facts in a private run's report that do not come from the ledgers.

These facts are the public items, the accesses to private data and the versions of the software.
They are computed from the public plan of the run. This module never reads data.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from fedsynth.config.checks import fewest
from fedsynth.config.participation import active_clients
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import OwnNetwork, PublicImages, PublishedEpsilon
from fedsynth.core.messages import privacy_of_fields
from fedsynth.core.sums import sums_securely
from fedsynth.data.registry import is_published
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.run_data import PRIVATE, PUBLIC
from fedsynth.files import file_hash
from fedsynth.formatting import format_epsilon, format_odds
from fedsynth.models.registry import feature_facts, has_given_weights
from fedsynth.privacy import disclosure
from fedsynth.privacy.ledger.ledger import Histories, History
from fedsynth.privacy.plans import ReleasePlan
from fedsynth.privacy.randomness import DESCRIPTION
from fedsynth.privacy.releases import USER
from fedsynth.privacy.report import figures
from fedsynth.privacy.report.build import reasons_in_ledgers
from fedsynth.privacy.report.pages import FILES, renderer_versions
from fedsynth.version import __version__

NEIGHBOURS = {
    "add-remove": "added or removed",
    "zero-out": "blanked out",
    "replace-one": "replaced by any other",
}
WEAK = 10.0  # the value of ε above which the headline contains a warning


def headline(plan: PrivacyPlan, *, simulated: bool = True) -> Iterator[str]:
    """Describes a planned run's privacy in a few lines of text.

    Args:
        plan: the run's plan.
        simulated: True if all clients are in one process, False for a run over a network.
    """
    chief = plan.chief
    if not plan.facts.guaranteed:
        yield f"no differential privacy guarantee: {plan.facts.reasons[0]}"
        return
    if reasons := reasons_in_ledgers(plan.histories):
        reason = f"a ledger in {plan.privacy.ledger} contains {reasons[0]}"
        yield f"no differential privacy guarantee: {reason}"
        noise = f"mechanism {chief.mechanism} adds noise (σ = {plan.sigma:.4g})"
        yield f"  {noise}, but no ε can be stated"
        return
    yield from _description(plan)
    if chief.shares > 1:
        aggregation = "the server sees only sums of masked values"
        if simulated:
            aggregation = "secure aggregation is assumed, but not executed"
        yield (
            f"  {aggregation}. Each client adds only 1/{chief.shares} of the noise variance, so ε "
            "holds only against parties that see nothing but the sums over clients"
        )
    spent = plan.epsilon(plan.histories)
    if spent > 0:
        yield f"  earlier runs have already spent ε = {format_epsilon(spent)} of this budget"
    for warning in noise_warnings(plan):
        yield (
            f"  warning: {warning}. To see the effect of more records, more clients or a larger ε, "
            "run `fedsynth privacy plan`"
        )
    yield from _cap_warnings(plan, plan.planned_epsilon())


def privacy_unit(plan: PrivacyPlan) -> str:
    """Describes what a planned run protects, for example "one patient with all examples"."""
    if plan.unit == USER:
        return f"one {plan.run.report.person or 'person'} with all examples"
    return "one example"


def _description(plan: PrivacyPlan) -> list[str]:
    """Returns a line about a planned run's guarantee, and a line about its mechanism."""
    chief, privacy = plan.chief, plan.privacy
    sampling = "all records at each step"
    if chief.sample_rate < 1:
        sampling = f"Poisson sampling at q = {chief.sample_rate:.3g}"
    rounds = pluralize(plan.run.rounds, "round")
    whom = "" if plan.run.partition.clients == 1 else "for each client "
    if plan.run.participation < 1:
        rounds += f" (each client takes part in at most {plan.most_rounds()})"
    noise = f"σ = {plan.sigma:.4g}, clip {chief.clip:.4g}"
    if plan.varies:
        noise = f"σ = {plan.sigma:.4g} for all releases together, and more for each release"
    return [
        f"privacy: ε = {format_epsilon(plan.planned_epsilon())} at δ = {privacy.delta:g} "
        f"{whom}over {rounds}, {privacy_unit(plan)} {NEIGHBOURS[privacy.adjacency]}",
        f"  mechanism {chief.mechanism} ({noise}), {sampling}, {schedule(plan)}",
    ]


def noise_warnings(plan: PrivacyPlan) -> list[str]:
    """Returns a warning if the noise of a release exceeds the largest possible signal.

    The warning names the release with the lowest signal-to-noise ratio, from public sizes.
    """
    if not plan.facts.guaranteed:
        return []
    ratio, quantity = min((plan.signal_to_noise(row), row.quantity) for row in plan.plans)
    if ratio >= 1:
        return []
    return [
        f"the noise exceeds the signal of {quantity} (S/N = {ratio:.2g}), so models may be poor"
    ]


def schedule(plan: PrivacyPlan) -> str:
    """Describes how often the clients release noisy values, for example "2 releases a round"."""
    if plan.varies:
        return f"{pluralize(plan.all_releases, 'release')} in all"
    return f"{pluralize(plan.releases, 'release')} a round"


def _cap_warnings(plan: PrivacyPlan, planned: float) -> Iterator[str]:
    """Yields a warning if the limit on ε will end the run early, or if ε is large and has no
    limit.
    """
    cap = plan.privacy.epsilon
    if cap is None and planned > WEAK:
        yield (
            f"  warning: ε = {format_epsilon(planned)} is a weak guarantee. One example may "
            f"change the odds of any outcome by a factor of {format_odds(planned)}. To limit ε, "
            "set privacy.epsilon instead of privacy.noise_multiplier"
        )
    elif cap is not None and planned > cap * (1 + 1e-9):
        yield f"  the run will end before the round that would exceed the limit ε = {cap:g}"


def start_facts(
    plan: PrivacyPlan,
    histories: Histories,
    test: str,
    began: figures.RunStart,
    warnings: Sequence[str] = (),
    *,
    simulated: bool,
) -> figures.Start:
    """Returns the public settings of a private run that are fixed when the run starts.

    These facts are written into the run folder at the start, so that a privacy report can be made
    even if the run is killed.

    Args:
        plan: the run's plan.
        histories: the contents of the ledgers that the run will charge, at the time when the run
            begins.
        test: the kind of test images: "public", "private" or "none".
        began: the run's identifier and start date.
        warnings: the warnings to include in the report.
        simulated: True if all clients are in one process, False for a run over a network.
    """
    return figures.Start(
        schema_version=5,
        charge_id="",
        noise_multiplier=plan.privacy.noise_multiplier,
        data_set=plan.spec.to_json(),
        test_images=test,  # type: ignore[arg-type]  # checked, as all of it is
        ledgers={
            history.client: figures.LedgerStart(rows=len(history.releases), chain=history.chain)
            for history in histories
        },
        run=began,
        simulated=simulated,
        warnings=[*warnings, *noise_warnings(plan)],
    )


def privacy_section(
    plan: PrivacyPlan, histories: Histories, *, simulated: bool = True
) -> figures.Promise:
    """Returns summary.json's section "privacy" with a run's privacy guarantee.

    Args:
        plan: the run's plan.
        histories: the current contents of the clients' ledgers.
        simulated: True if all clients are in one process, False for a run over a network.
    """
    promise = figures.Promise(
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


def pluralize(number: int, noun: str) -> str:
    """Formats a number and its noun, such as "1 round" or "3 rounds"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


FOUR_SUMS = ". Each value is half the sum of four Gaussians, against one floating-point attack"


def report_facts(
    plan: PrivacyPlan,
    rounds_done: int,
    events: Sequence[figures.Event],
    start: figures.Start,
    *,
    secret: bool = True,
    abandoned: bool = False,
    files: Mapping[str, str] = MappingProxyType({}),
    first: int = 0,
) -> figures.ReportFacts:
    """Returns the facts in a run's report that do not come from the ledgers.

    Args:
        plan: the run's plan.
        rounds_done: the number of finished rounds.
        events: the deviations from the plan.
        start: the facts that were fixed when the run began.
        secret: whether the keys for all clients' noise came from the operating system.
        abandoned: whether the run was killed before it finished.
        files: the files that the report covers, with their SHA-256 hashes.
        first: the index of the first client in the report.
    """
    run, privacy, facts = plan.run, plan.privacy, plan.facts
    report = run.report
    simulated = start.simulated
    person = report.person or "person"
    randomness = facts.randomness or DESCRIPTION
    if privacy.four_sums and not facts.randomness:
        randomness += FOUR_SUMS
    published = []
    if facts.guaranteed and isinstance(run.method, PublishedEpsilon):
        published.append(dict(run.method.paper_epsilon(privacy.delta, plan.sigma)))
    clients = [history.client for history in plan.histories]
    sites = report.site_names(run.partition.clients)[first:]
    return figures.ReportFacts(
        method=run.method.name,
        mechanism=plan.chief.mechanism,
        delta=privacy.delta,
        max_records=plan.max_records,
        adjacency=privacy.adjacency,
        unit=figures.Unit(kind=plan.unit, person=person, user_records=privacy.user_records),
        epsilon_cap=privacy.epsilon,
        planned_rounds=run.rounds,
        rounds_done=rounds_done,
        public_items=public_items(plan, simulated=simulated),
        verdict=figures.Verdict(reasons=list(facts.reasons), warnings=start.warnings),
        events=list(events),
        ledger_kept=not simulated or privacy.ledger_folder is not None,
        randomness=randomness,
        published=published,
        scope=accesses(plan, start.test_images, simulated=simulated),
        test_only_randomness=not secret,
        provenance=provenance(run),
        noise_multiplier=privacy.noise_multiplier,
        simulated=simulated,
        abandoned=abandoned,
        shares=plan.chief.shares,
        min_clients=min_clients_of_a_sum(plan, simulated=simulated),
        own_code=list(run.assumed_code),
        run=figures.RunFacts(
            id=start.run.id,
            date=start.run.date,
            responsible=report.responsible or None,
            purpose=report.purpose or None,
            sites=dict(zip(clients, sites, strict=False)),
        ),
        files=dict(files),
    )


def min_clients_of_a_sum(plan: PrivacyPlan, *, simulated: bool) -> int:
    """Returns the minimum number of clients in a sum shown to the server.

    Returns 0 if the server sees the upload of each client.
    """
    run, method = plan.run, plan.run.method
    if simulated or not sums_securely(method):
        return 0
    active = active_clients(run.partition.clients, run.participation)
    return fewest(method, active, run.partition.clients, private=True)


def owner_facts(
    plan: PrivacyPlan, k: int, history: History, rounds: int, start: figures.Start, *, secret: bool
) -> figures.ReportFacts:
    """Returns the facts in a data owner's report that do not come from the ledger.

    Args:
        plan: the run's plan.
        k: the index of the owner's client.
        history: the contents of the owner's ledger when the client joined the run.
        rounds: the number of finished rounds, as the server states it. The charges are read from
            the ledger, not from this number.
        start: the facts that were fixed when the run began.
        secret: whether the keys for the noise came from the operating system.
    """
    rounds = min(rounds, plan.run.rounds)
    owner_plan = replace(plan, histories=(history,))
    return report_facts(owner_plan, rounds, (), start, secret=secret, first=k)


def exported_files(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 hashes of the files in a run folder that the report covers.

    Raises:
        OSError: a file cannot be read.
    """
    return {name: file_hash(folder / name) for name in FILES if (folder / name).is_file()}


def public_items(plan: PrivacyPlan, *, simulated: bool = True) -> dict[str, str]:
    """Returns the privacy report's list of public items.

    These items were fixed before any data were read. The text about each item states its value and
    the reason why it is public.
    """
    spec = plan.spec
    run = plan.run
    items = {
        "data set": _data_set(plan, simulated=simulated),
        "classes and image shape": (
            f"{spec.classes} classes, {spec.channels}×{spec.height}×{spec.width}"
        ),
        "normalisation": f"mean {list(spec.mean)}, standard deviation {list(spec.std)}: constants "
        f"of the specification of {spec.name}",
        "architecture and initial weights": _architecture(run),
        "hyper-parameters": _settings_text(run, "method"),
        "bound on all records": f"{plan.max_records} (δ is checked against it)",
        "schedule": f"{pluralize(run.rounds, 'round')}, {schedule(plan)}, fixed before data are "
        "read",
        **feature_facts(run.model, spec),
    }
    if isinstance(run.method, OwnNetwork):
        items |= run.method.public_facts(spec)
    if spec.bounds is not None:
        low, high = spec.bounds
        items["bounds of the values"] = f"{low:g} to {high:g}, declared. Values outside are clipped"
    if spec.encoder:
        items["encoder"] = (
            f"{spec.encoder}. It is fixed before data are read. The vector of an image depends "
            "only on this image"
        )
    if run.folder is not None and run.folder.window:
        items["window"] = f"{run.folder.window} (centre and width of the levels shown), as declared"
    if run.participation < 1:
        share = f"{len(plan.participation.in_round(1))} of {run.partition.clients} clients a round"
        items["participation"] = f"{share}, drawn from the run's seed. No amplification is claimed"
    if run.client_failures:
        items["simulated failures"] = (
            f"each client fails with probability {run.client_failures:g} in a round, drawn from "
            "the run's seed. The computation is charged even if the upload did not arrive"
        )
    if not simulated or run.partition.clients > 1:
        server = "it computes only with the uploads and public values, which costs no privacy"
        items["what the server does"] = server
    if isinstance(run.method, PublicImages):
        proxy = run.method.public_images()
        items["proxy images"] = f"the training images of {proxy}, declared public"
    if plan.facts.guaranteed:
        items |= _guarantee_items(plan, simulated=simulated)
    return items


def _guarantee_items(plan: PrivacyPlan, *, simulated: bool) -> dict[str, str]:
    """Returns the public sizes and upload fields on which the guarantee depends."""
    items = {}
    run = plan.run
    unit = "record"
    if plan.unit == USER:
        unit = run.report.person or "person"
    source = "declared"
    if not plan.privacy.nominal_size:
        source = "from the declared size of the data set and the settings of the partition"
    items["sample rate q"] = f"{plan.chief.sample_rate:.6g}, from public sizes"
    owner = "the data owner" if simulated and run.partition.clients == 1 else "a client"
    items[f"nominal {unit}s of {owner}"] = (
        f"{plan.nominal_size:g} ({source}). The true number is never used as a divisor"
    )
    for name, (kind, reason) in privacy_of_fields(run.method.upload).items():
        if kind == "public":
            items[f"upload field {name!r}"] = reason
    return items


def _architecture(run: RunSettings) -> str:
    if isinstance(run.method, OwnNetwork):
        return "the method's own model. The settings of models have no effect"
    weights = "drawn from the run's seed"
    if has_given_weights(run.model):
        weights = "with the weights of a module that the operator supplies and declares public"
    return f"{_settings_text(run, 'model')}; {weights}"


def _settings_text(run: RunSettings, section: str) -> str:
    """Formats the settings of one section, such as "width = 32, depth = 2", without unset ones."""
    settings = run.to_mapping()[section]
    return ", ".join(f"{key} = {value}" for key, value in settings.items() if value != "")


def _data_set(plan: PrivacyPlan, *, simulated: bool) -> str:
    """Describes the data set and its public part for the report."""
    spec = plan.spec
    if is_published(spec):
        return f"{spec.name}, published: {spec.source}"
    if not simulated:
        return f"{spec.name} of the data owners. Its specification is public, its records are not"
    if plan.privacy.ledger_folder is None:
        return f"{spec.name}: the operator's own, declared public by the operator"
    holder = "data owner" if plan.run.partition.clients == 1 else "operator"
    return f"{spec.name} of the {holder}. Its specification is public, its records are not"


COMPARED_RECORDS = (
    "records, compared with those of the ledgers",
    "with a keyed hash that is stored with the ledgers. It decides whether the run starts",
)
TIMING = (
    "the response time of a client, and whether it responds",
    "visible to anyone who transports the messages, and outside the guarantee",
)
# The note in the report about data that only a simulation accesses.
IN_SIMULATION = "in the folder simulation_only and some error messages, and outside the guarantee"


def accesses(plan: PrivacyPlan, test: str, *, simulated: bool = True) -> list[figures.Access]:
    """Returns the privacy report's list of all accesses to private data.

    Args:
        plan: the run's plan.
        test: the kind of test images: "public", "private" or "none".
        simulated: True if all clients were in one process, which reads more data than a server
            does.
    """
    facts = plan.facts
    averaged = ""
    if plan.unit == USER:
        person = plan.run.report.person or "person"
        averaged = f", averaged over each {person}'s examples, and the average is clipped"
    listed = []
    for release in plan.plans:
        access = f"{release.quantity}: {release.clipped}{averaged}"
        note = f"mechanism {release.mechanism}, {_schedule_of(plan, release)}"
        listed.append((access, facts.status, note))
    for access, note in facts.accesses:
        listed.append((access, disclosure.UNACCOUNTED, note))
    local_test = simulated and plan.run.partition.local_test > 0
    unprotected = (
        (COMPARED_RECORDS, plan.privacy.ledger_folder is not None or not simulated),
        (TIMING, not simulated),
        (("clients' own test splits, and accuracies on them", IN_SIMULATION), local_test),
        (("partition into clients, true counts, seconds", IN_SIMULATION), simulated),
        (("test set, and accuracies on it", IN_SIMULATION), test == PRIVATE),
    )
    for (access, note), happens in unprotected:
        if happens:
            listed.append((access, disclosure.SIMULATION_ONLY, note))
    if test == PUBLIC:
        origin = f"of the published data set {plan.spec.name}"
        if not is_published(plan.spec):
            origin = "declared public by the operator"
        note = f"{origin}. The test accuracy is computed from released models"
        listed.append(("test set", disclosure.PUBLIC, note))
    return [
        figures.Access.model_validate({"access": access, "status": status, "note": note})
        for access, status, note in listed
    ]


def _schedule_of(plan: PrivacyPlan, release: ReleasePlan) -> str:
    """Describes how often a client releases a quantity, for example "2 releases a round"."""
    if not plan.varies:
        return f"{pluralize(release.steps, 'release')} a round"
    rounds = sum(release in plan.round_plans(number + 1) for number in range(plan.run.rounds))
    return f"{pluralize(release.steps * rounds, 'release')} in all"


DATA_PATHS = (
    "folder", "test_folder", "declaration", "data_root", "encoder_weights", "public_images",
    "encoder_cache", "feature_columns", "label_column", "user_column", "site_column",
)  # fmt: skip


def provenance(run: RunSettings) -> dict[str, str]:
    """Returns a run's software versions and a hash of all its settings.

    For custom images, the hash does not cover paths and names of columns, because they
    could be guessed from a hash.
    """
    sections = run.to_mapping()
    if run.folder is not None:
        for key in DATA_PATHS:
            sections["data"].pop(key, None)
        sections.get("privacy", {}).pop("ledger", None)
    config = json.dumps(sections, sort_keys=True).encode()
    packages = ("torch", "opacus", "dp-accounting", "numpy", "randomgen")
    return {
        "config": hashlib.blake2b(config, digest_size=16).hexdigest(),
        "python": platform.python_version(),
        "fedsynth": __version__,  # also if it runs from a folder, without being installed
        **{name: version(name) for name in packages},
        **renderer_versions(),
    }
