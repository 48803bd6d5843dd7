"""What a private run's metrics say of lost clients, against the run's seed and its quorum; and
which rows the ledgers lack because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsynth.core.context import RoundContext
from fedsynth.federation.exchange.rounds import FIRST_EXCHANGE, needed_uploads
from fedsynth.federation.outputs.lost_clients import LOST, NOT_COUNTED, REJECTED
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.releases import Release


class VerifiedLostClients:
    """Of one run.

    Args:
        plan: the run's.
        rows: of metrics.jsonl, by round; may be of any shape.
        served: the run was over nodes, whose clients are lost by no seed; whether a client that is
            lost was charged before is not known.
    """

    def __init__(
        self, plan: PrivacyPlan, rows: Sequence[Mapping[str, Any]], *, served: bool = False
    ) -> None:
        self._plan = plan
        self._served = served
        self._failures = plan.run.failures
        self._rows = rows

    def charged(self, client: int, context: RoundContext) -> list[tuple[Release, bool]]:
        """The rows that a client's ledger gets for the context's round, and whether it must have
        each: a client whose first upload was rejected is not asked for another, and nobody is
        where the first exchange missed the quorum."""
        number = context.round
        row = self._rows[number - 1] if number <= len(self._rows) else {}
        plans = self._plan.client_plans(client, context)
        if self._served and str(client) in {**_mapping(row, LOST), **_mapping(row, REJECTED)}:
            return [(release, False) for release in self._plan.client_rows(client, context)]
        found: list[tuple[Release, bool]] = []
        for plan, release in zip(plans, self._plan.client_rows(client, context), strict=True):
            two = self._two(number)
            if not self._failures.released(number, client, plan.phase, two=two):
                continue
            if plan.phase == FIRST or not two:
                found.append((release, True))
            elif _mapping(row, NOT_COUNTED).get("exchange") != FIRST:
                why = _mapping(row, REJECTED).get(str(client), "")
                found.append((release, not str(why).startswith(FIRST_EXCHANGE)))
        return found

    def _two(self, number: int) -> bool:
        """Whether the round has two exchanges with releases."""
        return any(one.phase == FIRST for one in self._plan.round_plans(number))

    def problems(self) -> list[str]:
        """Rows whose losses are not those of the run's seed, or not of the quorum."""
        return [
            f"metrics.jsonl: round {number} says {key} {said}, and {why}"
            for number, row in enumerate(self._rows, start=1)
            for key, said, why in self._odd(number, row)
        ]

    def _odd(self, number: int, row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        active = self._plan.participation.in_round(number)
        rejected = _mapping(row, REJECTED)
        missed = _mapping(row, NOT_COUNTED)
        ended = missed.get("exchange", MAIN)
        expected: dict[str, str] = {}
        for client in active:
            failure = self._failures.of(number, client)
            before_the_end = ended == MAIN or (failure is not None and failure.phase == FIRST)
            if failure is not None and before_the_end and str(client) not in rejected:
                expected[str(client)] = failure.kind
        found: list[tuple[str, str, str]] = []
        lost = _mapping(row, LOST)
        if self._served:
            expected = {k: why for k, why in lost.items() if k in set(map(str, active))}
        if {key: why for key, why in lost.items() if key not in rejected} != expected:
            found.append((LOST, f"{dict(lost)!r:.80}", "by the run's seed it is not so"))
        if not set(rejected) <= set(map(str, active)):
            found.append((REJECTED, f"{sorted(rejected)!r:.80}", "these take no part"))
        there = len(active) - len({*lost, *rejected})
        needed = needed_uploads(self._plan.run.quorum, len(active))
        stated = {"exchange": ended, "uploads": there, "needed": needed}
        known = ended == MAIN or (self._two(number) and ended == FIRST)
        if (there < needed) != bool(missed) or (missed and (missed != stated or not known)):
            why = f"{there} uploads are there, of {needed} that are needed"
            found.append((NOT_COUNTED, f"{dict(missed)!r:.80}", why))
        return found


def _mapping(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = row.get(key)
    return value if isinstance(value, dict) else {}
