"""A networked run over data owners' nodes: the rounds, their checkpoint, and the run's outputs.

It does what `simulated_run` does, without what only a simulation may show: the server sees no
partition, no record, and no client's test split. The server's checkpoint holds its own state and
its metrics; the clients' state stays with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsynth.config.checks import check_method, check_own_noise, check_quorum
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import is_published
from fedsynth.deployment.carrier import Carrier, Timeouts
from fedsynth.deployment.client_records import ClientRecords
from fedsynth.deployment.node_exchange import NodeExchange
from fedsynth.deployment.proposal import Proposal, new_run
from fedsynth.deployment.secure_aggregation.primitives import require_cryptography
from fedsynth.errors import CheckpointError, DataFilesMissingError
from fedsynth.federation.context import public_context, resolve_device, with_proxy
from fedsynth.federation.observer import Observer
from fedsynth.federation.position_leak_check import check_private_steps
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.round_loop import Played, agree, play_round
from fedsynth.federation.run_data import NO_TEST, PUBLIC
from fedsynth.federation.server import Server
from fedsynth.privacy.errors import LedgerError
from fedsynth.privacy.files import load_json, write_whole
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.figures import Event
from fedsynth.results import privacy_summary
from fedsynth.results.checkpoint import Checkpoint, CheckpointFolder
from fedsynth.results.measure import Measure
from fedsynth.results.run_folder import PRIVATE_START, SERVED, RunFolder
from fedsynth.results.run_record import RunRecord
from fedsynth.synthesizer.condensation.sets import synthetic_sets
from fedsynth.toml_file import to_toml


@dataclass(frozen=True)
class Served:
    """The result of a networked run.

    Args:
        folder: the run's.
        metrics: a row for each round.
        parameters: the final model's.
        report: the server's privacy report, over released values; None without privacy.
        histories: the clients' final ledgers, as they state them.
        deviations: the deviations from the plan.
    """

    folder: Path
    metrics: list[dict[str, Any]]
    parameters: Mapping[str, Tensor]
    report: dict[str, object] | None
    histories: list[History]
    deviations: tuple[str, ...] = ()


@dataclass(frozen=True)
class Post:
    """The server's connection to nodes.

    Args:
        carrier: transports messages to the nodes.
        timeouts: how long the server waits for them.
        numbers: node -> client, where the server knows it; empty: each node states its client.
    """

    carrier: Carrier
    timeouts: Timeouts = field(default_factory=Timeouts)
    numbers: Mapping[int, int] = field(default_factory=dict)


def serve(
    proposal: Proposal,
    post: Post,
    output: Path,
    *,
    observer: Observer | None = None,
    resume: Path | None = None,
) -> Served:
    """Runs a federation over nodes.

    Args:
        proposal: the run; its name is replaced by a new one, or that of the resumed run.
        post: to the nodes.
        output: the parent folder of run folders.
        observer: receives the progress.
        resume: the folder of a run of the same settings that did not finish.

    Raises:
        FedsynthError, PrivacyError: as `fedsynth.simulate`.
        TooFewClientsError: too few nodes have joined.
    """
    return _Run(proposal, post, output, observer or Observer(), resume).run()


class _Run:
    """One run over nodes, from checked settings."""

    def __init__(
        self, proposal: Proposal, post: Post, output: Path, observer: Observer, resume: Path | None
    ) -> None:
        settings = proposal.settings
        self.settings = settings
        self.method = settings.method
        self.observer = observer
        self.private = settings.privacy is not None
        if self.private:
            check_method(self.method)
        context = public_context(settings, proposal.spec, resolve_device(settings.device))
        plan = PrivacyPlan.checked(settings, context) if self.private else None
        if self.method.sums_alone:
            require_cryptography()
            check_quorum(settings)
        elif plan is not None:
            check_own_noise(plan.plans)
        self.method.check_model(context.architecture)
        context = with_proxy(context, settings)
        warnings = check_private_steps(settings, context)
        self.test = _test_set(proposal)
        self.folder = _opened(proposal, output, resume)
        self.proposal = replace(proposal, run=_name(self.folder, proposal, resume))
        self.checkpoints = CheckpointFolder(self.folder.path / "checkpoint", self.proposal.run)
        checkpoint = None if resume is None else self.checkpoints.read(self.method)
        self.records = ClientRecords(self.checkpoints.path)
        completed = 0 if checkpoint is None else checkpoint.round
        began = resume is not None and self.folder.has_begun
        lost = checkpoint is None and self.folder.has_rounds
        if resume is not None and (lost or (began and not self.records.exists)):
            raise CheckpointError(f"the checkpoint of the run in {self.folder.path} is gone")
        start = _start(self.folder.path) if began else None
        self.exchange = NodeExchange(
            self.proposal,
            post.carrier,
            context.device,
            post.timeouts,
            numbers=post.numbers,
            completed=completed,
            names=() if start is None else list(start[1]),
            records=self.records,
            note=observer.note,
        )
        planned = None if start is None else partial(_plan_when_it_began, start, settings, context)
        self.agreed = agree(settings, context, self.exchange, planned)
        self.context = self.agreed.context
        self.participation = settings.schedule(self.agreed.terms.sizes)
        test = None if self.test is None else self.test.to(context.device)
        local = settings.partition.local_test > 0 and not self.private
        self.server = Server.begun(self.method, self.context)
        self.uploads: dict[int, Message] = {}
        self.record = RunRecord(
            settings,
            self.agreed.plan,
            self.folder,
            observer,
            Measure(self.method, self.exchange, test, False, local),
            NO_TEST if self.test is None else PUBLIC,
            simulated=False,
            warnings=warnings,
        )
        self.record.events += [
            Event(kind="absent", client=str(k), why=why)
            for k, why in self.exchange.never_joined.items()
        ]
        self._begin(checkpoint, resumed=resume is not None)

    def _begin(self, checkpoint: Checkpoint | None, *, resumed: bool) -> None:
        """Writes a private run's initial state, and restores the checkpoint."""
        plan = self.agreed.plan
        if plan is not None:
            for line in privacy_summary.headline(plan, simulated=False):
                self.observer.note(line)
            self.record.begin(plan.histories)
            for line in self.record.warnings:
                self.observer.note(f"warning: {line}")
        if checkpoint is not None:
            device = self.context.device
            self.server.state = checkpoint.state.to(device)
            self.uploads = {k: upload.to(device) for k, upload in checkpoint.uploads.items()}
        if resumed:
            self.record.go_on(self.folder, [] if checkpoint is None else checkpoint.rows)

    def run(self) -> Served:
        """Runs all remaining rounds, and returns the result."""
        try:
            for number in range(len(self.record.rows) + 1, self.settings.rounds + 1):
                started = time.perf_counter()
                context = self._context_of(number)
                played = play_round(self.server, self.exchange, context, self.settings.quorum)
                if played.refusal is not None:
                    self.observer.note(self.record.ended_early(played.refusal))
                    break
                self._keep(context, played, started)
            return self._finish()
        finally:
            self.folder.release()

    def _context_of(self, number: int) -> RoundContext:
        """Returns the context of the server's steps in this round."""
        taking = self.participation.in_round(number)
        return replace(self.context, round=number, participants=taking)

    def _keep(self, context: RoundContext, played: Played, started: float) -> None:
        """Records the round's metrics, and writes the checkpoint."""
        if played.no_quorum is None:
            self.uploads = dict(played.uploads)
        state = self.server.state
        row = self.record.row(state, context, played, started)
        checkpoint = Checkpoint(tuple(self.record.rows), state, {}, synthetic_sets(self.uploads))
        self.records.write(self.exchange.clients)  # first: the checkpoint must not be ahead of it
        self.checkpoints.write(checkpoint, frozenset())
        self.record.tell(row)

    def _finish(self) -> Served:
        completed = len(self.record.rows)
        self.exchange.end(completed)
        if completed:
            self.server.end(self._context_of(completed))
        histories = self._charged()
        ended = self.record.end(self.server, self.context, self.uploads, histories)
        folder = self.folder.path / "checkpoint"
        ClientRecords(folder).discard()
        CheckpointFolder(folder, "").discard()
        return Served(
            self.folder.path,
            self.record.rows,
            self.server.final_parameters(),
            ended.report,
            histories,
            self.record.deviations,
        )

    def _charged(self) -> list[History]:
        """Returns the clients' ledgers, with rows added for steps whose charge was never stated.

        A client that was asked for a step and never answered again may have been charged for it,
        and its upload may have been seen: the report must include it.
        """
        plan = self.agreed.plan
        if plan is None:
            return self.exchange.histories()
        histories: list[History] = []
        for client, record in sorted(self.exchange.clients.items()):
            assumed: list[Release] = []
            for number, phase in record.unstated:
                context = self._context_of(number)
                plans = plan.client_plans(client, context)
                rows = plan.client_rows(client, context)
                assumed += [
                    row
                    for release_plan, row in zip(plans, rows, strict=True)
                    if release_plan.phase == phase
                ]
            history = record.history
            if history is None:
                continue
            if assumed:
                rounds = sorted({number for number, _ in record.unstated})
                event = Event(kind="unstated", client=str(client), rounds=rounds)
                self.record.events.append(event)
                rows_with = (*history.releases, *assumed)
                history = replace(history, releases=rows_with, chain=None)
            histories.append(history)
        return histories


