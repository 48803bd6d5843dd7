"""A run over data owners' nodes: the rounds, their checkpoint, and what the run leaves.

It does what `simulated_run` does, without what only a simulation may show: nobody here sees a
partition, a record, or anybody's test split. What the server restarts from has the server's state
and its rows; what clients keep stays with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsynth.config_file import to_toml
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import is_published
from fedsynth.errors import CheckpointError, DataFilesMissingError, OutputError
from fedsynth.federation.exchange.rounds import Played, agree, play_round, with_proxy
from fedsynth.federation.exchange.server import Server
from fedsynth.federation.nodes.proposal import Proposal, new_run
from fedsynth.federation.nodes.to_nodes import Carrier, Patience, ToNodes
from fedsynth.federation.observer import Observer
from fedsynth.federation.outputs import privacy_words
from fedsynth.federation.outputs.checkpoint import Checkpoint, CheckpointFolder, write_whole
from fedsynth.federation.outputs.disclosed import (
    Disclosed,
    declared_row,
    declared_summary,
    disclosed,
)
from fedsynth.federation.outputs.measure import Measure
from fedsynth.federation.outputs.report_context import report_context
from fedsynth.federation.outputs.result import summarise
from fedsynth.federation.outputs.results import Results
from fedsynth.federation.outputs.round_row import round_row
from fedsynth.federation.outputs.run_folder import PRIVATE_START, SERVED, RunFolder
from fedsynth.federation.secure_sums.errors import require_cryptography
from fedsynth.federation.terms.devices import resolve_device
from fedsynth.federation.terms.given_data import NO_TEST, PUBLIC
from fedsynth.federation.terms.plan_checks import check_method, check_own_noise
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.public_context import public_context
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.federation.terms.sums import check_quorum
from fedsynth.privacy.errors import LedgerError
from fedsynth.privacy.history import History
from fedsynth.privacy.report import build_report
from fedsynth.privacy.report_schema import Began
from fedsynth.synthesizer.condensation.sets import SyntheticSet


@dataclass(frozen=True)
class Served:
    """What a run over nodes ends with.

    Args:
        folder: the run's.
        metrics: a row for each round.
        parameters: the final model's.
        report: the server's privacy report, over released values; None without privacy.
        histories: what the clients' ledgers held at the end, as they say.
        deviations: what went otherwise than planned.
    """

    folder: Path
    metrics: list[dict[str, Any]]
    parameters: Mapping[str, Tensor]
    report: dict[str, object] | None
    histories: list[History]
    deviations: tuple[str, ...] = ()


@dataclass(frozen=True)
class Post:
    """Who a server reaches, and how.

    Args:
        carrier: to the nodes.
        patience: how long it waits for them.
        numbers: which client each node is, where the server knows; empty: each says so itself.
    """

    carrier: Carrier
    patience: Patience = field(default_factory=Patience)
    numbers: Mapping[int, int] = field(default_factory=dict)


def serve(
    proposal: Proposal,
    post: Post,
    output: Path,
    *,
    observer: Observer | None = None,
    resume: Path | None = None,
) -> Served:
    """Runs a federation over nodes.

    Args:
        proposal: the run; its name is a new one, unless it is resumed.
        post: to the nodes.
        output: the folder that run folders go into.
        observer: told of progress.
        resume: the folder of a run of the same settings that did not finish.

    Raises:
        FedsynthError, PrivacyError: as `fedsynth.simulate`; RemoteError: too few nodes have joined.
    """
    return _Run(proposal, post, output, observer or Observer(), resume).run()


class _Run:
    """One run over nodes, from checked settings."""

    def __init__(
        self, proposal: Proposal, post: Post, output: Path, observer: Observer, resume: Path | None
    ) -> None:
        settings = proposal.settings
        self.settings = settings
        self.method = settings.method
        self.observer = observer
        self.private = settings.privacy is not None
        if self.private:
            check_method(self.method)
        context = public_context(settings, proposal.spec, resolve_device(settings.device))
        plan = PrivacyPlan.checked(settings, context) if self.private else None
        if self.method.sums_alone:
            require_cryptography()
            check_quorum(settings)
        elif plan is not None:
            check_own_noise(plan.plans)
        self.method.check_model(context.architecture)
        context = with_proxy(context, settings)
        self.test = _test_set(proposal)
        self.folder = _opened(proposal, output, resume)
        self.proposal = replace(proposal, run=_name(self.folder, proposal, resume))
        self.checkpoints = CheckpointFolder(self.folder.path / "checkpoint", self.proposal.run)
        checkpoint = None if resume is None else self.checkpoints.read(self.method)
        after = 0 if checkpoint is None else checkpoint.round
        if resume is not None and checkpoint is None and self.folder.has_rounds:
            raise CheckpointError(f"the checkpoint of the run in {self.folder.path} is gone")
        self.exchange = ToNodes(
            self.proposal,
            post.carrier,
            context.device,
            post.patience,
            numbers=post.numbers,
            after=after,
            note=observer.note,
        )
        began = resume is not None and self.folder.has_begun
        planned = partial(_plan_when_it_began, self.folder.path, settings, context)
        self.agreed = agree(settings, context, self.exchange, planned if began else None)
        self.context = self.agreed.context
        self.participation = settings.schedule(self.agreed.terms.sizes)
        test = None if self.test is None else self.test.to(context.device)
        local = settings.partition.local_test > 0 and not self.private
        self.measure = Measure(self.method, self.exchange, test, False, local)
        self.server = Server.begun(self.method, self.context)
        self.metrics: list[dict[str, Any]] = []
        self.uploads: dict[int, Message] = {}
        self.deviations = [f"client {k} took no part: {w}" for k, w in self.exchange.out.items()]
        self._begin(checkpoint, resumed=resume is not None)

    def _begin(self, checkpoint: Checkpoint | None, *, resumed: bool) -> None:
        """Writes what a private run begins with, and goes to where a checkpoint stands."""
        plan = self.agreed.plan
        if plan is not None:
            for line in privacy_words.headline(plan, simulated=False):
                self.observer.note(line)
            if not self.folder.has_begun:
                began = Began(id=self.folder.name, date=f"{datetime.now():%Y-%m-%d}")
                start = privacy_words.start(plan, plan.histories, self._test_kind, began)
                self.folder.write_private_start(start.to_json())
        if checkpoint is not None:
            device = self.context.device
            self.server.state = checkpoint.state.to(device)
            self.uploads = {k: one.to(device) for k, one in checkpoint.uploads.items()}
            self.metrics = list(checkpoint.rows)
        if resumed:
            done = len(self.metrics)
            self.folder.rewrite_metrics([self._disclosed(row) for row in self.metrics])
            rounds = self.folder.resumptions()
            if done < self.settings.rounds:
                rounds = self.folder.resumed(done)
            words = [
                privacy_words.resumed(after, self.settings.rounds, simulated=False)
                for after in rounds
            ]
            self.deviations.extend(words)
            self.observer.note(f"the run goes on after {done} of {self.settings.rounds} rounds")

    @property
    def _test_kind(self) -> str:
        return NO_TEST if self.test is None else PUBLIC

    def run(self) -> Served:
        """All rounds that are left, and the result."""
        try:
            for number in range(len(self.metrics) + 1, self.settings.rounds + 1):
                started = time.perf_counter()
                context = self._context_of(number)
                played = play_round(self.server, self.exchange, context, self.settings.quorum)
                if played.refusal is not None:
                    done = number - 1
                    why = f"ended after {done} of {self.settings.rounds} rounds: "
                    self.deviations.append(why + played.refusal.reason)
                    self.observer.note(self.deviations[-1])
                    break
                self._record(context, played, started)
            return self._finish()
        finally:
            self.folder.release()

    def _context_of(self, number: int) -> RoundContext:
        """What the server's steps of this round know."""
        taking = self.participation.in_round(number)
        return replace(self.context, round=number, participants=taking)

    def _record(self, context: RoundContext, played: Played, started: float) -> None:
        """The round's row, and the checkpoint."""
        if played.no_quorum is None:
            self.uploads = dict(played.uploads)
        state = self.server.state
        plan = self.agreed.plan
        row = round_row(self.settings, plan, self.measure, state, context, played, started)
        shown = self._disclosed(row)
        self.metrics.append(row)
        sets = {k: u for k, u in self.uploads.items() if isinstance(u, SyntheticSet)}
        checkpoint = Checkpoint(tuple(self.metrics), state, {}, sets)
        self.checkpoints.write(checkpoint, frozenset())
        self.folder.append_metrics(shown)
        self.observer.round_ended(shown.shown)

    def _disclosed(self, row: Mapping[str, Any]) -> Disclosed:
        """Of a private run without what goes by the records, which nobody keeps here."""
        told = disclosed(row, declared_row(type(self.method)) if self.private else None)
        return Disclosed(told.shown)

    def _finish(self) -> Served:
        done = len(self.metrics)
        self.exchange.end(done)
        if done:
            self.server.end(self._context_of(done))
        state = self.server.state
        histories = self.exchange.histories()
        report = None
        promised = None
        plan = self.agreed.plan
        if plan is not None:
            report = self._report(plan, histories)
            promised = privacy_words.summary(plan, histories).to_json()
        final = self.server.final_parameters()
        results = Results(self.method, state, self.context, final, self.uploads, report)
        report = results.write(self.folder, self._picture_missing)
        summary = summarise(
            self.settings,
            self.metrics,
            self.measure.final_accuracy(self.metrics, state, self.context),
            device=str(self.context.device),
            test=self._test_kind,
            hidden=False,
            privacy=promised,
        )
        declared = declared_summary(type(self.method)) if self.private else None
        folder = self.folder.finish(Disclosed(disclosed(summary, declared).shown))
        CheckpointFolder(folder / "checkpoint", "").discard()
        return Served(folder, self.metrics, final, report, histories, tuple(self.deviations))

    def _report(self, plan: PrivacyPlan, histories: Sequence[History]) -> dict[str, object]:
        """Over what was released to the server, by the clients' ledgers as they state them."""
        context = report_context(
            plan,
            len(self.metrics),
            self.deviations,
            test=self._test_kind,
            began=self.folder.began(),
            simulated=False,
        )
        return build_report(context, histories)

    def _picture_missing(self, error: OutputError) -> None:
        self.observer.note(f"warning: a picture is missing: {error}")


