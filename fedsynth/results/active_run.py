"""The code that simulations and runs over a network have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.data.images import ImageData
from fedsynth.evaluation import FEATURE_SPACE
from fedsynth.federation.context import with_proxy
from fedsynth.federation.position_leak_check import check_private_steps
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import Backend, Observer, Refusal
from fedsynth.federation.run_data import PRIVATE
from fedsynth.federation.server import RoundResult, Server, negotiate_terms, run_round
from fedsynth.models.layers import check_embedding
from fedsynth.privacy.ledger.ledger import Histories, History
from fedsynth.results.checkpoint import Checkpoint, CheckpointFolder
from fedsynth.results.measure import Measure
from fedsynth.results.run_folder import RunFolder
from fedsynth.results.run_record import RunRecord, RunResult
from fedsynth.synthesizer.condensation.sets import synthetic_sets


class ActiveRun:
    """Base class for runs in progress.

    A subclass creates the exchange and calls `_join`. Then it sets the run folder and calls
    `_begin_record`, and for a resumed run `_restore`.

    Args:
        settings: the settings of the run.
        context: the public context of the run.
        observer: receives the progress.
        download: True lets torchvision download missing public images.

    Attributes:
        record: the run's metrics and deviations.
        folder: the run folder, or None if the run writes nothing.
        checkpoints: the folder of the run's checkpoint, or None.
        plan: the privacy plan, or None without differential privacy.
    """

    backend: Backend
    record: RunRecord
    folder: RunFolder | None = None
    checkpoints: CheckpointFolder | None = None

    def __init__(
        self,
        settings: RunSettings,
        context: RoundContext,
        observer: Observer,
        *,
        download: bool = False,
    ) -> None:
        self.settings = settings
        self.method = settings.method
        self.observer = observer
        self.method.check_model(context.architecture)
        if set(FEATURE_SPACE) & set(settings.measure_names):
            check_embedding("run.measures", context.architecture)
        self.context = with_proxy(context, settings, download=download)
        check = check_private_steps(settings, self.context)  # before anything is opened
        self._warnings = check.warnings
        self.context = replace(self.context, isolated=check.isolated)

    def _join(self, planned: Callable[[Sequence[History]], PrivacyPlan] | None) -> None:
        """Asks the clients to join, and creates the server.

        Args:
            planned: computes the plan with which a resumed run began (see `negotiate_terms`).
        """
        self.plan, self.context = negotiate_terms(
            self.settings, self.context, self.backend, planned
        )
        self.participation = self.settings.schedule(self.context.sizes)
        self.server = Server.begun(self.method, self.context)
        self.uploads: dict[int, Message] = {}
        self.played = RoundResult()

    def _begin_record(self, test: ImageData | None, kind: str, *, simulated: bool) -> None:
        """Creates the record of the run's results, given the test images."""
        hidden = self.plan is not None and kind == PRIVATE
        local = simulated and self.settings.partition.local_test > 0
        self.record = RunRecord(
            self.settings,
            self.plan,
            self.folder,
            self.observer,
            Measure(
                self.method,
                self.backend,
                test,
                hidden,
                local,
                self.context.spec.task,
                self.settings.measure_names,
            ),
            kind,
            simulated,
            self._warnings,
        )

    def _restore(self, folder: RunFolder, checkpoint: Checkpoint | None) -> None:
        """Restores a resumed run's server and metrics from its checkpoint."""
        if checkpoint is not None:
            device = self.context.device
            self.server.state = checkpoint.state.to(device)
            self.uploads = {k: upload.to(device) for k, upload in checkpoint.uploads.items()}
        self.record.go_on(folder, () if checkpoint is None else checkpoint.rows)

    def plain_context(self, number: int) -> RoundContext:
        """Returns a round's context, without checkpoints during the round."""
        return replace(
            self.context,
            round=number,
            participants=self.participation.in_round(number),
            report=partial(self.observer.step, number),
            note=self.observer.note,
        )

    def round_context(self, number: int) -> RoundContext:
        """Returns a round's context. A subclass may add checkpoints during the round."""
        return self.plain_context(number)

    def play(self, context: RoundContext) -> Refusal | None:
        """Runs one round without evaluating its results.

        If a client refuses to take part, the round is not completed. Returns the refusal then, and
        otherwise None.
        """
        played = run_round(self.server, self.backend, context, self.settings.quorum)
        if played.refusal is None:
            self.played = played
            if played.no_quorum is None:  # otherwise the uploads of the last counted round remain
                self.uploads = dict(played.uploads)
        return played.refusal

    def _rounds(self) -> None:
        """Runs the remaining rounds."""
        for number in range(len(self.record.rows) + 1, self.settings.rounds + 1):
            started = time.perf_counter()
            context = self.round_context(number)
            if self.record.is_evaluated(number):
                context = replace(context, measure=self.record.measure.accuracy)
            refusal = self.play(context)
            if refusal is not None:
                self._end_early(refusal)
                break
            started -= getattr(context.keeper, "resumed_seconds", 0.0)
            row = self.record.row(self.server.state, context, self.played, started)
            uploads = synthetic_sets(self.uploads)
            rows = tuple(self.record.rows)
            self._store(Checkpoint(rows, self.server.state, uploads=uploads))
            self.record.tell(row)

    def _store(self, checkpoint: Checkpoint) -> None:
        """Writes the files of a finished round, such as its checkpoint."""
        raise NotImplementedError  # abstract

    def _end_early(self, refusal: Refusal) -> None:
        """Records that a client refused the next round, and notifies the observer."""
        self.observer.note(self.record.ended_early(refusal))

    def _finish(self, histories: Histories, *, secret: bool = True) -> RunResult:
        """Ends the run and writes its results. See `RunRecord.end`."""
        completed = len(self.record.rows)
        if completed:
            self.server.end(self.plain_context(completed))
        return self.record.end(self.server, self.context, self.uploads, histories, secret=secret)
