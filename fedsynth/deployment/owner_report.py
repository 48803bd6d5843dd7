"""Texts for a data owner: before its client joins a run, the planned releases and their cost; after
the run, a privacy report over its own ledger, with the files that `fedsynth privacy verify` needs.
"""

from __future__ import annotations

import json
from dataclasses import replace
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
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import Release
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


def describe_request(proposal: Proposal, number: int, rows: tuple[Release, ...] = ()) -> list[str]:
    """Returns the lines that describe a proposal to the owner.

    Args:
        proposal: the server's.
        number: the client's index.
        rows: those of the current ledger.
    """
    run = proposal.settings
    method = run.method
    lines = [
        f"run {proposal.run} asks client {number} of {run.partition.clients}: {method.name}, "
        f"{pluralize(run.rounds, 'round')}, data set {proposal.spec.name}, model {run.model.name}",
        f"  agreement {proposal.agreement}, which its owner can use to approve exactly these "
        "settings",
    ]
    masking = ""
    if method.requires_secure_sum:
        masking = ", masked, so that the server receives only sums"
    for upload in (method.first_upload, method.upload):
        if upload is None:
            continue
        labels = {name: f" ({kind})" for name, (kind, _) in privacy_of_fields(upload).items()}
        fields = [f"{name}{label}" if run.privacy else name for name, label in labels.items()]
        lines.append(f"  it sends in each round{masking}: {', '.join(fields)}")
    return lines + _cost(proposal, rows)


def _cost(proposal: Proposal, rows: tuple[Release, ...]) -> list[str]:
    """Returns the cost by the client's own ledger; the server sends σ when all have joined."""
    run = proposal.settings
    if run.privacy is None:
        return [
            "  no differential privacy: its uploads are not protected, and no later run on "
            "these records can state an ε"
        ]
    history = History("this client", rows)
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
    initial = session.history
    if budget.ledger.path is not None:  # with its chain hash at that time
        chain = read_ledger(budget.ledger.path).chains[len(initial.releases)]
        initial = replace(initial, chain=chain)
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
