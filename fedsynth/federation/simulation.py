"""A federation on one machine: `simulate`, and the loop of its rounds.

    1. every client of the round is asked whether it can take part; with differential privacy one
       whose cap would be exceeded refuses, and the run ends in order with what it has;
    2. in each exchange of the round the server's request goes to the clients, whose steps run in
       groups, and the server makes its next state from their replies;
    3. the models are measured, and the round's row is written.

The parts know no more than they would in a real federation: `Server` sees messages, each
`ClientRuntime` its own records, memory and ledger, and an `Exchange` carries what passes between
them. What only a simulation can do (a partition of one data set, measuring on clients' own test
splits, pictures of who has what) is done here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.validation import check_choice
from fedsynth.data.images import ImageData, require_all_classes
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import GIVEN, IntArray, check_parts, count_matrix, hold_out, partition
from fedsynth.data.registry import DatasetSpec, is_published
from fedsynth.data.users import bounded, check_one_client_each
from fedsynth.errors import DataError, OutputError, Setting, Text
from fedsynth.federation.exchange.client_runtime import ClientRuntime, OwnData
from fedsynth.federation.exchange.in_process import InProcess
from fedsynth.federation.exchange.protocol import Refusal
from fedsynth.federation.exchange.rounds import agree, play_round, with_proxy
from fedsynth.federation.exchange.server import Server
from fedsynth.federation.observer import Observer
from fedsynth.federation.outputs import privacy_words
from fedsynth.federation.outputs.disclosed import (
    check_facts,
    declared_row,
    declared_summary,
    disclosed,
)
from fedsynth.federation.outputs.measure import Measure
from fedsynth.federation.outputs.privacy_words import NO_TEST, PRIVATE, PUBLIC
from fedsynth.federation.outputs.report_context import report_context
from fedsynth.federation.outputs.result import RunResult, summarise
from fedsynth.federation.outputs.run_folder import RunFolder
from fedsynth.federation.terms.client_ledgers import Clients
from fedsynth.federation.terms.devices import check_compiler, resolve_device
from fedsynth.federation.terms.duration import long_run
from fedsynth.federation.terms.participation import Participation
from fedsynth.federation.terms.privacy_plan import PrivacyPlan, check_method
from fedsynth.federation.terms.public_context import public_context
from fedsynth.federation.terms.settings import RunSettings, to_toml
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger_folder import check_names
from fedsynth.privacy.releases import USER
from fedsynth.privacy.report import ReportContext, build_report, write_report
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.synthesizer.condensation.sets import SyntheticSet

UNPROTECTED = Text(
    "no differential privacy: what clients send is not protected (",
    Setting("privacy", "epsilon"),
    " protects it)",
)
Counts = npt.NDArray[np.int64]
NO_LATER_EPSILON = "no run on these data can have an ε afterwards"


def simulate(
    settings: RunSettings,
    *,
    data: tuple[ImageData, ImageData | None] | None = None,
    parts: Sequence[IntArray] | None = None,
    names: Sequence[str] | None = None,
    test: str | None = None,
    output: Path | str | None = None,
    observer: Observer | None = None,
    download: bool = False,
) -> RunResult:
    """Runs a federation.

    Args:
        settings: the run's.
        data: (train, test) of your own, where test may be None; None loads `settings.dataset`. With
            differential privacy all of `train.spec` is public: declare a round `train_size`, not
            the true one, or set `nominal_size` and `max_records`. Unless it is the specification of
            a published data set, differential privacy then needs `PrivacySettings(ledger=...)`.
        parts: your own clients: for each the positions of its examples in the training data; of
            `settings.partition` only `local_test` is then used.
        names: the clients' names, one for each part: a kept ledger, and the privacy report, know
            them by these. They are public. None: client-000, client-001, … (a client whose records
            a kept ledger is for goes by that ledger's name).
        test: "public" or "private", what the test images are. None: those of a published data set
            are public, your own are private. With differential privacy, what is measured on private
            ones stands in `simulation_only` alone.
        output: the folder that run folders go into; None writes nothing.
        observer: told of progress.
        download: let torchvision fetch the data set if it is not there.

    Returns:
        The result; without any round (`metrics` is empty, `deviations` says why) where earlier runs
        on the same ledgers have spent what the cap allows.

    Raises:
        FedsynthError, PrivacyError: bad input, before the run folder is made; DivergedError, later.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, load_dataset
    >>> method = FedAvg(local_epochs=2, batch=32, lr=0.1)
    >>> settings = RunSettings(method, rounds=2, model=ModelSettings("linear"))
    >>> train, test = load_dataset("digits")
    >>> two_clients = [np.arange(700), np.arange(700, 1438)]  # positions in the training data
    >>> result = simulate(settings, data=(train, test), parts=two_clients)
    >>> len(result.metrics), result.accuracy > 0.8
    (2, True)
    """
    if settings.privacy is not None:
        check_method(settings.method)
    device = resolve_device(settings.device)
    if settings.compile:
        check_compiler(device)
    given = data or load_dataset(settings.dataset, settings.data_root, download=download)
    train, tested = _checked_data(given)
    settings = replace(settings, dataset=train.spec.name)
    kind = _kind_of_test(train.spec, tested, test)
    _require_a_ledger(settings, train.spec)
    if parts is not None:
        check_parts(parts, len(train))
        settings = replace(
            settings,
            partition=replace(settings.partition, kind=GIVEN, clients=len(parts), subset=1.0),
        )
    else:
        parts = partition(
            train.labels.cpu().numpy(),
            settings.resolved_partition,
            train.spec.classes,
            *train.origins(),
        )
    if settings.privacy is None:
        require_all_classes(train)
    folder = None if output is None else Path(output)
    positions = [np.asarray(part, np.int64) for part in parts]
    if _protects_users(settings):
        check_one_client_each(positions, train)
    declared = None if names is None else check_names(names, len(parts))
    return Simulation(
        settings,
        Clients(train, positions, declared),
        train.to(device),
        (None if tested is None else tested.to(device), kind),
        [torch.from_numpy(part) for part in positions],
        observer or Observer(),
        folder,
        download,
    ).run()


def _checked_data(given: tuple[ImageData, ImageData | None]) -> tuple[ImageData, ImageData | None]:
    train, test = given
    if not (isinstance(train, ImageData) and (test is None or isinstance(test, ImageData))):
        raise DataError(
            "data must be (train, test), each made by fedsynth.from_arrays, or (train, None)"
        )
    if test is not None and train.spec != test.spec:
        raise DataError(
            f"training and test data must have the same specification, got {train.spec.name!r} "
            f"and {test.spec.name!r}"
        )
    return train, test


def _kind_of_test(spec: DatasetSpec, test: ImageData | None, declared: str | None) -> str:
    """What the test images are: "public", "private" or "none"."""
    if declared is not None:
        check_choice(None, "test", declared, (PUBLIC, PRIVATE))
    if test is None:
        return NO_TEST
    return declared or (PUBLIC if is_published(spec) else PRIVATE)


def _require_a_ledger(settings: RunSettings, spec: DatasetSpec) -> None:
    """Own data are not public unless their owner says so: all runs on them have to be counted."""
    if settings.privacy is not None and settings.privacy.ledger is None and not is_published(spec):
        raise PrivacySettingError(
            "privacy",
            "ledger",
            f"must name a folder for the ledgers of your own data ({spec.name!r}), kept over all "
            f"runs on them; or say {NO_LEDGER!r}",
        )


def _protects_users(settings: RunSettings) -> bool:
    return settings.privacy is not None and settings.privacy.unit == USER


def _divided(
    settings: RunSettings, parts: Sequence[Tensor], data: ImageData
) -> tuple[list[Tensor], list[Tensor]]:
    """What each client trains on, and its own test split (empty without `local_test`).

    Where users are protected they are not cut in two, and at most `user_records` records of each
    train.
    """
    seed = settings.resolved_partition.seed or 0
    by_user = _protects_users(settings)
    training: Sequence[IntArray] = [part.numpy() for part in parts]
    testing: Sequence[IntArray] = [np.zeros(0, np.int64) for _ in parts]
    share = settings.partition.local_test
    if share > 0:
        training, testing = hold_out(training, share, seed, data, by_user)
    most = settings.privacy.user_records if settings.privacy is not None else None
    if most is not None:
        training = [bounded(part, data, most, seed) for part in training]
    return [torch.as_tensor(part) for part in training], [torch.as_tensor(p) for p in testing]


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
        self.exchange = self._clients(clients, train, parts)
        self.agreed = agree(settings, self.context, self.exchange)
        self.context = self.agreed.context
        self.participation = Participation(
            settings.seed,
            settings.partition.clients,
            settings.participation,
            self.agreed.terms.sizes if settings.sampling == "size" else None,
        )
        # Where earlier runs have spent the budget, this one ends before it begins, and leaves
        # nothing.
        first = self.round_context(1)
        self.over = self._private and bool(self.exchange.prepare(first))
        headline = [] if self.over else self._headline()
        if long:
            headline.append(long)
        self.folder: RunFolder | None = None
        if output is not None and not self.over:
            counts = count_matrix(
                train.labels.cpu().numpy(), [part.numpy() for part in parts], train.spec.classes
            )
            self.folder = self._new_folder(output, clients, counts)
        self.measure = Measure(
            self.method,
            self.exchange,
            test[0],
            self._private and self.test_kind == PRIVATE,
            settings.partition.local_test > 0,
        )
        if self.method.personal and not settings.partition.local_test:
            headline.append(
                Text(
                    f"warning: {self.method.name}'s clients keep models of their own, which "
                    "nothing tests here (",
                    Setting("partition", "local_test", "0.2"),
                    ")",
                )
            )
        for line in headline:
            observer.note(line)
        initial = self.context.architecture.state_dict()
        self.server = Server(
            self.method, {name: t.to(self.context.device) for name, t in initial.items()}
        )
        self.uploads: dict[int, Message] = {}
        self.sent: Mapping[int, tuple[Message, ...]] = {}
        self.metrics: list[dict[str, Any]] = []
        self.deviations: list[str] = []

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

    def _clients(self, clients: Clients, train: ImageData, parts: list[Tensor]) -> InProcess:
        """All clients, with what is theirs."""
        settings = self.settings
        training, held_out = _divided(settings, parts, train)
        ledgers: Sequence[Ledger | None] = [None] * len(parts)
        if settings.privacy is not None:
            ledgers = clients.ledgers(settings.privacy.ledger_folder, settings)
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

    def run(self) -> RunResult:
        """All rounds, and the result."""
        for number in range(1, self.settings.rounds + 1):
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
        return replace(
            self.context,
            round=number,
            participants=self.participation.in_round(number),
            reporter=_RoundReporter(self.observer, number),
        )

    def play(self, context: RoundContext) -> Refusal | None:
        """One round; a client's refusal ends it."""
        played = play_round(self.server, self.exchange, context)
        if played.refusal is None:
            self.uploads = dict(played.uploads)
            self.sent = played.sent
            self._after_uploads(context)
        return played.refusal

    def _new_folder(self, output: Path, clients: Clients, counts: Counts) -> RunFolder:
        """The run folder, with what is known before the first round; fresh ledgers go into it."""
        name = f"{self.method.name}-{self.context.spec.name}"
        folder = RunFolder(output, name)
        folder.write_config(to_toml(self.settings.to_mapping()))
        if self._private:
            if self.plan.privacy.ledger_folder is None:
                moved = clients.fresh_ledgers(folder.path / "ledger", self.settings)
                for client, ledger in zip(self.exchange.clients, moved, strict=True):
                    client.move_ledger(ledger)
            histories = self.exchange.histories()
            start = privacy_words.start(self.plan, histories, self.test_kind)
            folder.write_private_start(start.to_json())
        folder.write_partition(counts)
        return folder

    def _headline(self) -> list[str]:
        if self._private:
            return privacy_words.headline(self.plan)
        lines: list[str] = [UNPROTECTED]
        if self.settings.ledger is not None:
            lines.append(f"  the ledgers in {self.settings.ledger} say so: {NO_LATER_EPSILON}")
        return lines

    def _end_early(self, number: int, refusal: Refusal) -> None:
        done = number - 1
        self.deviations.append(
            f"ended after {done} of {self.settings.rounds} rounds: {refusal.reason}"
        )
        if not self.over:
            self.observer.note(self.deviations[-1])

    def _after_uploads(self, context: RoundContext) -> None:
        """A class that is too rare at every client would otherwise vanish without a word."""
        if context.round > 1 or len(self.uploads) < context.clients:
            return
        sets = [u for u in self.uploads.values() if isinstance(u, SyntheticSet)]
        sent = {label for u in sets for label in u.labels.unique().tolist()}
        missing = sorted(set(range(context.spec.classes)) - sent) if sets else []
        if missing:
            names = ", ".join(context.spec.class_names[c] for c in missing)
            enough = Setting("method", "min_examples", "1")
            why = Text("no client has min_examples examples of it (", enough, ")")
            if self._private and self.plan.facts.guaranteed:
                why = Text(
                    "no client's released count of it is clearly above the counts' noise "
                    "(a larger budget helps)"
                )
            self.observer.note(Text(f"warning: nobody sends images of {names}: ", why))

    def _record(self, context: RoundContext, started: float) -> None:
        """The round's row."""
        number = context.round
        state = self.server.state
        facts = self.method.discloses if self._private else None
        row: dict[str, Any] = {
            "round": number,
            **check_facts(self.method.facts(state, context), facts),
            **check_facts(self.method.merge_facts(self.exchange.facts(context)), facts),
        }
        if number % self.settings.evaluate_every == 0 or number == self.settings.rounds:
            row.update(self.measure.row(state, context))
        if self._private:
            histories = self.exchange.histories()
            if self.plan.guaranteed(histories):
                row["epsilon"] = self.plan.epsilon(histories)
        row["upload_floats"] = sum(m.floats for sent in self.sent.values() for m in sent)
        row["client_upload_bytes"] = [sum(m.nbytes for m in sent) for sent in self.sent.values()]
        row["upload_bytes"] = sum(row["client_upload_bytes"])
        if len(self.uploads) < context.clients:
            row["participants"] = list(self.uploads)
        row["seconds"] = round(time.perf_counter() - started, 3)
        told = disclosed(row, declared_row(type(self.method)) if self._private else None)
        self.metrics.append(row)
        if self.folder is not None:
            self.folder.append_metrics(told)
        self.observer.round_ended(told.shown)

    def _finish(self) -> RunResult:
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
            self._write_results(self.folder, artefacts, report)
            summary["folder"] = str(self.folder.finish(told))
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
        )

    def _write_results(
        self,
        folder: RunFolder,
        artefacts: Mapping[str, Tensor],
        report: dict[str, Any] | None,
    ) -> None:
        """What was promised first, and pictures last: none of them may cost a result."""
        if report is not None:
            write_report(report, folder.path)
        folder.write_model(self.server.final_parameters())
        sets = [
            (client, upload.images, upload.labels)
            for client, upload in self.uploads.items()
            if isinstance(upload, SyntheticSet)
        ]
        if sets:
            folder.write_synthetic(sets, self.context.spec)
        folder.write_artefacts(artefacts)
        try:
            if sets:
                folder.draw_synthetic(sets, self.context.spec)
            folder.draw_artefacts(artefacts)
        except OutputError as error:
            self.observer.note(f"warning: a picture is missing: {error}")


@dataclass(frozen=True)
class _RoundReporter:
    """Tells an observer of one round's steps."""

    observer: Observer
    number: int

    def report(self, phase: str, done: int, total: int) -> None:
        self.observer.step(self.number, phase, done, total)

    def note(self, text: str) -> None:
        self.observer.note(text)
