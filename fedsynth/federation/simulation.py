"""A federation on one machine: the round loop.

    1. every client gets the server's message;
    2. the clients' steps run in groups, as many at once as the method allows;
    3. the server makes the next state from all uploads;
    4. the model is evaluated on the public test set, and the round's row is written.

With differential privacy the guard is asked before step 1: where a round would exceed the cap, the run ends in order with what it has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, OpenClients, PrivateClients
from fedsynth.core.messages import Message
from fedsynth.core.method import Memory, RoundContext, ServerState
from fedsynth.data.images import ImageData, require_all_classes
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import count_matrix, partition
from fedsynth.errors import DivergedError
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.federation.devices import resolve_device
from fedsynth.federation.observer import Observer
from fedsynth.federation.private_run import PrivateRun, check_method
from fedsynth.federation.run_folder import RunFolder
from fedsynth.federation.settings import RunSettings, to_toml
from fedsynth.models.registry import build_model
from fedsynth.privacy.errors import BudgetExceededError
from fedsynth.privacy.report import build_report, write_report
from fedsynth.synthesizer.sets import SyntheticSet


@dataclass(frozen=True)
class RunResult:
    """What a run ends with.

    Attributes:
        accuracy: of the global model on the test set, in [0, 1].
        metrics: a row for each round. uploads: the last round's, by client.
        privacy: the privacy report, None without differential privacy. folder: None if nothing was written.
    """

    settings: RunSettings
    accuracy: float
    metrics: list[dict[str, Any]]
    model: nn.Module
    uploads: dict[int, Message]
    privacy: dict[str, object] | None
    folder: Path | None
    summary: dict[str, Any]


@dataclass
class _Progress:
    """What the loop carries from round to round."""

    state: ServerState
    memories: dict[int, Memory] = field(default_factory=dict)
    uploads: dict[int, Message] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)


def simulate(
    settings: RunSettings,
    *,
    data: tuple[ImageData, ImageData] | None = None,
    output: Path | None = None,
    observer: Observer | None = None,
    download: bool = False,
) -> RunResult:
    """Runs a federation.

    Args:
        data: (train, test) of your own; None loads `settings.dataset`.
        output: the folder that run folders go into; None writes nothing.
        observer: hears of progress.
        download: let torchvision fetch the data set if it is not there.

    Raises:
        FedsynthError, PrivacyError: bad input, before anything is written.
    """
    observer = observer or Observer()
    device = resolve_device(settings.device)
    if settings.privacy is not None:
        check_method(settings.method)
    train, test = data or load_dataset(settings.dataset, settings.data_root, download=download)
    spec = train.spec
    nominal = settings.privacy.nominal_size if settings.privacy is not None else None
    architecture = build_model(settings.model, spec.image_shape, spec.classes, settings.seed)
    settings.method.check_model(architecture)
    context = RoundContext(
        round=1,
        seed=settings.seed,
        device=device,
        spec=spec,
        architecture=architecture,
        nominal_size=nominal or spec.train_size / settings.partition.clients,
    )
    private = PrivateRun(settings, context) if settings.privacy is not None else None
    if private is not None:
        private.check_round(1)  # a cap that allows no round at all is the user's mistake, not a run that ended early
    if private is None:
        require_all_classes(train)
    parts = partition(train.labels.cpu().numpy(), settings.partition, spec.classes)
    counts = count_matrix(train.labels.cpu().numpy(), parts, spec.classes)
    folder = RunFolder(output, f"{settings.method.name}-{spec.name}") if output is not None else None
    if folder is not None:
        folder.write_config(to_toml(settings.to_mapping()))
        folder.write_partition(counts)
        if private is not None:
            private.keep_ledgers_in(folder.path / "ledger")
    groups = _groups(settings, train.to(device), [torch.from_numpy(p) for p in parts], private)
    if private is not None:
        context = replace(context, privacy=private.privacy)
        for line in private.headline():
            observer.note(line)
    progress = _Progress(ServerState({name: t.to(device) for name, t in architecture.state_dict().items()}))
    _run_rounds(settings, context, groups, test.to(device), private, progress, observer, folder)
    return _finish(settings, context, private, progress, folder, observer)


def _groups(settings: RunSettings, train: ImageData, parts: Sequence[Tensor], private: PrivateRun | None) -> list[ClientGroup]:
    at_once = settings.method.clients_at_once(train.spec.classes)
    groups: list[ClientGroup] = []
    for first in range(0, len(parts), at_once):
        ids = range(first, min(first + at_once, len(parts)))
        mine = [parts[k] for k in ids]
        if private is None or not private.guaranteed:
            groups.append(OpenClients(ids, train, mine))
        else:
            groups.append(PrivateClients(ids, train, mine, [private.guards[k] for k in ids], [private.secrets[k] for k in ids]))
    return groups


def _run_rounds(
    settings: RunSettings,
    context: RoundContext,
    groups: Sequence[ClientGroup],
    test: ImageData,
    private: PrivateRun | None,
    progress: _Progress,
    observer: Observer,
    folder: RunFolder | None,
) -> None:
    for round in range(1, settings.rounds + 1):
        started = time.perf_counter()
        if private is not None:
            try:
                private.check_round(round)
            except BudgetExceededError as error:
                progress.deviations.append(f"ended after {round - 1} of {settings.rounds} rounds: {error}")
                observer.note(progress.deviations[-1])
                return
            if not private.guaranteed:
                private.charge_unprotected(round)
        _one_round(settings, replace(context, round=round), groups, progress, observer)
        row: dict[str, Any] = {"round": round}
        if round % settings.evaluate_every == 0 or round == settings.rounds:
            row["test_accuracy"] = accuracy(context.load(progress.state.parameters), test)
        if private is not None and private.guaranteed:
            row["epsilon"] = private.epsilon()
        row["upload_floats"] = sum(u.floats for u in progress.uploads.values())
        row["upload_bytes"] = sum(u.nbytes for u in progress.uploads.values())
        row["seconds"] = round_to(time.perf_counter() - started)
        progress.metrics.append(row)
        if folder is not None:
            folder.append_metrics(row)
        observer.round_ended(row)


def _one_round(
    settings: RunSettings, context: RoundContext, groups: Sequence[ClientGroup], progress: _Progress, observer: Observer
) -> None:
    method, clients = settings.method, sum(len(group.ids) for group in groups)
    message = method.broadcast(progress.state, context)
    done = 0
    for group in groups:
        report = _GroupReport(observer, context.round, done, len(group.ids), clients)
        memories = [progress.memories.get(k, {}) for k in group.ids]
        results = method.client_step(message, group, memories, replace(context, report=report))
        for k, (upload, memory) in zip(group.ids, results, strict=True):
            _check_finite(dict(upload.arrays()), f"client {k}", context.round)
            progress.uploads[k], progress.memories[k] = upload, memory
        done += len(group.ids)
    uploads = [progress.uploads[k] for k in sorted(progress.uploads)]
    server = replace(context, report=lambda phase, step, total: observer.step(context.round, phase, step, total))
    progress.state = method.server_step(progress.state, uploads, server)
    _check_finite(progress.state.parameters, "server's model", context.round)


def _check_finite(tensors: Mapping[str, Tensor], whose: str, round: int) -> None:
    """One look at each result, outside the hot loops; a NaN would otherwise spread over the whole federation unseen."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DivergedError(
                f"round {round}: {name} of the {whose} is not finite: its optimisation diverged; lower the learning rate "
                "(--set image_lr=…, lr=… or server_lr=…) or use a smaller --depth"
            )


