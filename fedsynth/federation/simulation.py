"""A federation on one machine: the round loop.

    1. every client gets the server's message (in methods with a first phase, after one more such exchange);
    2. the clients' steps run in groups, as many at once as the method allows;
    3. the server makes the next state from all uploads;
    4. the model is evaluated on the test set, if there is one, and the round's row is written.

With differential privacy the guards are asked before step 1: where a round would exceed a cap, the
run ends in order with what it has. A run without it charges the ledgers that it was given, so that
later reports know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, MakeSeries, OpenClients, PrivateClients
from fedsynth.core.messages import Message
from fedsynth.core.method import Memory, RoundContext, ServerState
from fedsynth.core.validation import check_choice
from fedsynth.data.images import ImageData, require_all_classes
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import GIVEN, IntArray, check_parts, count_matrix, hold_out, partition
from fedsynth.data.proxy import NOISE, ProxyImages, noise_images
from fedsynth.data.registry import DatasetSpec, is_published
from fedsynth.data.users import bounded, check_one_client_each
from fedsynth.errors import DataError, DivergedError, Setting, Text
from fedsynth.evaluation.accuracy import accuracy_by_domain, correct
from fedsynth.evaluation.fairness import local_metrics
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.federation.clients import Clients, OpenLedgers
from fedsynth.federation.devices import check_compiler, resolve_device
from fedsynth.federation.observer import Observer
from fedsynth.federation.participation import Participation
from fedsynth.federation.planning import public_context
from fedsynth.federation.private_run import NO_TEST, PRIVATE, PUBLIC, PrivateRun, check_method
from fedsynth.federation.run_folder import LOCAL, PRIVATE_TEST, RunFolder
from fedsynth.federation.settings import RunSettings, to_toml
from fedsynth.privacy.errors import BudgetExceededError, PrivacySettingError
from fedsynth.privacy.ledger_folder import check_names
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.releases import USER
from fedsynth.privacy.report import build_report, write_report
from fedsynth.privacy.requests import check_request
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.synthesizer.condensation.sets import SyntheticSet

UNPROTECTED = Text(
    "no differential privacy: what clients send is not protected (",
    Setting("privacy", "epsilon"),
    " protects it)",
)
NO_LATER_EPSILON = "no run on these data can have an ε afterwards"
COMMON = "common_model_accuracy"
"""What the test accuracy of a method is called whose clients end with models of their own."""

Step = Callable[
    [Message, ClientGroup, Sequence[Memory], RoundContext], list[tuple[Message, Memory]]
]


@dataclass(frozen=True)
class RunResult:
    """What a run ends with.

    Attributes:
        accuracy: of the global model on the test set, in [0, 1]; None without a test set, or
            without any round; no result of a method whose clients have models of their own (FedBN,
            SOLO): theirs is AMP, in the last row's `local`. On a private test set it is an exact
            function of private data: here for whoever runs the simulation, and in no file outside
            `simulation_only`.
        metrics: a row for each round. uploads: the last round's, by client.
        privacy: the privacy report, None without differential privacy. folder: None if nothing was written.
        artefacts: matrices [classes, clients] that the server measured, such as FedHydra's stratification.
        deviations: what went otherwise than planned: why the run ended early.
    """

    settings: RunSettings
    accuracy: float | None
    metrics: list[dict[str, Any]]
    model: nn.Module
    uploads: dict[int, Message]
    privacy: dict[str, object] | None
    folder: Path | None
    summary: dict[str, Any]
    artefacts: Mapping[str, Tensor] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()


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
        data: (train, test) of your own, where test may be None; None loads `settings.dataset`. With
            differential privacy all of `train.spec` is public: declare a round `train_size`, not
            the true one, or set `nominal_size` and `max_records`. Unless it is the specification of
            a published data set, differential privacy then needs `PrivacySettings(ledger=...)`.
        parts: your own clients: for each the positions of its examples in the training data; of `settings.partition` only `local_test` is
            then used.
        names: the clients' names, one for each part: a kept ledger, and the privacy report, know
            them by these. They are public. None: client-000, client-001, … (a client whose records
            a kept ledger is for goes by that ledger's name).
        test: "public" or "private", what the test images are. None: those of a published data set
            are public, your own are private. With differential privacy, what is measured on private
            ones stands in `simulation_only` alone.
        output: the folder that run folders go into; None writes nothing.
        observer: hears of progress.
        download: let torchvision fetch the data set if it is not there.

    Returns:
        The result; without any round (`metrics` is empty, `deviations` says why) where earlier runs
        on the same ledgers have spent what the cap allows.

    Raises:
        FedsynthError, PrivacyError: bad input, before the run folder is made; DivergedError, later.
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
    """What each client trains on, and its own test split (none without `local_test`).

    Where users are protected they are not cut in two, and at most `user_records` records of each train.
    """
    seed = settings.resolved_partition.seed or 0
    by_user = _protects_users(settings)
    training: Sequence[IntArray] = [part.numpy() for part in parts]
    testing: Sequence[IntArray] = []
    share = settings.partition.local_test
    if share > 0:
        training, testing = hold_out(training, share, seed, data, by_user)
    most = settings.privacy.user_records if settings.privacy is not None else None
    if most is not None:
        training = [bounded(part, data, most, seed) for part in training]
    return [torch.as_tensor(part) for part in training], [torch.as_tensor(p) for p in testing]


class Simulation:
    """One run, from checked settings and resident data; `simulate` makes it.

    Attributes:
        make_series: private clients' charged series are made by it, see `PrivateClients`.
    """

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
        self.settings, self.method, self.observer = settings, settings.method, observer
        self.test, self.test_kind = test
        self.context = public_context(settings, train.spec, train.labels.device)
        self.method.check_model(self.context.architecture)
        name = getattr(self.method, "proxy", "")
        if name:
            if name == NOISE:
                proxy = noise_images(train.spec, settings.seed)
            else:
                proxy, _ = load_dataset(name, settings.data_root, download=download)
            self.context = replace(
                self.context, proxy=ProxyImages(proxy.to(train.labels.device), train.spec)
            )
        self.context = replace(self.context, note=observer.note)
        self.private, self.open_ledgers = None, None
        if settings.privacy is not None:
            self.private = PrivateRun(settings, self.context, clients=clients, test=self.test_kind)
            self.private.check_cap()
            self.context = replace(self.context, privacy=self.private.privacy)
        elif settings.ledger is not None:
            self.open_ledgers = OpenLedgers(settings, settings.ledger, clients)
        # Where earlier runs have spent the budget, this one ends before it begins, and leaves
        # nothing.
        self.over = self.private is not None and not self.private.allows_round(1)
        headline = [] if self.over else self._headline()
        self.folder = None
        if output is not None and not self.over:
            self.folder = RunFolder(
                output, f"{self.method.name}-{train.spec.name}", private=self.private is not None
            )
        if self.folder is not None:
            self.folder.write_config(to_toml(settings.to_mapping()))
            labels = train.labels.cpu().numpy()
            self.folder.write_partition(
                count_matrix(labels, [part.numpy() for part in parts], train.spec.classes)
            )
            if self.private is not None:
                self.private.keep_ledgers_in(self.folder.path / "ledger")
                self.folder.write_private_start(self.private.start())
        self.train = train
        self.parts, self.tests = _divided(settings, parts, train)
        self.users = train.groups if _protects_users(settings) else None
        if self.private is None:
            self.context = replace(self.context, sizes=tuple(len(part) for part in self.parts))
        sizes = self.context.sizes if settings.sampling == "size" else None
        self.participation = Participation(
            settings.seed, settings.partition.clients, settings.participation, sizes
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
        self.make_series: MakeSeries = GaussianSums
        self.state = ServerState(
            {
                name: t.to(self.context.device)
                for name, t in self.context.architecture.state_dict().items()
            }
        )
        self.memories: dict[int, Memory] = {}
        self.uploads: dict[int, Message] = {}
        self.answers: dict[int, Message] = {}
        self.metrics: list[dict[str, Any]] = []
        self.deviations: list[str] = []

    def _headline(self) -> list[str]:
        if self.private is not None:
            return self.private.headline()
        lines: list[str] = [UNPROTECTED]
        if self.open_ledgers is not None:
            lines.append(f"  the ledgers in {self.open_ledgers.folder} say so: {NO_LATER_EPSILON}")
        return lines

    def run(self) -> RunResult:
        for number in range(1, self.settings.rounds + 1):
            started = time.perf_counter()
            try:
                if self.private is not None:
                    self.private.check_round(number)
                    self.private.check_ledgers(number)
                    self.private.charge_unprotected(number)
                participants = self.participation.in_round(number)
                if self.open_ledgers is not None:
                    self.open_ledgers.charge(number, participants)
                context = replace(self.context, round=number, participants=participants)
                self._round(context)
            except BudgetExceededError as error:  # in the round itself only if another process charged the same ledger meanwhile
                self.deviations.append(
                    f"ended after {number - 1} of {self.settings.rounds} rounds: {error}"
                )
                if not self.over:
                    self.observer.note(self.deviations[-1])
                break
            self._record(context, started)
        return self._finish()

    def _groups(self, participants: Sequence[int]) -> list[ClientGroup]:
        each = self.method.client_bytes(self.context)
        at_once = 1 if each is None else max(1, self.context.memory_bytes // 2 // max(1, each))
        groups: list[ClientGroup] = []
        for first in range(0, len(participants), at_once):
            ids = participants[first : first + at_once]
            mine = [self.parts[k] for k in ids]
            if self.private is None or not self.private.protects:
                groups.append(OpenClients(ids, self.train, mine))
            else:
                guards, secrets = (
                    [self.private.guards[k] for k in ids],
                    [self.private.secrets[k] for k in ids],
                )
                groups.append(
                    PrivateClients(
                        ids,
                        self.train,
                        mine,
                        guards,
                        secrets,
                        self.make_series,
                        nominal_size=self.context.nominal_size,
                        users=self.users,
                    )
                )
        return groups

    def _round(self, context: RoundContext) -> None:
        quiet = replace(
            context,
            report=lambda phase, done, total: self.observer.step(context.round, phase, done, total),
        )
        state, kept = self.state, self.memories
        self.groups = self._groups(context.participants or ())
        self.answers = {}
        question = self.method.question(state, context)
        if question is not None:
            self.answers, kept = self._ask(
                self.method.answer, self.method.answers, question, kept, context
            )
            state = self.method.hear(state, list(self.answers.values()), quiet)
        message = self.method.broadcast(state, context)
        uploads, memories = self._ask(
            self.method.client_step, self.method.upload, message, kept, context
        )
        state = self.method.server_step(state, list(uploads.values()), quiet)
        _check_finite(state.parameters, "server's model", context.round)
        if context.round == 1 and len(uploads) == context.clients:
            self._note_missing_classes(uploads)
        self.state, self.uploads = state, uploads
        self.memories.update(memories)

    def _ask(
        self,
        step: Step,
        declared: type[Message] | None,
        message: Message,
        kept: Mapping[int, Memory],
        context: RoundContext,
    ) -> tuple[dict[int, Message], dict[int, Memory]]:
        """One exchange with all clients, group by group: their messages and memories."""
        if context.privacy is not None:
            check_request(message.numbers(), context.privacy.max_request_norm)
        sent: dict[int, Message] = {}
        memories: dict[int, Memory] = {}
        for group in self.groups:
            report = _GroupReport(
                self.observer,
                context.round,
                len(sent),
                len(group.ids),
                len(context.participants or ()),
            )
            results = step(
                message,
                group,
                [kept.get(k, {}) for k in group.ids],
                replace(context, report=report),
            )
            for k, (upload, memory) in zip(group.ids, results, strict=True):
                if type(upload) is not declared:  # what was declared, and checked, is what is sent
                    expected = "nothing" if declared is None else declared.__name__
                    raise TypeError(
                        f"{self.method.name} declares messages of type {expected}, got {type(upload).__name__}"
                    )
                _check_finite(dict(upload.arrays()), f"client {k}", context.round)
                if self.method.personal:  # what is tested stays with the client
                    _check_finite(memory, f"client {k}", context.round)
                sent[k], memories[k] = upload, memory
        return sent, memories

    def _note_missing_classes(self, uploads: Mapping[int, Message]) -> None:
        """A class that is too rare at every client would otherwise vanish without a word."""
        sets = [u for u in uploads.values() if isinstance(u, SyntheticSet)]
        sent = {label for u in sets for label in u.labels.unique().tolist()}
        missing = sorted(set(range(self.context.spec.classes)) - sent) if sets else []
        if missing:
            names = ", ".join(self.context.spec.class_names[c] for c in missing)
            enough = Setting("method", "min_examples", "1")
            why = Text("no client has min_examples examples of it (", enough, ")")
            if self.private is not None and self.private.protects:
                why = Text(
                    "no client's released count of it is clearly above the counts' noise (a larger "
                    "budget helps)"
                )
            self.observer.note(Text(f"warning: nobody sends images of {names}: ", why))

    def _record(self, context: RoundContext, started: float) -> None:
        number = context.round
        kept = [self.memories[client] for client in self.uploads]
        row: dict[str, Any] = {
            "round": number,
            **self.method.facts(self.state, context),
            **self.method.client_facts(kept, context),
        }
        if number % self.settings.evaluate_every == 0 or number == self.settings.rounds:
            row.update(self._evaluate())
        if self.private is not None and self.private.guaranteed:
            row["epsilon"] = self.private.epsilon()
        messages = [
            [u, *([self.answers[k]] if k in self.answers else [])] for k, u in self.uploads.items()
        ]
        row["upload_floats"] = sum(m.floats for sent in messages for m in sent)
        row["client_upload_bytes"] = [sum(m.nbytes for m in sent) for sent in messages]
        row["upload_bytes"] = sum(row["client_upload_bytes"])
        if len(self.uploads) < self.context.clients:
            row["participants"] = list(self.uploads)
        row["seconds"] = round(time.perf_counter() - started, 3)
        self.metrics.append(row)
        if self.folder is not None:
            self.folder.append_metrics(row)
        self.observer.round_ended(row)

    def _evaluate(self) -> dict[str, Any]:
        """What a round's row says of the model, and under `models` of each of the method's variants."""
        final, variants = self.method.final_parameters(self.state), self.method.variants(self.state)
        models = {name: self._evaluate_one(parameters) for name, parameters in variants.items()}
        same = [
            name
            for name, one in variants.items()
            if all(one[key] is value for key, value in final.items())
        ]
        row = models[same[0]] if same else self._evaluate_one(final)
        return {**row, "models": models} if models else row

    def _evaluate_one(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """What is measured on the test set and on the clients' own test splits, if there are."""
        model = self.context.load(parameters)
        row: dict[str, Any] = {}
        if self.test is not None:
            measured = self._measured(correct(model, self.test), self.test)
            row = {PRIVATE_TEST: measured} if self._hides_the_test else measured
        if sum(map(len, self.tests)):
            own = (
                self.method.personal_parameters(parameters, self.memories.get(k, {}))
                for k in range(len(self.parts))
            )
            personal = (model if one is None else self.context.load(one) for one in own)
            row[LOCAL] = local_metrics(
                personal if self.method.personal else model,
                self.train,
                self.tests,
                [len(part) for part in self.parts],
            )
        return row

    def _measured(self, right: Tensor, test: ImageData) -> dict[str, Any]:
        """Accuracy on the test set; where it has domains also each one's, and their plain average,
        as papers on feature skew report.

        Where clients have models of their own, the common one is no result, and its accuracy has
        another name."""
        row: dict[str, Any] = {self._accuracy_name: int(right.sum()) / len(right)}
        domains = {} if self.method.personal else accuracy_by_domain(right, test)
        if domains:
            row["domain_accuracy"] = domains
            row["domain_average"] = sum(domains.values()) / len(domains)
        return row

    @property
    def _accuracy_name(self) -> str:
        return COMMON if self.method.personal else "test_accuracy"

    def _final_accuracy(self) -> float | None:
        """The last round's accuracy, measured now if it was not; None if it cannot be."""
        if not self.metrics or self.test is None:
            return None
        last = self.metrics[-1]
        if not {self._accuracy_name, PRIVATE_TEST} & last.keys():
            last = self._evaluate()
        return float(last.get(PRIVATE_TEST, last)[self._accuracy_name])

    def _finish(self) -> RunResult:
        final = self._final_accuracy()
        report, summary, artefacts = None, self._summary(final), self.method.artefacts(self.state)
        if self.private is not None:
            ledgers = {ledger.client: ledger for ledger in self.private.ledgers}
            report = build_report(
                self.private.report_context(len(self.metrics), self.deviations), ledgers
            )
        if self.folder is not None:
            self.folder.write_model(self.method.final_parameters(self.state))
            sets = [
                (k, u.images, u.labels)
                for k, u in self.uploads.items()
                if isinstance(u, SyntheticSet)
            ]
            if sets:
                self.folder.write_synthetic(sets, self.context.spec)
            self.folder.write_artefacts(artefacts)
            if report is not None:
                write_report(report, self.folder.path)
            summary["folder"] = str(self.folder.finish(summary))
        model, folder = (
            self.context.load(self.method.final_parameters(self.state)),
            self.folder.path if self.folder else None,
        )
        return RunResult(
            self.settings,
            final,
            self.metrics,
            model,
            self.uploads,
            report,
            folder,
            summary,
            artefacts,
            tuple(self.deviations),
        )

    @property
    def _hides_the_test(self) -> bool:
        """Whether accuracies on the test set are exact functions of data that privacy protects."""
        return self.private is not None and self.test_kind == PRIVATE

    def _summary(self, final: float | None) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "method": self.method.name,
            "settings": {f.name: getattr(self.method, f.name) for f in fields(self.method)},
            "dataset": self.context.spec.name,
            "rounds": len(self.metrics),
            "test_accuracy": None if self._hides_the_test or self.method.personal else final,
            **({COMMON: final} if self.method.personal and not self._hides_the_test else {}),
            "upload_bytes": sum(row["upload_bytes"] for row in self.metrics),
            "upload_floats_per_round": self.metrics[-1]["upload_floats"] if self.metrics else 0,
            "device": str(self.context.device),
            "seed": self.settings.seed,
        }
        if self.test is None or self._hides_the_test:
            summary["test_data"] = self.test_kind
        if self.private is None:
            summary["seconds"] = round(sum(row["seconds"] for row in self.metrics), 3)
        last = self.metrics[-1] if self.metrics else {}
        if "domain_average" in last:
            summary["domain_average"] = last["domain_average"]
        if "models" in last:
            summary["models"] = {
                name: {"test_accuracy": one["test_accuracy"]}
                for name, one in last["models"].items()
                if "test_accuracy" in one
            }
        generators = [row[GENERATOR] for row in self.metrics if GENERATOR in row]
        if generators:
            summary[GENERATOR] = generators[-1]
        if LOCAL in last and self.private is None:
            summary[LOCAL] = {name: last[LOCAL][name] for name in ("amp", "fm", "wlp")}
        if self.private is not None:
            summary["differential_privacy"] = self.private.summary()
        return summary


def _check_finite(tensors: Mapping[str, Tensor], whose: str, number: int) -> None:
    """One look at each result, outside the hot loops; a NaN would otherwise spread over the whole federation unseen."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DivergedError(
                Text(
                    f"round {number}: {name} of the {whose} is not finite: its optimisation "
                    "diverged; lower the learning rate (the method's image_lr, lr or server_lr) or "
                    "use a smaller ",
                    Setting("model", "depth"),
                )
            )


@dataclass(frozen=True)
class _GroupReport:
    """Turns one group's steps into the round's: `before` clients are done, `share` are in the group."""

    observer: Observer
    number: int
    before: int
    share: int
    clients: int

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.observer.step(
            self.number, phase, self.before * total + done * self.share, self.clients * total
        )
