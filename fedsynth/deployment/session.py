"""A client's session in one run at a data owner's node.

The session answers the server's requests (`fedsynth.deployment.frames`) and stores its state in
files. Whatever a request contains, the client uses the settings that its owner accepted, and
charges its ledger first. The files never leave the machine. After a restart, another process
continues from the files. The client's state (the tensors that it keeps between rounds) is stored
for several rounds. If a server resumes from an older checkpoint, the client still has the client
state of that round.

    HOME/runs/RUN/session.json           the proposal, σ, and the completed steps
    HOME/runs/RUN/main-ROUND             the client's state after that round
    HOME/runs/RUN/first-ROUND            the client's state after the first exchange of that round
    HOME/runs/RUN/answer-ROUND-EXCHANGE-REQUEST    the client's answer to that request. If the
                                         server repeats the request, this answer is sent again,
                                         which costs nothing and releases nothing new.
    HOME/runs/RUN/sum.json               the state of an unfinished secure sum, with its secrets
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from fedsynth.core.capabilities import exchange_of
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import ClientState
from fedsynth.core.sums import SummedUploads, sums_securely
from fedsynth.data.images import ImageData
from fedsynth.deployment import frames
from fedsynth.deployment.frames import Frame, RoundFacts
from fedsynth.deployment.owner_report import note_round, spent_epsilon, write_owner_report
from fedsynth.deployment.policy import Owner
from fedsynth.deployment.proposal import STATE, Proposal, State, damage_is_named
from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.client import (
    Identities,
    SumClient,
    SumTerms,
    sum_terms,
    upload_layout,
)
from fedsynth.errors import MessageError, RequestRefusedError
from fedsynth.federation.client_runtime import ClientData, ClientRuntime
from fedsynth.federation.context import public_context, resolve_device, with_proxy
from fedsynth.federation.in_process import step_together
from fedsynth.federation.position_leak_check import StepCheck
from fedsynth.federation.protocol import Refusal, RunTerms
from fedsynth.federation.run_data import divided
from fedsynth.files import (
    MAX_TENSORS_BYTES,
    delete_partial,
    read_regular,
    with_hash,
    without_hash,
    write_whole,
)
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.results.checkpoint import StoredClientState

RUNS = "runs"
SUM_FILE = "sum.json"
# How often the client answers one exchange of a private run, counted across restarts.
#
# A server that was killed resumes from its checkpoint and repeats a round. Each answer is charged.
# Without a cap on ε, the client gives only one answer.
MAX_ATTEMPTS = 3
# The number of rounds whose files are stored. A resumed server has lost at most the last round.
STORED_ROUNDS = 3

HASH_BYTES = 32
_ROUND_FILE = re.compile(r"(?:main|first|answer)-([0-9]+)(?:-[a-z-]+)?")


@dataclass
class Place:
    """The environment of a data owner's client: its folder, its owner and its device.

    Args:
        number: the client's index in the federation, from 0.
        home: the owner's folder for ledgers, which all runs share. The node also stores its runs
            there.
        owner: decides whether to accept a proposal.
        device: "auto", "cpu" or "cuda", as in the settings of a run.
        say: receives messages for the owner.
        secret: makes the noise generator of a run. It is for the owner's own tests: a report over
            repeatable noise states "not private". No message from a server, no setting and no
            environment variable can set it. None: each run has a fresh secret key.
        identities: the identity keys of all clients, for secure sums. The owners must have
            exchanged them without the server. None: the server is trusted to pass on the clients'
            keys unchanged.
    """

    number: int
    home: Path
    owner: Owner
    device: str = "auto"
    say: Callable[[str], None] = print
    secret: Callable[[], SecretGenerator] | None = None
    identities: Identities | None = None

    def folder(self, run: str) -> Path:
        """Returns the folder of a run. The caller must have checked the run's name."""
        return self.home / RUNS / run


