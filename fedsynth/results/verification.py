"""Verifies the privacy report in a private run's folder.

The figures in the report are computed again from config.toml, privacy_start.json and the ledgers,
as are the ε of each round and in the summary, and the clients of each round. The report has the
hashes of the other files, and each ledger in the folder has the hash of these hashes: the clients'
ledgers of a simulation, or the server's ledger of a run over a network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from fedsynth.core.capabilities import Measurements
from fedsynth.core.method import Method
from fedsynth.core.periods import has_periods
from fedsynth.data.shared_set import SUMS, TENSORS
from fedsynth.errors import FedsynthError, LedgerError, PrivacyError, short_key, short_repr
from fedsynth.evaluation import NAMES
from fedsynth.federation import run_data
from fedsynth.files import file_hash, plain_files
from fedsynth.privacy.disclosure import PUBLIC, Disclosure
from fedsynth.privacy.guard import verify_guard
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.owner import METHOD as OWNERS_PIPELINE
from fedsynth.privacy.report import file as report_file
from fedsynth.privacy.report.build import NAME
from fedsynth.privacy.report.figures import Event, schema_problems
from fedsynth.privacy.report.file import GUARD_SETTINGS, Problem
from fedsynth.privacy.report.verify import Verification, differences, page_problems, report_problems
from fedsynth.privacy.signing import EXCLUDED, SIGNATURE
from fedsynth.results import private_run, run_folder
from fedsynth.results.charges import Charges
from fedsynth.results.disclosed import (
    DOMAIN_MEASURES,
    GUARANTEE,
    LOST,
    MEASURED,
    MODELS,
    NOT_COUNTED,
    ON_TEST,
    REJECTED,
    declared_row,
    finite,
    metric_faults,
    undeclared,
)
from fedsynth.results.file_names import CONFIG, METRICS, MODEL, SERVED, SERVER_LEDGER, SUMMARY
from fedsynth.results.finished import is_unfinished
from fedsynth.results.later_reports import OWNER, owner_problems
from fedsynth.results.private_run import PrivateRun
from fedsynth.results.report_facts import exported_files, privacy_section, report_facts
from fedsynth.results.run_record import own_sources
from fedsynth.version import __version__

# The files of a finished run apart from those in `simulation_only/`, as patterns.
RUN_FILES = (
    *(CONFIG, METRICS, SUMMARY, MODEL, TENSORS, "synthetic.png", f"{run_folder.ROUNDS}/*.png"),
    *(run_folder.ARTEFACTS, run_folder.PRIVATE_START, run_folder.RESUMED, SIGNATURE, "sources/*"),
    *(f"{NAME}.{ending}" for ending in ("json", "md", "html")),
)
OF_SIMULATION = ("ledger/*.jsonl", "ledger/*.torn-*")
OF_NETWORKED_RUN = (SERVED, SERVER_LEDGER)
REQUIRED = (CONFIG, run_folder.PRIVATE_START, f"{NAME}.md", f"{NAME}.html")
PLANNED = ("participants", LOST, REJECTED, NOT_COUNTED)
TAKEN_AS_STATED = (
    "these parts of the run cannot be verified: its name and date, the versions of the software, "
    "its warnings, {audit}the sizes of uploads, and pictures"
)
NO_LEDGER = "no ledger was compared. To compare the ledgers, name their folder with --ledger DIR"
EPSILON = "metrics.jsonl.epsilon"
_REASON = re.compile(r".{1,1000}")


def verify_run(
    run: Path | str, *, ledger: Path | None = None, method: type[Method] | None = None
) -> Verification:
    """Checks that a run's privacy report follows from its settings and the clients' ledgers.

    Args:
        run: the run folder, a guard's folder (`fedsynth.privacy.guard`), or the
            privacy_report.json in it.
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
    if path.suffix in (".html", ".md"):
        raise PrivacyError(f"{path} is a page without data. Verify the run folder or {NAME}.json")
    report = report_file.read_report(path)
    if report.get("method") == OWNERS_PIPELINE:
        raise PrivacyError(
            f"{path} cannot be verified, because a DataOwner stores no settings to compare it "
            "with. Use simulate with an output folder for runs that must be verified"
        )
    if wrong := schema_problems(report):
        return Verification([Problem("schema", text) for text in wrong])
    with report_file.damage_as_error(f"the run in {folder} is damaged"):
        if (folder / GUARD_SETTINGS).exists():
            return verify_guard(folder, report, ledger)
        return _verified(folder, report, ledger, method)