def _test_set(proposal: Proposal) -> ImageData | None:
    """Returns the public test images of a published data set; None: the server does not have
    them.
    """
    if not is_published(proposal.spec):
        return None
    try:
        _, test = load_dataset(proposal.settings.dataset, proposal.settings.data_root)
    except DataFilesMissingError:
        return None
    return test


def _opened(proposal: Proposal, output: Path, resume: Path | None) -> RunFolder:
    """Returns the run's folder, which holds its settings.

    Raises:
        CheckpointError: the run to resume has other settings.
    """
    config = to_toml(proposal.settings.to_mapping())
    if resume is None:
        folder = RunFolder(output, f"{proposal.settings.method.name}-{proposal.spec.name}")
        folder.write_config(config)
        return folder
    return RunFolder.reopen(resume)


def _name(folder: RunFolder, proposal: Proposal, resume: Path | None) -> str:
    """Returns the run's name: a new one, or that of the resumed run.

    Raises:
        CheckpointError: that run has other settings, or its file is damaged.
    """
    file = folder.path / SERVED
    if resume is None:
        stated = {"run": new_run(), "agreement": proposal.agreement}
        write_whole(file, json.dumps(stated).encode())
        return str(stated["run"])
    try:
        stated = load_json(file)
        agreed = str(stated["agreement"])
        name = str(stated["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r:.120}") from None
    if agreed != proposal.agreement:
        raise CheckpointError(f"the run in {folder.path} has other settings")
    return name


def _start(folder: Path) -> tuple[float, dict[str, int]]:
    """Reads a private run's initial state: σ, and the number of rows in each client's ledger, by
    name, in the clients' order.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        start = load_json(folder / PRIVATE_START)
        rows = {str(name): int(entry["rows"]) for name, entry in start["ledgers"].items()}
        return float(start["noise_multiplier"]), rows
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / PRIVATE_START} is damaged: {error!r:.120}") from None


def _plan_when_it_began(
    start: tuple[float, Mapping[str, int]],
    settings: RunSettings,
    context: RoundContext,
    histories: Sequence[History],
) -> PrivacyPlan:
    """Returns the run's original plan: with its σ, and the ledgers' rows at that time.

    Raises:
        LedgerError: a ledger has lost rows.
    """
    sigma, initial_rows = start
    initial: list[History] = []
    for history in histories:
        rows = initial_rows[history.client]
        if len(history.releases) < rows:
            raise LedgerError(f"{history.client}: its ledger has lost rows that it had")
        initial.append(replace(history, releases=history.releases[:rows]))
    plan = PrivacyPlan.checked(settings, context)
    privacy = replace(plan.privacy, noise_multiplier=sigma)
    return replace(plan, privacy=privacy, histories=tuple(initial))
