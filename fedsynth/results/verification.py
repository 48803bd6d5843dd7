"""Verifies the report of a private run's folder: recomputes its figures from config.toml,
privacy_start.json and the ledgers, and compares every other file with the run's plan, its charges
and its method's declarations.

`private_run` reads the folder, computes the plan and finds the run's rows in the ledgers. The same
code builds the report of a run that was killed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsynth.core.method import Method
from fedsynth.data.files import one_line, read_tensors
from fedsynth.data.shared_set import BYTES, NORMALISED, SUMS, TENSORS, set_facts
from fedsynth.errors import FedsynthError
from fedsynth.federation import run_data
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.privacy.disclosure import PUBLIC
from fedsynth.privacy.errors import PrivacyError, shown
from fedsynth.privacy.files import file_hash
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.build import NAME, build_report
from fedsynth.privacy.report.figures import Event, schema_problems
from fedsynth.privacy.report.file import HOSTILE, read_json, read_ledger_rows, read_report
from fedsynth.privacy.report.verify import (
    Verification,
    differences,
    page_problems,
    report_problems,
    unverifiable_claims,
)
from fedsynth.results import disclosed, privacy_summary, private_run
from fedsynth.results.disclosed import COMMON, LOST, MODELS, NOT_COUNTED, REJECTED
from fedsynth.results.private_run import Charges, MismatchError, PrivateRun
from fedsynth.results.report_facts import handed_over, owner_facts, report_facts, rows_before
from fedsynth.results.result import own_sources, summarise
from fedsynth.results.run_folder import CONFIG, INCOMPLETE, METRICS, MODEL, PRIVATE_START, SERVER
from fedsynth.synthesizer.condensation.sets import SyntheticSet
from fedsynth.version import __version__

OWNER = "owner.json"
"""A file in the folder of an owner's report: the client index, and the number of rounds after which
the run ended.
"""
_REASON = re.compile(r".{1,1000}")
NOT_COMPARED = {
    True: "the data owners have the ledgers, so no ledger file was compared: each owner can "
    "verify the report in its folder",
    False: "no ledger file was compared, because the ledgers are in another folder (compare "
    "them with --ledger DIR)",
}
"""The note of a verification without ledger files, by whether the run was over nodes."""


def verify_run(
    run: Path | str, *, ledger: Path | None = None, method: type[Method] | None = None
) -> Verification:
    """Checks a run folder's report against everything that it follows from.

    Args:
        run: the folder, or the privacy_report.json in it.
        ledger: folder of the ledger files; None takes `ledger/` in the run folder, or where
            config.toml states that ledgers are kept.
        method: the class of a method that fedsynth does not know by name.

    Raises:
        PrivacyError: there is no report of this schema to check.
    """
    path = Path(run)
    if path.is_dir() and not (path / f"{NAME}.json").exists() and is_unfinished(path):
        raise PrivacyError(
            f"the run in {path} did not finish and has no report yet: build it with fedsynth "
            f"privacy report {path}"
        )
    report = read_report(path)
    folder = path if path.is_dir() else path.parent
    problems = schema_problems(report)
    if problems:
        return Verification(problems)
    with _sound(folder):
        return _verified(folder, report, ledger, method)


@contextmanager
def _sound(folder: Path) -> Iterator[None]:
    """Converts the exceptions that a run's damaged files may raise into PrivacyError."""
    try:
        yield
    except (*HOSTILE, RuntimeError) as error:  # torch's complaints are RuntimeErrors
        raise PrivacyError(f"the run in {folder} is damaged: {shown(error)}") from None


