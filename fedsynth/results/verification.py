"""Verifies the privacy report in the folder of a private run.

The figures in the report are computed again from config.toml, privacy_start.json and the ledgers.
All other files are compared with the run's plan, the ledgers and the declared metrics. This module
also builds the report of a run that was killed. `private_run` reads the folder and the ledgers.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from fedsynth.core.capabilities import ImagesAtEnd, Measurements, SyntheticImages
from fedsynth.core.messages import Tensors
from fedsynth.core.method import Method
from fedsynth.core.sums import sums_securely
from fedsynth.data.files import read_tensors
from fedsynth.data.shared_set import BYTES, NORMALISED, SUMS, TENSORS, set_facts
from fedsynth.errors import FedsynthError, one_line, short_repr
from fedsynth.evaluation.classification import MEASURES, rates
from fedsynth.faults import HOSTILE
from fedsynth.federation import run_data
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.files import file_hash, plain_files
from fedsynth.models.flat import restore
from fedsynth.privacy.disclosure import PUBLIC, Disclosure
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report import file as report_file
from fedsynth.privacy.report.build import NAME, build_report
from fedsynth.privacy.report.figures import Event, Owner, ReportFacts, schema_problems
from fedsynth.privacy.report.verify import Verification, differences, page_problems, report_problems
from fedsynth.privacy.signing import EXCLUDED, SIGNATURE
from fedsynth.results import disclosed, private_run, run_folder
from fedsynth.results.disclosed import COMMON, CONFUSION, LOST, MODELS, NOT_COUNTED, REJECTED
from fedsynth.results.file_names import CONFIG, METRICS, MODEL, SERVED, SUMMARY
from fedsynth.results.finished import is_unfinished
from fedsynth.results.private_run import Charges, PrivateRun
from fedsynth.results.report_facts import exported_files, owner_facts, privacy_section, report_facts
from fedsynth.results.run_record import own_sources, summarise
from fedsynth.results.saved_model import Architecture, computes
from fedsynth.synthesizer.condensation.sets import SyntheticSet
from fedsynth.version import __version__

OWNER = "owner.json"  # the name of a file that only the folder of a data owner's report contains
# The files of a finished run apart from those in `simulation_only/`, as patterns.
RUN_FILES = (
    *(CONFIG, METRICS, SUMMARY, MODEL, TENSORS, "synthetic.png", f"{run_folder.ROUNDS}/*.png"),
    *(run_folder.ARTEFACTS, run_folder.PRIVATE_START, run_folder.RESUMED, SERVED),
    *(SIGNATURE, "sources/*", "ledger/*.jsonl", "ledger/*.torn-*"),
    *(f"{NAME}.{ending}" for ending in ("json", "md", "html")),
)
REQUIRED = (CONFIG, run_folder.PRIVATE_START, f"{NAME}.md", f"{NAME}.html")
PLANNED = ("participants", LOST, REJECTED, NOT_COUNTED)
TAKEN_AS_STATED = (
    "these parts of the run cannot be verified: its name and date, the versions of the software, "
    "its warnings, the counts of an audit, the sizes of uploads, and pictures"
)
# The maximum sum of a confusion matrix, whose entries could otherwise carry other content.
MAX_TEST_EXAMPLES = 10**9

NO_LEDGER = "no ledger was compared. To compare the ledgers, name their folder with --ledger DIR"
_REASON = re.compile(r".{1,1000}")


def verify_run(
    run: Path | str, *, ledger: Path | None = None, method: type[Method] | None = None
) -> Verification:
    """Checks that the privacy report of a run follows from the run's settings and the clients'
    ledgers.

    Args:
        run: the run folder, or the privacy_report.json in it.
        ledger: the folder of the ledger files. With None, this is `ledger/` in the run folder, or
            the folder that config.toml states.
        method: the class of the run's method, if fedsynth does not know the method by name.

    Raises:
        PrivacyError: the folder contains no report, or the report cannot be read.
    """
    path = Path(run)
    folder = path
    if not path.is_dir():
        folder = path.parent
    elif not (path / f"{NAME}.json").exists() and is_unfinished(path):
        advice = f"To build a report, run fedsynth privacy report {path}"
        raise PrivacyError(f"the run did not finish, so it has no report yet. {advice}")
    report = report_file.read_report(path)
    problems = schema_problems(report)
    if problems:
        return Verification(problems)
    with report_file.damage_as_error(f"the run in {folder} is damaged"):
        return _verified(folder, report, ledger, method)


def _verified(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> Verification:
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if run_folder.PRIVATE_START in missing and (folder / SUMS).is_file():
        raise PrivacyError(
            f"the report in {folder} cannot be verified, because an export has no settings and "
            f"ledgers. Verify the run folder. To check the export's files, run sha256sum -c {SUMS}"
        )
    page_differences, notes = page_problems(report, folder)
    problems = [f"{name} is missing" for name in missing] + page_differences
    if CONFIG not in missing and run_folder.PRIVATE_START not in missing:
        check = _owner_problems if (folder / OWNER).exists() else _run_problems
        try:
            differing, note = check(folder, report, ledger, method)
            problems += differing
            notes = [note, *notes]
        except FedsynthError as error:
            problems.append(str(error))
    version = report["provenance"].get("fedsynth", "an unknown version")
    if problems and version != __version__:
        problems.append(f"the run used fedsynth {version}, but this is fedsynth {__version__}")
    return Verification(problems, [*notes, TAKEN_AS_STATED])


# ---------------------------------------------------------------------------- a run's own folder


def _run_problems(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> tuple[list[str], str]:
    """Returns the differences between a run's report and the other files of the run.

    A second result is a note about the ledgers.
    """
    run = private_run.read_run(folder, method)
    files, exact = private_run.ledger_files(folder, run, ledger)
    ledger_rows = report_file.read_ledger_rows(report, files, exact=exact)
    note = ledger_rows.note or NO_LEDGER
    try:
        charges = Charges(run, ledger_rows)
    except PrivacyError as error:
        return [*ledger_rows.problems, str(error)], note
    facts = report_facts(
        charges.plan,
        charges.rounds_done,
        _events(charges, report),
        run.start,
        secret=not report["test_only_randomness"],  # injected noise leaves no other trace
        abandoned=run.abandoned,
        files={} if run.abandoned else exported_files(folder),
    )
    problems = [*ledger_rows.problems, *charges.problems()]
    if _ended_early(charges) and not run.networked and charges.refusal() is None:
        rounds = f"{charges.rounds_done} of {run.settings.rounds} rounds"
        problems.append(f"{METRICS} has only {rounds}, which the limit on ε does not explain")
    problems += report_problems(report, facts, ledger_rows, run.start.ledgers)
    problems += _row_problems(charges) or _summary_problems(charges)
    if not run.abandoned:
        problems += [*_file_problems(charges, folder), *_unknown_files(folder)]
    return problems, note


def _ended_early(charges: Charges) -> bool:
    return charges.rounds_done < charges.run.settings.rounds and not charges.run.abandoned


def _events(charges: Charges, report: Mapping[str, Any]) -> list[Event]:
    """Returns the events that the privacy report must state because the run deviated from its plan.

    In a run over a network, the reasons for the events are taken from the report. In a simulation,
    the limit on ε explains an early end. If other runs have charged the ledgers since the early
    end, the figures of this event are taken from the report.
    """
    run = charges.run
    stated = list(map(Event.model_validate, report["events"]))
    if run.networked:
        events = []
        for number in charges.absent:
            events.append(_with_reason(Event(kind="absent", client=str(number)), stated))
        events += run.resumptions
        if _ended_early(charges):
            ended = Event(kind="ended", rounds_done=charges.rounds_done)
            events.append(_with_reason(ended, stated))
        return events + [event for event in stated if _may_be_silent(event, charges)]
    refusal = charges.refusal()
    if refusal is None or not _ended_early(charges):
        return run.resumptions
    charged = chain.from_iterable(charges.charged.values())
    charged_since = charges.foreign or any(row.round > charges.rounds_done for row in charged)
    for event in stated[-1:]:
        figures = {name: getattr(event, name) for name in ("client", "epsilon", "epsilon_next")}
        if charged_since and event.client in run.start.ledgers and None not in figures.values():
            refusal = refusal.model_copy(update=figures)
    return [*run.resumptions, refusal]


def _may_be_silent(event: Event, charges: Charges) -> bool:
    """Returns True if an event may have happened which states that a client did not send its
    ledger.

    It may have happened if the client did not answer in the rounds of the event, or if these rounds
    were interrupted.
    """
    if event != Event(kind="unstated", client=event.client, rounds=event.rounds):
        return False
    if event.client is None or not event.rounds or event.client in map(str, charges.absent):
        return False
    for number in event.rounds:
        cut_off = number - 1 in charges.run.resumed or number == charges.rounds_done + 1
        if not cut_off and event.client not in charges.row(number).get(LOST, {}):
            return False
    return True


def _with_reason(expected: Event, stated: Sequence[Event]) -> Event:
    """Returns an event with the reason that the report states for the event, if the report states
    one.
    """
    for event in stated:
        matches = event.model_copy(update={"why": None}) == expected
        if matches and event.why is not None and _REASON.fullmatch(event.why):
            return event
    return expected


# ----------------------------------------------------------------------------------- metrics.jsonl


def _row_problems(charges: Charges) -> list[str]:
    """Returns a problem for each value in metrics.jsonl that contradicts the data set, the plan or
    the ledgers.
    """
    problems = []
    for row in charges.run.rows:
        for problem in (*_measurement_problems(row, charges), *_planned_problems(row, charges)):
            problems.append(f"{METRICS}: round {row['round']} {problem}")
    return [*problems, *_epsilon_problems(charges)]


def _measurement_problems(row: Mapping[str, Any], charges: Charges) -> Iterator[str]:
    """Yields a problem for each metric of a round that a run with these settings cannot have
    measured.
    """
    run = charges.run
    models = row.get(MODELS, {})
    for name, variant in models.items():
        if name not in getattr(run.settings.method, "variant_names", ()):
            yield f"has metrics of a model {name!r:.40}, which the method does not make"
        for problem in disclosed.undeclared(variant, disclosed.MEASURED):
            yield f"{problem} (in the metrics of the model {name!r:.40})"
    test = run.start.test_images
    for values in (row, *models.values()):
        if test != run_data.PUBLIC and values.keys() & set(disclosed.ON_TEST):
            yield f"has an accuracy on test images, but the kind of test images is {test!r}"
        domains = {*values.get("domain_accuracy", ()), *values.get(disclosed.DOMAIN_MEASURES, ())}
        if not domains <= set(run.spec.domains):
            yield "has an accuracy for a domain that the data set does not have"
        if set().union(*values.get(disclosed.DOMAIN_MEASURES, {}).values()) - set(MEASURES):
            yield "has an unknown measure of a domain"
    sizes = row.get("client_upload_bytes", [])
    active = charges.plan.participation.in_round(row["round"])
    total = row.get("upload_bytes")  # a pixel has one byte, other values have more
    if len(sizes) > len(active) or not row.get("upload_floats", 0) <= sum(sizes) == total:
        yield "has upload sizes that contradict each other"


def _planned_problems(row: Mapping[str, Any], charges: Charges) -> list[str]:
    """Returns a problem for each metric of a round that contradicts the privacy plan or the run's
    seed.
    """
    number = row["round"]
    active = charges.plan.participation.in_round(number)
    method = charges.run.settings.method
    expected = dict(charges.expected_losses(number))
    metric_privacy: Mapping[str, Disclosure] = {}
    if isinstance(method, Measurements):
        expected |= method.planned_facts(charges.round_context(number))
        metric_privacy = method.metric_privacy
    if len(active) < charges.run.settings.partition.clients:
        expected["participants"] = list(active)
    stated = {}
    for key, value in row.items():
        label = metric_privacy.get(key)
        if key in PLANNED or (label is not None and label.kind == PUBLIC):
            stated[key] = value
    return differences("", expected, stated)


def _epsilon_problems(charges: Charges) -> list[str]:
    """Returns a problem for each round whose metrics state a wrong ε.

    The correct ε is computed from the ledger rows up to this round.
    """
    rows, plan = charges.run.rows, charges.plan
    if not plan.guaranteed(plan.histories):
        if any("epsilon" in row for row in rows):
            return [f"{METRICS} states an epsilon, but the run has no guarantee"]
        return []
    # over nodes, what a lost client was charged is unknown
    lost = charges.run.networked and any(LOST in row or REJECTED in row for row in rows)
    by_round = {} if lost else charges.epsilon_by_round()
    problems = []
    spent = by_round.get(0, 0.0)
    upper = plan.epsilon(charges.histories)
    for row in rows:
        spent = by_round.get(row["round"], spent)
        epsilon = row.get("epsilon")
        location = f"{METRICS}: epsilon of round {row['round']}"
        if epsilon is None and math.isinf(upper):  # another run's release had no guarantee
            continue
        if not charges.foreign and not lost:
            problems += differences(location, spent, epsilon)
        elif epsilon is None or not spent * 0.999999 <= epsilon <= upper * 1.000001:
            # the time at which another run charged the ledger is unknown
            problems.append(f"{location} must be between {spent:.6g} and {upper:.6g}")
    return problems


# ------------------------------------------------------------------------------------ summary.json


def _summary_problems(charges: Charges) -> list[str]:
    """Returns a problem for each value in summary.json that contradicts the metrics of the rounds.

    If there is no summary.json, there is no problem.
    """
    run = charges.run
    if run.summary is None:
        return []
    settings = run.settings
    final = {}  # from the last row, or as stated if that round was not measured
    if run.rows and run.start.test_images == run_data.PUBLIC:
        stated = {**run.summary, **run.rows[-1]}
        for name in ("test_accuracy", COMMON, *MEASURES):
            if name in stated and disclosed.ROW[name].fits(stated[name]):
                final[name] = stated[name]
        if CONFUSION in run.summary and _is_confusion_matrix(run, final):
            final[CONFUSION] = run.summary[CONFUSION]
    promise = privacy_section(charges.plan, charges.histories, simulated=not run.networked)
    expected = summarise(
        settings,
        run.rows,
        final,
        device=str(run.summary.get("device"))[:20],
        test=run.start.test_images,
        privacy=promise.to_json(),
    )
    declared = disclosed.declared_summary(type(settings.method))
    public = dict(disclosed.disclosed(expected, declared).public)
    public["folder"] = str(run.summary.get("folder"))
    return differences(SUMMARY, json.loads(json.dumps(public)), run.summary)


def _is_confusion_matrix(run: PrivateRun, final: Mapping[str, Any]) -> bool:
    """Returns True if the summary's confusion matrix has the measures of the last round.

    These are the accuracy, the balanced accuracy and the F1 score.
    """
    matrix: Any = (run.summary or {}).get(CONFUSION)
    if not disclosed.SUMMARY[CONFUSION].fits(matrix):
        return False
    classes = run.spec.classes
    total = sum(map(sum, matrix))
    if list(map(len, matrix)) != [classes] * classes or not 0 < total <= MAX_TEST_EXAMPLES:
        return False
    accuracy = sum(matrix[label][label] for label in range(classes)) / total
    measures = {"test_accuracy": accuracy, **rates(matrix)}
    return all(
        math.isclose(value, final.get(name, math.nan), rel_tol=1e-9)
        for name, value in measures.items()
    )


# ------------------------------------------------------------------------------------------- files


def _file_problems(charges: Charges, folder: Path) -> list[str]:
    """Returns the problems with the files in a run folder that contain results.

    A problem is a missing file, a file that this run cannot have written, or a tensor of a wrong
    shape.
    """
    run = charges.run
    method = run.settings.method
    counted = [row["round"] for row in run.rows if NOT_COUNTED not in row]
    sends_sets = issubclass(method.upload, SyntheticSet)
    plans_images = isinstance(method, SyntheticImages) and getattr(method, "images_each", 1) > 0
    uncertain = isinstance(method, ImagesAtEnd) and (sums_securely(method) or 1 not in counted)
    certain = plans_images and not uncertain
    required = [MODEL, SUMMARY]
    if run.rows or (run.summary or {}).get("rounds") != 0:
        required.append(METRICS)
    if counted and (sends_sets or certain):
        required.append(TENSORS)
    checks = {MODEL: _model_problems}
    if counted and (sends_sets or plans_images):
        checks[TENSORS] = _images_problems
    measured = getattr(type(method), "artefacts", Measurements.artefacts)
    if counted and measured is not Measurements.artefacts:
        checks[run_folder.ARTEFACTS] = _matrices_problems
    problems = [f"{name} is missing" for name in required if not (folder / name).is_file()]
    for name in (TENSORS, run_folder.ARTEFACTS):
        if name not in checks and (folder / name).exists():
            problems.append(f"{name} exists, but this run does not write such a file")
    for name, check in checks.items():
        if (folder / name).is_file():
            try:
                problems += check(charges, *read_tensors(folder / name))
            except (OSError, RuntimeError, *HOSTILE) as error:
                problems.append(f"{name} cannot be read: {one_line(error)}")
    expected = {code.file: code.sha256 for code in own_sources(run.settings).values()}
    sources = {file.name: file_hash(file) for file in folder.glob("sources/*")}
    return problems + differences("sources", expected, sources)


def _unknown_files(folder: Path) -> list[str]:
    """Returns a problem for each file that no run writes. Such a file could hold anything."""
    try:
        names = plain_files(folder, leave_out=[EXCLUDED])
    except OSError as error:
        return [str(error.strerror)]
    problems = []
    for name in names:
        patterns = [p for p in RUN_FILES if p.count("/") == name.count("/")]
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            problems.append(
                f"{short_repr(name)} is no file of a run. Move it out of the run folder"
            )
    return problems


def _model_problems(charges: Charges, tensors: Tensors, metadata: Mapping[str, str]) -> list[str]:
    """Returns the problems with the file of the model.

    The tensors and the metadata must fit the run's architecture, and the outputs in the metadata
    must be those of the model.
    """
    run = charges.run
    network = copy.deepcopy(run.context.architecture)
    problems = differences(MODEL, _shapes(network.state_dict()), _shapes(tensors))
    if problems:
        return problems
    restore(network, tensors)
    architecture = Architecture(run.spec, run.settings.model, run.settings)
    expected = {**architecture.to_metadata(), "logits": metadata["logits"]}
    problems = differences(f"{MODEL}: metadata", expected, metadata)
    if not computes(network, run.spec, metadata["logits"]):
        problems.append(f"{MODEL} states other outputs than the model computes")
    return problems


def _matrices_problems(
    charges: Charges, tensors: Tensors, metadata: Mapping[str, str]
) -> list[str]:
    """Returns a problem for each matrix of the server without the shape [classes, clients]."""
    classes, clients = charges.run.spec.classes, charges.run.settings.partition.clients
    problems = []
    for name, shape in _shapes(tensors).items():
        if len(shape) != 2 or shape[0] != classes or not 1 <= shape[1] <= clients:
            expected = f"must be [{classes}, clients]"
            problems.append(
                f"{run_folder.ARTEFACTS}: {short_repr(name)} is {shape}, but {expected}"
            )
    return problems


def _shapes(tensors: Tensors) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _images_problems(charges: Charges, tensors: Tensors, metadata: Mapping[str, str]) -> list[str]:
    """Returns the problems with the file of synthetic images.

    A problem is a wrong shape or type, or images of clients that cannot have sent any.
    """
    spec = charges.run.spec
    clients, labels = set(tensors["client"].tolist()), set(tensors["labels"].tolist())
    count = tensors["labels"].numel()
    expected = {"images": [count, *spec.image_shape], "labels": [count], "client": [count]}
    if "soft_labels" in tensors:
        expected["soft_labels"] = [count, spec.classes]
    pixels = BYTES if metadata.get("pixels") == BYTES else NORMALISED
    problems = differences(TENSORS, expected, _shapes(tensors))
    problems += differences(f"{TENSORS}: metadata", set_facts(spec, pixels), metadata)
    last = [row["round"] for row in charges.run.rows if NOT_COUNTED not in row][-1]
    active = charges.plan.participation.in_round(last)
    if not (clients <= {*active, run_folder.SERVER} and labels <= set(range(spec.classes))):
        problems.append(f"{TENSORS} contains clients or classes that do not exist")
    return problems


# ------------------------------------------------------------------------------- an owner's folder


def _owner_problems(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> tuple[list[str], str]:
    """Returns the differences between a data owner's report and the other files in the owner's
    folder.

    A second result is a note about the ledger. An owner can read only one ledger, so σ and the
    number of rounds are taken from what the server stated.
    """
    run, owner = _owner_run(folder, method)
    if report["ledger_heads"].keys() != run.start.ledgers.keys():
        raise PrivacyError(f"the report's client differs from that in {run_folder.PRIVATE_START}")
    [(client, start)] = run.start.ledgers.items()
    if ledger is None:
        ledger = folder.resolve().parents[1]
    ledger_rows = report_file.read_ledger_rows(report, ledger, exact=False)
    problems = list(ledger_rows.problems)
    if not ledger_rows.begins_with(client, start):
        problems.append(f"the ledger of {client} is not the ledger with which the run began")
    rows = ledger_rows.rows[client]
    new_rows = rows[start.rows :]
    plan = _owner_plan(run)
    planned: set[Release] = set()
    for round_number in plan.participation.rounds_of(owner.client, plan.run.rounds):
        planned.update(plan.client_rows(owner.client, replace(run.context, round=round_number)))
    if new_rows and planned.isdisjoint(new_rows):
        problems.append("the ledger has new rows, but this run's settings charge none of them")
    facts = _owner_facts(run, owner, rows)
    problems += report_problems(report, facts, ledger_rows, run.start.ledgers)
    return problems, ledger_rows.note


def owner_report(
    folder: Path, *, ledger: Path | None = None, method: type[Method] | None = None
) -> dict[str, Any]:
    """Builds a data owner's report from the current ledger and the other files in the folder.

    Args:
        folder: the folder of the run in the owner's folder of ledgers.
        ledger: the folder of the ledger, as in `verify_run`.
        method: the class of the run's method, as in `verify_run`.

    Raises:
        PrivacyError: a file is missing or damaged.
    """
    with report_file.damage_as_error(f"the run in {folder} is damaged"):
        run, owner = _owner_run(folder, method)
        [client] = run.start.ledgers
        history = read_ledger((ledger or folder.resolve().parents[1]) / f"{client}.jsonl").history()
        facts = _owner_facts(run, owner, history.releases)
        return build_report(facts, [history], run.start.ledgers)


def _owner_run(folder: Path, method: type[Method] | None) -> tuple[PrivateRun, Owner]:
    run = private_run.read_start(folder, method)
    owner = report_file.read_part(folder / OWNER, "facts of an owner's report", Owner)
    number, rounds = owner.client, owner.rounds
    if rounds > run.settings.rounds or number >= run.settings.partition.clients:
        raise PrivacyError(f"{OWNER} names client {number} and round {rounds}, which the run lacks")
    if not run.networked or len(run.start.ledgers) != 1:
        raise PrivacyError("the report must be that of exactly one client of a run over a network")
    return run, owner


def _owner_facts(run: PrivateRun, owner: Owner, rows: Sequence[Release]) -> ReportFacts:
    [(client, start)] = run.start.ledgers.items()
    history = History(client, tuple(rows[: start.rows]))
    plan = _owner_plan(run)
    return owner_facts(
        plan, owner.client, history, owner.rounds, run.start, secret=owner.secret_noise
    )


def _owner_plan(run: PrivateRun) -> PrivacyPlan:
    """Returns the privacy plan from which the releases of a data owner's client were charged.

    The plan has the σ that the server stated.
    """
    plan = PrivacyPlan.checked(run.settings, run.context)
    stated, configured = run.start.noise_multiplier, plan.privacy.noise_multiplier
    if stated is None or stated <= 0 or configured not in (None, stated):
        raise PrivacyError(f"the run began with σ = {stated}, but config.toml states {configured}")
    return replace(plan, privacy=replace(plan.privacy, noise_multiplier=stated))


# ------------------------------------------------------------------------- runs that did not finish


def unfinished_report(
    folder: Path, *, ledger: Path | None = None, method: type[Method] | None = None
) -> dict[str, Any]:
    """Builds the privacy report of a run that did not finish, from the current contents of the
    run's ledgers.

    `write_report` writes the report into the folder.

    Args:
        folder: the run folder.
        ledger: the folder of the ledger files, as in `verify_run`.
        method: the class of the run's method, as in `verify_run`.

    Raises:
        PrivacyError: the run had no differential privacy or has not released anything yet, or a
            file is missing or damaged.
    """
    if (folder / OWNER).exists():
        return owner_report(folder, ledger=ledger, method=method)
    if not (folder / run_folder.PRIVATE_START).exists():
        reason = "The run had no differential privacy, or ended before its first release"
        raise PrivacyError(f"{folder} lacks {run_folder.PRIVATE_START}. {reason}")
    with report_file.damage_as_error(f"the run in {folder} is damaged"):
        run = private_run.read_run(folder, method)
        files, _ = private_run.ledger_files(folder, run, ledger)
        if files is None:
            raise PrivacyError(f"{folder} has no ledgers. State their folder with --ledger DIR")
        histories = [read_ledger(files / f"{name}.jsonl").history() for name in run.start.ledgers]
        plan = private_run.rebuild_plan(
            run, {history.client: history.releases for history in histories}
        )
        facts = report_facts(plan, len(run.rows), run.resumptions, run.start, abandoned=True)
        return build_report(facts, histories, run.start.ledgers)