@dataclass(frozen=True)
class _GroupReport:
    """Turns one group's steps into the round's: `before` clients are done, `share` are in the group."""

    observer: Observer
    round: int
    before: int
    share: int
    clients: int

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.observer.step(self.round, phase, self.before * total + done * self.share, self.clients * total)


def _finish(
    settings: RunSettings,
    context: RoundContext,
    private: PrivateRun | None,
    progress: _Progress,
    folder: RunFolder | None,
    observer: Observer,
) -> RunResult:
    done = len(progress.metrics)
    accuracies = [row["test_accuracy"] for row in progress.metrics if "test_accuracy" in row]
    report = None
    if private is not None:
        report = build_report(
            private.report_context(done, progress.deviations), {ledger.client: ledger for ledger in private.ledgers}
        )
    summary: dict[str, Any] = {
        "method": settings.method.name,
        "dataset": context.spec.name,
        "rounds": done,
        "test_accuracy": accuracies[-1] if accuracies else None,
        "upload_bytes": sum(row["upload_bytes"] for row in progress.metrics),
        "upload_floats_per_round": progress.metrics[-1]["upload_floats"] if done else 0,
        "seconds": round_to(sum(row["seconds"] for row in progress.metrics)),
        "device": str(context.device),
        "seed": settings.seed,
    }
    if private is not None:
        summary["differential_privacy"] = {
            "guarantee": private.guaranteed,
            **({"epsilon": private.epsilon(), "delta": private.privacy.delta} if private.guaranteed else {}),
            "noise_multiplier": private.privacy.noise_multiplier,
            "mechanism": private.plan.mechanism,
        }
    if folder is not None:
        folder.write_model(progress.state.parameters)
        sets = [(k, u.images, u.labels) for k, u in sorted(progress.uploads.items()) if isinstance(u, SyntheticSet)]
        if sets:
            folder.write_synthetic(sets, context.spec)
        if report is not None:
            write_report(report, folder.path)
        summary["folder"] = str(folder.finish(summary))
    model = context.load(progress.state.parameters)
    return RunResult(
        settings,
        accuracies[-1] if accuracies else float("nan"),
        progress.metrics,
        model,
        progress.uploads,
        report,
        folder.path if folder else None,
        summary,
    )


def round_to(seconds: float) -> float:
    """Seconds to the millisecond, for people."""
    return float(f"{seconds:.3f}")
