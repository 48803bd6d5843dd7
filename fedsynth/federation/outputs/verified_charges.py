"""What a private run has charged, made again from its folder: its plan, and which rows of its
clients' ledgers are the plan's, are not, or are missing.

The plan is made as the run made it (`PrivacyPlan`), from what the ledgers held when it began. A run
that is resumed takes its plan from here too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.federation.outputs.run_files import MismatchError, RunFiles, ledger_files, read_run
from fedsynth.federation.outputs.run_folder import PRIVATE_START
from fedsynth.federation.outputs.verified_lost_clients import VerifiedLostClients
from fedsynth.federation.terms.client_ledgers import data_set_id
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.public_context import public_context
from fedsynth.privacy.accounting import epsilon_by_round
from fedsynth.privacy.errors import BudgetExceededError
from fedsynth.privacy.held_rows import Held
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import chain_hashes
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report_sections import over_clients
from fedsynth.privacy.verify import differences

CALIBRATED = 2e-3  # σ is found to 0.1 %: another version of the libraries may end elsewhere in that
Rows = Mapping[str, Sequence[Release]]


def context_of(run: RunFiles) -> RoundContext:
    """The public context of the run's first round."""
    return public_context(run.settings, run.spec, torch.device("cpu"))


def rebuilt(run: RunFiles, before: Rows) -> PrivacyPlan:
    """The run's plan, as it was when the run began with these rows in its clients' ledgers."""
    context = context_of(run)
    run.settings.method.check_model(context.architecture)
    plan = PrivacyPlan.make(run.settings, context, _histories(run, before))
    stated = run.start["noise_multiplier"]
    found = plan.privacy.noise_multiplier
    given = run.settings.privacy and run.settings.privacy.noise_multiplier
    tolerance = 0.0 if given else CALIBRATED
    if stated is None or found is None or not math.isclose(stated, found, rel_tol=tolerance):
        raise MismatchError(
            f"{PRIVATE_START} says σ = {stated}, and config.toml and the ledgers give {found}"
        )
    return replace(plan, privacy=replace(plan.privacy, noise_multiplier=stated))


def _histories(run: RunFiles, rows: Rows) -> list[History]:
    """What these rows are of, in the clients' order."""
    return [History(client, tuple(rows[client])) for client in run.start["ledgers"]]


def plan_when_it_began(
    folder: Path,
    histories: Sequence[History],
    *,
    method: type[Method],
    rows: Sequence[dict[str, Any]],
) -> PrivacyPlan:
    """The plan of a run that is to be resumed: with σ, and what its ledgers held, as when it began.

    Args:
        folder: the run's.
        histories: what the clients' ledgers hold now, in the clients' order.
        method: the run's.
        rows: of the rounds that have ended, as its checkpoint has them.

    Raises:
        PrivacyError: a file is damaged, a ledger is not the one that the run began with, or it
            lacks what the run has charged: the run would forget it, and exceed its cap.
    """
    run = replace(read_run(folder, method), rows=list(rows))
    start = run.start["ledgers"]
    if [one.client for one in histories] != list(start):
        raise MismatchError(f"the run's clients are not those of {PRIVATE_START}")
    files, _ = ledger_files(folder, run, None)
    if files is None:
        raise MismatchError("the run's ledgers are not where its config.toml says")
    for one in histories:
        began = start[one.client]
        chains = chain_hashes(files / f"{one.client}.jsonl")
        if len(chains) <= began["rows"] or chains[began["rows"]] != began["chain"]:
            raise MismatchError(f"{one.client}: its ledger is not the one that the run began with")
    held = Held({one.client: one.releases for one in histories}, {}, {}, {}, [], "")
    charges = Charges(run, held)
    for client, lacking in charges.lacking.items():
        if lacking:
            raise MismatchError(
                f"{client}: its ledger has lost rows that the run has charged: {_row(lacking[0])}"
            )
    return charges.plan