def _test_set(proposal: Proposal) -> ImageData | None:
    """The test images of a published data set, which are public; None: the server has none."""
    if not is_published(proposal.spec):
        return None
    try:
        _, test = load_dataset(proposal.settings.dataset, proposal.settings.data_root)
    except DataFilesMissingError:
        return None
    return test


def _opened(proposal: Proposal, output: Path, resume: Path | None) -> RunFolder:
    """The run's folder, with its settings.

    Raises:
        CheckpointError: the one to go on with is of other settings.
    """
    config = to_toml(proposal.settings.to_mapping())
    if resume is None:
        folder = RunFolder(output, f"{proposal.settings.method.name}-{proposal.spec.name}")
        folder.write_config(config)
        return folder
    return RunFolder.reopen(resume)


def _name(folder: RunFolder, proposal: Proposal, resume: Path | None) -> str:
    """The run's name: a new one, or that of the run that goes on.

    Raises:
        CheckpointError: that run is of other settings, or its file is damaged.
    """
    file = folder.path / SERVED
    if resume is None:
        stated = {"run": new_run(), "agreement": proposal.agreement}
        write_whole(file, json.dumps(stated).encode())
        return str(stated["run"])
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
        agreed = str(stated["agreement"])
        name = str(stated["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r:.120}") from None
    if agreed != proposal.agreement:
        raise CheckpointError(f"the run in {folder.path} has other settings")
    return name


def _plan_when_it_began(
    folder: Path, settings: RunSettings, context: RoundContext, histories: Sequence[History]
) -> PrivacyPlan:
    """The plan that the run had: with its σ, and what the ledgers held then.

    Raises:
        CheckpointError: the file that says so is damaged.
        LedgerError: a ledger has lost rows that it had.
    """
    try:
        start = json.loads((folder / PRIVATE_START).read_text(encoding="utf-8"))
        sigma = float(start["noise_multiplier"])
        rows = {name: int(one["rows"]) for name, one in start["ledgers"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / PRIVATE_START} is damaged: {error!r:.120}") from None
    for one in histories:
        if len(one.releases) < rows.get(one.client, 0):
            raise LedgerError(f"{one.client}: its ledger has lost rows that it had")
    plan = PrivacyPlan.checked(settings, context)
    before = tuple(
        replace(one, releases=one.releases[: rows.get(one.client, 0)]) for one in histories
    )
    privacy = replace(plan.privacy, noise_multiplier=sigma)
    return replace(plan, privacy=privacy, histories=before)