class Session:
    """Answers the server's requests to one client in one run.

    Args:
        place: where the client runs.
        proposal: the proposal that the owner has accepted.
        data: the owner's records.
        ledger: the client's ledger.
        state: the state that an earlier process has stored. None: the client joins for the first
            time.

    Attributes:
        folder: the folder of the run.
        runtime: the client, with a separate copy of the run's settings.
        history: the ledger at the time when the client first joined the run.
    """

    def __init__(
        self, place: Place, proposal: Proposal, data: ImageData, ledger: Ledger, state: State | None
    ) -> None:
        settings = proposal.settings
        device = resolve_device(place.device)
        context = with_proxy(public_context(settings, proposal.spec, device), settings)
        context = replace(context, isolated=state is not None and state.isolated)
        settings.method.check_model(context.architecture)
        [training], [held_out] = divided(settings, [torch.arange(len(data))], data)
        self.runtime = ClientRuntime(
            place.number,
            settings,
            context,
            ClientData(data.to(device), training, held_out),
            ledger,
            secret=place.secret() if place.secret else None,
            cap=place.owner.cap,
            remote=True,
        )
        self._place = place
        self.folder = place.folder(proposal.run)
        delete_partial(self.folder)  # may have secrets of a sum
        self._agreement = proposal.agreement
        self._schedule = settings.schedule()
        self._terms: RunTerms | None = None
        self._stored = b""
        history = ledger.history()
        self.state = state or State(
            proposal=proposal, client=place.number, initial_rows=len(history.releases)
        )
        self.history = replace(history, releases=history.releases[: self.state.initial_rows])
        privacy = settings.privacy  # without it, a second sum of the same uploads reveals one
        capped = privacy is not None and (
            place.owner.cap is not None or privacy.epsilon is not None
        )
        self._noted = 0
        self._max_attempts = MAX_ATTEMPTS if capped else 1

    @property
    def current(self) -> bool:
        """Returns True if no other process has changed the state file of this session."""
        file = self.folder / STATE
        return file.is_file() and read_regular(file) == self._stored

    def join(self, last_round: int) -> Frame:
        """Joins the run, or rejoins it after a restart of the server.

        `last_round` is 0 for a new run, and the last round in the checkpoint of a restarted server.
        The client continues with the latest client state that it stored up to this round. This
        client state may be older than `last_round`, because a client takes part only in some rounds
        and may fail in others.

        Returns:
            The message with which the client joins the run.

        Raises:
            MessageError: if the client no longer stores a client state of `last_round` or of an
                earlier round.
        """
        files = self._files()
        client_states = {n for name, n in files.items() if name == f"{MAIN}-{n}"}
        last = max((number for number in client_states if number <= last_round), default=0)
        if last_round and not last and len(client_states) >= STORED_ROUNDS:
            raise MessageError(f"the client's state of round {last_round} is lost. Start a new run")
        for number in client_states:
            # rounds that the server repeats, unless their answers are stored, too
            if number > last_round and f"answer-{number}-{MAIN}-{frames.STEP}" not in files:
                (self.folder / f"{MAIN}-{number}").unlink()
        reset = {"steps": set(), "recorded": 0, "pending": None, "client_state": last}
        self.state = self.state.model_copy(update=reset)
        if last:
            self.runtime.client_state = self._read(f"{MAIN}-{last}")
        self.store()
        return Frame(frames.ANSWER, {"size": self.runtime.join().size, **self.statement()})

    def record_check(self, check: StepCheck) -> None:
        """Stores the result of the trial step that the client made when it joined."""
        self.state.warnings = check.warnings
        self.state.isolated = check.isolated
        self.runtime.context = replace(self.runtime.context, isolated=check.isolated)

    def resume(self) -> None:
        """Continues the run from the state stored by another process.

        Raises:
            CheckpointError: if the folder is damaged.
        """
        state = self.state
        with damage_is_named(self.folder):
            if state.sigma is not None:
                self.accept(RunTerms(noise_multiplier=state.sigma))
            if state.pending is not None:
                client_state = self._read(f"{FIRST}-{state.pending}")
                self.runtime.pending = (state.pending, client_state)
            self.runtime.recorded = state.recorded
            if state.client_state:
                self.runtime.client_state = self._read(f"{MAIN}-{state.client_state}")

    def statement(self) -> dict[str, Any]:
        """Returns the client's ledger history, as a field for an answer to the server."""
        history = self.runtime.history()
        return {"history": history and history.to_json()}

    def accept(self, terms: RunTerms) -> None:
        """Checks and stores the run terms: the client sizes and the noise multiplier σ.

        The server repeats the terms in every request of the run. A changed σ would not make the
        ledger wrong, because each charge uses the σ of the noise. But the owner has not agreed to a
        run with a changed σ.

        Raises:
            MessageError: if the settings do not belong to this run, or if σ differs from the σ with
                which the run began.
            RequestRefusedError: if the settings differ from those received before, or in the same
                cases as in `ClientRuntime.start`.
            LedgerError: in the same cases as in `ClientRuntime.start`.
        """
        if terms == self._terms:
            return
        clients = self.runtime.context.clients
        if terms.sizes is not None and len(terms.sizes) != clients:
            raise MessageError(
                f"the server sent {len(terms.sizes)} client sizes, but the run has {clients} "
                "clients"
            )
        if self.state.sigma not in (None, terms.noise_multiplier):
            raise MessageError(
                f"the server sent the noise multiplier {terms.noise_multiplier!r:.40}, but the run "
                f"began with {self.state.sigma:g}"
            )
        self.runtime.start(terms)
        self._terms = terms
        self.state.sigma = terms.noise_multiplier

    def answer(self, frame: Frame) -> Frame:
        """Answers a server's request in a round.

        The answer and the client's state are stored before the method returns.

        If a request is repeated, the stored answer is returned. The ledger is not charged again,
        because the answer releases nothing new.

        Raises:
            MessageError, RequestRefusedError: if the request is invalid.
            OSError: if the state cannot be written.
            Exception: any other error. Its text may depend on the owner's records.
        """
        if frame.kind not in frames.EXCHANGE:
            raise MessageError(f"the server sent an unknown request {frame.kind!r:.40}")
        question = RoundFacts.of(frame)
        context = self._context(question)
        exchange = question.exchange
        file = self.folder / f"answer-{context.round}-{exchange}-{frame.kind}"
        answer = _stored_answer(file, frame)
        try:
            if answer is None:
                if self._noted != context.round:
                    self._note_round(context.round)
                    self._noted = context.round
                with self._undone_unless_stored():
                    answer = self._new_answer(frame, question, context)
                    if answer.kind == frames.ANSWER:
                        self._write(file.name, _digest(frame) + with_hash(answer.to_bytes()))
                if answer.kind == frames.ANSWER:
                    if frame.kind == frames.STEP and exchange == MAIN:
                        self._tell_owner(context)
                else:
                    number, rounds = context.round, self.runtime.settings.rounds
                    self._place.say(f"round {number}/{rounds}: refused: {answer.facts['reason']}")
            elif frame.kind == frames.STEP:
                self._restore(exchange, context)
        finally:
            self.store()
        if frame.kind != frames.STEP or (answer.kind == frames.ANSWER and exchange == FIRST):
            return answer
        return replace(answer, facts={**answer.facts, **self.statement()})

    @contextmanager
    def _undone_unless_stored(self) -> Iterator[None]:
        """Restores the client's state if a `with` block fails, such as on a full disk.

        A repeated request then starts from the same state. Charges and attempts are not undone.
        """
        runtime, state = self.runtime, self.state
        snapshot = runtime.client_state, runtime.pending, state.client_state, set(state.steps)
        try:
            yield
        except Exception:
            runtime.client_state, runtime.pending, state.client_state, state.steps = snapshot
            raise

    def _tell_owner(self, context: RoundContext) -> None:
        """Tells the owner that the client has answered in a round, and states the ledger's ε."""
        text = f"round {context.round}/{self.runtime.settings.rounds}: answered"
        if spent := spent_epsilon(self.runtime.budget):
            text += f", this client's ledger has spent {spent}"
        self._place.say(text)

    def _context(self, question: RoundFacts) -> RoundContext:
        """Checks the settings and the round in a request, and returns the context of this round."""
        self.accept(question.terms)
        runtime = self.runtime
        clients = runtime.context.clients
        rounds = runtime.settings.rounds
        participants = question.participants
        if list(participants) != sorted(set(participants)) or participants[-1] >= clients:
            raise MessageError(
                f"the server's participants must be ascending and below {clients}, got "
                f"{participants!s:.80}"
            )
        if not 1 <= question.round <= rounds:
            raise RequestRefusedError(
                f"the server's round must be from 1 to {rounds}, got {question.round!s:.20}"
            ).with_code("request.round")
        if runtime.number not in participants:
            raise RequestRefusedError(f"this client does not take part in round {question.round}")
        # a sum's smallest number of clients follows from the participants, with privacy and without
        fixed = runtime.private or runtime.sends_sums
        if fixed and participants != self._schedule.in_round(question.round):
            raise RequestRefusedError(
                f"the server's list of participants in round {question.round} does not match the "
                "run's settings"
            ).with_code("request.participants")
        return replace(
            runtime.context, note=self._place.say, round=question.round, participants=participants
        )

    # ----------------------------------------------------------------------------- an exchange

    def _new_answer(self, frame: Frame, question: RoundFacts, context: RoundContext) -> Frame:
        """Computes the answer to a request received for the first time."""
        begun = any(number == context.round for number, _ in self.state.steps)
        if frame.kind in (frames.KEYS, frames.STEP) and not begun:
            refusal = self.runtime.prepare(context)
            if refusal is not None:
                return _answered(refusal)
        if frame.kind == frames.STEP:
            return self._step(frame, question, context)
        terms = self._sum_terms(question, context)
        if frame.kind == frames.KEYS:  # discards an unfinished sum and its secrets
            client = SumClient.begin(self.runtime.number, terms)
            keys = client.keys(self._place.identities)
            self._write(SUM_FILE, client.to_bytes())
            return _answered(keys)
        with self._open_sum(terms) as client:
            if frame.kind == frames.SHARES:
                roster = primitives.Roster.from_bytes(frame.payload)
                return _answered(client.share(roster, self._place.identities))
            shares = client.unmask(primitives.Present.from_bytes(frame.payload))
        (self.folder / SUM_FILE).unlink()
        return _answered(shares)

    def _step(self, frame: Frame, question: RoundFacts, context: RoundContext) -> Frame:
        """Computes the client's upload, or returns a refusal.

        In a secure sum, the upload is masked.
        """
        method = self.runtime.method
        exchange = question.exchange
        if self.runtime.sends_sums and question.sum is None:
            raise RequestRefusedError(
                "the server requested an upload without a secure sum, but method "
                f"{method.name} requires one"
            )
        message = exchange_of(method, exchange).request.from_bytes(frame.payload)
        step = (context.round, exchange)
        key = f"{context.round}-{exchange}"
        attempts = self.state.attempts.get(key, 0)
        limited = self.runtime.private or question.sum is not None
        if limited and (step in self.state.steps or attempts >= self._max_attempts):
            raise RequestRefusedError(
                f"this client already answered round {context.round}'s {exchange} exchange"
            ).with_code("request.repeated")

        def reply() -> Message | Refusal:
            self.state.attempts[key] = attempts + 1
            self.store()  # before the charge: a killed process has used an attempt
            self.state.steps.add(step)
            request = message.to(context.device)
            replies = step_together([self.runtime], exchange, request, context)
            if replies.refusals:
                return replies.refusals[0]
            self._store_state(exchange, context)
            return replies.messages[self.runtime.number]

        if question.sum is None:
            return _answered(reply())
        with self._open_sum(self._sum_terms(question, context)) as client:
            # first: the step is not charged if the others' shares are too few
            client.receive(primitives.Sealed.from_bytes(question.sealed.encode()))
            upload = reply()
            if isinstance(upload, Refusal):
                return _answered(upload)
            layout = upload_layout(cast(SummedUploads, method), exchange, context)
            masked = client.mask(layout.encode(upload))
            return Frame(frames.ANSWER, {}, masked.astype("<u8").tobytes())

    def _sum_terms(self, question: RoundFacts, context: RoundContext) -> SumTerms:
        method = self.runtime.method
        if not sums_securely(method):
            raise MessageError(
                f"the server requested a secure sum, which method {method.name} does not support"
            )
        return sum_terms(method, question.exchange, context, question.sum or "", self._agreement)

    @contextmanager
    def _open_sum(self, terms: SumTerms) -> Iterator[SumClient]:
        """Loads the current secure sum for a `with` block, and stores its state afterwards.

        No answer leaves the node before the state is stored. Otherwise two uploads could be sent
        under the same masks.
        """
        file = self.folder / SUM_FILE
        if not file.is_file():
            raise primitives.SecureSumError("the server continued a sum that was not begun")
        client = SumClient.stored(read_regular(file), self.runtime.number, terms)
        try:
            yield client
        finally:
            self._write(SUM_FILE, client.to_bytes())

    def write_report(self, rounds: int) -> str:
        """Writes the owner's privacy report at the end of the run. Returns a summary for the owner.

        Args:
            rounds: the number of completed rounds, as the server states it.
        """
        self._note_round(rounds)
        return write_owner_report(self.runtime.budget, self.folder)

    def _note_round(self, rounds: int) -> None:
        about = {"client": self.runtime.number, "rounds": rounds}
        note_round(self.runtime.budget, self.folder, self.history, self.state.warnings, about)

    # ------------------------------------------------------------------------------- its files

    def _restore(self, exchange: str, context: RoundContext) -> None:
        """Restores the client's state after a step that was already answered."""
        name = f"{exchange}-{context.round}"
        client_state = self._read(name) if (self.folder / name).is_file() else {}
        self.runtime.store_state(exchange, client_state, context)
        self._store_state(exchange, context)
        self.state.steps.add((context.round, exchange))

    def _store_state(self, exchange: str, context: RoundContext) -> None:
        """Stores the tensors that the client keeps between rounds."""
        client_state = self.runtime.load_state(MAIN, context)
        if client_state or exchange == FIRST:
            self._write(f"{exchange}-{context.round}", StoredClientState(client_state).to_bytes())
        if client_state and exchange == MAIN:
            self.state.client_state = context.round

    def store(self) -> None:
        """Writes the client's state to its file, and deletes the files of old rounds.

        An answer may leave the node only after this method has returned.

        Raises:
            OSError: if the state cannot be written.
        """
        pending = self.runtime.pending
        self.state.recorded = self.runtime.recorded
        self.state.pending = pending[0] if pending else None
        self._stored = self.state.model_dump_json().encode()
        self._write(STATE, self._stored)
        files = self._files()
        stored = sorted(set(files.values()))[-STORED_ROUNDS:]
        for name, number in files.items():
            if number not in stored:
                (self.folder / name).unlink(missing_ok=True)

    def _files(self) -> dict[str, int]:
        """Maps the name of each round's file to the round's number."""
        matches = map(_ROUND_FILE.fullmatch, (path.name for path in self.folder.glob("*")))
        return {match[0]: int(match[1]) for match in matches if match}

    def _write(self, name: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(self.folder / name, content, secret=True)

    def _read(self, name: str) -> ClientState:
        """Loads a client state from a file to the client's device."""
        stored = StoredClientState.from_bytes(read_regular(self.folder / name, MAX_TENSORS_BYTES))
        return stored.to(self.runtime.context.device).client_state


def _digest(question: Frame) -> bytes:
    """Hashes a request. A repetition of the request has the same hash."""
    facts = {**question.facts, "number": None}
    text = json.dumps([question.kind, facts], sort_keys=True)
    return hashlib.sha256(text.encode() + b"\0" + question.payload).digest()


def _stored_answer(file: Path, question: Frame) -> Frame | None:
    """Loads the stored answer to a request. Returns None if the client has not answered this
    request.
    """
    if not file.is_file():
        return None
    with damage_is_named(file):
        content = read_regular(file, MAX_TENSORS_BYTES)
        if content[:HASH_BYTES] != _digest(question):
            return None
        return Frame.from_bytes(without_hash(content[HASH_BYTES:]))


def _answered(answer: Message | primitives.Parcel | Refusal) -> Frame:
    if isinstance(answer, Refusal):
        return Frame(frames.REFUSAL, {"reason": answer.reason, "kind": answer.kind})
    return Frame(frames.ANSWER, {}, answer.to_bytes())
