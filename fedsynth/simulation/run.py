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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from fedsynth.config.checks import long_run
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.data.images import ImageData
from fedsynth.data.partition import count_matrix
from fedsynth.federation.client_runtime import ClientRuntime, OwnData
from fedsynth.federation.context import public_context, with_proxy
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.observer import Observer
from fedsynth.federation.position_leak_check import check_private_steps
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import Refusal
from fedsynth.federation.round_loop import Played, agree, play_round
from fedsynth.federation.run_data import PRIVATE, Clients, divided
from fedsynth.federation.server import Server
from fedsynth.methods import is_own_method
from fedsynth.models.registry import is_own_model
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.report.formatting import format_epsilon
from fedsynth.results.checkpoint import Checkpoint, run_identity
from fedsynth.results.loop_checkpoints import LoopCheckpoints
from fedsynth.results.measure import Measure
from fedsynth.results.private_run import plan_when_it_began
from fedsynth.results.result import RunResult, own_sources
from fedsynth.results.run_checkpoints import RunCheckpoints
from fedsynth.results.run_folder import RunFolder
from fedsynth.results.run_record import RunRecord
from fedsynth.simulation import run_messages
from fedsynth.synthesizer.condensation.sets import synthetic_sets
from fedsynth.toml_file import to_toml


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
        trained: Path | None = None,
    ) -> None:
        self.settings = settings
        self.method = settings.method
        self.observer = observer
        long = long_run(settings, train.spec)
        context = public_context(settings, train.spec, train.labels.device)
        self.method.check_model(context.architecture)
        self.context = with_proxy(context, settings, download=download)
        warnings = check_private_steps(settings, self.context)  # before anything is opened
        identity = partial(run_identity, settings, train, test[0], parts)
        shared = trained if _may_share(settings) else None
        self.checkpoints = RunCheckpoints(settings, identity, shared)
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
        hidden = self._private and test[1] == PRIVATE
        local = settings.partition.local_test > 0
        self.record = RunRecord(
            settings,
            self.agreed.plan,
            self.folder,
            observer,
            Measure(self.method, self.exchange, test[0], hidden, local),
            test[1],
            simulated=True,
            warnings=warnings,
        )
        if self.folder is not None:
            self._begin(self.folder, train, parts)
        self._announce(long, new=new)
        self.server = Server.begun(self.method, self.context)
        self.uploads: dict[int, Message] = {}
        self.played = Played()
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
                None,
                "privacy",
                "is not set: this run has no differential privacy, so it has no plan",
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
            folder_ledgers = None if resumed is None else resumed.path / "ledger"
            if resumed is not None and resumed.has_begun:
                resumed.require_ledgers(clients.fresh_names)
            ledgers = clients.fresh_ledgers(folder_ledgers, settings)
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
        """Notifies the observer before the first round.

        Args:
            long: a line on the expected duration; None: no such line.
            new: False for a resumed run.
        """
        settings = self.settings
        lines = [] if self.over else run_messages.headline(settings, self.agreed.plan)
        if long:
            lines.append(long)
        lines += run_messages.warnings(settings)
        if new and not self.over:
            lines += [f"warning: {warning}" for warning in self.record.warnings]
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
        for number in range(len(self.record.rows) + 1, self.settings.rounds + 1):
            started = time.perf_counter()
            context = self.round_context(number)
            refusal = self.play(context)
            if refusal is not None:
                self._end_early(refusal)
                break
            previous = (
                context.keeper.earlier if isinstance(context.keeper, LoopCheckpoints) else 0.0
            )
            self._record(context, started - previous)
        return self._finish()

    def round_context(self, number: int) -> RoundContext:
        """Returns the context of this round's steps."""
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
        rows = [] if checkpoint is None else checkpoint.rows
        for client in self.exchange.clients if len(rows) < self.settings.rounds else ():
            if client.budget is not None:  # before the folder claims that it was resumed
                client.budget.ledger.note_resumption(len(rows))
        self.record.go_on(folder, rows)

    def _keep(self, context: RoundContext) -> None:
        """A checkpoint after a round."""
        following: Sequence[int] = ()
        if context.round < self.settings.rounds:
            following = self.participation.in_round(context.round + 1)
        self.checkpoints.keep(
            Checkpoint(
                tuple(self.record.rows), self.server.state, uploads=synthetic_sets(self.uploads)
            ),
            self.exchange.clients,
            context,
            following,
        )

    def _spent(self) -> str:
        """Returns the text on the cost so far; empty without a guarantee."""
        histories = self.exchange.histories() if self._private else []
        if not self._private or not self.plan.guaranteed(histories):
            return ""
        spent = format_epsilon(self.plan.epsilon(histories))
        return f"; spent: ε = {spent} at δ = {self.plan.privacy.delta:g}"

    def _interrupted(self, reason: str) -> str:
        """Returns what a stopped run has done and spent, and how to resume it."""
        progress = f"{reason} after {len(self.record.rows)} of {self.settings.rounds} rounds"
        if self.folder is None:
            return f"{progress}{self._spent()}; nothing was written"
        charge_note = ""
        if self._private:
            charge_note = "; an interrupted round is charged again when the run is resumed"
        return f"{progress}{self._spent()}{charge_note}; to resume: --resume {self.folder.path}"

    def _new_folder(self, output: Path, clients: Clients) -> RunFolder:
        """The run folder, with the settings; fresh ledgers go into it, and checkpoints."""
        name = f"{self.method.name}-{self.context.spec.name}"
        folder = RunFolder(output, name)
        folder.write_config(to_toml(self.settings.to_mapping()))
        folder.write_sources([code.text_file for code in own_sources(self.settings).values()])
        if self._private and self.plan.privacy.ledger_folder is None:
            moved = clients.fresh_ledgers(folder.path / "ledger", self.settings)
            for client, ledger in zip(self.exchange.clients, moved, strict=True):
                client.move_ledger(ledger)
        self.checkpoints.begin(folder)
        return folder

    def _begin(self, folder: RunFolder, train: ImageData, parts: list[Tensor]) -> None:
        """Writes what is known before the first round, as far as it is not there."""
        if self._private:
            self.record.begin(self.exchange.histories())
        numbers = [part.numpy() for part in parts]
        counts = count_matrix(train.labels.cpu().numpy(), numbers, train.spec.classes)
        folder.write_partition(counts, self.context.spec.class_names)

    def _end_early(self, refusal: Refusal) -> None:
        message = self.record.ended_early(refusal)
        if not self.over:
            location = "nothing was written"
            if self.folder is not None:
                location = f"its results are in {self.folder.final}"
            self.observer.note(f"{message}{self._spent()}; {location}")

    def _after_uploads(self, context: RoundContext) -> None:
        """A class that is too rare at every client would otherwise vanish without a word."""
        if context.round == 1 and len(self.uploads) == context.clients:
            sets = list(synthetic_sets(self.uploads).values())
            guaranteed = self._private and self.plan.facts.guaranteed
            for line in run_messages.missing_classes(sets, context.spec, guaranteed=guaranteed):
                self.observer.note(line)

    def _record(self, context: RoundContext, started: float) -> None:
        """The round's row, its picture, and the checkpoint."""
        row = self.record.row(self.server.state, context, self.played, started)
        self._draw_round(context.round)  # before the checkpoint, which marks the round as finished
        self._keep(context)
        self.record.tell(row)

    def _finish(self) -> RunResult:
        rows = self.record.rows
        if rows:
            self.server.end(self._plain_context(len(rows)))
        artefacts = self.method.artefacts(self.server.state)
        budgets = [client.budget for client in self.exchange.clients]
        ended = self.record.end(
            self.server,
            self.context,
            self.uploads,
            self.exchange.histories() if self._private else [],
            secret=all(budget.secret.is_secret for budget in budgets if budget is not None),
        )
        if self.folder is not None:
            # not earlier: without its checkpoint, a run that is killed here would start again
            self.checkpoints.discard(self.folder)
        return RunResult(
            self.settings,
            ended.accuracy,
            rows,
            self.context.load(self.server.final_parameters()),
            self.uploads,
            ended.report,
            ended.folder,
            ended.summary,
            artefacts,
            self.record.deviations,
        )

    def _draw_round(self, number: int) -> None:
        """A picture of what was sent in this round; one that cannot be made is only said."""
        sets = [
            (k, images.images, images.labels) for k, images in synthetic_sets(self.uploads).items()
        ]
        if self.folder is None or not sets or self.played.no_quorum is not None:
            return
        try:
            self.folder.draw_round(number, sets, self.context.spec)
        except Exception as error:  # it may not end the run, whose round is charged
            self.record.missing("picture", error)


def _may_share(settings: RunSettings) -> bool:
    """Returns True if runs can share trained client models: runs of one round without privacy,
    whose models and methods are built in, so that their settings identify them."""
    custom = is_own_model(settings.model) or is_own_method(settings.method) or own_sources(settings)
    return settings.rounds == 1 and settings.privacy is None and not custom


@dataclass(frozen=True)
class _RoundReporter:
    """Tells an observer of one round's steps."""

    observer: Observer
    number: int

    def report(self, phase: str, completed: int, total: int) -> None:
        self.observer.step(self.number, phase, completed, total)

    def note(self, text: str) -> None:
        self.observer.note(text)
