"""A private run's folder, and its charges recomputed from it: the plan, and the rows of the clients'
ledgers that belong to the plan, do not, or are missing. The folder is untrusted input.

The plan is made as the run made it (`PrivacyPlan`), from the contents of the ledgers when the run
began. A resumed run takes its plan from here, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.data.registry import DatasetSpec, dataset_spec, spec_from_json
from fedsynth.errors import FedsynthError, UnknownNameError
from fedsynth.federation.context import public_context
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.round_loop import FIRST_EXCHANGE, needed_uploads
from fedsynth.federation.run_data import data_set_id
from fedsynth.privacy.accounting import epsilon_by_round
from fedsynth.privacy.errors import BudgetExceededError, PrivacyError, shown
from fedsynth.privacy.files import read_text
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.build import over_clients
from fedsynth.privacy.report.figures import Event, Start
from fedsynth.privacy.report.file import HOSTILE, LedgerRows, parse_json, read_json
from fedsynth.privacy.report.verify import differences
from fedsynth.results import run_folder
from fedsynth.results.disclosed import LOST, NOT_COUNTED, REJECTED
from fedsynth.results.run_folder import CONFIG, PRIVATE_START, RESUMED
from fedsynth.toml_file import read_sections

CALIBRATED = 2e-3
"""Relative tolerance of σ. Calibration finds it to 0.1 %, and another version of the libraries may
return another value within that.
"""
MAX_REASON = 1000
"""Maximum number of characters of a reason that another party gave."""
Rows = Mapping[str, Sequence[Release]]
OWN_METHOD = (
    "a custom method is needed again: pass its file, or in Python "
    "fedsynth.results.verification.verify_run(folder, method=TheClass)"
)


class MismatchError(PrivacyError):
    """A file of the run folder does not fit the others."""


# ------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class PrivateRun:
    """The content of a private run's folder.

    Attributes:
        settings: read from config.toml.
        spec: the data set's.
        start: read from privacy_start.json.
        rows: read from metrics.jsonl; empty in an owner's folder, like what follows.
        summary: None if there is none.
        resumed: the rounds after which the run was resumed.
    """

    settings: RunSettings
    spec: DatasetSpec
    start: Start
    rows: Sequence[dict[str, Any]] = ()
    summary: dict[str, Any] | None = None
    resumed: Sequence[int] = ()

    @cached_property
    def context(self) -> RoundContext:
        """The public context of the first round."""
        return public_context(self.settings, self.spec, torch.device("cpu"))

    @property
    def served(self) -> bool:
        """Returns whether the run was over nodes."""
        return not self.start.simulated

    @property
    def resumptions(self) -> list[Event]:
        """The events of the report for `resumed`."""
        return [Event(kind="resumed", after=after) for after in self.resumed]


def read_run(folder: Path, method: type[Method] | None = None) -> PrivateRun:
    """Reads a private run's folder.

    Raises:
        PrivacyError: a file is missing, damaged, or does not fit another.
    """
    run = read_start(folder, method)
    clients, started = run.settings.partition.clients, len(run.start.ledgers)
    if clients != started:
        raise MismatchError(f"config.toml has {clients} clients, but {PRIVATE_START} has {started}")
    summary = folder / "summary.json"
    rows = _metrics(folder / "metrics.jsonl")
    try:
        resumed = run_folder.resumed_rounds(folder / RESUMED)
    except (OSError, ValueError) as error:
        raise MismatchError(f"{RESUMED} is damaged: {error}") from None
    limit = min(len(rows), run.settings.rounds - 1)
    if resumed and resumed[-1] > limit:
        raise MismatchError(f"{RESUMED} names round {resumed[-1]}, but at most {limit} is possible")
    stated = read_json(summary, "run's summary") if summary.exists() else None
    return replace(run, rows=rows, summary=stated, resumed=resumed)


def read_start(folder: Path, method: type[Method] | None) -> PrivateRun:
    """Reads the settings and the initial state of a private run.

    Raises:
        PrivacyError: a file is missing, damaged, or does not fit another.
    """
    start = run_folder.private_start(folder)
    sections = read_sections(folder / CONFIG)
    spec, custom = _specification(start.data_set)
    try:
        settings = resolve(sections, own_method=method, own_data=spec.name if custom else None)
    except FedsynthError as error:
        advice = f"; {OWN_METHOD}" if isinstance(error, UnknownNameError) else ""
        raise MismatchError(f"config.toml: {error}{advice}") from None
    if settings.privacy is None:
        raise MismatchError(
            "according to config.toml, the run had no differential privacy, so it has no "
            "privacy report"
        )
    named = sections.get("data", {}).get("dataset")
    if named != spec.name and not (custom and named is None):
        raise MismatchError(
            f"config.toml names the data set {shown(named)}, but {PRIVATE_START} names "
            f"{spec.name!r}"
        )
    return PrivateRun(settings, spec, start)


def _specification(stated: Mapping[str, Any]) -> tuple[DatasetSpec, bool]:
    """Returns the data set's specification, and whether it is the operator's, not one that fedsynth
    publishes.
    """
    try:
        spec = spec_from_json(stated)
    except (FedsynthError, *HOSTILE) as error:
        raise MismatchError(
            f"{PRIVATE_START} has no valid data set specification: {error}"
        ) from None
    try:
        published = dataset_spec(spec.name)
    except UnknownNameError:
        return spec, True
    for field in fields(spec):
        if getattr(spec, field.name) != getattr(published, field.name):
            raise MismatchError(
                f"{PRIVATE_START} has another {field.name} of {spec.name} than the published "
                "data set"
            )
    return spec, False


def _metrics(file: Path) -> list[dict[str, Any]]:
    """Returns the rows; skips a last line that was cut off when the run was killed."""
    try:
        text = read_text(file) if file.exists() else ""
    except (OSError, ValueError) as error:
        raise MismatchError(f"cannot read {file}: {error}") from None
    lines = text.split("\n")[:-1]
    rows = [parse_json(line, f"{file.name} is damaged") for line in lines]
    for number, row in enumerate(rows, start=1):
        if row.get("round") != number:
            raise MismatchError(f"{file.name}: line {number} is not of round {number}")
    return rows


def ledger_files(folder: Path, run: PrivateRun, ledger: Path | None) -> tuple[Path | None, bool]:
    """Returns the folder of the ledger files (None: not accessible), and whether they hold only
    this run's rows: files in the run folder belong only to this run, a kept ledger may have grown
    since.
    """
    if run.served:  # its clients keep their ledgers
        return ledger, False
    local = folder / "ledger"
    kept = None if run.settings.privacy is None else run.settings.privacy.ledger_folder
    files = ledger or (local if local.is_dir() or kept is None else kept)
    if not files.is_dir():
        if ledger is not None or kept is None:
            raise MismatchError(f"the ledger folder {files} does not exist")
        return None, False
    return files, kept is None or files.resolve() == local.resolve()


# ----------------------------------------------------------------------------------------- charges


def rebuilt(run: PrivateRun, previous_rows: Rows) -> PrivacyPlan:
    """Returns the run's plan for the case that its clients' ledgers held these rows when it began.

    Raises:
        MismatchError: σ is not what the plan gives.
    """
    run.settings.method.check_model(run.context.architecture)
    plan = PrivacyPlan.make(run.settings, run.context, _histories(run, previous_rows))
    stated = run.start.noise_multiplier
    sigma = plan.privacy.noise_multiplier
    configured = run.settings.privacy and run.settings.privacy.noise_multiplier
    tolerance = 0.0 if configured else CALIBRATED
    if stated is None or sigma is None or not math.isclose(stated, sigma, rel_tol=tolerance):
        raise MismatchError(
            f"{PRIVATE_START} states σ = {stated}, but config.toml and the ledgers result in "
            f"{sigma}"
        )
    return replace(plan, privacy=replace(plan.privacy, noise_multiplier=stated))


def _histories(run: PrivateRun, rows: Rows) -> list[History]:
    """Returns the clients' histories with these rows, in client order."""
    return [History(client, tuple(rows[client])) for client in run.start.ledgers]


