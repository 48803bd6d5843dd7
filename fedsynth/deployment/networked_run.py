"""The server's side of a run across data owners' nodes: rounds, checkpoints and outputs.

The module corresponds to `fedsynth.simulation.run`, but the server here sees no partition, no
records and no client's test split. Its checkpoint contains only its own state and metrics. The
clients store their state themselves.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedsynth.config.checks import check_quorum
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import is_published
from fedsynth.deployment.frames import FILE, Connection, write_clients
from fedsynth.deployment.node_exchange import NodeExchange
from fedsynth.deployment.proposal import Proposal, check_executable, damage_is_named, new_run
from fedsynth.errors import CheckpointError, DataFilesMissingError
from fedsynth.federation.context import public_context, resolve_device, with_proxy
from fedsynth.federation.position_leak_check import check_private_steps
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import Observer
from fedsynth.federation.run_data import NO_TEST, PUBLIC
from fedsynth.federation.server import RoundResult, Server, negotiate_terms, run_round
from fedsynth.privacy.errors import LedgerError
from fedsynth.privacy.files import load_json, write_whole
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.report.figures import Event, Start
from fedsynth.results.checkpoint import Checkpoint, CheckpointFolder
from fedsynth.results.measure import Measure
from fedsynth.results.report_facts import headline
from fedsynth.results.run_folder import SERVED, RunFolder, private_start
from fedsynth.results.run_record import RunRecord
from fedsynth.synthesizer.condensation.sets import synthetic_sets
from fedsynth.validation import to_toml


class NetworkedRun:
    """The server's side of a run, in which the clients are nodes of data owners.

    Args:
        proposal: the proposed run. Its name is replaced by a new name, or by the name of the
            resumed run.
        connection: the connection to the nodes.
        output: the parent folder of run folders.
        observer: receives the progress.
        resume: the folder of an unfinished run with the same settings. None: a new run begins.

    Attributes:
        record: the run's metrics and deviations.
        histories: the clients' final ledgers, as the clients state them. The attribute exists once
            `run` has finished.
        report: the server's privacy report, which covers the released values. It is None without
            differential privacy.

    Raises:
        FedsynthError, PrivacyError: in the same cases as `fedsynth.simulate`.
        TooFewClientsError: if too few nodes have joined.
    """

    def __init__(
        self,
        proposal: Proposal,
        connection: Connection,
        output: Path,
        observer: Observer | None = None,
        resume: Path | None = None,
    ) -> None:
        settings = proposal.settings
        self.settings = settings
        self.method = settings.method
        self.observer = observer or Observer()
        context = public_context(settings, proposal.spec, resolve_device(settings.device))
        check_executable(proposal, context)
        if self.method.requires_secure_sum:
            check_quorum(settings)
        self.method.check_model(context.architecture)
        context = with_proxy(context, settings)
        warnings = check_private_steps(settings, context)
        test = _test_set(proposal)
        proposal, self.folder = _begun(proposal, output, resume)
        self.checkpoints = CheckpointFolder(self.folder.path / "checkpoint", proposal.run)
        self.file = self.checkpoints.path / FILE
        checkpoint = None if resume is None else self.checkpoints.read(self.method)
        planned = None
        if self.folder.has_begun:
            start = private_start(self.folder.path)
            planned = partial(_initial_plan, start, settings, context)
        rounds_missing = checkpoint is None and self.folder.has_rounds
        if rounds_missing or (self.folder.has_begun and not self.file.exists()):
            raise CheckpointError(f"the checkpoint of the run in {self.folder.path} is missing")
        rows = () if checkpoint is None else checkpoint.rows
        self.exchange = NodeExchange(
            proposal,
            connection,
            context.device,
            self.file,
            last_round=len(rows),
            note=self.observer.note,
        )
        plan, self.context = negotiate_terms(settings, context, self.exchange, planned)
        self.plan = plan
        self.participation = settings.schedule(self.context.sizes)
        self.server = Server.begun(self.method, self.context)
        self.uploads: dict[int, Message] = {}
        images = None if test is None else test.to(context.device)
        self.record = RunRecord(
            settings,
            plan,
            self.folder,
            self.observer,
            Measure(self.method, self.exchange, images, hidden=False, local=False),
            NO_TEST if test is None else PUBLIC,
            simulated=False,
            warnings=warnings,
        )
        for number, reason in self.exchange.never_joined.items():
            self.record.events.append(Event(kind="absent", client=str(number), why=reason))
        if plan is not None:  # announces a private run and writes its initial state
            noted = [f"warning: {line}" for line in self.record.warnings]
            for line in [*headline(plan, simulated=False), *noted]:
                self.observer.note(line)
            self.record.begin(plan.histories)
        if checkpoint is not None:
            device = self.context.device
            self.server.state = checkpoint.state.to(device)
            self.uploads = {k: upload.to(device) for k, upload in checkpoint.uploads.items()}
        if resume is not None:
            self.record.go_on(self.folder, rows)

    def run(self) -> Path:
        """Runs all remaining rounds, and returns the run's folder."""
        try:
            for number in range(len(self.record.rows) + 1, self.settings.rounds + 1):
                started = time.perf_counter()
                context = self._round_context(number)
                played = run_round(self.server, self.exchange, context, self.settings.quorum)
                if played.refusal is not None:
                    self.observer.note(self.record.ended_early(played.refusal))
                    break
                self._store(context, played, started)
            return self._finish()
        finally:
            self.folder.release()

    def _round_context(self, number: int) -> RoundContext:
        """Returns the context in which the server computes this round."""
        participants = self.participation.in_round(number)
        return replace(self.context, round=number, participants=participants)

    def _store(self, context: RoundContext, played: RoundResult, started: float) -> None:
        """Records the metrics of a round and writes the checkpoint."""
        if played.no_quorum is None:
            self.uploads = dict(played.uploads)
        state = self.server.state
        row = self.record.row(state, context, played, started)
        checkpoint = Checkpoint(tuple(self.record.rows), state, {}, synthetic_sets(self.uploads))
        # the clients first: the checkpoint must not be ahead of them
        write_clients(self.file, self.exchange.clients)
        self.checkpoints.write(checkpoint)
        self.record.tell(row)

    def _finish(self) -> Path:
        completed = len(self.record.rows)
        self.exchange.end(completed)
        if completed:
            self.server.end(self._round_context(completed))
        self.histories = self._charged_histories()
        result = self.record.end(self.server, self.context, self.uploads, self.histories)
        self.report = result.privacy
        # the run folder has another name now
        shutil.rmtree(self.folder.path / "checkpoint", ignore_errors=True)
        return self.folder.path

    def _charged_histories(self) -> list[History]:
        """Returns the clients' ledgers, including charges that a client could not report to the
        server.

        If a client was asked for a step and never answered again, the client may have been charged,
        and its upload may have been seen. The report must include this charge, so the function
        adds the charge.
        """
        plan = self.plan
        if plan is None:
            return self.exchange.histories()
        histories: list[History] = []
        for number, client in sorted(self.exchange.clients.items()):
            history = client.history
            if history is None:
                continue
            assumed = list(history.releases)
            for round_number, phase in client.unstated:
                context = self._round_context(round_number)
                plans = plan.client_plans(number, context)
                rows = plan.client_rows(number, context)
                pairs = zip(plans, rows, strict=True)
                assumed += [row for release, row in pairs if release.phase == phase]
            if len(assumed) > len(history.releases):
                rounds = sorted({round_number for round_number, _ in client.unstated})
                self.record.events.append(Event(kind="unstated", client=str(number), rounds=rounds))
                history = replace(history, releases=tuple(assumed), chain=None)
            histories.append(history)
        return histories


