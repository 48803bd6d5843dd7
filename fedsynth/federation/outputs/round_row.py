"""A round's row of metrics.jsonl, which is alike over every exchange: its keys, in their order."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fedsynth.core.context import RoundContext
from fedsynth.core.state import ServerState
from fedsynth.federation.exchange.rounds import Played
from fedsynth.federation.outputs.disclosed import check_facts
from fedsynth.federation.outputs.lost_clients import lost_clients
from fedsynth.federation.outputs.measure import Figures, Measure
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.settings import RunSettings


def round_row(
    settings: RunSettings,
    plan: PrivacyPlan | None,
    measure: Measure,
    state: ServerState,
    context: RoundContext,
    played: Played,
    started: float,
    figures: Figures,
) -> dict[str, Any]:
    """Returns the row of a round that has been played, with what only a simulation may show.

    Args:
        settings: the run's.
        plan: of a private run; None without differential privacy.
        measure: the run's, whose exchange reaches the clients.
        state: the server's, after the round.
        context: the round's.
        played: what the round was.
        started: when it began, by `time.perf_counter`.
        figures: computes what is said of the round.

    Raises:
        UnaccountedReleaseError: a fact of the method's that may not stand here.
    """
    number = context.round
    method, exchange = settings.method, measure.exchange
    declared = None if plan is None else method.discloses

    def of_server() -> Mapping[str, Any]:
        return check_facts(method.facts(state, context), declared)

    def of_clients() -> Mapping[str, Any]:
        told = exchange.facts(context, played.there)
        return check_facts(method.merge_facts(told), declared)

    row: dict[str, Any] = {"round": number}
    row.update(check_facts(method.planned_facts(context), declared))
    row.update(figures("facts of the server", of_server))
    row.update(figures("facts of the clients", of_clients))
    if number % settings.evaluate_every == 0 or number == settings.rounds:
        row.update(measure.row(state, context, figures))
    if plan is not None:
        histories = exchange.histories()
        if plan.guaranteed(histories):
            row["epsilon"] = plan.epsilon(histories)
    row["upload_floats"] = sum(m.floats for sent in played.sent.values() for m in sent)
    row["client_upload_bytes"] = [sum(m.nbytes for m in sent) for sent in played.sent.values()]
    row["upload_bytes"] = sum(row["client_upload_bytes"])
    if len(context.active) < context.clients:
        row["participants"] = list(context.active)
    row.update(lost_clients(played))
    row["seconds"] = round(time.perf_counter() - started, 3)
    return row
