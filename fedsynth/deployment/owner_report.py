"""The texts that a data owner receives.

Before the client joins a run, the owner sees the planned releases and their cost. After the run,
the owner receives a privacy report on the client's own ledger, with the files that `fedsynth
privacy verify` needs.
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
from fedsynth.results.report_facts import headline, owner_facts, pluralize, start_facts
from fedsynth.results.run_folder import PRIVATE_START
from fedsynth.results.verification import OWNER
from fedsynth.validation import to_toml

if TYPE_CHECKING:
    from fedsynth.deployment.session import Session


def describe_request(proposal: Proposal, number: int, rows: tuple[Release, ...] = ()) -> list[str]:
    """Describes a proposal to the owner, in lines of text.

    Args:
        proposal: the server's proposal.
        number: the index of the client.
        rows: the releases in the client's current ledger.
    """
    run = proposal.settings
    method = run.method
    lines = [
        f"run {proposal.run} asks client {number} of {run.partition.clients}: {method.name}, "
        f"{pluralize(run.rounds, 'round')}, data set {proposal.spec.name}, model {run.model.name}",
        f"  agreement {proposal.agreement}: the owner can approve exactly these settings with this "
        "hash",
    ]
    masking = ""
    if method.requires_secure_sum:
        masking = " (masked, so that the server sees only sums)"
    for upload in (method.first_upload, method.upload):
        if upload is None:
            continue
        labels = {name: f" ({kind})" for name, (kind, _) in privacy_of_fields(upload).items()}
        fields = [f"{name}{label}" if run.privacy else name for name, label in labels.items()]
        lines.append(f"  the client sends in each round{masking}: {', '.join(fields)}")
    return lines + _cost(proposal, rows)


def _cost(proposal: Proposal, rows: tuple[Release, ...]) -> list[str]:
    """Describes the cost of the run for this client's own ledger.

    The cost is planned here from the proposal, because the server sends σ only after all clients
    have joined.
    """
    run = proposal.settings
    if run.privacy is None:
        return [
            "  no differential privacy: the client's uploads are not protected, and no later run "
            "on these records can state an ε"
        ]
    history = History("this client", rows)
    try:
        context = public_context(run, proposal.spec, torch.device("cpu"))
        plan = PrivacyPlan.make(run, context, [history] * run.partition.clients)
        return [f"  {line}" for line in headline(plan, simulated=False)]
    except (FedsynthError, PrivacyError) as error:
        return [f"  the client cannot take part: {error}"]


def write_owner_report(session: Session, rounds: int, folder: Path) -> str:
    """Writes the owner's privacy report if the run was private.

    Args:
        session: the client's session in the run.
        rounds: the number of completed rounds, as the server states it. The charges are those of
            the client's own ledger.
        folder: the folder for the report.

    Returns:
        A summary for the owner.

    Raises:
        PrivacyError: if the ledger cannot be read.
        OSError: if the report cannot be written.
    """
    runtime = session.runtime
    budget = runtime.budget
    if budget is None:
        return "the run had no differential privacy, and the ledger records this"
    plan = budget.plan
    initial = session.history
    if budget.ledger.path is not None:  # with its chain hash at that time
        chain = read_ledger(budget.ledger.path).chains[len(initial.releases)]
        initial = replace(initial, chain=chain)
    began = RunStart.today(folder.name)
    start = start_facts(plan, (initial,), NO_TEST, began, session.state.warnings, simulated=False)
    write_whole(folder / "config.toml", to_toml(plan.run.to_mapping()).encode())
    write_whole(folder / PRIVATE_START, json.dumps(start.to_json(), indent=1).encode())
    about = {"client": runtime.number, "rounds": rounds}
    write_whole(folder / OWNER, json.dumps(about).encode())
    current = budget.history()
    secret = budget.secret.is_secret
    facts = owner_facts(plan, runtime.number, initial, rounds, start, secret=secret)
    write_report(build_report(facts, [current], start.ledgers), folder)
    if not plan.guaranteed([current]):
        return f"no ε can be stated for this client's ledger; the report is in {folder}"
    return (
        f"this client's ledger has spent ε = {format_epsilon(plan.epsilon([current]))} at δ "
        f"= {plan.privacy.delta:g}; the report is in {folder}"
    )