def _test_set(proposal: Proposal) -> ImageData | None:
    """Loads the public test images of a published data set.

    Returns None if the server does not have these images.
    """
    if is_published(proposal.spec):
        with suppress(DataFilesMissingError):
            return load_dataset(proposal.settings.dataset, proposal.settings.data_root)[1]
    return None


def _begun(proposal: Proposal, output: Path, resume: Path | None) -> tuple[Proposal, RunFolder]:
    """Creates or reopens the run folder, which contains the proposal of the run.

    Raises:
        CheckpointError: if the run in the folder has other settings, or its file is damaged.
    """
    if resume is None:
        folder = RunFolder(output, f"{proposal.settings.method.name}-{proposal.spec.name}")
        folder.write_config(to_toml(proposal.settings.to_mapping()))
        proposal = replace(proposal, run=new_run())
        write_whole(folder.path / SERVED, json.dumps(proposal.to_json()).encode())
        return proposal, folder
    folder = RunFolder.reopen(resume)
    with damage_is_named(folder.path / SERVED):
        begun = Proposal.from_json(load_json(folder.path / SERVED))
    if begun.agreement != proposal.agreement:
        raise CheckpointError(f"cannot resume {folder.path}, because the settings have changed")
    return begun, folder


def _initial_plan(
    start: Start, settings: RunSettings, context: RoundContext, histories: Sequence[History]
) -> PrivacyPlan:
    """Rebuilds the privacy plan with which a resumed run began.

    The plan is computed from the σ and the lengths of the ledgers at the beginning of the run.

    Raises:
        LedgerError: if a ledger has fewer entries now than when the run began.
    """
    initial: list[History] = []
    for history in histories:
        rows = start.ledgers[history.client].rows
        if len(history.releases) < rows:
            raise LedgerError(f"the ledger of {history.client} lost entries since the run began")
        initial.append(replace(history, releases=history.releases[:rows]))
    plan = PrivacyPlan.checked(settings, context)
    privacy = replace(plan.privacy, noise_multiplier=start.noise_multiplier)
    return replace(plan, privacy=privacy, histories=tuple(initial))