def plan_when_it_began(
    folder: Path,
    histories: Sequence[History],
    *,
    method: type[Method],
    rows: Sequence[dict[str, Any]],
) -> PrivacyPlan:
    """Returns the plan with which a run that is to be resumed began.

    Args:
        folder: the run folder.
        histories: the current contents of the clients' ledgers, in client order.
        method: the run's method.
        rows: the rows of the finished rounds, from the checkpoint.

    Raises:
        PrivacyError: a file is damaged, a ledger is not the one that the run began with, or it
            lacks what the run has charged: the run would forget it, and exceed its cap.
    """
    run = replace(read_run(folder, method), rows=rows)
    start = run.start.ledgers
    if [history.client for history in histories] != list(start):
        raise MismatchError(f"the run's clients differ from those of {PRIVATE_START}")
    files, _ = ledger_files(folder, run, None)
    if files is None:
        raise MismatchError("the run's ledgers are not in the folder that its config.toml names")
    for history in histories:
        began = start[history.client]
        chains = read_ledger(files / f"{history.client}.jsonl").chains
        if len(chains) <= began.rows or chains[began.rows] != began.chain:
            raise MismatchError(
                f"{history.client}: its ledger is not the one that the run began with"
            )
    charges = Charges(run, LedgerRows({history.client: history.releases for history in histories}))
    for client, row in charges.lacking:
        raise MismatchError(
            f"{client}: its ledger has lost rows that the run has charged: {_row(row)}"
        )
    return charges.plan