def _verified(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> Verification:
    owner = (folder / OWNER).exists()
    abandoned = not (folder / "summary.json").exists() and folder.resolve().suffix == INCOMPLETE
    names = ["config.toml", PRIVATE_START, f"{NAME}.md", f"{NAME}.html"]
    if not owner and not abandoned:
        names.append("summary.json")
    problems = [f"{name} is missing" for name in names if not (folder / name).is_file()]
    if (folder / SUMS).is_file() and f"{PRIVATE_START} is missing" in problems:
        raise PrivacyError(
            f"{folder} was exported without the run's settings and ledgers, which are "
            "required to rebuild a report: verify it in the run folder; check the exported "
            f"files with `sha256sum -c {SUMS}`"
        )
    new_problems, notes = page_problems(report, folder)
    problems += new_problems
    if not {"config.toml is missing", f"{PRIVATE_START} is missing"} & set(problems):
        try:
            if owner:
                new_problems, note = _owner_problems(folder, report, ledger, method)
            else:
                new_problems, note = _run_problems(
                    folder, report, ledger, method, abandoned=abandoned
                )
            problems += new_problems
            notes = [note, *notes]
        except (FedsynthError, PrivacyError) as error:
            problems.append(str(error))
    made_by = report["provenance"].get("fedsynth", "an unknown version")
    if problems and made_by != __version__:
        problems.append(
            f"(made by fedsynth {made_by}; this is {__version__}, so results may differ)"
        )
    notes += [f"not verified, taken as stated: {fact}" for fact in unverifiable_claims(report)]
    return Verification(problems, notes)


# ---------------------------------------------------------------------------- a run's own folder


def _run_problems(
    folder: Path,
    report: dict[str, Any],
    ledger: Path | None,
    method: type[Method] | None,
    *,
    abandoned: bool,
) -> tuple[list[str], str]:
    """Returns all differences between a run's files and its report, and a note on what was
    compared.
    """
    run = private_run.read_run(folder, method)
    files, exact = private_run.ledger_files(folder, run, ledger)
    ledger_rows = read_ledger_rows(report, files, exact=exact)
    note = ledger_rows.note or NOT_COMPARED[run.served]
    try:
        charges = Charges(run, ledger_rows)
    except MismatchError as error:
        return [*ledger_rows.problems, str(error)], note
    facts = report_facts(
        charges.plan,
        charges.done,
        _events(charges, report, abandoned=abandoned),
        run.start,
        secret=not report["test_only_randomness"],  # injected noise leaves no other trace
        abandoned=abandoned,
        files={} if abandoned else handed_over(folder),
    )
    problems = [*ledger_rows.problems, *charges.problems()]
    short = charges.done < run.settings.rounds and not abandoned
    if short and not run.served and charges.refusal() is None:
        problems.append(
            f"metrics.jsonl has {charges.done} of {run.settings.rounds} rounds, and no cap "
            "explains this early end"
        )
    problems += report_problems(report, facts, ledger_rows, rows_before(charges.plan))
    problems += _row_problems(charges) or _summary_problems(charges)
    if not abandoned:
        problems += _file_problems(charges, folder)
    return problems, note


def _events(charges: Charges, report: Mapping[str, Any], *, abandoned: bool) -> list[Event]:
    """Returns the events that the report must state.

    Over nodes the reasons are texts of other parties, and are taken as stated. In a simulation the
    cap explains an early end. If another run has charged the ledgers since, or releases of a round
    under way are charged, the figures of that moment are unknown, and are taken as stated.
    """
    run = charges.run
    stated = [Event.model_validate(event) for event in report["events"]]
    short = charges.done < run.settings.rounds and not abandoned
    if run.served:
        absent = [Event(kind="absent", client=str(number)) for number in charges.absent]
        ended = [Event(kind="ended", after=charges.done)] if short else []
        silent = [event for event in stated if _may_be_silent(event, charges)]
        events = [_with_reason(event, stated) for event in absent] + run.resumptions
        return events + [_with_reason(event, stated) for event in ended] + silent
    refusal = charges.refusal() if short else None
    if refusal is None:
        return run.resumptions
    under_way = any(row.round > charges.done for rows in charges.own.values() for row in rows)
    last = stated[-1] if stated else refusal
    unknown = {"client": last.client, "epsilon": last.epsilon, "epsilon_next": last.epsilon_next}
    expected = last.client in run.start.ledgers and None not in unknown.values()
    if expected and (under_way or not charges.alone):
        refusal = refusal.model_copy(update=unknown)
    return [*run.resumptions, refusal]


def _may_be_silent(event: Event, charges: Charges) -> bool:
    """Returns whether a client may have made no statement in the rounds that an event names,
    because it was lost in them or they were cut off.
    """
    if event != Event(kind="unstated", client=event.client, rounds=event.rounds):
        return False
    run, client = charges.run, event.client
    if client is None or not event.rounds or client in map(str, charges.absent):
        return False
    for number in event.rounds:
        row = run.rows[number - 1] if 1 <= number <= charges.done else {}
        cut_off = number - 1 in run.resumed or number == charges.done + 1
        if not cut_off and client not in row.get(LOST, {}):
            return False
    return True


def _with_reason(expected: Event, stated: Sequence[Event]) -> Event:
    """Returns an event with the reason of the matching stated event, if there is one."""
    for event in stated:
        same = event.model_copy(update={"why": None}) == expected
        if same and event.why is not None and _REASON.fullmatch(event.why):
            return event
    return expected


# ----------------------------------------------------------------------------------- metrics.jsonl


def _row_problems(charges: Charges) -> list[str]:
    """Returns the deviations of metrics.jsonl from what the method declares, or, if all values are
    declared, from what the plan and the charges give.
    """
    for check in (_shape_problems, _planned_problems):
        problems = []
        for row in charges.run.rows:
            problems += [
                f"{METRICS}: round {row['round']} {problem}" for problem in check(row, charges)
            ]
        if problems and check is _shape_problems:
            return problems
    return [*problems, *_epsilon_problems(charges)]


def _shape_problems(row: Mapping[str, Any], charges: Charges) -> list[str]:
    """Returns the keys of a row that no private run may show, and the values of an undeclared
    shape.
    """
    run = charges.run
    problems = _undeclared(row, disclosed.declared_row(type(run.settings.method)))
    if problems:
        return problems
    models = row.get(MODELS, {})
    for name, variant in models.items():
        if name not in run.settings.method.variant_names:
            problems.append(f"has a model {name!r:.40}, which the method does not produce")
        problems += [
            f"{problem} (of model {name!r:.40})"
            for problem in _undeclared(variant, disclosed.MEASURED)
        ]
    test = run.start.test_images
    for values in (row, *models.values()):
        if test != run_data.PUBLIC and set(disclosed.ON_TEST) & set(values):
            problems.append(f"has an accuracy, but the test images are {test}")
        if set(values.get("domain_accuracy", {})) - set(run.spec.domains):
            problems.append("has the accuracy of a domain that the data set does not have")
    sizes = row.get("client_upload_bytes", [])
    active = charges.plan.participation.in_round(row["round"])
    if len(sizes) > len(active) or sum(sizes) != row.get("upload_bytes"):
        problems.append("has inconsistent upload sizes")
    return problems


def _undeclared(row: Mapping[str, Any], declared: disclosed.Declared) -> list[str]:
    """Returns what is wrong with the keys and the shapes of a row."""
    problems = []
    for key, value in row.items():
        if key not in declared or not declared[key].shown:
            problems.append(f"has {key!r:.80}, which may not be shown")
        elif not declared[key].fits(value):
            problems.append(f"has {key} in a shape that was not declared")
    return problems


def _planned_problems(row: Mapping[str, Any], charges: Charges) -> list[str]:
    """Returns the differences between a row and what the plan and the run's seed give."""
    number = row["round"]
    run, plan = charges.run, charges.plan
    active = plan.participation.in_round(number)
    method = run.settings.method
    expected = {**method.planned_facts(charges.in_round(number)), **charges.expected_losses(number)}
    if len(active) < run.settings.partition.clients:
        expected["participants"] = list(active)
    planned = {key for key, label in method.metric_privacy.items() if label.kind == PUBLIC}
    planned |= {"participants", LOST, REJECTED, NOT_COUNTED}
    stated = {key: value for key, value in row.items() if key in planned}
    return differences("", expected, stated)


def _epsilon_problems(charges: Charges) -> list[str]:
    """Returns the rounds whose ε does not follow from the ledger rows charged up to the end of the
    round.
    """
    rows, plan = charges.run.rows, charges.plan
    if not plan.guaranteed(plan.histories):
        stated = [row["round"] for row in rows if "epsilon" in row]
        location = f"{METRICS} gives an epsilon in round"
        return [f"{location} {number}, but no value would be valid" for number in stated]
    # over nodes, what a lost client was charged is unknown
    lost = charges.run.served and any(LOST in row or REJECTED in row for row in rows)
    table = {} if lost else charges.epsilon_by_round()
    problems = []
    spent = table.get(0, 0.0)
    upper = plan.epsilon(charges.now)
    for row in rows:
        spent = table.get(row["round"], spent)
        epsilon = row.get("epsilon")
        location = f"{METRICS}: epsilon of round {row['round']}"
        if epsilon is None and math.isinf(upper):  # another run's release had no guarantee
            continue
        if charges.alone and not lost:
            problems += differences(location, spent, epsilon)
        elif type(epsilon) is not float or not spent * 0.999999 <= epsilon <= upper * 1.000001:
            # the time at which another run charged the ledger is unknown
            problems.append(f"{location} must be between {spent:.6g} and {upper:.6g}")
    return problems


# ------------------------------------------------------------------------------------ summary.json


def _summary_problems(charges: Charges) -> list[str]:
    """Returns the differences between summary.json, if present, and the summary of the rows."""
    run, summary = charges.run, charges.run.summary
    if summary is None:
        return []
    settings = run.settings
    test = run.start.test_images
    accuracy = None  # from the last row, or as stated if that round was not measured
    if run.rows and test == run_data.PUBLIC:
        name = COMMON if settings.method.personal else "test_accuracy"
        stated = run.rows[-1].get(name, summary.get(name))
        accuracy = (
            stated if isinstance(stated, float) and disclosed.ROW[name].fits(stated) else None
        )
    promise = privacy_summary.summary(charges.plan, charges.now, simulated=not run.served)
    expected = summarise(
        settings,
        run.rows,
        accuracy,
        device=str(summary.get("device"))[:20],
        test=test,
        privacy=promise.to_json(),
    )
    declared = disclosed.declared_summary(type(settings.method))
    public = dict(disclosed.disclosed(expected, declared).shown)
    public["folder"] = str(summary.get("folder"))
    return differences("summary.json", json.loads(json.dumps(public)), summary)


# ------------------------------------------------------------------------------------------- files


def _file_problems(charges: Charges, folder: Path) -> list[str]:
    """Returns the files that the run must leave but that are missing, the files that it cannot
    leave, and the tensors whose shapes do not fit the run.
    """
    run = charges.run
    method = run.settings.method
    counted = [row["round"] for row in run.rows if NOT_COUNTED not in row]
    sends_sets = issubclass(method.upload, SyntheticSet)
    required = {MODEL, CONFIG}
    if run.rows or (run.summary or {}).get("rounds") != 0:
        required.add(METRICS)
    if counted and (sends_sets or method.produces_synthetic_data(counted)):
        required.add(TENSORS)
    checks = {MODEL: _model_problems}
    if counted and (sends_sets or method.plans_images):
        checks[TENSORS] = _images_problems
    problems = [f"{name} is missing" for name in sorted(required) if not (folder / name).is_file()]
    for name in (TENSORS, "artefacts.json"):
        if name not in checks and (folder / name).exists():
            problems.append(f"{name} exists, but the run does not produce it")
    for name, check in checks.items():
        if (folder / name).is_file():
            try:
                problems += check(charges, *read_tensors(folder / name))
            except (OSError, ValueError, LookupError, TypeError) as error:
                problems.append(f"{name} cannot be read: {one_line(error)}")
    sources = {code.file: code.sha256 for code in own_sources(run.settings).values()}
    sources_folder = folder / "sources"
    names = {path.name for path in sources_folder.iterdir()} if sources_folder.is_dir() else set()
    for name in sorted(names | set(sources)):
        if (
            name not in names
            or name not in sources
            or file_hash(sources_folder / name) != sources[name]
        ):
            problems.append(f"sources/{name} differs from the file that the run used")
    return problems


def _model_problems(
    charges: Charges, tensors: Mapping[str, Tensor], facts: Mapping[str, str]
) -> list[str]:
    """Returns the differences between a model's tensors and the run's architecture."""
    expected = _shapes(charges.run.context.architecture.state_dict())
    return differences(MODEL, expected, _shapes(tensors))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _images_problems(
    charges: Charges, tensors: Mapping[str, Tensor], facts: Mapping[str, str]
) -> list[str]:
    """Returns the differences between the synthetic images and images of the data set, made by the
    run's clients or its server.
    """
    spec = charges.run.spec
    clients, labels = set(tensors["client"].tolist()), set(tensors["labels"].tolist())
    count = tensors["labels"].numel()
    expected = {"images": [count, *spec.image_shape], "labels": [count], "client": [count]}
    if "soft_labels" in tensors:
        expected["soft_labels"] = [count, spec.classes]
    pixels = BYTES if facts.get("pixels") == BYTES else NORMALISED
    problems = differences(TENSORS, expected, _shapes(tensors))
    problems += differences(f"{TENSORS}: metadata", set_facts(spec, pixels), facts)
    last = [row["round"] for row in charges.run.rows if NOT_COUNTED not in row][-1]
    active = charges.plan.participation.in_round(last)
    if clients - {*active, SERVER} or labels - set(range(spec.classes)):
        problems.append(f"{TENSORS} names clients or classes that do not exist")
    return problems


# ------------------------------------------------------------------------------- an owner's folder


def _owner_problems(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> tuple[list[str], str]:
    """Returns all differences between an owner's folder and its report, and a note on what was
    compared.

    An owner knows only its own ledger: σ and the number of rounds are as the server stated them.

    Raises:
        PrivacyError: a file does not fit the others.
    """
    run = private_run.read_start(folder, method)
    number, rounds = _owners_numbers(folder / OWNER, run.settings.rounds)
    if len(run.start.ledgers) != 1 or set(report["ledger_heads"]) != set(run.start.ledgers):
        raise MismatchError(
            "an owner's report must have one client, the one that the run began with"
        )
    if not run.served:
        raise MismatchError("an owner's report must belong to a deployment")
    [(name, began)] = run.start.ledgers.items()
    home = folder.resolve().parents[1] if ledger is None else ledger
    ledger_rows = read_ledger_rows(report, home, exact=False)
    problems = list(ledger_rows.problems)
    previous, since = ledger_rows.rows[name][: began.rows], ledger_rows.rows[name][began.rows :]
    if not ledger_rows.begins_with(name, began):
        problems.append(f"{name}: the ledger is not the one that the run began with")
    plan = _owners_plan(run, number)
    planned: set[Release] = set()
    for round_number in plan.participation.rounds_of(number, plan.run.rounds):
        planned |= set(plan.client_rows(number, replace(run.context, round=round_number)))
    if since and not planned & set(since):
        problems.append("the ledger has new rows, but none that this run's settings charge")
    secret = not report["test_only_randomness"]
    facts, rows = owner_facts(
        plan, number, History(name, previous), rounds, run.start, secret=secret
    )
    return [*problems, *report_problems(report, facts, ledger_rows, rows)], ledger_rows.note


def _owners_plan(run: PrivateRun, number: int) -> PrivacyPlan:
    """Returns the plan by which the client was charged; σ is the run's, or as the
    server stated it.
    """
    plan = PrivacyPlan.checked(run.settings, run.context)
    stated, configured = run.start.noise_multiplier, plan.privacy.noise_multiplier
    if not run.settings.partition.clients > number >= 0:
        raise MismatchError(f"the run has no client {number}")
    if stated is None or stated <= 0 or (configured is not None and configured != stated):
        raise MismatchError(f"the run began with σ = {stated}, but its settings have {configured}")
    return replace(plan, privacy=replace(plan.privacy, noise_multiplier=stated))


def _owners_numbers(file: Path, rounds: int) -> tuple[int, int]:
    """Returns the owner's client index, and the number of rounds after which the run ended.

    Raises:
        PrivacyError: the file is damaged.
    """
    stated = read_json(file, "facts of an owner's report")
    number, ended = stated.get("client"), stated.get("rounds")
    if set(stated) != {"client", "rounds"} or type(number) is not int or type(ended) is not int:
        raise MismatchError(f"{file.name} must have a client's number and the number of rounds")
    if not 0 <= ended <= rounds:
        raise MismatchError(f"{file.name} states {ended} rounds, but the run has {rounds}")
    return number, ended


# ------------------------------------------------------------------------- runs that did not finish


def is_unfinished(path: Path) -> bool:
    """Returns whether a folder is of a run that was killed or is still running, so that its report
    has to be built from its files.
    """
    if not (path / "config.toml").is_file() or (path / "summary.json").exists():
        return False
    return path.resolve().suffix == INCOMPLETE or not (path / f"{NAME}.json").exists()


def unfinished_report(
    folder: Path, *, ledger: Path | None = None, method: type[Method] | None = None
) -> dict[str, Any]:
    """Returns the report of a run that did not finish, from what its ledgers hold now;
    `write_report` puts it into the folder.

    Args:
        ledger, method: as in `verify_run`.

    Raises:
        PrivacyError: the run had no differential privacy, released nothing yet, or its files are
            missing or damaged.
    """
    if not (folder / PRIVATE_START).exists():
        raise PrivacyError(
            f"{folder} has no privacy report, and no {PRIVATE_START} to build one from: the run "
            "had no differential privacy, or ended before its first release"
        )
    with _sound(folder):
        run = private_run.read_run(folder, method)
        files, _ = private_run.ledger_files(folder, run, ledger)
        if files is None:
            raise PrivacyError(
                f"the run's ledgers are not in the folder that {folder / 'config.toml'} "
                "names: set their folder with --ledger (ledger=DIR)"
            )
        started = run.start.ledgers
        histories = [read_ledger(files / f"{client}.jsonl").history() for client in started]
        before = {
            history.client: history.releases[: started[history.client].rows]
            for history in histories
        }
        plan = private_run.rebuilt(run, before)
        facts = report_facts(plan, len(run.rows), run.resumptions, run.start, abandoned=True)
        return build_report(facts, histories, rows_before(plan))
