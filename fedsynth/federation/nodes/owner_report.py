"""A data owner's own privacy report of a run: over its own ledger, without anybody else's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsynth.federation.outputs.report_context import report_context
from fedsynth.federation.terms.given_data import NO_TEST
from fedsynth.privacy.report import build_report, write_report

if TYPE_CHECKING:
    from fedsynth.federation.nodes.session import Session


def write_owner_report(session: Session, rounds: int, folder: Path) -> str:
    """Writes the report, if the run was private.

    Args:
        session: the client's.
        rounds: that have ended, as the server says; charges are the ledger's.
        folder: that it goes into.

    Returns:
        What the owner reads of it.

    Raises:
        PrivacyError: the ledger cannot be read.
        OSError: the report cannot be written.
    """
    runtime = session.remote.runtime
    budget = runtime.budget
    if budget is None:
        return "it was without differential privacy, which the ledger says"
    plan = replace(budget.plan, histories=(session.history,))
    done = min(rounds, plan.run.rounds)
    context = report_context(
        plan, done, (), test=NO_TEST, secret=budget.secret.is_secret, simulated=False
    )
    context = replace(context, fresh_ledger=False, no_ledger="")
    now = budget.history()
    write_report(build_report(context, [now]), folder)
    if not plan.guaranteed([now]):
        return f"no ε can be stated; the report is in {folder}"
    return (
        f"this client's ledger stands at ε = {plan.epsilon([now]):.4g} at "
        f"δ = {plan.privacy.delta:g}; the report is in {folder}"
    )
