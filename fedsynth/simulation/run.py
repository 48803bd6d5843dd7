"""One simulated run, from checked settings and loaded data to its results.

    1. Each client of the round states whether it can take part. With differential privacy, a client
       refuses if the round would exceed its cap, and the run ends with the results so far.
    2. In each exchange of the round, the server's request goes to the clients. Their steps are
       computed in groups, and the server computes its next state from their replies.
    3. The models are evaluated, and the metrics of the round are written.

As in a real federation, `Server` sees only messages, and each `ClientRuntime` sees only its own
records, client state and ledger. A `Backend` carries the messages. Unlike a real server, a
simulation can also test models on the clients' test splits and draw how the classes are distributed
among the clients.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedsynth.config.loading import code_options
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.feature_cache import keep_on_disk
from fedsynth.core.messages import Tensors
from fedsynth.core.periods import has_periods
from fedsynth.data.images import ImageData
from fedsynth.data.partition import count_matrix
from fedsynth.errors import DataError, FedsynthError, SettingError
from fedsynth.federation.client_runtime import ClientData, ClientRuntime
from fedsynth.federation.context import choose_speed, public_context
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.links import Links
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import Observer, Refusal
from fedsynth.federation.ranks import Ranks, statement
from fedsynth.federation.run_data import Clients, divided, new_ledgers
from fedsynth.formatting import format_epsilon
from fedsynth.methods import is_own_method
from fedsynth.models.on_features import FeatureLinear, OnFeatures
from fedsynth.models.registry import is_own_model
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.periods import ENCODING, PeriodFacts, ReleaseSequence
from fedsynth.results import run_messages
from fedsynth.results.active_run import ActiveRun
from fedsynth.results.charges import plan_when_it_began
from fedsynth.results.checkpoint import Checkpoint, CheckpointFolder, run_identity, without_place
from fedsynth.results.run_folder import ROUNDS, RunFolder, private_start
from fedsynth.results.run_record import RunResult, own_sources, sent_sets
from fedsynth.simulation.following import send_result
from fedsynth.simulation.trial import Trial
from fedsynth.synthesizer.condensation.sets import synthetic_sets
from fedsynth.validation import to_toml


class Simulation(ActiveRun):
    """One simulated run, with checked settings and data in memory.

    Use the function `simulate` to create and run it.

    Args:
        settings: the settings of the run.
        clients: the clients, with data on the CPU.
        train: the training images, on the run's device.
        test: the test images on the run's device, and their kind ("public", "private" or "none").
        observer: an observer that receives the progress.
        output: the parent folder of run folders. None writes nothing.
        download: True lets torchvision download missing public images.
        resumed: the folder of the run to resume. None begins a new run.
        trained: the folder in which runs of one round share trained clients, or None.
        continued: the released model of the first period, from which a later period takes the
            centre and the whitening of the features. None in a first period.
        trial: the trial of a private selection that this run is, or None.
        links: the connections to the other ranks, or None in a single process.
    """

    backend: InProcess

    def __init__(
        self,
        settings: RunSettings,
        clients: Clients,
        train: ImageData,
        test: tuple[ImageData | None, str],
        observer: Observer,
        output: Path | None = None,
        download: bool = False,
        resumed: RunFolder | None = None,
        trained: Path | None = None,
        continued: Tensors | None = None,
        trial: Trial | None = None,
        links: Links | None = None,
    ) -> None:
        settings = choose_speed(settings, train.labels.device)
        parts = list(map(torch.from_numpy, clients.parts))
        context = public_context(settings, train.spec, train.labels.device)
        super().__init__(settings, context, observer, download=download)
        self._links = links
        if continued is not None:
            self._load_released(continued)
        self._keep_features(train, test[0], torch.cat(parts).unique())
        self._identity = partial(run_identity, settings, train, test[0], parts)
        self._trained = trained if _may_share(settings) else None
        self._trial = trial
        checkpoint = None
        if resumed is not None:
            self.checkpoints = self._checkpoints_of(resumed)
            checkpoint = self.checkpoints.resume(resumed, settings)
        self.backend = self._make_clients(clients, train, parts, resumed)
        self._join(self._original_plan(resumed, checkpoint))
        self._state_period()
        # If earlier runs have exhausted the budget, this one ends before its first round and writes
        # nothing.
        self.folder = resumed
        if resumed is None and output is not None and not self._is_refused():
            self.folder = self._new_folder(output, clients)
        self._begin_record(*test, simulated=True)
        charge_id = self._mark_charges()
        if self.folder is not None:
            self._begin_folder(charge_id)
            counts = count_matrix(train.labels.cpu().numpy(), clients.parts, train.spec.classes)
            self.folder.write_partition(counts)
        self._announce(new=resumed is None)
        if resumed is not None:
            self._restore(resumed, checkpoint)

    def _load_released(self, continued: Tensors) -> None:
        """Loads the model of the first period, which only images of the same shape can continue."""
        try:
            self.context.architecture.load_state_dict(continued)
        except RuntimeError as error:
            spec = self.context.spec
            raise DataError(
                f"the period's data have images of shape {list(spec.image_shape)} in "
                f"{spec.classes} classes, unlike period 1. Use the image size, channels and "
                "classes of period 1, or start a new sequence with another ledger folder"
            ).with_code("sequence.images") from error

    def _state_period(self) -> None:
        """Passes the public settings of the current period to each client."""
        sections = self.settings.to_mapping()
        # the encoder is a part of the statistics, and the rest of the section is the period's data
        sections["data"] = {key: sections["data"].get(key, "") for key in ENCODING}
        for client in self.backend.clients:
            if client.sequence is not None and self.plan is not None:
                client.sequence.facts = PeriodFacts(
                    self.plan.sigma, self.context.nominal_size, sections
                )

    def _begin_folder(self, charge_id: str) -> None:
        """Writes the run's initial state into its folder."""
        if self._trial is None:
            stated = [client.history() for client in self.backend.clients]  # without this period
            histories = [history for history in stated if history is not None]
            self.record.begin(histories, charge_id)
        else:
            histories = [ledger.history_at_start for ledger in self._trial.ledgers]
            self.record.begin(histories, charge_id, self._trial.began)

    def _mark_charges(self) -> str:
        """Gives the clients' ledgers the run's identifier, and returns it.

        A resumed run has that of its start. All runs of a period have the same one, because they
        charge the period only once.
        """
        identifier = secrets.token_hex(8)
        if self._trial is not None:
            identifier = self._trial.ledgers[0].charge_id
        elif has_periods(self.method):
            identifier = f"period {self.method.period} of {self.method.periods}"
        elif self.folder is not None and self.folder.has_begun:
            identifier = private_start(self.folder.path).charge_id
        for client in self.backend.clients:
            if client.ledger is not None:
                client.ledger.charge_id = identifier
        return identifier

    @property
    def _private(self) -> bool:
        return self.settings.privacy is not None

    def _is_refused(self) -> bool:
        """Returns True if a client refuses the first round."""
        return self._private and bool(self.backend.prepare(self.plain_context(1)))

    def _keep_features(self, train: ImageData, test: ImageData | None, used: Tensor) -> None:
        """Reads feature vectors of the run's images from the cache folder in the settings.

        Vectors that are not there are computed and stored, except if each pass has one record,
        since stored vectors come from full passes. `used` contains the indices of the clients'
        images in `train`.
        """
        encoder, network = self.settings.encoder, self.context.architecture
        if encoder is None or encoder.encoder or not encoder.encoder_cache:
            return
        if not isinstance(network, OnFeatures | FeatureLinear):
            reason = (
                "has no effect, because the run has neither an encoder nor a model on features. "
                "Remove it"
            )
            raise SettingError("data", "encoder_cache", reason)
        if self.context.isolated:
            return
        folder, features = Path(encoder.encoder_cache), network.feature_map
        note = self.observer.note if self._private else None
        keep_on_disk(folder, train, features, used, note)
        if test is not None:
            keep_on_disk(folder, test, features, torch.arange(len(test)))

    def _make_clients(
        self, clients: Clients, train: ImageData, parts: list[Tensor], resumed: RunFolder | None
    ) -> InProcess:
        """Creates all clients with their data and ledgers.

        If a run is resumed, its existing ledgers are opened again.
        """
        settings = self.settings
        training, held_out = divided(settings, parts, train)
        ledgers: Sequence[Ledger | None] = [None] * len(parts)
        names = clients.ledger_names
        folder = settings.privacy.ledger_folder if settings.privacy is not None else settings.ledger
        sequences: Mapping[str, ReleaseSequence] = {}
        if folder is not None and self._private and self._trial is None:
            sequences = clients.sequences(folder, settings)
        if folder is not None:  # which refuses records that the ledgers were not charged for
            ledgers = clients.kept_ledgers(folder, settings, sequences)
        elif resumed is not None and self._private:
            if resumed.has_begun:
                resumed.require_ledgers(names)
            ledgers = new_ledgers(names, resumed.path / "ledger", settings)
        elif self._private:
            ledgers = new_ledgers(names, None, settings)
        if self._trial is not None:
            ledgers = self._trial.ledgers
        runtimes = []
        for number, ledger in enumerate(ledgers):
            data = ClientData(train, training[number], held_out[number])
            sequence = sequences.get(names[number])
            runtimes.append(
                ClientRuntime(number, settings, self.context, data, ledger, sequence=sequence)
            )
        if self._links is not None:
            stated = statement(without_place(settings.to_mapping()), self._identity())
            return Ranks(runtimes, self._links, stated)
        return InProcess(runtimes)

    def _original_plan(
        self, resumed: RunFolder | None, checkpoint: Checkpoint | None
    ) -> Callable[[Sequence[History]], PrivacyPlan] | None:
        """Returns a function that recomputes the privacy plan of a resumed run.

        The function takes the contents of the clients' ledgers. Returns None if the run is new or
        was interrupted before its plan was made.
        """
        if resumed is None or (checkpoint is None and not resumed.has_begun):
            return None
        rows = () if checkpoint is None else checkpoint.rows
        return partial(plan_when_it_began, resumed.path, method=type(self.method), rows=rows)

    def _announce(self, *, new: bool) -> None:
        """Notifies the observer of the run's start, with its privacy guarantee and warnings."""
        folder = None if self.folder is None else self.folder.final
        self.observer.started(self.settings, folder)
        lines = [*run_messages.headline(self.settings, self.plan)]
        lines += run_messages.warnings(self.settings)
        if new:
            lines += [f"warning: {warning}" for warning in self.record.warnings]
        for line in lines:
            self.observer.note(line)

    def run(self) -> RunResult:
        """Runs the remaining rounds and returns the result."""
        summary = None
        try:
            self._rounds()
            histories = self.backend.histories() if self._private else []
            budgets = [client.budget for client in self.backend.clients]
            secret = all(budget.secret.is_secret for budget in budgets if budget is not None)
            result = self._finish(histories, secret=secret)
            if len(self.record.rows) == self.settings.rounds:
                for client in self.backend.clients:
                    if client.sequence is not None:
                        client.sequence.finish()
            if self._trial is not None:
                self._trial.measure(result.model, self.backend.clients, self.context)
            summary = result.summary
            if self._links is not None:
                send_result(self._links, result)
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
            self.observer.ended(summary)

    def plain_context(self, number: int) -> RoundContext:
        context = super().plain_context(number)
        if isinstance(self.backend, Ranks):
            context = replace(context, all_ranks=self.backend.compute_parts)
        return context

    def round_context(self, number: int) -> RoundContext:
        context = self.plain_context(number)
        if self.checkpoints is None:
            return context
        return replace(context, keeper=self.checkpoints.steps_of(number))

    def play(self, context: RoundContext) -> Refusal | None:
        refusal = super().play(context)
        if refusal is None and self.played.no_quorum is None:
            self._warn_of_missing_classes(context)
        return refusal

    # ------------------------------------------------------------------ checkpoints, interruption

    def _restore(self, folder: RunFolder, checkpoint: Checkpoint | None) -> None:
        """Restores server and client state from a resumed run's checkpoint."""
        completed = 0
        if checkpoint is not None and self.checkpoints is not None:
            completed = checkpoint.round
            self.checkpoints.give_states(self.backend.clients, self.context.device)
        if completed < self.settings.rounds:
            for client in self.backend.clients:
                if client.budget is not None:  # before the folder claims that it was resumed
                    client.budget.ledger.note_resumption(completed)
        super()._restore(folder, checkpoint)

    def _store(self, checkpoint: Checkpoint) -> None:
        """Draws a round's synthetic images from the clients, and writes the checkpoint.

        The picture comes first, because the checkpoint marks the round as finished.
        """
        if self.played.no_quorum is None:
            name = f"{ROUNDS}/round-{checkpoint.round:05d}.png"
            self.record.draw(sent_sets(self.uploads), self.context.spec, name)
        if self.checkpoints is not None:
            self.checkpoints.keep(checkpoint, self.backend.clients, self.context.device)

    def _spent(self) -> str:
        """Describes the ε spent by clients so far.

        Returns an empty string if the run has no privacy guarantee.
        """
        plan = self.plan
        if plan is None or not plan.guaranteed(self.backend.histories()):
            return ""
        spent = format_epsilon(plan.epsilon(self.backend.histories()))
        return f". Spent: ε = {spent} at δ = {plan.privacy.delta:g}"

    def _interrupted(self, reason: str) -> str:
        """Describes an interrupted run's progress and cost, and how to resume it."""
        completed = len(self.record.rows)
        if self.checkpoints is not None:  # the last round may have metrics but no checkpoint
            completed = self.checkpoints.rounds
        progress = f"{reason} after {completed} of {self.settings.rounds} rounds"
        if self.folder is None:
            return f"{progress}{self._spent()}. Nothing was written"
        if has_periods(self.method):
            return f"{progress}{self._spent()}. Repeat the command, which charges nothing again"
        charge_note = ""
        if self._private and completed < self.settings.rounds:
            charge_note = ". Resuming charges the interrupted round again"
        arguments = ["fedsynth", "train", "--resume", str(self.folder.path)]
        with suppress(FedsynthError):  # a command cannot load code that is only in Python
            arguments += code_options(self.settings)
        return f"{progress}{self._spent()}{charge_note}. To resume: {shlex.join(arguments)}"

    def _new_folder(self, output: Path, clients: Clients) -> RunFolder:
        """Creates the run folder and writes the settings into it.

        If the ledgers are not kept elsewhere, the clients get new ledgers in this folder.
        """
        trial = self._trial
        stated = () if trial is None else (trial.began, trial.home)
        folder = RunFolder(output, f"{self.method.name}-{self.context.spec.name}", *stated)
        folder.write_config(to_toml(self.settings.to_mapping()))
        folder.write_sources(own_sources(self.settings).values())
        privacy = self.settings.privacy
        if privacy is not None and privacy.ledger_folder is None:
            ledgers = new_ledgers(clients.ledger_names, folder.path / "ledger", self.settings)
            for client, ledger in zip(self.backend.clients, ledgers, strict=True):
                client.move_ledger(ledger)
        self.checkpoints = self._checkpoints_of(folder)
        return folder

    def _checkpoints_of(self, folder: RunFolder) -> CheckpointFolder:
        return CheckpointFolder(folder.checkpoints, self._identity(), self._trained)

    # ------------------------------------------------------------------ results

    def _end_early(self, refusal: Refusal) -> None:
        message = self.record.ended_early(refusal)
        location = "Nothing was written"
        if self.folder is not None:
            location = f"The results are in {self.folder.final}"
        self.observer.note(f"{message}{self._spent()}. {location}")

    def _warn_of_missing_classes(self, context: RoundContext) -> None:
        """Warns in the first round about classes for which no client sends images.

        This happens, for example, if each client has too few examples of the class.
        """
        if context.round == 1 and len(self.uploads) == context.clients:
            sets = list(synthetic_sets(self.uploads).values())
            guaranteed = self.plan is not None and self.plan.facts.guaranteed
            for line in run_messages.missing_classes(sets, context.spec, guaranteed=guaranteed):
                self.observer.note(line)


def _may_share(settings: RunSettings) -> bool:
    """Returns True if a run's settings allow trained clients to be shared with other runs.

    The run must have one round, and neither differential privacy nor custom code. The settings then
    identify the trained clients.
    """
    custom = is_own_model(settings.model) or is_own_method(settings.method) or own_sources(settings)
    return settings.rounds == 1 and settings.privacy is None and not custom