class Charges:
    """A run's plan, and the rows that its clients' ledgers have got since it began.

    Args:
        run: its files.
        held: the rows that its report speaks of.

    Attributes:
        held: of clients that the run knows.
        absent: numbers of the clients that the report has nothing of; over nodes alone.
        done: rounds that have ended.
        plan: as when the run began.
        now: what its clients' ledgers hold.
        own: by client, the rows that this run has charged, in the order of rounds.
        foreign: by client, further rows since the run began.
        lacking: by client, what the plan charges and the ledger does not have.

    Raises:
        MismatchError: the report's clients are not the run's; σ is not what the plan gives.
    """

    def __init__(self, run: RunFiles, held: Held) -> None:
        self.run = run
        start = run.start["ledgers"]
        self.absent = [number for number, client in enumerate(start) if client not in held.rows]
        if not set(held.rows) <= set(start) or (self.absent and not run.served):
            raise MismatchError(f"the report has other clients than {PRIVATE_START}")
        there = {client: held.rows[client] for client in start if client in held.rows}
        self.held = replace(held, rows=there)
        self.done = len(run.rows)
        rows = {client: there.get(client, ()) for client in start}
        self._before = {client: rows[client][: start[client]["rows"]] for client in start}
        self.plan = rebuilt(run, self._before)
        self._context = context_of(run)
        self._losses = VerifiedLostClients(self.plan, run.rows, served=run.served)
        self.now = _histories(run, rows)
        self.own: dict[str, list[Release]] = {}
        self.foreign: dict[str, list[Release]] = {}
        self.lacking: dict[str, list[Release]] = {}
        for number, client in enumerate(start):
            self._sort_rows(number, client, rows[client][start[client]["rows"] :])

    def _sort_rows(self, number: int, client: str, since: Sequence[Release]) -> None:
        """Sorts a client's rows since the start into those that the plan charges, also for a
        round under way, or once more for one in which the run was resumed, and others."""
        left = list(since)
        self.own[client], self.lacking[client] = [], []
        for planned, needed in self._planned_rows(number):
            match = next((row for row in left if _fits(row, planned)), None)
            if match is not None:
                left.remove(match)
                self.own[client].append(match)
            elif needed and planned.round <= self.done:
                self.lacking[client].append(planned)
        for repeated in self._repeated_rows(number):
            match = next((row for row in left if _fits(row, repeated)), None)
            if match is not None:
                left.remove(match)
                self.own[client].append(match)
        self.own[client].sort(key=lambda row: row.round)
        self.foreign[client] = left

    def _planned_rows(self, client: int) -> list[tuple[Release, bool]]:
        """What the plan charges this client for until the end of the round under way, and whether
        its ledger must have each."""
        rows: list[tuple[Release, bool]] = []
        rounds = self.plan.participation.rounds_of(client, min(self.done + 1, self.plan.run.rounds))
        for number in rounds:
            rows += self._losses.charged(client, self._in_round(number))
        return rows

    def _repeated_rows(self, client: int) -> list[Release]:
        """What the client may have been charged for in rounds that were cut off and repeated."""
        contexts = [self._in_round(after + 1) for after in self.run.resumed]
        return [
            row
            for context in contexts
            if client in context.active
            for row in self.plan.client_rows(client, context)
        ]

    def _in_round(self, number: int) -> RoundContext:
        there = self.plan.participation.in_round(number)
        return replace(self._context, round=number, participants=there)

    def problems(self) -> list[str]:
        """What a ledger lacks; and what a ledger of this run alone has beside it."""
        privacy = self.run.settings.privacy
        kept = self.run.served or (privacy is not None and privacy.ledger_folder is not None)
        problems = []
        for client, start in self.run.start["ledgers"].items():
            if self.held.starts.get(client, start["chain"]) != start["chain"]:
                problems.append(
                    f"{client}: the ledger's first {start['rows']} rows are not those of "
                    f"{PRIVATE_START}"
                )
            problems += [
                f"{client}: by config.toml {_row(row)} is charged, and the ledger has no such row"
                for row in self.lacking[client]
            ]
            if not kept:
                problems += [
                    f"{client}: the ledger has {_row(row)}, which by config.toml is not charged"
                    for row in self.foreign[client]
                ]
                own = data_set_id(self.run.settings)
                if self.held.data_sets.get(client, own) != own:
                    problems.append(f"{client}: the ledger is another data set's or partition's")
        return problems

    def loss_problems(self) -> list[str]:
        """Rounds whose lost clients are not those of the run's seed."""
        return self._losses.problems()

    def refusal(self) -> str | None:
        """Why no round more would have been allowed; None if it would have been."""
        try:
            self.plan.check_round(self.done + 1, self.now)
        except BudgetExceededError as error:
            return f"ended after {self.done} of {self.plan.run.rounds} rounds: {error}"
        return None

    def epsilon_by_round(self) -> dict[int, float]:
        """The worst client's ε after each round, and as round 0 from before the run; of this
        run's own rows."""
        privacy = self.plan.privacy
        histories = {}
        for client, before in self._before.items():
            earlier = [replace(row, round=0) for row in before]
            rows = [*earlier, *self.own[client]]
            histories[client] = epsilon_by_round(rows, privacy.delta, privacy.adjacency)
        return {point.round: point.worst for point in over_clients(histories)}


def _fits(row: Release, planned: Release) -> bool:
    """Whether a row is what was planned, but for rounding."""
    return differences("", asdict(planned), asdict(row)) == []


def _row(row: Release) -> str:
    return f"{row.quantity} in round {row.round} (σ = {row.noise_multiplier:.6g})"
