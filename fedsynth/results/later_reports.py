"""Builds privacy reports for runs that have not written one.

These are the report of a run that was killed, and the report that a data owner keeps about the
client's own ledger. This module also verifies the second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsynth.core.method import Method
from fedsynth.errors import PrivacyError
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report import file as report_file
from fedsynth.privacy.report.build import build_report
from fedsynth.privacy.report.figures import Owner, ReportFacts
from fedsynth.privacy.report.file import Problem
from fedsynth.privacy.report.verify import report_problems
from fedsynth.results import private_run, run_folder
from fedsynth.results.charges import rebuild_plan
from fedsynth.results.private_run import PrivateRun
from fedsynth.results.report_facts import owner_facts, report_facts

OWNER = "owner.json"  # the name of a file that only the folder of a data owner's report contains


def unfinished_report(
    folder: Path, *, ledger: Path | None = None, method: type[Method] | None = None
) -> dict[str, Any]:
    """Builds an unfinished run's privacy report from the current contents of its ledgers.

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
        raise PrivacyError(f"{folder} does not contain {run_folder.PRIVATE_START}. {reason}")
    with report_file.damage_as_error(f"the run in {folder} is damaged"):
        run = private_run.read_run(folder, method)
        files, _ = private_run.ledger_files(folder, run, ledger)
        if files is None:
            raise PrivacyError(f"{folder} contains no ledgers. Name their folder with --ledger DIR")
        histories = [read_ledger(files / f"{name}.jsonl").history() for name in run.start.ledgers]
        plan = rebuild_plan(run, {history.client: history.releases for history in histories})
        facts = report_facts(plan, len(run.rows), run.resumptions, run.start, abandoned=True)
        return build_report(facts, histories, run.start.ledgers)


def owner_problems(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> tuple[list[Problem], str]:
    """Compares a data owner's report with the other files in its folder.

    Returns the differences, and a note about the ledger. An owner can read only one ledger, so σ
    and the number of rounds are taken from what the server stated.
    """
    run, owner = _owner_run(folder, method)
    if report["ledger_heads"].keys() != run.start.ledgers.keys():
        raise PrivacyError(f"the report's client does not match {run_folder.PRIVATE_START}")
    [(client, start)] = run.start.ledgers.items()
    if ledger is None:
        ledger = folder.resolve().parents[1]
    ledger_rows = report_file.read_ledger_rows(report, ledger, exact=False)
    problems = list(ledger_rows.problems)
    if not ledger_rows.begins_with(client, start):
        text = f"{client}'s ledger is not the one that the run used at its start"
        problems.append(Problem("ledger.chain", text))
    rows = ledger_rows.rows[client]
    new_rows = rows[start.rows :]
    plan = _owner_plan(run)
    planned: set[Release] = set()
    for round_number in plan.participation.rounds_of(owner.client, plan.run.rounds):
        planned.update(plan.client_rows(owner.client, replace(run.context, round=round_number)))
    if new_rows and planned.isdisjoint(new_rows):
        text = f"{client}'s ledger contains new rows, but the run's settings charge none of them"
        problems.append(Problem("ledger.rows", text))
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
    clients, limit = run.settings.partition.clients, run.settings.rounds
    if rounds > limit or number >= clients:
        raise PrivacyError(
            f"{OWNER} states client number {number} and {rounds} rounds, but the run has client "
            f"numbers 0 to {clients - 1} and {limit} rounds. Restore the original file"
        )
    if not run.networked or len(run.start.ledgers) != 1:
        raise PrivacyError("the report must be for exactly one client of a run over a network")
    return run, owner


def _owner_facts(run: PrivateRun, owner: Owner, rows: Sequence[Release]) -> ReportFacts:
    [(client, start)] = run.start.ledgers.items()
    history = History(client, tuple(rows[: start.rows]))
    plan = _owner_plan(run)
    return owner_facts(
        plan, owner.client, history, owner.rounds, run.start, secret=owner.secret_noise
    )


def _owner_plan(run: PrivateRun) -> PrivacyPlan:
    """Returns the privacy plan of a data owner's client.

    The plan has the σ that the server stated.
    """
    plan = PrivacyPlan.checked(run.settings, run.context)
    stated, configured = run.start.noise_multiplier, plan.privacy.noise_multiplier
    if stated is None or stated <= 0 or configured not in (None, stated):
        raise PrivacyError(f"the run began with σ = {stated}, but config.toml sets {configured}")
    return replace(plan, privacy=replace(plan.privacy, noise_multiplier=stated))
