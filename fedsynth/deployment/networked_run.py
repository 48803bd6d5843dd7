"""A networked run over data owners' nodes: the rounds, their checkpoint, and the run's outputs.

It does what `simulated_run` does, without what only a simulation may show: the server sees no
partition, no record, and no client's test split. The server's checkpoint holds its own state and
its metrics; the clients' state stays with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsynth.config.checks import check_quorum
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import is_published
from fedsynth.deployment.carrier import Post
from fedsynth.deployment.client_records import FILE, write_clients
from fedsynth.deployment.node_exchange import NodeExchange
from fedsynth.deployment.proposal import Proposal, new_run, refuse
from fedsynth.errors import CheckpointError, DataFilesMissingError
from fedsynth.federation.context import public_context, resolve_device, with_proxy
from fedsynth.federation.observer import Observer
from fedsynth.federation.position_leak_check import check_private_steps
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.round_loop import RoundResult, negotiate_terms, run_round
from fedsynth.federation.run_data import NO_TEST, PUBLIC
from fedsynth.federation.server import Server
from fedsynth.privacy.errors import LedgerError
from fedsynth.privacy.files import load_json, write_whole
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.figures import Event, Start
from fedsynth.results import privacy_summary
from fedsynth.results.checkpoint import Checkpoint, CheckpointFolder
from fedsynth.results.measure import Measure
from fedsynth.results.run_folder import SERVED, RunFolder, private_start
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
        context = public_context(settings, proposal.spec, resolve_device(settings.device))
        refuse(proposal, context)
        if self.method.requires_secure_sum:
            check_quorum(settings)
        self.method.check_model(context.architecture)
        context = with_proxy(context, settings)
        warnings = check_private_steps(settings, context)
        test = _test_set(proposal)
        self.folder = _folder(proposal, output, resume)
        run = _run_name(self.folder, proposal)
        self.checkpoints = CheckpointFolder(self.folder.path / "checkpoint", run)
        checkpoint = None if resume is None else self.checkpoints.read(self.method)
        self.file = self.checkpoints.path / FILE
        began = self.folder.has_begun
        lost = checkpoint is None and self.folder.has_rounds
        if lost or (began and not self.file.exists()):
            raise CheckpointError(f"the checkpoint of the run in {self.folder.path} is missing")
        start = private_start(self.folder.path) if began else None
        self.exchange = NodeExchange(
            replace(proposal, run=run),
            post,
            context.device,
            self.file,
            after=0 if checkpoint is None else checkpoint.round,
            names=() if start is None else list(start.ledgers),
            note=observer.note,
        )
        planned = None if start is None else partial(_plan_when_it_began, start, settings, context)
        self.agreed = negotiate_terms(settings, context, self.exchange, planned)
        self.context = self.agreed.context
        self.participation = settings.schedule(self.agreed.terms.sizes)
        local = settings.partition.local_test > 0 and settings.privacy is None
        on_device = None if test is None else test.to(context.device)
        self.server = Server.begun(self.method, self.context)
        self.uploads: dict[int, Message] = {}
        self.record = RunRecord(
            settings,
            self.agreed.plan,
            self.folder,
            observer,
            Measure(self.method, self.exchange, on_device, False, local),
            NO_TEST if test is None else PUBLIC,
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
            warnings = [f"warning: {line}" for line in self.record.warnings]
            for line in [*privacy_summary.headline(plan, simulated=False), *warnings]:
                self.observer.note(line)
            self.record.begin(plan.histories)
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
                played = run_round(self.server, self.exchange, context, self.settings.quorum)
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

    def _keep(self, context: RoundContext, played: RoundResult, started: float) -> None:
        """Records the round's metrics, and writes the checkpoint."""
        if played.no_quorum is None:
            self.uploads = dict(played.uploads)
        state = self.server.state
        row = self.record.row(state, context, played, started)
        kept = Checkpoint(tuple(self.record.rows), state, {}, synthetic_sets(self.uploads))
        write_clients(
            self.file, self.exchange.clients
        )  # first: the checkpoint must not be ahead of it
        self.checkpoints.write(kept, frozenset())
        self.record.tell(row)

    def _finish(self) -> Served:
        completed = len(self.record.rows)
        self.exchange.end(completed)
        if completed:
            self.server.end(self._context_of(completed))
        histories = self._charged()
        ended = self.record.end(self.server, self.context, self.uploads, histories)
        folder = self.folder.path / "checkpoint"  # the run folder has another name now
        (folder / FILE).unlink(missing_ok=True)
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


def _folder(proposal: Proposal, output: Path, resume: Path | None) -> RunFolder:
    """Returns the run's folder, with its settings and its name."""
    if resume is not None:
        return RunFolder.reopen(resume)
    folder = RunFolder(output, f"{proposal.settings.method.name}-{proposal.spec.name}")
    folder.write_config(to_toml(proposal.settings.to_mapping()))
    stated = {"run": new_run(), "agreement": proposal.agreement}
    write_whole(folder.path / SERVED, json.dumps(stated).encode())
    return folder


def _run_name(folder: RunFolder, proposal: Proposal) -> str:
    """Returns the run's name.

    Raises:
        CheckpointError: the run has other settings, or its file is damaged.
    """
    file = folder.path / SERVED
    try:
        stated = load_json(file)
        agreed, name = str(stated["agreement"]), str(stated["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r:.120}") from None
    if agreed != proposal.agreement:
        raise CheckpointError(f"the run in {folder.path} has other settings")
    return name


def _plan_when_it_began(
    start: Start,
    settings: RunSettings,
    context: RoundContext,
    histories: Sequence[History],
) -> PrivacyPlan:
    """Returns the run's original plan: with its σ, and the ledgers' rows at that time.

    Raises:
        LedgerError: a ledger has lost rows.
    """
    before: list[History] = []
    for one in histories:
        rows = start.ledgers[one.client].rows
        if len(one.releases) < rows:
            raise LedgerError(f"{one.client}: its ledger has lost earlier rows")
        before.append(replace(one, releases=one.releases[:rows]))
    plan = PrivacyPlan.checked(settings, context)
    privacy = replace(plan.privacy, noise_multiplier=start.noise_multiplier)
    return replace(plan, privacy=privacy, histories=tuple(before))
