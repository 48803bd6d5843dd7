"""One simulated run, from checked settings and resident data: its rounds, and what it leaves.

    1. every client of the round is asked whether it can take part; with differential privacy one
       whose cap would be exceeded refuses, and the run ends in order with what it has;
    2. in each exchange of the round the server's request goes to the clients, whose steps run in
       groups, and the server makes its next state from their replies;
    3. the models are measured, and the round's row is written.

The parts know no more than they would in a real federation: `Server` sees messages, each
`ClientRuntime` its own records, memory and ledger, and an `Exchange` carries what passes between
them. What only a simulation can do (measuring on clients' own test splits, pictures of who has
what) is done here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsynth.config_file import to_toml
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.data.images import ImageData
from fedsynth.data.partition import count_matrix
from fedsynth.errors import OutputError, Setting, Text
from fedsynth.federation import run_words
from fedsynth.federation.exchange.client_runtime import ClientRuntime, OwnData
from fedsynth.federation.exchange.in_process import InProcess
from fedsynth.federation.exchange.places import place_warnings
from fedsynth.federation.exchange.protocol import Refusal
from fedsynth.federation.exchange.rounds import Played, agree, play_round, with_proxy
from fedsynth.federation.exchange.server import Server
from fedsynth.federation.observer import Observer
from fedsynth.federation.outputs import privacy_words
from fedsynth.federation.outputs.checkpoint import Checkpoint, run_identity
from fedsynth.federation.outputs.disclosed import (
    Disclosed,
    declared_row,
    declared_summary,
    disclosed,
)
from fedsynth.federation.outputs.measure import Measure
from fedsynth.federation.outputs.report_context import report_context
from fedsynth.federation.outputs.result import RunResult, own_sources, summarise
from fedsynth.federation.outputs.results import Results
from fedsynth.federation.outputs.round_row import round_row
from fedsynth.federation.outputs.run_checkpoints import RunCheckpoints
from fedsynth.federation.outputs.run_folder import RunFolder
from fedsynth.federation.outputs.verified_charges import plan_when_it_began
from fedsynth.federation.terms.client_ledgers import Clients
from fedsynth.federation.terms.duration import long_run
from fedsynth.federation.terms.given_data import PRIVATE, divided
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.public_context import public_context
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.report import ReportContext, build_report
from fedsynth.privacy.report_schema import Began
from fedsynth.synthesizer.condensation.sets import SyntheticSet


class Simulation:
    """One run, from checked settings and resident data; `simulate` makes it."""

    def __init__(
        self,
        settings: RunSettings,
        clients: Clients,
        train: ImageData,
        test: tuple[ImageData | None, str],
        parts: list[Tensor],
        observer: Observer,
        output: Path | None,
        download: bool = False,
        resumed: RunFolder | None = None,
    ) -> None:
        self.settings = settings
        self.method = settings.method
        self.observer = observer
        self.test_kind = test[1]
        long = long_run(settings, train.spec)
        context = public_context(settings, train.spec, train.labels.device)
        self.method.check_model(context.architecture)
        self.context = with_proxy(context, settings, download=download)
        if settings.privacy is not None:
            PrivacyPlan.checked(settings, self.context)
        identity = partial(run_identity, settings, train, test[0], parts)
        self.checkpoints = RunCheckpoints(settings, identity)
        checkpoint = None if resumed is None else self.checkpoints.read(resumed)
        self.exchange = self._clients(clients, train, parts, resumed)
        planned = self._planned_before(resumed, checkpoint)
        self.agreed = agree(settings, self.context, self.exchange, planned)
        self.context = self.agreed.context
        self.participation = settings.schedule(self.agreed.terms.sizes)
        # Where earlier runs have spent the budget, this one ends before it begins, and leaves
        # nothing.
        new = resumed is None
        self.over = new and self._private and bool(self.exchange.prepare(self._plain_context(1)))
        self.folder: RunFolder | None = resumed
        if output is not None and new and not self.over:
            self.folder = self._new_folder(output, clients)
        if self.folder is not None:
            self._begin(self.folder, train, parts)
        self.measure = Measure(
            self.method,
            self.exchange,
            test[0],
            self._private and self.test_kind == PRIVATE,
            settings.partition.local_test > 0,
        )
        self._announce(long, new=new)
        self.server = Server.begun(self.method, self.context)
        self.uploads: dict[int, Message] = {}
        self.played = Played()
        self.metrics: list[dict[str, Any]] = []
        self.deviations: list[str] = []
        self.pictures_missing = False
        if resumed is not None:
            self._go_on(resumed, checkpoint)

    @property
    def _private(self) -> bool:
        return self.settings.privacy is not None

    @property
    def plan(self) -> PrivacyPlan:
        """The plan of a private run.

        Raises:
            PrivacySettingError: the run is not private.
        """
        if self.agreed.plan is None:
            raise PrivacySettingError(
                None, "privacy", "is not set: this run has no differential privacy, and so no plan"
            )
        return self.agreed.plan

    def _clients(
        self, clients: Clients, train: ImageData, parts: list[Tensor], resumed: RunFolder | None
    ) -> InProcess:
        """All clients, with what is theirs; of a resumed run with the ledgers that it has."""
        settings = self.settings
        training, held_out = divided(settings, parts, train)
        ledgers: Sequence[Ledger | None] = [None] * len(parts)
        if settings.privacy is not None and settings.privacy.ledger_folder is not None:
            ledgers = clients.kept_ledgers(settings.privacy.ledger_folder, settings)
        elif settings.privacy is not None:
            beside = None if resumed is None else resumed.path / "ledger"
            if resumed is not None and resumed.has_begun:
                resumed.require_ledgers(clients.fresh_names)
            ledgers = clients.fresh_ledgers(beside, settings)
        elif settings.ledger is not None:
            ledgers = clients.ledgers(settings.ledger, settings)
        return InProcess(
            [
                ClientRuntime(
                    number,
                    settings,
                    self.context,
                    OwnData(train, training[number], held_out[number]),
                    ledgers[number],
                )
                for number in range(len(parts))
            ]
        )

    def _planned_before(
        self, resumed: RunFolder | None, checkpoint: Checkpoint | None
    ) -> Callable[[Sequence[History]], PrivacyPlan] | None:
        """Gives the plan that a resumed run began with; None: none was made yet."""
        if resumed is None or (checkpoint is None and not resumed.has_begun):
            return None
        rows = () if checkpoint is None else checkpoint.rows
        return partial(plan_when_it_began, resumed.path, method=type(self.method), rows=rows)

    def _announce(self, long: str | None, *, new: bool) -> None:
        """What the observer is told before the first round.

        Args:
            long: how long the run takes, if that is worth a line.
            new: the run is not resumed.
        """
        settings, context = self.settings, self.context
        lines = [] if self.over else run_words.headline(settings, self.agreed.plan)
        if long:
            lines.append(long)
        lines += run_words.warnings(settings)
        if new and not self.over:
            networks = context.client_architectures or (context.architecture,)
            lines += place_warnings(settings, context, networks)
        if not self.over:
            self.observer.started(settings, None if self.folder is None else self.folder.final)
        for line in lines:
            self.observer.note(line)

    def run(self) -> RunResult:
        """All rounds that are left, and the result."""
        result: RunResult | None = None
        try:
            result = self._rounds()
            return result
        except KeyboardInterrupt:
            self.observer.note(self._interrupted("interrupted"))
            raise
        except Exception:
            self.observer.note(self._interrupted("failed"))
            raise
        finally:
            if self.folder is not None:
                self.folder.release()
            if not self.over:
                self.observer.ended(None if result is None else result.summary)

    def _rounds(self) -> RunResult:
        for number in range(len(self.metrics) + 1, self.settings.rounds + 1):
            started = time.perf_counter()
            context = self.round_context(number)
            refusal = self.play(context)
            if refusal is not None:
                self._end_early(number, refusal)
                break
            self._record(context, started)
        return self._finish()

    def round_context(self, number: int) -> RoundContext:
        """What the steps of this round know."""
        context = self._plain_context(number)
        keeper = self.checkpoints.steps_of(number)
        return context if keeper is None else replace(context, keeper=keeper)

    def _plain_context(self, number: int) -> RoundContext:
        return replace(
            self.context,
            round=number,
            participants=self.participation.in_round(number),
            reporter=_RoundReporter(self.observer, number),
        )

    def play(self, context: RoundContext) -> Refusal | None:
        """One round; a client's refusal ends it."""
        played = play_round(self.server, self.exchange, context, self.settings.quorum)
        if played.refusal is None:
            self.played = played
            if played.no_quorum is None:  # else the last ones that made a round stay
                self.uploads = dict(played.uploads)
                self._after_uploads(context)
        return played.refusal

    # ------------------------------------------------------------------ to stop, and to go on

    def _go_on(self, folder: RunFolder, checkpoint: Checkpoint | None) -> None:
        """Puts server and clients where the checkpoint has them."""
        if checkpoint is not None:
            device = self.context.device
            self.server.state = checkpoint.state.to(device)
            self.checkpoints.give_memories(self.exchange.clients, device)
            self.uploads = {k: upload.to(device) for k, upload in checkpoint.uploads.items()}
            self.metrics = list(checkpoint.rows)
        done = len(self.metrics)
        folder.rewrite_metrics([self._disclosed(row) for row in self.metrics])
        self.observer.note(f"the run goes on after {done} of {self.settings.rounds} rounds")
        rounds = folder.resumptions()
        if done < self.settings.rounds:
            rounds = folder.resumed(done)
        if self._private:
            words = [privacy_words.resumed(after, self.settings.rounds) for after in rounds]
            self.deviations.extend(words)

    def _keep(self, context: RoundContext) -> None:
        """A checkpoint after a round."""
        sets = {k: u for k, u in self.uploads.items() if isinstance(u, SyntheticSet)}
        following: Sequence[int] = ()
        if context.round < self.settings.rounds:
            following = self.participation.in_round(context.round + 1)
        self.checkpoints.keep(
            Checkpoint(tuple(self.metrics), self.server.state, uploads=sets),
            self.exchange.clients,
            context,
            following,
        )

    def _spent(self) -> str:
        """What has been spent by now, in words; empty without a guarantee."""
        histories = self.exchange.histories() if self._private else []
        if not self._private or not self.plan.guaranteed(histories):
            return ""
        spent = f"{self.plan.epsilon(histories):.4g}"
        return f"; spent: ε = {spent} at δ = {self.plan.privacy.delta:g}"

    def _interrupted(self, how: str) -> Text:
        """What a run that is stopped has done and spent, and how it goes on."""
        parts: list[str | Setting] = [
            f"{how} after {len(self.metrics)} of {self.settings.rounds} rounds{self._spent()}"
        ]
        if self.folder is None:
            parts.append("; nothing was written")
        else:
            parts += ["; to go on: ", Setting(None, "resume", str(self.folder.path))]
        return Text(*parts)

    def _new_folder(self, output: Path, clients: Clients) -> RunFolder:
        """The run folder, with the settings; fresh ledgers go into it, and checkpoints."""
        name = f"{self.method.name}-{self.context.spec.name}"
        folder = RunFolder(output, name)
        folder.write_config(to_toml(self.settings.to_mapping()))
        folder.write_sources([one.text_file for one in own_sources(self.settings).values()])
        if self._private and self.plan.privacy.ledger_folder is None:
            moved = clients.fresh_ledgers(folder.path / "ledger", self.settings)
            for client, ledger in zip(self.exchange.clients, moved, strict=True):
                client.move_ledger(ledger)
        self.checkpoints.begin(folder)
        return folder

    def _begin(self, folder: RunFolder, train: ImageData, parts: list[Tensor]) -> None:
        """Writes what is known before the first round, as far as it is not there."""
        if self._private and not folder.has_begun:
            histories = self.exchange.histories()
            began = Began(id=folder.name, date=f"{datetime.now():%Y-%m-%d}")
            start = privacy_words.start(self.plan, histories, self.test_kind, began)
            folder.write_private_start(start.to_json())
        numbers = [part.numpy() for part in parts]
        counts = count_matrix(train.labels.cpu().numpy(), numbers, train.spec.classes)
        folder.write_partition(counts, self.context.spec.class_names)

    def _end_early(self, number: int, refusal: Refusal) -> None:
        done = number - 1
        self.deviations.append(
            f"ended after {done} of {self.settings.rounds} rounds: {refusal.reason}"
        )
        if not self.over:
            where = "nothing is written"
            if self.folder is not None:
                where = f"what it has done is in {self.folder.final}"
            self.observer.note(f"{self.deviations[-1]}{self._spent()}; {where}")

    def _after_uploads(self, context: RoundContext) -> None:
        """A class that is too rare at every client would otherwise vanish without a word."""
        if context.round == 1 and len(self.uploads) == context.clients:
            sets = [u for u in self.uploads.values() if isinstance(u, SyntheticSet)]
            guaranteed = self._private and self.plan.facts.guaranteed
            for line in run_words.missing_classes(sets, context.spec, guaranteed=guaranteed):
                self.observer.note(line)

    def _record(self, context: RoundContext, started: float) -> None:
        """The round's row, its picture, and the checkpoint."""
        row = round_row(
            self.settings,
            self.agreed.plan,
            self.measure,
            self.server.state,
            context,
            self.played,
            started,
        )
        told = self._disclosed(row)
        self.metrics.append(row)
        self._draw_round(context.round)  # before the checkpoint, which says that the round is over
        self._keep(context)
        if self.folder is not None:
            self.folder.append_metrics(told)
        self.observer.round_ended(told.shown)

    def _disclosed(self, row: Mapping[str, Any]) -> Disclosed:
        return disclosed(row, declared_row(type(self.method)) if self._private else None)

    def _finish(self) -> RunResult:
        if self.metrics:
            self.server.end(self._plain_context(len(self.metrics)))
        state = self.server.state
        accuracy = self.measure.final_accuracy(self.metrics, state, self.context)
        artefacts = self.method.artefacts(state)
        report = None
        promised = None
        if self._private:
            histories = self.exchange.histories()
            report = build_report(self._report_context(), histories)
            promised = privacy_words.summary(self.plan, histories).to_json()
        summary = summarise(
            self.settings,
            self.metrics,
            accuracy,
            device=str(self.context.device),
            test=self.test_kind,
            hidden=self.measure.hidden,
            privacy=promised,
        )
        declared = declared_summary(type(self.method)) if self._private else None
        told = disclosed(summary, declared)
        summary = dict(told.shown)
        if self.folder is not None:
            results = Results(
                self.method,
                state,
                self.context,
                self.server.final_parameters(),
                self.uploads,
                report,
            )
            report = results.write(self.folder, self._picture_missing)
            summary["folder"] = str(self.folder.finish(told))
            # not before: without it a run that is killed here would begin anew
            self.checkpoints.discard(self.folder)
        return RunResult(
            self.settings,
            accuracy,
            self.metrics,
            self.context.load(self.server.final_parameters()),
            self.uploads,
            report,
            self.folder.path if self.folder else None,
            summary,
            artefacts,
            tuple(self.deviations),
        )

    def _report_context(self) -> ReportContext:
        budgets = [client.budget for client in self.exchange.clients]
        return report_context(
            self.plan,
            len(self.metrics),
            self.deviations,
            test=self.test_kind,
            secret=all(budget.secret.is_secret for budget in budgets if budget is not None),
            began=_today() if self.folder is None else self.folder.began(),
        )

    def _sets(self) -> list[tuple[int, Tensor, Tensor]]:
        """The last uploads' synthetic sets: client, images, labels."""
        return [
            (client, upload.images, upload.labels)
            for client, upload in self.uploads.items()
            if isinstance(upload, SyntheticSet)
        ]

    def _picture_missing(self, error: OutputError) -> None:
        """Said once: a disk that is full stays so."""
        if not self.pictures_missing:
            self.observer.note(f"warning: a picture is missing: {error}")
        self.pictures_missing = True

    def _draw_round(self, number: int) -> None:
        """A picture of what was sent in this round; one that cannot be made is only said."""
        sets = self._sets()
        if self.folder is None or not sets or self.played.no_quorum is not None:
            return
        try:
            self.folder.draw_round(number, sets, self.context.spec)
        except OutputError as error:
            self._picture_missing(error)


def _today() -> Began:
    """Of a run that leaves no folder."""
    return Began(id=None, date=f"{datetime.now():%Y-%m-%d}")


@dataclass(frozen=True)
class _RoundReporter:
    """Tells an observer of one round's steps."""

    observer: Observer
    number: int

    def report(self, phase: str, done: int, total: int) -> None:
        self.observer.step(self.number, phase, done, total)

    def note(self, text: str) -> None:
        self.observer.note(text)
