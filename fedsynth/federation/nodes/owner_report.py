"""A data owner's own privacy report of a run: over its own ledger, without anybody else's, with
what `fedsynth privacy verify` needs to make it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fedsynth.config_file import to_toml
from fedsynth.federation.outputs import privacy_words
from fedsynth.federation.outputs.checkpoint import write_whole
from fedsynth.federation.outputs.report_facts import owner_facts
from fedsynth.federation.outputs.run_folder import PRIVATE_START
from fedsynth.federation.outputs.verification import OWNER
from fedsynth.federation.terms.run_data import NO_TEST
from fedsynth.privacy.formatting import format_epsilon
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.report import build_report, write_report
from fedsynth.privacy.report_figures import Began

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
    plan = budget.plan
    held = _as_it_was(session.history, budget.ledger.path)
    began = Began.today(folder.name)
    start = privacy_words.start(plan, (held,), NO_TEST, began, session.warnings, simulated=False)
    write_whole(folder / "config.toml", to_toml(plan.run.to_mapping()).encode())
    write_whole(folder / PRIVATE_START, json.dumps(start.to_json(), indent=1).encode())
    about = {"client": runtime.number, "rounds": rounds}
    write_whole(folder / OWNER, json.dumps(about).encode())
    now = budget.history()
    facts, before = owner_facts(
        plan,
        runtime.number,
        held,
        rounds,
        secret=budget.secret.is_secret,
        began=began,
        warnings=session.warnings,
    )
    write_report(build_report(facts, [now], before), folder)
    if not plan.guaranteed([now]):
        return f"no ε can be stated; the report is in {folder}"
    return (
        f"this client's ledger stands at ε = {format_epsilon(plan.epsilon([now]))} at "
        f"δ = {plan.privacy.delta:g}; the report is in {folder}"
    )


def _as_it_was(history: History, ledger: Path | None) -> History:
    """What the ledger held when the client joined, with the chain hash of that time."""
    if ledger is None:
        return history
    chain = read_ledger(ledger).chains[len(history.releases)]
    return History(history.client, history.releases, chain)
