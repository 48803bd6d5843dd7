"""Texts for a data owner: before its client joins a run, the planned releases and their cost; after
the run, a privacy report over its own ledger, with the files that `fedsynth privacy verify` needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedsynth.core.messages import privacy_of_fields
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import FedsynthError
from fedsynth.federation.context import public_context
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.run_data import NO_TEST
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import write_whole
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.report.build import build_report, write_report
from fedsynth.privacy.report.figures import RunStart
from fedsynth.privacy.report.formatting import format_epsilon
from fedsynth.results import privacy_summary
from fedsynth.results.privacy_summary import headline, pluralize
from fedsynth.results.report_facts import owner_facts
from fedsynth.results.run_folder import PRIVATE_START
from fedsynth.results.verification import OWNER
from fedsynth.toml_file import to_toml

if TYPE_CHECKING:
    from fedsynth.deployment.session import Session


def request_words(proposal: Proposal, number: int, ledger: Ledger | None) -> list[str]:
    """Returns the lines that describe a proposal to the owner.

    Args:
        proposal: the server's.
        number: the client's index.
        ledger: the current one; None: there is none yet.
    """
    run = proposal.settings
    method = run.method
    lines = [
        f"run {proposal.run} asks client {number} of {run.partition.clients}: {method.name}, "
        f"{pluralize(run.rounds, 'round')}, data set {proposal.spec.name}, model {run.model.name}",
        f"  agreement {proposal.agreement}, which its owner can use to approve exactly these "
        "settings",
    ]
    uploads = (
        [method.upload] if method.first_upload is None else [method.first_upload, method.upload]
    )
    for upload in uploads:
        declared = privacy_of_fields(upload)
        named = ", ".join(
            name if run.privacy is None else f"{name} ({kind})"
            for name, (kind, _) in declared.items()
        )
        masking = (
            ", masked, so that the server receives only sums" if method.requires_secure_sum else ""
        )
        lines.append(f"  it sends in each round{masking}: {named}")
    return lines + _cost(proposal, ledger)


def _cost(proposal: Proposal, ledger: Ledger | None) -> list[str]:
    """Returns the cost by the client's own ledger; the server sends σ when all have joined."""
    run = proposal.settings
    if run.privacy is None:
        return [
            "  no differential privacy: its uploads are not protected, and no later run on "
            "these records can state an ε"
        ]
    releases = ledger.releases if ledger is not None else ()
    history = History("this client", releases)
    try:
        context = public_context(run, proposal.spec, torch.device("cpu"))
        plan = PrivacyPlan.make(run, context, [history] * run.partition.clients)
        return [f"  {line}" for line in headline(plan, simulated=False)]
    except (FedsynthError, PrivacyError) as error:
        return [f"  it cannot take part: {error}"]


def write_owner_report(session: Session, rounds: int, folder: Path) -> str:
    """Writes the report, if the run was private.

    Args:
        session: the client's.
        rounds: the completed rounds, as the server states them; charges are from the ledger.
        folder: receives the report.

    Returns:
        A summary for the owner.

    Raises:
        PrivacyError: the ledger cannot be read.
        OSError: the report cannot be written.
    """
    runtime = session.runtime
    budget = runtime.budget
    if budget is None:
        return "the run had no differential privacy, which the ledger records"
    plan = budget.plan
    initial = _as_it_was(session.history, budget.ledger.path)
    began = RunStart.today(folder.name)
    start = privacy_summary.start(
        plan, (initial,), NO_TEST, began, session.state.warnings, simulated=False
    )
    write_whole(folder / "config.toml", to_toml(plan.run.to_mapping()).encode())
    write_whole(folder / PRIVATE_START, json.dumps(start.to_json(), indent=1).encode())
    about = {"client": runtime.number, "rounds": rounds}
    write_whole(folder / OWNER, json.dumps(about).encode())
    current = budget.history()
    secret = budget.secret.is_secret
    facts = owner_facts(plan, runtime.number, initial, rounds, start, secret=secret)
    write_report(build_report(facts, [current], start.ledgers), folder)
    if not plan.guaranteed([current]):
        return f"no ε can be stated; the report is in {folder}"
    return (
        f"this client's ledger has spent ε = {format_epsilon(plan.epsilon([current]))} at δ "
        f"= {plan.privacy.delta:g}; the report is in {folder}"
    )


def _as_it_was(history: History, ledger: Path | None) -> History:
    """Returns the ledger as it was when the client joined, with its chain hash at that time."""
    if ledger is None:
        return history
    chain = read_ledger(ledger).chains[len(history.releases)]
    return History(history.client, history.releases, chain)