class Charges:
    """A run's plan, and the rows added to its clients' ledgers since it began.

    Args:
        run: the run's files.
        ledger_rows: the ledger rows that the report covers.

    Attributes:
        absent: indices of the clients that are missing from the report; only over nodes.
        done: the number of finished rounds.
        plan: the plan with which the run began.
        now: the current contents of its clients' ledgers.
        own: by client, the rows that this run has charged, in round order.
        foreign: by client, the other rows since the run began.
        lacking: (client, row) for each row that the plan charges but the ledger lacks.

    Raises:
        MismatchError: the report's clients are not the run's, or σ is not what the plan gives.
    """

    def __init__(self, run: PrivateRun, ledger_rows: LedgerRows) -> None:
        self.run = run
        self.held = ledger_rows
        start = run.start.ledgers
        self.absent = [
            number for number, client in enumerate(start) if client not in ledger_rows.rows
        ]
        if not set(ledger_rows.rows) <= set(start) or (self.absent and not run.served):
            raise MismatchError(f"the report has other clients than {PRIVATE_START}")
        self.done = len(run.rows)
        rows = {client: ledger_rows.rows.get(client, ()) for client in start}
        self._before = {client: rows[client][: began.rows] for client, began in start.items()}
        self.plan = rebuilt(run, self._before)
        self.now = _histories(run, rows)
        self.own: dict[str, list[Release]] = {}
        self.foreign: dict[str, list[Release]] = {}
        self.lacking: list[tuple[str, Release]] = []
        for number, (client, began) in enumerate(start.items()):
            self._sort_rows(number, client, list(rows[client][began.rows :]))

    @property
    def alone(self) -> bool:
        """Returns whether no other run has charged the ledgers since this one began."""
        return not any(self.foreign.values())

    def _sort_rows(self, number: int, client: str, foreign: list[Release]) -> None:
        """Sorts a client's rows since the start into those that the plan charges and others. The
        plan also charges a round under way, and charges a round again if the run was resumed in it.
        """
        client_rows: list[Release] = []
        last = min(self.done + 1, self.plan.run.rounds)
        for round_number in self.plan.participation.rounds_of(number, last):
            for planned, needed in self._charged(number, self.in_round(round_number)):
                if (
                    not _take(planned, foreign, client_rows)
                    and needed
                    and round_number <= self.done
                ):
                    self.lacking.append((client, planned))
        for round_before in self.run.resumed:  # a round that was cut off is charged again
            context = self.in_round(round_before + 1)
            if number in context.active:
                for planned in self.plan.client_rows(number, context):
                    _take(planned, foreign, client_rows)
        self.own[client] = sorted(client_rows, key=lambda row: row.round)
        self.foreign[client] = foreign

    def in_round(self, number: int) -> RoundContext:
        active = self.plan.participation.in_round(number)
        return replace(self.run.context, round=number, participants=active)

    def _charged(self, client: int, context: RoundContext) -> list[tuple[Release, bool]]:
        """Returns the rows that a round may add to a client's ledger, each with whether it must be
        there.

        A client whose first upload was rejected gets no second request, and no client does if the
        first exchange missed the quorum. Over nodes it is unknown whether a lost client was
        charged.
        """
        number = context.round
        row = self.run.rows[number - 1] if number <= self.done else {}
        rows = self.plan.client_rows(client, context)
        lost, rejected = _mapping(row, LOST), _mapping(row, REJECTED)
        if self.run.served and str(client) in {**lost, **rejected}:
            return [(release, False) for release in rows]
        charged: list[tuple[Release, bool]] = []
        two = self._two_exchanges(number)
        failures = self.plan.run.failures
        for plan, release in zip(self.plan.client_plans(client, context), rows, strict=True):
            if not failures.released(number, client, plan.phase, two=two):
                continue
            if plan.phase == FIRST or not two:
                charged.append((release, True))
            elif _mapping(row, NOT_COUNTED).get("exchange") != FIRST:
                why = str(rejected.get(str(client), ""))
                charged.append((release, not why.startswith(FIRST_EXCHANGE)))
        return charged

    def _two_exchanges(self, number: int) -> bool:
        """Returns whether the round has two exchanges with releases."""
        return any(release.phase == FIRST for release in self.plan.round_plans(number))

    def problems(self) -> list[str]:
        """Returns the rows that a ledger lacks, and, for a ledger of only this run, the rows beyond
        the plan.
        """
        privacy = self.run.settings.privacy
        has_ledger = self.run.served or (privacy is not None and privacy.ledger_folder is not None)
        problems = [
            f"{client}: according to config.toml, {_row(row)} is charged, but the ledger has "
            "no such row"
            for client, row in self.lacking
        ]
        for client, began in self.run.start.ledgers.items():
            ledger = self.held.ledgers.get(client)
            client_problems = []
            if not self.held.begins_with(client, began):
                count = began.rows
                client_problems.append(
                    f"the ledger's first {count} rows differ from those of {PRIVATE_START}"
                )
            if ledger is not None:
                noted = Counter(after for rows, after in ledger.resumptions if rows >= began.rows)
                if Counter(self.run.resumed) - noted:
                    client_problems.append(
                        f"{RESUMED} has a resumption that is missing in the ledger"
                    )
                if not has_ledger and ledger.dataset != data_set_id(self.run.settings):
                    client_problems.append("the ledger belongs to another data set or partition")
            if not has_ledger:
                for row in self.foreign[client]:
                    text = (
                        f"the ledger has {_row(row)}, which is not charged according to config.toml"
                    )
                    client_problems.append(text)
            problems += [f"{client}: {problem}" for problem in client_problems]
        return problems

    def refusal(self) -> Event | None:
        """Returns the event that the cap allows no further round, or None if it allows one."""
        try:
            self.plan.check_round(self.done + 1, self.now)
        except BudgetExceededError as error:
            return Event.ended(self.done, error.spent, str(error))
        return None

    def epsilon_by_round(self) -> dict[int, float]:
        """Returns the worst client's ε after each round from this run's own rows; round 0 is the ε
        from before the run.
        """
        privacy = self.plan.privacy
        histories = {}
        for client, previous in self._before.items():
            previous_rows = [replace(row, round=0) for row in previous]
            rows = [*previous_rows, *self.own[client]]
            histories[client] = epsilon_by_round(rows, privacy.delta, privacy.adjacency)
        return {point.round: point.worst for point in over_clients(histories)}

    def expected_losses(self, number: int) -> dict[str, Any]:
        """Returns the fields that a round's row must have about clients whose uploads were not
        used.

        In a simulation they follow from the run's seed. Over nodes, and for a rejected upload, the
        row's own reasons are used.
        """
        row = self.run.rows[number - 1]
        active = self.plan.participation.in_round(number)
        rejected = _of_clients(_mapping(row, REJECTED), active)
        ended = _mapping(row, NOT_COUNTED).get("exchange", MAIN)
        lost: dict[str, Any] = {}
        for client in active:
            failure = self.plan.run.failures.of(number, client)
            if failure is None or str(client) in rejected:
                continue
            if ended == MAIN or failure.phase == FIRST:
                lost[str(client)] = failure.kind
        stated = _of_clients(_mapping(row, LOST), active)
        lost |= {client: why for client, why in stated.items() if client in rejected}
        if self.run.served:
            lost = stated
        uploads = len(active) - len({*lost, *rejected})
        needed = needed_uploads(self.plan.run.quorum, len(active))
        expected: dict[str, Any] = {LOST: lost, REJECTED: rejected}
        if uploads < needed:
            first = self._two_exchanges(number) and ended == FIRST
            expected[NOT_COUNTED] = {
                "exchange": FIRST if first else MAIN,
                "uploads": uploads,
                "needed": needed,
            }
        return {key: value for key, value in expected.items() if value}


def _take(planned: Release, remaining: list[Release], taken_rows: list[Release]) -> bool:
    """Moves the first row that equals the planned one, up to rounding, from `remaining` to
    `taken_rows`."""
    for row in remaining:
        if not differences("", asdict(planned), asdict(row)):
            remaining.remove(row)
            taken_rows.append(row)
            return True
    return False


def _of_clients(reasons: Mapping[str, Any], active: Sequence[int]) -> dict[str, str]:
    """Returns the reasons of participating clients that are short enough strings."""
    return {
        str(client): reasons[str(client)]
        for client in active
        if isinstance(reasons.get(str(client)), str) and len(reasons[str(client)]) <= MAX_REASON
    }


def _mapping(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def _row(row: Release) -> str:
    return f"{row.quantity} in round {row.round} (σ = {row.noise_multiplier:.6g})"