def _verified(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> Verification:
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if run_folder.PRIVATE_START in missing and (folder / SUMS).is_file():
        raise PrivacyError(
            f"{folder} cannot be verified, because it is an export without settings and ledgers. "
            f"Verify the run folder. To check the export's files, run sha256sum -c {SUMS}"
        )
    page_differences, notes = page_problems(report, folder)
    problems = [Problem(name, f"{name} is missing") for name in missing] + page_differences
    if CONFIG not in missing and run_folder.PRIVATE_START not in missing:
        check = owner_problems if (folder / OWNER).exists() else _run_problems
        try:
            differing, note = check(folder, report, ledger, method)
            problems += differing
            notes = [note, *notes]
        except FedsynthError as error:
            problems.append(_problem(error))
    version = report["provenance"].get("fedsynth", "an unknown version")
    if problems and version != __version__:
        text = (
            f"the run used fedsynth {version}, but this is fedsynth {__version__}. Install the "
            "version of the run"
        )
        problems.append(Problem("provenance.fedsynth", text))
    audit = "" if report["audit"] is None else "the counts of its audit, "
    return Verification(problems, [*notes, TAKEN_AS_STATED.format(audit=audit)])


def _problem(error: FedsynthError) -> Problem:
    return Problem(error.code, str(error))


def _run_problems(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> tuple[list[Problem], str]:
    """Lists the contradictions between a run's report and its other files.

    A second result is a note about the ledgers.
    """
    run = private_run.read_run(folder, method)
    files, exact = private_run.ledger_files(folder, run, ledger)
    ledger_rows = report_file.read_ledger_rows(report, files, exact=exact)
    note = ledger_rows.note or NO_LEDGER
    try:
        charges = Charges(run, ledger_rows)
    except PrivacyError as error:
        return [*ledger_rows.problems, _problem(error)], note
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
        text = f"{METRICS} has only {rounds}, which the limit on ε does not explain"
        problems.append(Problem("rounds_done", text))
    problems += report_problems(report, facts, ledger_rows, run.start.ledgers)
    problems += _figure_problems(charges)
    if not run.abandoned:
        problems += _file_problems(folder, report, facts.files, charges)
    return problems, note


def _ended_early(charges: Charges) -> bool:
    return charges.rounds_done < charges.run.settings.rounds and not charges.run.abandoned


def _events(charges: Charges, report: Mapping[str, Any]) -> list[Event]:
    """Returns the deviations from the plan that the privacy report must list.

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
    """Checks whether it is plausible that a client did not send its ledger.

    It is plausible if the client did not answer in the rounds of the event, or if these rounds were
    interrupted.
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
    """Adds the report's reason to an expected event, if the report states one."""
    for event in stated:
        matches = event.model_copy(update={"why": None}) == expected
        if matches and event.why is not None and _REASON.fullmatch(event.why):
            return event
    return expected


# ----------------------------------------------------------------------- figures in other files


def _figure_problems(charges: Charges) -> list[Problem]:
    """Lists the figures in metrics.jsonl and summary.json that contradict the plan or the
    ledgers.
    """
    run, plan = charges.run, charges.plan
    problems = _epsilon_problems(charges)
    for row in run.rows:
        problems += _planned_problems(row, charges)
        for text in _measurement_problems(row, charges):
            problems.append(Problem(METRICS, f"{METRICS}: round {row['round']} {text}"))
    if run.summary is not None:
        promise = privacy_section(plan, charges.histories, simulated=not run.networked)
        stated = {GUARANTEE: run.summary.get(GUARANTEE), "rounds": run.summary.get("rounds")}
        expected = {GUARANTEE: promise.to_json(), "rounds": charges.rounds_done}
        problems += differences(SUMMARY, expected, stated)
    return problems


def _measurement_problems(row: Mapping[str, Any], charges: Charges) -> Iterator[str]:
    """Yields a problem for each metric that a round cannot contain under the run's settings."""
    run = charges.run
    method = run.settings.method
    names = method.variant_names if isinstance(method, Measurements) else ()
    models = row.get(MODELS, {})
    for name, variant in models.items():
        if name not in names:
            yield f"contains metrics of the model {name!r:.40}, which the method does not have"
        for problem in undeclared(variant, MEASURED):
            yield f"{problem} (in the metrics of the model {name!r:.40})"
    for values in (row, *models.values()):
        if run.start.test_images != run_data.PUBLIC and values.keys() & set(ON_TEST):
            yield f"contains an accuracy on {run.start.test_images!r} test images"
        keys = (*(names.domains for names in NAMES.values()), DOMAIN_MEASURES)
        domains = {domain for key in keys for domain in values.get(key, ())}
        if not domains <= set(run.spec.domains):
            yield "contains an accuracy for a domain that is not in the data set"
    sizes = row.get("client_upload_bytes", [])
    active = charges.plan.participation.in_round(row["round"])
    total = row.get("upload_bytes")  # a pixel has one byte, other values have more
    if len(sizes) > len(active) or not row.get("upload_floats", 0) <= sum(sizes) == total:
        yield "contains upload sizes that contradict each other"


def _planned_problems(row: Mapping[str, Any], charges: Charges) -> list[Problem]:
    """Lists a round's metrics that contradict the privacy plan or the run's seed."""
    number = row["round"]
    active = charges.plan.participation.in_round(number)
    method = charges.run.settings.method
    expected = dict(charges.expected_losses(number))
    metric_privacy: Mapping[str, Disclosure] = {}
    if isinstance(method, Measurements):
        planned = finite(method.planned_facts(charges.round_context(number)))
        faults = metric_faults(planned, declared_row(type(method)), planned=True)
        expected |= {key: value for key, value in planned.items() if key not in faults}
        metric_privacy = method.metric_privacy
    if len(active) < charges.run.settings.partition.clients:
        expected["participants"] = list(active)
    stated = {}
    for key, value in row.items():
        label = metric_privacy.get(key)
        if key in PLANNED or (label is not None and label.kind == PUBLIC):
            stated[key] = value
    problems = []
    for code, text in differences("", expected, stated):
        problems.append(Problem(f"{METRICS}.{code}", f"{METRICS}: round {number} {text}"))
    return problems


def _epsilon_problems(charges: Charges) -> list[Problem]:
    """Lists the rounds with a wrong ε in their metrics.

    The correct ε is computed from the ledger rows up to this round.
    """
    rows, plan = charges.run.rows, charges.plan
    if not plan.guaranteed(plan.histories):
        if any("epsilon" in row for row in rows):
            text = f"{METRICS} states an epsilon, but the run has no guarantee"
            return [Problem(EPSILON, text)]
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
            for problem in differences(location, spent, epsilon):
                problems.append(Problem(EPSILON, problem.text))
        elif epsilon is None or not spent * 0.999999 <= epsilon <= upper * 1.000001:
            # the time at which another run charged the ledger is unknown
            text = f"{location} must be between {spent:.6g} and {upper:.6g}"
            problems.append(Problem(EPSILON, text))
    return problems


# ------------------------------------------------------------------------------------------- files


def _file_problems(
    folder: Path, report: Mapping[str, Any], files: Mapping[str, str], charges: Charges
) -> list[Problem]:
    """Lists the problems with the files in a finished run's folder.

    The hashes in the report are compared with the files in `report_problems`. Here, the hash of
    these hashes is compared with those in the ledgers.
    """
    run = charges.run
    problems = []
    for name in sorted({MODEL, SUMMARY, *report["files"]} - files.keys()):
        problems.append(Problem(f"files.{short_key(name)}", f"{short_key(name)} is missing"))
    noted = report_file.hash_of_files(report["files"])
    for holder, hashes in _noted_hashes(folder, run, charges.ledger_rows.ledgers).items():
        if noted not in hashes:
            text = f"the ledger of {holder} does not contain the hash of the report's files"
            problems.append(Problem("ledger.files", text))
    expected = {code.file: code.sha256 for code in own_sources(run.settings).values()}
    sources = {file.name: file_hash(file) for file in folder.glob("sources/*")}
    return [*problems, *differences("sources", expected, sources), *_unknown_files(folder, run)]


def _noted_hashes(
    folder: Path, run: PrivateRun, ledgers: Mapping[str, Ledger]
) -> dict[str, list[str]]:
    """Returns the hashes of report files that this run may have written to each ledger.

    Only the first counts, because a later line could state the hash of other files. Of a period,
    all count, because several runs may repeat it.
    """
    if run.networked:
        try:
            server = read_ledger(folder / SERVER_LEDGER)
        except LedgerError:
            return {"the server": []}
        return {"the server": [hashed for _, hashed in server.lines.files[:1]]}
    hashes = {}
    for client in run.start.ledgers:
        if client in ledgers:
            files = ledgers[client].lines.files
            stated = [hashed for marked, hashed in files if marked == run.start.charge_id]
            hashes[client] = stated if has_periods(run.settings.method) else stated[:1]
    return hashes


def _unknown_files(folder: Path, run: PrivateRun) -> list[Problem]:
    """Lists the files that do not belong in a run folder."""
    allowed = (*RUN_FILES, *(OF_NETWORKED_RUN if run.networked else OF_SIMULATION))
    try:
        names = plain_files(folder, leave_out=[EXCLUDED])
    except OSError as error:
        return [Problem("files", str(error.strerror))]
    problems = []
    for name in names:
        patterns = [p for p in allowed if p.count("/") == name.count("/")]
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            text = f"{short_repr(name)} is not a run's file. Move it out of the run folder"
            problems.append(Problem("files", text))
    return problems
