"""Writes the privacy report that a data owner receives after a run.

The report is on the client's own ledger, and has the files that `fedsynth privacy verify` needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedsynth.federation.client_runtime import ClientBudget
from fedsynth.federation.run_data import NO_TEST
from fedsynth.files import write_whole
from fedsynth.formatting import format_epsilon
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.report.build import NAME, write_report
from fedsynth.privacy.report.figures import RunStart
from fedsynth.results.file_names import CONFIG
from fedsynth.results.later_reports import OWNER, owner_report
from fedsynth.results.report_facts import start_facts
from fedsynth.results.run_folder import PRIVATE_START
from fedsynth.validation import to_toml


def note_round(
    budget: ClientBudget | None,
    folder: Path,
    initial: History,
    warnings: Sequence[str],
    about: Mapping[str, int],
) -> None:
    """Stores the facts for the owner's report before a private run charges the client.

    Building a report takes longer than a small step. An older report is deleted, because it would
    lack the charge. `Node.write_reports` builds the report if the run does not end.

    Args:
        budget: the client's budget. None: the run is not private, and nothing is stored.
        folder: the folder of the run.
        initial: the ledger at the time when the client joined the run.
        warnings: the warnings from the client's trial step.
        about: the client's index, and the number of rounds that have begun, as the server states
            it.
    """
    if budget is None:
        return
    for ending in ("json", "md", "html"):
        (folder / f"{NAME}.{ending}").unlink(missing_ok=True)
    if not (folder / OWNER).exists():
        plan = budget.plan
        if budget.ledger.path is not None:  # with its chain hash at that time
            chain = read_ledger(budget.ledger.path).lines.chains[len(initial.releases)]
            initial = replace(initial, chain=chain)
        began = RunStart.today(folder.name)
        start = start_facts(plan, (initial,), NO_TEST, began, warnings, simulated=False)
        write_whole(folder / CONFIG, to_toml(plan.run.to_mapping()).encode())
        write_whole(folder / PRIVATE_START, json.dumps(start.to_json(), indent=1).encode())
    owner = {**about, "secret_noise": budget.secret.is_secret}
    write_whole(folder / OWNER, json.dumps(owner).encode())


def write_owner_report(budget: ClientBudget | None, folder: Path) -> str:
    """Writes the owner's report from the client's ledger and the facts that `note_round` stored.

    Returns:
        A summary for the owner.

    Raises:
        PrivacyError: if the ledger cannot be read.
        OSError: if the report cannot be written.
    """
    if budget is None:
        return "the ledger records that the run had no differential privacy"
    write_report(owner_report(folder), folder)
    spent = spent_epsilon(budget)
    if spent is None:
        return f"this client's ledger has no ε. The report is in {folder}"
    delta = budget.plan.privacy.delta
    return f"this client's ledger has spent {spent} at δ = {delta:g}. The report is in {folder}"


def spent_epsilon(budget: ClientBudget | None) -> str | None:
    """Formats the ε of the client's ledger, or returns None if the ledger gives no ε."""
    if budget is None or not budget.plan.guaranteed([budget.ledger.history()]):
        return None
    return f"ε = {format_epsilon(budget.plan.epsilon([budget.ledger.history()]))}"
