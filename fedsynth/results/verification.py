"""Verifies the report of a private run's folder: recomputes its figures from config.toml,
privacy_start.json and the ledgers, and compares every other file with the run's plan.

`verified_charges` computes the plan and finds the run's rows in the ledgers; `verified_contents`
checks metrics, summary and tensors. The same code builds the report of a run that was killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsynth.core.method import Method
from fedsynth.data.shared_set import SUMS
from fedsynth.errors import FedsynthError
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.privacy.errors import PrivacyError, shown
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.build import NAME, build_report
from fedsynth.privacy.report.figures import Event, schema_problems
from fedsynth.privacy.report.file import HOSTILE, held_rows, read_json, read_report
from fedsynth.privacy.report.verify import (
    Verification,
    page_problems,
    report_problems,
    taken_as_stated,
)
from fedsynth.results.disclosed import LOST
from fedsynth.results.report_facts import (
    handed_over,
    owner_facts,
    report_facts,
    rows_before,
)
from fedsynth.results.run_files import (
    MismatchError,
    RunStart,
    ledger_files,
    read_run,
    read_start,
)
from fedsynth.results.run_folder import INCOMPLETE, PRIVATE_START
from fedsynth.results.verified_charges import Charges, rebuilt
from fedsynth.results.verified_contents import contents_problems, file_problems
from fedsynth.version import __version__

OWNER = "owner.json"
"""A file in the folder of an owner's report: the client index, and the number of rounds after which
the run ended.
"""
_REASON = re.compile(r".{1,1000}")
NOT_COMPARED = {
    True: "the ledgers are the data owners', so no ledger file was compared here: each owner can "
    "verify the report in its own folder",
    False: "no ledger file was compared: the ledger is kept elsewhere (--ledger DIR compares it)",
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
            f"the run in {path} did not finish and has no report yet: fedsynth privacy report "
            f"{path} builds it"
        )
    report = read_report(path)
    folder = path if path.is_dir() else path.parent
    problems = schema_problems(report)
    if problems:
        return Verification(problems)
    try:
        return _verified(folder, report, ledger, method)
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
            f"{folder} was handed over without the run's settings and ledgers, from which alone a "
            "report is made again: whoever has the run's folder verifies it there; what came is "
            f"whole if `sha256sum -c {SUMS}` says so"
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
        problems.append(f"(made by fedsynth {made_by}; this is {__version__}, which may differ)")
    notes += [f"taken as stated: {fact}" for fact in taken_as_stated(report)]
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
    run = read_run(folder, method)
    files, exact = ledger_files(folder, run, ledger)
    ledger_rows = held_rows(report, files, exact=exact)
    note = ledger_rows.note or NOT_COMPARED[run.served]
    try:
        charges = Charges(run, ledger_rows)
    except MismatchError as error:
        return [*ledger_rows.problems, str(error)], note
    facts = report_facts(
        charges.plan,
        charges.done,
        _events(charges, report, abandoned=abandoned),
        test=run.stated["test_images"],
        began=run.began,
        warnings=run.stated["warnings"],
        secret=not report["test_only_randomness"],  # injected noise leaves no other trace
        abandoned=abandoned,
        files={} if abandoned else handed_over(folder),
        simulated=not run.served,
    )
    problems = [*ledger_rows.problems, *charges.problems()]
    short = charges.done < run.settings.rounds and not abandoned
    if short and not run.served and charges.refusal() is None:
        problems.append(
            f"metrics.jsonl has {charges.done} of {run.settings.rounds} rounds, and no cap "
            "explains the end there"
        )
    problems += report_problems(report, facts, ledger_rows, rows_before(charges.plan))
    problems += contents_problems(charges)
    if not abandoned:
        problems += file_problems(charges, folder)
    return problems, note


def _events(charges: Charges, report: Mapping[str, Any], *, abandoned: bool) -> list[Event]:
    """Returns the events that the report must state.

    Over nodes the reasons are texts of other parties, and are taken as stated. In a simulation the
    cap explains an early end. If another run has charged the ledgers since, or releases of a round
    under way are charged, the figures of that moment are unknown, and are taken as stated.
    """
    run = charges.run
    stated = [Event.model_validate(stated_event) for stated_event in report["events"]]
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
    expected = last.client in run.stated["ledgers"] and None not in unknown.values()
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
    run = read_start(folder, method)
    number, rounds = _owners_numbers(folder / OWNER, run.settings.rounds)
    started = run.stated["ledgers"]
    if set(report["ledger_heads"]) != set(started) or len(started) != 1 or not run.served:
        raise MismatchError("an owner's report is of one client, the one that the run began with")
    [(name, start)] = started.items()
    home = folder.resolve().parents[1] if ledger is None else ledger
    ledger_rows = held_rows(report, home, exact=False)
    problems = list(ledger_rows.problems)
    previous, since = (
        ledger_rows.rows[name][: start["rows"]],
        ledger_rows.rows[name][start["rows"] :],
    )
    if not ledger_rows.begins_with(name, start):
        problems.append(f"{name}: the ledger is not the one that the run began with")
    plan = _owners_plan(run, number)
    planned: set[Release] = set()
    for round_number in plan.participation.rounds_of(number, plan.run.rounds):
        planned |= set(plan.client_rows(number, replace(run.context, round=round_number)))
    if since and not planned & set(since):
        problems.append("the ledger has new rows, and none that this run's settings charge")
    facts, rows = owner_facts(
        plan,
        number,
        History(name, previous),
        rounds,
        secret=not report["test_only_randomness"],
        began=run.began,
        warnings=run.stated["warnings"],
    )
    return [*problems, *report_problems(report, facts, ledger_rows, rows)], ledger_rows.note


def _owners_plan(run: RunStart, number: int) -> PrivacyPlan:
    """Returns the plan by which the client was charged; σ is the run's, or as the
    server stated it.
    """
    plan = PrivacyPlan.checked(run.settings, run.context)
    stated, configured = run.stated["noise_multiplier"], plan.privacy.noise_multiplier
    if not run.settings.partition.clients > number >= 0:
        raise MismatchError(f"the run has no client {number}")
    if (
        type(stated) is not float
        or stated <= 0
        or (configured is not None and configured != stated)
    ):
        raise MismatchError(f"the run began with σ = {stated}, and its settings say {configured}")
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
        raise MismatchError(f"{file.name} says {ended} rounds, and the run has {rounds}")
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
    try:
        run = read_run(folder, method)
        files, _ = ledger_files(folder, run, ledger)
        if files is None:
            raise PrivacyError(
                f"the run's ledgers are not where {folder / 'config.toml'} says: give their folder "
                "with --ledger (ledger=DIR)"
            )
        start = run.stated["ledgers"]
        histories = [read_ledger(files / f"{client}.jsonl").history() for client in start]
        previous = {
            history.client: history.releases[: start[history.client]["rows"]]
            for history in histories
        }
        plan = rebuilt(run, previous)
        facts = report_facts(
            plan,
            len(run.rows),
            run.resumptions,
            test=run.stated["test_images"],
            began=run.began,
            warnings=run.stated["warnings"],
            abandoned=True,
            simulated=not run.served,
        )
        return build_report(facts, histories, rows_before(plan))
    except (*HOSTILE, RuntimeError) as error:
        raise PrivacyError(f"the run in {folder} is damaged: {shown(error)}") from None
