"""The server's side of a run across data owners' nodes: rounds, checkpoints and outputs.

The module corresponds to `fedsynth.simulation.run`, but the server here sees no partition, no
records and no client's test split. Its checkpoint contains only its own state and metrics. The
clients store their state themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedsynth.config.checks import check_quorum
from fedsynth.core.method import Method
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import is_published
from fedsynth.deployment.frames import FILE, Connection, write_clients
from fedsynth.deployment.node_backend import NodeBackend
from fedsynth.deployment.proposal import Proposal, check_executable, new_run, served_proposal
from fedsynth.errors import BudgetExceededError, CheckpointError, DataFilesMissingError
from fedsynth.federation.context import public_context, resolve_device
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import Observer
from fedsynth.federation.run_data import NO_TEST, PUBLIC
from fedsynth.files import write_whole
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.report.figures import Event
from fedsynth.results.active_run import ActiveRun
from fedsynth.results.charges import rebuild_plan
from fedsynth.results.checkpoint import Checkpoint, CheckpointFolder
from fedsynth.results.file_names import SERVED, SERVER_LEDGER
from fedsynth.results.private_run import read_start
from fedsynth.results.report_facts import headline
from fedsynth.results.run_folder import CHECKPOINT, RunFolder
from fedsynth.validation import to_toml


class NetworkedRun(ActiveRun):
    """The server's side of a run whose clients are data owners' nodes.

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
        FedsynthError: in the same cases as `fedsynth.simulate`.
        TooFewClientsError: if too few nodes have joined.
    """

    backend: NodeBackend
    folder: RunFolder
    checkpoints: CheckpointFolder

    def __init__(
        self,
        proposal: Proposal,
        connection: Connection,
        output: Path,
        observer: Observer | None = None,
        resume: Path | None = None,
    ) -> None:
        settings = proposal.settings
        context = public_context(settings, proposal.spec, resolve_device(settings.device))
        check_executable(proposal, context)
        check_quorum(settings)
        super().__init__(settings, context, observer or Observer())
        test = _test_set(proposal)
        proposal, self.folder = _begun(proposal, output, resume)
        self.checkpoints = CheckpointFolder(self.folder.path / CHECKPOINT, proposal.run)
        self.file = self.checkpoints.path / FILE
        checkpoint = None if resume is None else self.checkpoints.read(self.method)
        planned = None
        if self.folder.has_begun:
            planned = partial(_initial_plan, self.folder.path, type(self.method))
        rounds_missing = checkpoint is None and self.folder.has_rounds
        if rounds_missing or (self.folder.has_begun and not self.file.exists()):
            raise CheckpointError(f"{self.folder.path} contains no checkpoint. Start a new run")
        self.backend = NodeBackend(
            proposal,
            connection,
            context.device,
            self.file,
            self.folder.path / SERVER_LEDGER,
            last_round=0 if checkpoint is None else checkpoint.round,
            note=self.observer.note,
        )
        try:
            self._join(planned)
        except BudgetExceededError:
            if resume is None:  # nothing was released
                self.folder.discard()
            raise
        images = None if test is None else test.to(context.device)
        self._begin_record(images, NO_TEST if test is None else PUBLIC, simulated=False)
        for number, reason in self.backend.never_joined.items():
            self.record.events.append(Event(kind="absent", client=str(number), why=reason))
        plan = self.plan
        if plan is not None:  # announces a private run and writes its initial state
            warnings = map("warning: {}".format, self.record.warnings)
            for line in (*headline(plan, simulated=False), *warnings):
                self.observer.note(line)
            self.record.begin(plan.histories)
        if resume is not None:
            self._restore(self.folder, checkpoint)

    def run(self) -> Path:
        """Runs all remaining rounds, and returns the run's folder.

        Raises:
            BudgetExceededError: if the clients' budgets allow no round. The folder is deleted,
                unless a client was charged.
        """
        try:
            self._rounds()
            refused = None if self.record.rows else BudgetExceededError(self.record.deviations[-1])
            self.backend.end(len(self.record.rows))
            self.histories = self._charged_histories()
            if refused is not None and not self._charged:
                self.folder.discard()
            else:
                self.report = self._finish(self.histories).privacy
            if refused is not None:
                raise refused
            return self.folder.path
        finally:
            self.folder.release()

    @property
    def _charged(self) -> bool:
        """Returns True if a client was charged, or may have been charged."""
        initial = () if self.plan is None else self.plan.histories
        return sum(len(h.releases) for h in self.histories) > sum(len(h.releases) for h in initial)

    def _store(self, checkpoint: Checkpoint) -> None:
        """Writes the list of joined clients, and then the checkpoint.

        In this order, a crash cannot leave a checkpoint that is newer than the list.
        """
        write_clients(self.file, self.backend.clients)
        self.checkpoints.write(checkpoint)

    def _charged_histories(self) -> list[History]:
        """Returns the clients' ledger histories, including charges that were not reported.

        If a client was asked for a step and never answered again, the client may have been charged,
        and its upload may have been seen. The report must include this charge, so the function
        adds the charge.
        """
        plan = self.plan
        if plan is None:
            return self.backend.histories()
        histories: list[History] = []
        for number, client in sorted(self.backend.clients.items()):
            history = client.history
            if history is None:
                continue
            assumed = list(history.releases)
            for round_number, exchange in client.unstated:
                assumed += plan.client_rows(number, self.plain_context(round_number), [exchange])
            if len(assumed) > len(history.releases):
                rounds = sorted(dict(client.unstated))
                self.record.events.append(Event(kind="unstated", client=str(number), rounds=rounds))
                history = replace(history, releases=tuple(assumed), chain=None)
            histories.append(history)
        return histories


def _test_set(proposal: Proposal) -> ImageData | None:
    """Loads the public test images of a published data set.

    Returns None if the server does not have the images.
    """
    if is_published(proposal.spec):
        with suppress(DataFilesMissingError):
            return load_dataset(proposal.settings.dataset, proposal.settings.data_root)[1]
    return None


def _begun(proposal: Proposal, output: Path, resume: Path | None) -> tuple[Proposal, RunFolder]:
    """Creates the run folder with the run's proposal, or reopens an existing one."""
    if resume is None:
        folder = RunFolder(output, f"{proposal.settings.method.name}-{proposal.spec.name}")
        folder.write_config(to_toml(proposal.settings.to_mapping()))
        proposal = replace(proposal, run=new_run())
        write_whole(folder.path / SERVED, json.dumps(proposal.to_json()).encode())
        return proposal, folder
    folder = RunFolder.reopen(resume)
    begun = served_proposal(folder.path)
    if begun.agreement != proposal.agreement:
        raise CheckpointError(f"the settings in {folder.path} have changed. Restore them")
    return begun, folder


def _initial_plan(folder: Path, method: type[Method], histories: Sequence[History]) -> PrivacyPlan:
    """Rebuilds a resumed run's original privacy plan.

    The clients' ledgers were compared with their earlier states when the clients joined.
    """
    rows = {history.client: history.releases for history in histories}
    return rebuild_plan(read_start(folder, method), rows)
