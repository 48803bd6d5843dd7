"""Recomputes a private run's planned charges, and compares them with the clients' ledgers.

The comparison states which ledger rows belong to the plan, which rows do not, and which rows are
missing. The plan is made in the same way as the run made it (`PrivacyPlan`): from the contents of
the ledgers when the run began. A resumed run also takes its plan from here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.core.periods import has_periods
from fedsynth.errors import BudgetExceededError, PrivacyError
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.run_data import data_set_id
from fedsynth.federation.server import FIRST_EXCHANGE, needed_uploads
from fedsynth.privacy.accounting import Totals, epsilon_by_round, totals
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.ledger.ledger import Histories, History
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.build import worst_by_round
from fedsynth.privacy.report.figures import Event
from fedsynth.privacy.report.file import LedgerRows, Problem
from fedsynth.privacy.report.verify import differences
from fedsynth.results.disclosed import LOST, NOT_COUNTED, REJECTED
from fedsynth.results.private_run import PrivateRun, ledger_files, read_run
from fedsynth.results.run_folder import PRIVATE_START, RESUMED

# The relative tolerance for σ. Calibration finds σ with an accuracy of 0.1 %, so other versions of
# the libraries may return slightly different values.
SIGMA_TOLERANCE = 2e-3

Rows = Mapping[str, Sequence[Release]]


def rebuild_plan(run: PrivateRun, rows: Rows) -> PrivacyPlan:
    """Computes the privacy plan that a run had when it started.

    The plan is computed from the settings and from the rows that the ledgers had at that time.

    Raises:
        PrivacyError: the σ that the run states differs from the σ in the plan.
    """
    run.settings.method.check_model(run.context.architecture)
    histories = []
    for client, start in run.start.ledgers.items():
        histories.append(History(client, tuple(rows[client][: start.rows])))
    plan = PrivacyPlan.make(run.settings, run.context, histories)
    stated = run.start.noise_multiplier
    sigma = plan.privacy.noise_multiplier
    tolerance = 0.0 if run.privacy.noise_multiplier else SIGMA_TOLERANCE
    if stated is None or sigma is None or not math.isclose(stated, sigma, rel_tol=tolerance):
        computed = f"config.toml and the ledgers give {sigma}"
        text = f"{PRIVATE_START} states σ = {stated}, but {computed}"
        raise PrivacyError(text).with_code("noise_multiplier")
    return replace(plan, privacy=replace(plan.privacy, noise_multiplier=stated))


def plan_when_it_began(
    folder: Path, histories: Histories, *, method: type[Method], rows: Sequence[dict[str, Any]]
) -> PrivacyPlan:
    """Returns the privacy plan that an interrupted run had when it started.

    Args:
        folder: the run folder.
        histories: the current contents of the clients' ledgers, in client order.
        method: the run's method.
        rows: the metrics of the finished rounds, from the checkpoint.

    Raises:
        PrivacyError: a file is damaged, a ledger is not the one with which the run began, or a
            ledger lacks a row that the run has charged. Without this row, the resumed run could
            exceed its limit on ε.
    """
    run = replace(read_run(folder, method), rows=rows)
    files, _ = ledger_files(folder, run, None)
    if files is None:
        raise PrivacyError("the ledger folder in config.toml does not contain the run's ledgers")
    current = {history.client: history.releases for history in histories}
    if list(current) != list(run.start.ledgers):
        raise PrivacyError(f"the run's clients do not match those in {PRIVATE_START}")
    ledgers = {client: read_ledger(files / f"{client}.jsonl") for client in current}
    for client, start in run.start.ledgers.items():
        chains = ledgers[client].lines.chains
        if len(chains) <= start.rows or chains[start.rows] != start.chain:
            raise PrivacyError(f"{client}'s ledger is not the one that the run used at its start")
    charges = Charges(run, LedgerRows(current, ledgers))
    for client, row in charges.missing:
        raise PrivacyError(f"{client}'s ledger lacks the run's charge for {_text(row)}")
    return charges.plan


class Charges:
    """Compares a run's plan with the ledger rows added since its start.

    Args:
        run: the content of the run folder.
        ledger_rows: the ledger rows that the report covers.

    Attributes:
        absent: the indices of clients that are missing from the report. Only a run over a network
            may have such clients.
        rounds_done: the number of finished rounds.
        plan: the plan with which the run began.
        histories: the current contents of the clients' ledgers.
        charged: for each client, the ledger rows that this run has added, in round order.
        foreign: pairs (client, row) for all other ledger rows that were added since the run began.
        unplanned: pairs (client, row) for rows with the run's identifier that the plan does not
            contain, or the report leaves out.
        missing: pairs (client, row) for rows that the plan requires and the ledger does not
            contain.

    Raises:
        PrivacyError: the clients in the report differ from those of the run, or the σ that the run
            states differs from the σ in the plan.
    """

    def __init__(self, run: PrivateRun, ledger_rows: LedgerRows) -> None:
        self.run = run
        self.ledger_rows = ledger_rows
        self.rounds_done = len(run.rows)
        self.absent: list[int] = []
        self.charged: dict[str, list[Release]] = {}
        self.foreign: list[tuple[str, Release]] = []
        self.unplanned: list[tuple[str, Release]] = []
        self.missing: list[tuple[str, Release]] = []
        rows: dict[str, tuple[Release, ...]] = {}
        for number, client in enumerate(run.start.ledgers):
            if client not in ledger_rows.rows:
                self.absent.append(number)
            rows[client] = ledger_rows.rows.get(client, ())
        if not ledger_rows.rows.keys() <= rows.keys() or (self.absent and not run.networked):
            text = f"the report's clients do not match those in {PRIVATE_START}"
            raise PrivacyError(text).with_code("ledger.clients")
        self.plan = rebuild_plan(run, rows)
        self.histories = [History(client, rows[client]) for client in rows]
        for number, history in enumerate(self.plan.histories):
            new_rows = self._own_rows(history.client, len(history.releases))
            self._sort_rows(number, history.client, new_rows)

    def _own_rows(self, client: str, rows_before: int) -> list[Release]:
        """Returns the ledger rows with the run's identifier, and adds all others to `foreign`.

        A report without ledger files does not state the identifiers. All rows that were added since
        the run began are then returned.
        """
        covered = self.ledger_rows.rows.get(client, ())
        if client not in self.ledger_rows.ledgers:
            return list(covered[rows_before:])
        of_run = []
        lines = self.ledger_rows.ledgers[client].lines
        for number, (row, run) in enumerate(zip(lines.releases, lines.runs, strict=True)):
            is_own = run == self.run.start.charge_id
            if rows_before <= number < len(covered):
                if is_own:
                    of_run.append(row)
                else:
                    self.foreign.append((client, row))
            elif is_own and self._is_marked(client) and not self.run.abandoned:
                self.unplanned.append((client, row))  # the report leaves it out
        return of_run

    def _is_marked(self, client: str) -> bool:
        """Returns True if only this run adds lines with its identifier to the client's ledger.

        Without a ledger file, this is unknown. Several runs may charge the same period.
        """
        has_lines = client in self.ledger_rows.ledgers and not self.run.networked
        return has_lines and not has_periods(self.run.settings.method)

    def _sort_rows(self, number: int, client: str, remaining: list[Release]) -> None:
        """Compares a client's ledger rows of this run with the planned rows.

        The plan also covers a round that was under way when the run stopped. If the run was resumed
        in a round, the plan covers this round twice.
        """
        if self.run.start.selected:
            self._sort_selection(number, client, remaining)
            return
        planned: list[tuple[Release, bool]] = []
        last = min(self.rounds_done + 1, self.plan.run.rounds)
        for round_number in self.plan.participation.rounds_of(number, last):
            planned += self._planned_rows(number, round_number)
        for round_before in self.run.resumed:  # a round that was cut off is charged again
            context = self.round_context(round_before + 1)
            if number in context.active:
                planned += [(row, False) for row in self.plan.client_rows(number, context)]
        charged = self.charged[client] = []
        for row, required in planned:
            # `vars` copies nothing; a planned row has no selection, whose figures would be nested
            same = next((r for r in remaining if not differences("", vars(row), vars(r))), None)
            if same is not None:
                remaining.remove(same)
                charged.append(same)
            elif required:
                self.missing.append((client, row))
        charged.sort(key=lambda row: row.round)
        self._add_unplanned(client, remaining)

    def _sort_selection(self, number: int, client: str, remaining: list[Release]) -> None:
        """Finds the ledger row that a private selection has charged for this run.

        The row must cover all releases that the run plans.
        """
        planned = []
        for round_number in self.plan.participation.rounds_of(number, self.plan.run.rounds):
            planned += self.plan.client_rows(number, self.round_context(round_number))
        candidates = []
        if remaining and remaining[0].selection is not None:
            candidates = list(map(Totals, remaining[0].selection.candidates))
        self.charged[client] = []
        if any(candidate.covers(totals(planned)) for candidate in candidates):
            self.charged[client] = [remaining.pop(0)]
        else:
            self.missing += [(client, row) for row in planned]
        self._add_unplanned(client, remaining)

    def _add_unplanned(self, client: str, rows: Sequence[Release]) -> None:
        """Adds rows that the plan does not contain."""
        self.foreign += [(client, row) for row in rows]
        if self._is_marked(client):
            self.unplanned += [(client, row) for row in rows]

    def round_context(self, number: int) -> RoundContext:
        active = self.plan.participation.in_round(number)
        return replace(self.run.context, round=number, participants=active)

    def row(self, number: int) -> Mapping[str, Any]:
        """Returns a round's metrics, or an empty mapping if the round has not finished."""
        if not 1 <= number <= self.rounds_done:
            return {}
        return self.run.rows[number - 1]

    def _planned_rows(self, client: int, number: int) -> list[tuple[Release, bool]]:
        """Returns the ledger rows that are planned for a client in a round.

        Each row has a flag that is True if the ledger must contain the row. A client whose first
        upload was rejected receives no second request. If the first exchange had too few uploads,
        no client receives a second request. In a run over a network, it is unknown whether a client
        that did not answer was charged.
        """
        context = self.round_context(number)
        row = self.row(number)
        releases = self.plan.client_rows(client, context)
        rejected = row.get(REJECTED, {})
        if self.run.networked and str(client) in {**row.get(LOST, {}), **rejected}:
            return [(release, False) for release in releases]
        planned = []
        two = self._has_two_exchanges(number)
        for plan, release in zip(self.plan.client_plans(client, context), releases, strict=True):
            if not self.plan.run.failures.released(number, client, plan.exchange, two=two):
                continue
            required = number <= self.rounds_done
            if two and plan.exchange != FIRST:
                if row.get(NOT_COUNTED, {}).get("exchange") == FIRST:
                    continue
                reason = rejected.get(str(client), "")
                required = required and not reason.startswith(FIRST_EXCHANGE)
            planned.append((release, required))
        return planned

    def _has_two_exchanges(self, number: int) -> bool:
        """Returns True if clients make private releases in both exchanges of a round."""
        return any(release.exchange == FIRST for release in self.plan.round_plans(number))

    def problems(self) -> list[Problem]:
        """Lists the differences between the ledgers and the plan.

        Missing rows are always reported, and so are unplanned rows with the run's identifier. Other
        rows are reported only if the ledger belongs to no other run.
        """
        problems = []
        for client, row in self.missing:
            text = f"{client}'s ledger is missing {_text(row)}, which config.toml requires"
            problems.append(Problem("ledger.missing", text))
        only_this_run = not self.run.networked and self.run.privacy.ledger_folder is None
        for client, start in self.run.start.ledgers.items():
            if not self.ledger_rows.begins_with(client, start):
                rows = f"the first {start.rows} rows of {client}'s ledger"
                problems.append(Problem("ledger.chain", f"{rows} do not match {PRIVATE_START}"))
            if client not in self.ledger_rows.ledgers:
                continue
            ledger = self.ledger_rows.ledgers[client]
            run_id = self.run.start.charge_id
            noted = Counter(n for run, n in ledger.lines.resumptions if run == run_id)
            if Counter(self.run.resumed) - noted:
                text = f"{client}'s ledger is missing a resumption listed in {RESUMED}"
                problems.append(Problem("ledger.resumptions", text))
            if only_this_run and ledger.dataset != data_set_id(self.run.settings):
                text = f"{client}'s ledger belongs to another data set or partition"
                problems.append(Problem("ledger.data_set", text))
        unplanned = list(self.unplanned)
        if only_this_run:
            unplanned += [other for other in self.foreign if other not in unplanned]
        for client, row in unplanned:
            text = f"{client}'s ledger contains {_text(row)}, which is not planned by config.toml"
            problems.append(Problem("ledger.foreign", text))
        return problems

    def refusal(self) -> Event | None:
        """Describes why the limit on ε ended the run, as an event for the report.

        Returns None if the limit allows another round.
        """
        try:
            self.plan.check_round(self.rounds_done + 1, self.histories)
        except BudgetExceededError as error:
            return Event.ended(self.rounds_done, error.spent, str(error))
        return None

    def epsilon_by_round(self) -> dict[int, float]:
        """Returns the ε spent by the end of each round.

        The value is that of the client with the largest ε.

        Rows charged by other runs since the start are not counted. The entry for round 0 is the ε
        spent before the run.
        """
        privacy = self.plan.privacy
        by_client = {}
        for history in self.plan.histories:
            rows = [replace(row, round=0) for row in history.releases]
            rows += self.charged[history.client]
            by_client[history.client] = epsilon_by_round(rows, privacy.delta, privacy.adjacency)
        return worst_by_round(by_client)

    def expected_losses(self, number: int) -> dict[str, Any]:
        """Returns the expected metrics about the unused uploads of a round.

        In a simulation, the entries follow from the run's seed. In a run over a network, and for
        rejected uploads, the reasons are copied from the round's metrics.
        """
        row = self.row(number)
        active = self.plan.participation.in_round(number)
        last_exchange = row.get(NOT_COUNTED, {}).get("exchange", MAIN)
        lost: dict[str, str] = {}
        rejected: dict[str, str] = {}
        for index in active:
            client = str(index)
            failure = self.plan.run.failures.of(number, index)
            if client in row.get(REJECTED, {}):
                rejected[client] = row[REJECTED][client]
            if self.run.networked or client in rejected:
                if client in row.get(LOST, {}):
                    lost[client] = row[LOST][client]
            elif failure is not None and (last_exchange == MAIN or failure.exchange == FIRST):
                lost[client] = failure.kind
        uploads = len(active) - len({*lost, *rejected})
        needed = needed_uploads(self.plan.run.quorum, len(active))
        expected: dict[str, Any] = {LOST: lost, REJECTED: rejected}
        if uploads < needed:
            exchange = MAIN
            if self._has_two_exchanges(number) and last_exchange == FIRST:
                exchange = FIRST
            expected[NOT_COUNTED] = {"exchange": exchange, "uploads": uploads, "needed": needed}
        return {key: value for key, value in expected.items() if value}


def _text(row: Release) -> str:
    return f"{row.quantity} in round {row.round} (σ = {row.noise_multiplier:.6g})"
