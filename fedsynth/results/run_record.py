"""Records a run's metrics and results, and defines summary.json's content.

Both simulations and runs over a network use this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import Measurements, PersonalModels, SyntheticImages
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, Tensors
from fedsynth.data.registry import CLASSIFICATION, DatasetSpec
from fedsynth.errors import FedsynthError, PrivacyError, one_line
from fedsynth.evaluation import GENERATOR, MEASURES, NAMES, Names
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import Observer, Refusal
from fedsynth.federation.run_data import NO_TEST, PRIVATE
from fedsynth.federation.server import RoundResult, Server
from fedsynth.methods import own_label
from fedsynth.own_code import SOURCES, OwnCode
from fedsynth.privacy.ledger.ledger import Histories
from fedsynth.privacy.report.build import build_report, write_report
from fedsynth.privacy.report.figures import Event, RunStart, Start
from fedsynth.privacy.report.file import hash_of_files
from fedsynth.privacy.report.pages import event_text
from fedsynth.results import disclosed
from fedsynth.results.file_names import MODEL
from fedsynth.results.measure import Measure
from fedsynth.results.report_facts import exported_files, privacy_section, report_facts, start_facts
from fedsynth.results.run_folder import SERVER, RunFolder, Sets, private_start, resumed_rounds
from fedsynth.results.saved_model import Architecture, write_model
from fedsynth.synthesizer.condensation.sets import synthetic_sets


@dataclass(frozen=True)
class RunResult:
    """A run's result, as returned by `simulate`.

    Args:
        settings: the run's settings, with the actual name of the data set and the actual kind of
            partition.
        accuracy: the accuracy of the global model on the test set, in [0, 1], or the mean Dice
            coefficient in segmentation. None if there is no test set or no round. For a method with
            personal models (FedBN, SOLO), this accuracy is not the result: use AMP, in `local` in
            the last round's metrics. On a private test set, the accuracy is an exact function of
            private data. It is available here to whoever runs the simulation, but is in no file
            outside `simulation_only`.
        metrics: the metrics of each round.
        model: the final model, on the run's device.
        uploads: the uploads of the last round, by client.
        privacy: the privacy report, or None without differential privacy.
        folder: the run folder, or None if no files were written.
        summary: the content of summary.json.
        artefacts: matrices [classes, clients] that the server measured, such as FedHydra's
            stratification.
        deviations: sentences that describe how the run deviated from its plan, for example why it
            ended early.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, simulate
    >>> settings = RunSettings(FedAvg(local_steps=1), rounds=2, model=ModelSettings("linear"))
    >>> result = simulate(settings)
    >>> len(result.uploads), result.uploads[0].floats, result.metrics[-1]["upload_floats"]
    (10, 650, 6500)
    >>> result.accuracy == result.metrics[-1]["test_accuracy"], result.privacy, result.folder
    (True, None, None)
    """

    settings: RunSettings
    accuracy: float | None
    metrics: list[dict[str, Any]]
    model: nn.Module
    uploads: dict[int, Message]
    privacy: dict[str, object] | None
    folder: Path | None
    summary: dict[str, Any]
    artefacts: Tensors = field(default_factory=dict)
    deviations: tuple[str, ...] = ()


def own_sources(settings: RunSettings) -> dict[str, OwnCode]:
    """Returns the user's Python files for a run's method, model and feature maps."""
    labels = {"method": own_label(settings.method.name), "model": settings.model.name}
    for number, name in enumerate(settings.model.client_names):
        labels[f"client model {number}"] = name
    for name in settings.feature_names:
        if name in SOURCES:
            labels["features"] = name
    labels["loss"] = str(getattr(settings.method, "matching", ""))
    if settings.encoder is not None:
        labels["encoder"] = settings.encoder.encoder
    return {key: SOURCES[label] for key, label in labels.items() if label in SOURCES}


def summarise(
    settings: RunSettings,
    metrics: Sequence[Mapping[str, Any]],
    final: Mapping[str, Any],
    *,
    device: str,
    test: str,
    privacy: Mapping[str, Any] | None,
    names: Names = NAMES[CLASSIFICATION],
) -> dict[str, Any]:
    """Returns summary.json's content, except the run folder's path.

    For a private run, the result includes values that only a simulation may show.
    `fedsynth.results.disclosed` separates them.

    Args:
        settings: the settings of the run.
        metrics: the metrics of each round.
        final: the measures of the final model on the test set.
        device: torch's name for the device.
        test: the kind of test images: "public", "private" or "none".
        privacy: the privacy section, or None without differential privacy.
        names: the keys of the main measure.
    """
    method = settings.method
    personal = isinstance(method, PersonalModels)
    hidden = privacy is not None and test == PRIVATE
    summary: dict[str, Any] = {
        "method": method.name,
        "settings": method.to_dict(),
        "dataset": settings.dataset,
        "rounds": len(metrics),
        names.test: None if hidden or personal else final.get(names.test),
    }
    if personal and not hidden:
        summary[names.common] = final.get(names.common)
    if not hidden:
        summary |= {name: final[name] for name in (*MEASURES, disclosed.CONFUSION) if name in final}
    summary["upload_bytes"] = sum(row["upload_bytes"] for row in metrics)
    last: Mapping[str, Any] = next(reversed(metrics), {})
    summary["upload_floats_per_round"] = last.get("upload_floats", 0)
    summary |= {"device": device, "seed": settings.seed}
    if test == NO_TEST or hidden:
        summary["test_data"] = test
    summary["seconds"] = round(sum(row.get("seconds", 0.0) for row in metrics), 3)
    summary |= _last_measures(metrics, final, names)
    if privacy is not None:
        summary[disclosed.GUARANTEE] = privacy
    if sources := own_sources(settings):
        summary[disclosed.SOURCES] = {
            key: {"file": entry.file, "name": entry.name, "sha256": entry.sha256}
            for key, entry in sources.items()
        }
    return summary


def _last_measures(
    metrics: Sequence[Mapping[str, Any]], final: Mapping[str, Any], names: Names
) -> dict[str, Any]:
    """Returns the measures of the final model, and of the last generator.

    `final` has them if the last round was not evaluated.
    """
    last: Mapping[str, Any] = {**final, **(metrics[-1] if metrics else {})}
    measures: dict[str, Any] = {}
    if "domain_average" in last:
        measures["domain_average"] = last["domain_average"]
    if disclosed.MODELS in last:
        measures[disclosed.MODELS] = {
            name: {names.test: entry[names.test]}
            for name, entry in last[disclosed.MODELS].items()
            if names.test in entry
        }
    generators = [row[GENERATOR] for row in metrics if GENERATOR in row]
    if generators:
        measures[GENERATOR] = generators[-1]
    if disclosed.LOCAL in last:
        local = last[disclosed.LOCAL]
        measures[disclosed.LOCAL] = {name: local[name] for name in ("amp", "fm", "wlp")}
    return measures


def sent_sets(uploads: Mapping[int, Message]) -> Sets:
    """Returns the synthetic sets among the uploads, for `RunFolder.write_synthetic`."""
    sets: Sets = []
    for client, upload in synthetic_sets(uploads).items():
        sets.append((client, upload.images, upload.labels, upload.soft_labels()))
    return sets


@dataclass
class RunRecord:
    """Collects a run's metrics, and writes metrics and results into the run folder.

    Args:
        settings: the run's settings.
        plan: the plan of a private run, or None without differential privacy.
        folder: the run folder, or None if no files are written.
        observer: receives notes and the metrics of each round.
        measure: measures the run's models.
        test: the kind of test images: "public", "private" or "none".
        simulated: True if all clients are in one process, False if each client runs where its data
            are. In the second case, values that only a simulation may show are not recorded.

    Attributes:
        warnings: the warnings to include in the report. The list must be complete when `begin` is
            called.
        rows: the metrics of each round so far.
        events: the deviations from the plan.
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

    def begin(
        self, histories: Histories, charge_id: str = "", selected: datetime | None = None
    ) -> None:
        """Writes a private run's initial state into the run folder, before the first round.

        The initial state includes the current contents of the clients' ledgers. If the run is
        resumed, the initial state is already in the folder, and only new warnings are added.

        Args:
            histories: the contents of the clients' ledgers.
            charge_id: the identifier of the run's lines in the ledgers.
            selected: the time when the selection began, if the run is a trial of one.
        """
        if self.plan is None or self.folder is None:
            return
        if self.folder.has_begun:
            start = private_start(self.folder.path)
            warnings = list(dict.fromkeys([*start.warnings, *self.warnings]))
            start = start.model_copy(update={"warnings": warnings})
        else:
            start = self._start(self.plan, histories, self.folder.final.name)
            start = start.model_copy(update={"charge_id": charge_id})
            if selected is not None:  # the trial's own date would hint at its number
                run = RunStart(id=start.run.id, date=selected.date().isoformat())
                start = start.model_copy(update={"selected": True, "run": run})
        self.folder.write_private_start(start)

    def _start(self, plan: PrivacyPlan, histories: Histories, name: str | None) -> Start:
        run, test = RunStart.today(name), self.test
        return start_facts(plan, histories, test, run, self.warnings, simulated=self.simulated)

    def go_on(self, folder: RunFolder, rows: Sequence[dict[str, Any]]) -> None:
        """Restores the finished rounds' metrics when a run is resumed.

        Args:
            folder: the run folder.
            rows: the metrics of the finished rounds.
        """
        self.rows = list(rows)
        completed = len(rows)
        rounds = self.settings.rounds
        folder.rewrite_metrics(list(map(self._disclosed, rows)))
        self.observer.note(f"the run resumes after {completed} of {rounds} rounds")
        if completed < rounds:
            folder.note_resumption(completed)
        for number in resumed_rounds(folder.path):
            self.events.append(Event(kind="resumed", rounds_done=number))

    def is_evaluated(self, number: int) -> bool:
        """Returns True if the models are evaluated after a round."""
        return number % self.settings.evaluate_every == 0 or number == self.settings.rounds

    def row(
        self, state: ServerState, context: RoundContext, played: RoundResult, started: float
    ) -> disclosed.Disclosed:
        """Computes and records a finished round's metrics.

        The result separates the metrics that may be shown from those that only a simulation may
        show.

        Args:
            state: the server's state after the round.
            context: the context of the round.
            played: the result of the round.
            started: the time at which the round started, from `time.perf_counter`.
        """
        number = context.round
        method = self.settings.method
        row: dict[str, Any] = {"round": number}
        if isinstance(method, Measurements):
            facts = partial(method.facts, state, context)
            client_states = self.measure.backend.client_states(sorted(played.uploads))
            of_clients = partial(method.client_metrics, client_states)
            planned = partial(method.planned_facts, context)
            row |= self._of_method("planned metrics", planned, planned=True)
            row |= self._of_method("metrics of the server", facts)
            row |= self._of_method("metrics of the clients", of_clients)
        if self.is_evaluated(number):
            row |= self.measure.row(state, context, self.figures)
            row |= self.measure.optional(state, context, played.uploads, self.figures)
        if self.plan is not None:
            histories = self.measure.backend.histories()
            if self.plan.guaranteed(histories):
                row["epsilon"] = self.plan.epsilon(histories)
        row |= {"upload_floats": 0, "client_upload_bytes": []}
        for messages in played.sent.values():
            row["upload_floats"] += sum(message.floats for message in messages)
            row["client_upload_bytes"].append(sum(message.nbytes for message in messages))
        row["upload_bytes"] = sum(row["client_upload_bytes"])
        if len(context.active) < context.clients:
            row["participants"] = list(context.active)
        row |= disclosed.lost_clients(played)
        row["seconds"] = round(time.perf_counter() - started, 3)
        public = self._disclosed(row)
        self.rows.append(row)
        return public

    def tell(self, row: disclosed.Disclosed) -> None:
        """Writes a round's metrics into the run folder, and notifies the observer."""
        if self.folder is not None:
            self.folder.append_metrics(row)
        self.observer.round_ended(row.public)

    def ended_early(self, refusal: Refusal) -> str:
        """Records that the run ended early because a client refused the next round.

        Returns a sentence about this, to be printed.
        """
        self.events.append(Event.ended(len(self.rows), refusal.spent, refusal.reason))
        return self.deviations[-1]

    @property
    def deviations(self) -> tuple[str, ...]:
        """Sentences that describe the run's deviations from its plan."""
        cap = None if self.plan is None else self.plan.privacy.epsilon
        rounds = self.settings.rounds
        return tuple(event_text(e, rounds, cap, simulated=self.simulated) for e in self.events)

    def figures(self, name: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Computes metrics about the run, and ignores errors in the computation.

        If the computation fails, the failure is noted once, and an empty mapping is returned. In
        the metrics, None replaces infinities and NaN. A failure here must not end the run: the
        rounds may already be charged to the ledgers, and a resumed run would be charged again for
        the unfinished round.

        Args:
            name: the name of the metrics, for the note.
            make: the function that computes the metrics.

        Raises:
            PrivacyError: the metrics may not be shown, or a ledger cannot be written.
        """
        try:
            return dict(disclosed.finite(make()))
        except PrivacyError:
            raise
        except Exception as error:
            self.missing(name, error)
            return {}

    def _of_method(
        self, name: str, make: Callable[[], Mapping[str, Any]], *, planned: bool = False
    ) -> Mapping[str, Any]:
        """Computes a method's own metrics, and leaves out those that may not be recorded."""
        metrics = self.figures(name, make)
        faults = disclosed.metric_faults(metrics, self._declared, planned=planned)
        for key, fault in faults.items():
            self.missing(f"metric {one_line(key, 80)}", fault)
        return {key: value for key, value in metrics.items() if key not in faults}

    def missing(self, name: str, error: Exception | str) -> None:
        """Records that a part of the results is missing.

        The note is made only once per name, because a cause such as a full disk would repeat it
        each round.
        """
        if name not in self._missing:
            self._missing.add(name)
            text = one_line(error)
            if not isinstance(error, FedsynthError | str):
                text = f"{type(error).__name__}: {text}"
            self.observer.note(f"warning: cannot record the {name}: {text}")

    def end(
        self,
        server: Server,
        context: RoundContext,
        uploads: Mapping[int, Message],
        histories: Histories,
        *,
        secret: bool = True,
    ) -> RunResult:
        """Writes the privacy report, the results and the summary, and renames the run folder.

        Args:
            server: the server after its last step.
            context: the context of any round of the run.
            uploads: the uploads of the last round whose result was used.
            histories: the contents of the clients' ledgers.
            secret: whether the keys for all clients' noise came from the operating system.
        """
        final = self.measure.final_measures(self.rows, server.state, context, self.figures)
        report = privacy = declared = None
        if self.plan is not None:
            report = self._report(self.plan, histories, secret=secret)
            privacy = privacy_section(self.plan, histories, simulated=self.simulated).to_json()
            declared = disclosed.SUMMARY
        device = str(context.device)
        summary = summarise(
            self.settings,
            self.rows,
            final,
            device=device,
            test=self.test,
            privacy=privacy,
            names=self.measure.names,
        )
        allowed = self._allowed(summary, declared)
        public = dict(allowed.public)
        accuracy = final.get(self.measure.accuracy_name)
        folder = None
        if self.folder is not None:
            report = self._write_results(self.folder, server, context, uploads, report, allowed)
            folder = self.folder.finish()
            public["folder"] = str(folder)
        return RunResult(
            self.settings,
            accuracy,
            self.rows,
            context.load(server.final_parameters()),
            dict(uploads),
            report,
            folder,
            public,
            self._artefacts(server),
            self.deviations,
        )

    def _write_results(
        self,
        folder: RunFolder,
        server: Server,
        context: RoundContext,
        uploads: Mapping[int, Message],
        report: dict[str, Any] | None,
        summary: disclosed.Disclosed,
    ) -> dict[str, Any] | None:
        """Writes a run's results into the run folder.

        Returns the privacy report, which contains the hashes of the result files.

        The report is written first and the pictures last, so that a failed picture never costs a
        result. The ledgers receive a hash of the result files before the report states them.
        """
        method = self.settings.method
        if report is not None:
            write_report(report, folder.path)
        architecture = Architecture(context.spec, self.settings.model, self.settings)
        model = context.load(server.final_parameters())
        write_model(folder.path / MODEL, model, architecture)
        sets = sent_sets(uploads)
        if isinstance(method, SyntheticImages):
            images = method.synthetic(server.state, context)
            if images is not None:
                sets.append((SERVER, *images))
        if sets:
            folder.write_synthetic(sets, context.spec)
        folder.write_artefacts(self._artefacts(server))
        folder.write_summary(summary)
        if report is not None:
            files = exported_files(folder.path)
            self.measure.backend.note_files(hash_of_files(files))
            report = {**report, "files": files}
            write_report(report, folder.path)
        self.draw(sets, context.spec, "synthetic.png")
        return report

    def _artefacts(self, server: Server) -> Tensors:
        method = self.settings.method
        return method.artefacts(server.state) if isinstance(method, Measurements) else {}

    def draw(self, sets: Sets, spec: DatasetSpec, name: str) -> None:
        """Draws synthetic images as a picture in the run folder, if there are any.

        An error does not end the run, because the round has already been charged. It is only noted.
        """
        try:
            if sets and self.folder is not None:
                self.folder.draw_synthetic(sets, spec, name)
        except Exception as error:
            self.missing("picture", error)

    def _report(self, plan: PrivacyPlan, histories: Histories, *, secret: bool) -> dict[str, Any]:
        start = self._start(plan, plan.histories, None)
        if self.folder is not None:  # a resumed run was begun by another process
            start = private_start(self.folder.path)
        facts = report_facts(plan, len(self.rows), self.events, start, secret=secret)
        return build_report(facts, histories, start.ledgers)

    @property
    def _declared(self) -> disclosed.Declared | None:
        """The declaration of each metric of a round, or None without differential privacy."""
        return None if self.plan is None else disclosed.declared_row(type(self.settings.method))

    def _disclosed(self, row: Mapping[str, Any]) -> disclosed.Disclosed:
        return self._allowed(row, self._declared)

    def _allowed(
        self, values: Mapping[str, Any], declared: disclosed.Declared | None
    ) -> disclosed.Disclosed:
        """Splits values into public ones and those that only a simulation may show.

        In a run over a network, the values that only a simulation may show are dropped."""
        metrics = disclosed.disclosed(values, declared)
        if self.simulated:
            return metrics
        return disclosed.Disclosed(metrics.public)
