"""What is written down of a run, from its private start to its results; of a simulation and of a
run over nodes alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.state import ServerState
from fedsynth.data.files import one_line
from fedsynth.errors import FedsynthError
from fedsynth.federation.exchange.protocol import Refusal
from fedsynth.federation.exchange.rounds import Played
from fedsynth.federation.exchange.server import Server
from fedsynth.federation.observer import Observer
from fedsynth.federation.outputs import privacy_words
from fedsynth.federation.outputs.disclosed import (
    Declared,
    Disclosed,
    declared_row,
    declared_summary,
    disclosed,
    finite,
)
from fedsynth.federation.outputs.final_files import FinalFiles
from fedsynth.federation.outputs.measure import Measure
from fedsynth.federation.outputs.report_facts import report_facts, rows_before
from fedsynth.federation.outputs.result import summarise
from fedsynth.federation.outputs.round_row import round_row
from fedsynth.federation.outputs.run_folder import RunFolder
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.history import History
from fedsynth.privacy.report import build_report
from fedsynth.privacy.report_figures import Began, Event
from fedsynth.privacy.report_pages import event_text


@dataclass(frozen=True)
class Ended:
    """What a run has come to.

    Attributes:
        accuracy: the final model's; None: it was not tested.
        report: the privacy report; None without privacy.
        summary: what may be shown of it all.
        folder: the run's; None: nothing was written.
    """

    accuracy: float | None
    report: dict[str, Any] | None
    summary: dict[str, Any]
    folder: Path | None


@dataclass
class RunRecord:
    """One run's.

    Args:
        settings: the run's.
        plan: of a private run; None without differential privacy.
        folder: the run's; None: nothing is written.
        observer: told of what is new.
        measure: of the run's models.
        test: what the test images are: "public", "private" or "none".
        simulated: all clients are in one process; else each is where its data are, and what only a
            simulation may show is shown nowhere.

    Attributes:
        warnings: what the run's report is to warn of; complete before `begin`.
        rows: of the rounds so far.
        events: what did not go as planned.
    """

    settings: RunSettings
    plan: PrivacyPlan | None
    folder: RunFolder | None
    observer: Observer
    measure: Measure
    test: str
    simulated: bool
    warnings: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _missing: set[str] = field(default_factory=set)

    def begin(self, histories: Sequence[History]) -> None:
        """Writes what a private run begins with, if it is not there: what its clients' ledgers hold
        now. A run that is resumed adds its own warnings."""
        if self.plan is None or self.folder is None:
            return
        if not self.folder.has_begun:
            began = Began.today(self.folder.name)
            made = privacy_words.start(
                self.plan, histories, self.test, began, self.warnings, simulated=self.simulated
            )
            self.folder.write_private_start(made.to_json())
            return
        start = self.folder.private_start()
        new = [one for one in self.warnings if one not in start["warnings"]]
        if new:
            start["warnings"] += new
            self.folder.write_private_start(start)

    def go_on(self, folder: RunFolder, rows: Sequence[dict[str, Any]]) -> None:
        """Goes on after these rounds, in the folder that has them."""
        self.rows = list(rows)
        done = len(rows)
        rounds = self.settings.rounds
        folder.rewrite_metrics([self._disclosed(row) for row in rows])
        self.observer.note(f"the run goes on after {done} of {rounds} rounds")
        for after in folder.resumed(done) if done < rounds else folder.resumptions():
            self.events.append(Event(kind="resumed", after=after))

    def row(
        self, state: ServerState, context: RoundContext, played: Played, started: float
    ) -> Disclosed:
        """Takes the row of a round that has been played; to be told once the round is kept."""
        made = round_row(
            self.settings, self.plan, self.measure, state, context, played, started, self.figures
        )
        told = self._disclosed(made)
        self.rows.append(made)
        return told

    def tell(self, row: Disclosed) -> None:
        """Writes and tells a round's row."""
        if self.folder is not None:
            self.folder.append_metrics(row)
        self.observer.round_ended(row.shown)

    def ended_early(self, refusal: Refusal) -> str:
        """Notes that a client's refusal has ended the run; returns that in words."""
        done = len(self.rows)
        self.events.append(Event.ended(done, refusal.spent, refusal.reason))
        return self.deviations[-1]

    @property
    def deviations(self) -> tuple[str, ...]:
        """What did not go as planned, in words."""
        rounds = self.settings.rounds
        cap = None if self.settings.privacy is None else self.settings.privacy.epsilon
        return tuple(
            event_text(event, rounds, cap, simulated=self.simulated) for event in self.events
        )

    def figures(self, name: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Computes figures about the run, without any that are not finite.

        They never end a run: its rounds may be charged, and a resumed run is charged again for the
        round that has not ended. What cannot be computed is noted once.

        Args:
            name: of the figures, for the note.
            make: computes them.

        Returns:
            Empty if they cannot be computed.

        Raises:
            PrivacyError: figures that may not be shown, or a ledger that cannot be written.
        """
        try:
            return dict(finite(make()))
        except PrivacyError:
            raise
        except Exception as error:
            self.missing(name, error)
            return {}

    def missing(self, name: str, error: Exception) -> None:
        """Notes once that something about the run is missing: a full disk stays full."""
        if name not in self._missing:
            self._missing.add(name)
            kind = "" if isinstance(error, FedsynthError) else f"{type(error).__name__}: "
            self.observer.note(f"warning: no {name}: {kind}{one_line(error)}")

    def end(
        self,
        server: Server,
        context: RoundContext,
        uploads: Mapping[int, Message],
        histories: Sequence[History],
        *,
        secret: bool = True,
    ) -> Ended:
        """Report, results and summary; the folder gets its final name.

        Args:
            server: after its last step.
            context: of a round of the run.
            uploads: of the last round that counted.
            histories: what the clients' ledgers hold.
            secret: whether all clients' noise came from the operating system's keys.
        """
        state = server.state
        accuracy = self.measure.final_accuracy(self.rows, state, context, self.figures)
        report = None
        promised = None
        if self.plan is not None:
            report = self._report(self.plan, histories, secret=secret)
            promised = privacy_words.summary(
                self.plan, histories, simulated=self.simulated
            ).to_json()
        summary = summarise(
            self.settings,
            self.rows,
            accuracy,
            device=str(context.device),
            test=self.test,
            hidden=self.measure.hidden,
            privacy=promised,
        )
        method = self.settings.method
        told = self._told(summary, None if self.plan is None else declared_summary(type(method)))
        shown = dict(told.shown)
        if self.folder is None:
            return Ended(accuracy, report, shown, None)
        files = FinalFiles(method, state, context, server.final_parameters(), uploads, report)
        report = files.write(self.folder, self.missing)
        folder = self.folder.finish(told)
        return Ended(accuracy, report, {**shown, "folder": str(folder)}, folder)

    def _report(
        self, plan: PrivacyPlan, histories: Sequence[History], *, secret: bool
    ) -> dict[str, Any]:
        began, warnings = Began.today(None), self.warnings
        if self.folder is not None:  # a run that is resumed was begun by another process
            start = self.folder.private_start()
            began, warnings = Began(**start["run"]), start["warnings"]
        facts = report_facts(
            plan,
            len(self.rows),
            self.events,
            test=self.test,
            secret=secret,
            began=began,
            warnings=warnings,
            simulated=self.simulated,
        )
        return build_report(facts, histories, rows_before(plan))

    def _disclosed(self, row: Mapping[str, Any]) -> Disclosed:
        return self._told(
            row, None if self.plan is None else declared_row(type(self.settings.method))
        )

    def _told(self, values: Mapping[str, Any], declared: Declared | None) -> Disclosed:
        """Over nodes without what goes by the records, which nobody keeps there."""
        told = disclosed(values, declared)
        return told if self.simulated else Disclosed(told.shown)
