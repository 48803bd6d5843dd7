"""A client of one run at a data owner's node: it answers the server's questions
(`fedsynth.deployment.frames`), and its state is in files.

Whatever a question states, the client uses its own settings, and charges its own ledger first. Its
files never leave the machine, and persist across processes. The client memory of the last rounds is
stored, so that a server that resumes from its checkpoint finds the memory of that round.

    HOME/runs/RUN/session.json           the proposal, σ, and the completed steps
    HOME/runs/RUN/memory-ROUND           the client's memory after that round
    HOME/runs/RUN/first-ROUND            its memory of that round's first exchange
    HOME/runs/RUN/answer-ROUND-EXCHANGE-QUESTION    its answer, for a server that repeats the
                                         question: that costs nothing and releases nothing new
    HOME/runs/RUN/sum.json               the state of an unfinished secure sum, with its secrets
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator

from fedsynth.core.context import RoundContext, Silent
from fedsynth.core.messages import Message
from fedsynth.core.method import Memory
from fedsynth.data.images import ImageData
from fedsynth.deployment import frames
from fedsynth.deployment.frames import Frame, RoundFacts, history_to_json
from fedsynth.deployment.proposal import Proposal
from fedsynth.deployment.secure_aggregation.client import Identities, SumClient, SumTerms
from fedsynth.deployment.secure_aggregation.messages import (
    Masked,
    Parcel,
    Present,
    Roster,
    Sealed,
    SumState,
)
from fedsynth.deployment.secure_aggregation.primitives import SecureSumError
from fedsynth.deployment.secure_aggregation.quantization import sum_terms, upload_layout
from fedsynth.errors import CheckpointError, MessageError
from fedsynth.federation.client_group import step_alone
from fedsynth.federation.client_runtime import ClientData, ClientRuntime, ResumeState
from fedsynth.federation.context import public_context, resolve_device, with_proxy
from fedsynth.federation.protocol import Refusal, RunTerms, agreement, declared
from fedsynth.federation.run_data import divided
from fedsynth.privacy.errors import RequestRefusedError
from fedsynth.privacy.files import MAX_TENSORS_BYTES, read_regular, read_text, write_whole
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.results.checkpoint import ClientMemory

if TYPE_CHECKING:
    from fedsynth.deployment.node import Node

STATE = "session.json"
SUM_FILE = "sum.json"
MAX_ATTEMPTS = 3
"""How often an exchange of a private run is answered, over all joins: a server that was killed
resumes from its checkpoint and repeats a round. Each answer is charged; without a cap, only one is
given."""
STORED_ROUNDS = 3
"""The number of rounds whose files are stored: a resumed server lacks at most the last one."""
HASH_BYTES = 32
_ROUND_FILE = re.compile(r"(?:memory|first|answer)-([0-9]+)(?:-[a-z-]+)?")


def _stored_proposal(stated: Any) -> Proposal:
    if isinstance(stated, Proposal):
        return stated
    return Proposal.from_json(stated)


class State(BaseModel):
    """The data that a client's next process needs, in addition to its memory.

    Args:
        proposal: the proposal that the owner has accepted.
        initial_rows: the number of rows in the ledger when the client first joined the run.
        warnings: of the trial of the client's step when it joined.
        sigma: σ, which is calibrated once for a run; None: not received yet.
        attempts: how often each step was taken, over all joins, by "ROUND-frames.EXCHANGE".
        steps: (round, exchange) of each step since the client joined.
        memory: the round whose memory it has; 0: none.
        recorded: see `ResumeState`.
        pending: the round of `ResumeState.pending`.
    """

    model_config = ConfigDict(extra="forbid")

    proposal: Annotated[
        Proposal, PlainValidator(_stored_proposal), PlainSerializer(Proposal.to_json)
    ]
    initial_rows: int
    warnings: list[str] = []
    sigma: float | None = None
    attempts: dict[str, int] = {}
    steps: set[tuple[int, str]] = set()
    memory: int = 0
    recorded: int = 0
    pending: int | None = None


def read_state(folder: Path) -> State | None:
    """Returns the state in the folder of a run; None: none was written yet.

    Raises:
        CheckpointError: it is damaged; that does not count as having answered nothing.
    """
    if not (folder / STATE).is_file():
        return None
    with damage_is_named(folder):
        return State.model_validate_json(read_text(folder / STATE))


@contextmanager
def damage_is_named(folder: Path) -> Iterator[None]:
    """Converts errors from reading a damaged folder to CheckpointError."""
    try:
        yield
    except (OSError, ValueError, MessageError) as error:
        raise CheckpointError(f"{folder} is damaged: {error!r:.120}") from None


class Session:
    """A client of one run.

    Args:
        node: the owner's.
        proposal: the proposal that the owner has accepted.
        data: its records.
        ledger: its own.
        state: what an earlier process has left; None: the client joins for the first time.

    Attributes:
        folder: of the run.
        runtime: the client, with its own copy of the run's settings.
        history: the ledger when the client first joined the run.
    """

    def __init__(
        self, node: Node, proposal: Proposal, data: ImageData, ledger: Ledger, state: State | None
    ) -> None:
        settings = proposal.settings
        device = resolve_device(node.device)
        context = with_proxy(public_context(settings, proposal.spec, device), settings)
        settings.method.check_model(context.architecture)
        [training], [held_out] = divided(settings, [torch.arange(len(data))], data)
        self.runtime = ClientRuntime(
            node.number,
            settings,
            context,
            ClientData(data.to(device), training, held_out),
            ledger,
            secret=node.secret() if node.secret else None,
            cap=node.owner.cap,
            remote=True,
        )
        self._node = node
        self.folder = node.folder(proposal.run)
        self._agreement = agreement(settings)
        self._schedule = settings.schedule()
        self._terms: RunTerms | None = None
        self._stamp = _stamp(self.folder)
        history = ledger.history()
        self.state = state or State(proposal=proposal, initial_rows=len(history.releases))
        self.history = replace(history, releases=history.releases[: self.state.initial_rows])
        privacy = settings.privacy  # without it, a second sum of the same uploads reveals one
        capped = privacy is not None and (node.owner.cap is not None or privacy.epsilon is not None)
        self._max_attempts = MAX_ATTEMPTS if capped else 1

    @property
    def current(self) -> bool:
        """Returns whether no other process has answered for this client since this one did."""
        return self._stamp == _stamp(self.folder)

    def join(self, last_round: int) -> Frame:
        """Begins after a round: 0, or the one after which a restarted server resumes.

        The client continues with the memory of its last round until then. That may be an earlier
        one: it takes part in some rounds only, and may have been lost in others.

        Returns:
            Its join message.

        Raises:
            MessageError: the memory of its last round until then was pruned.
        """
        files = self._files()
        memories = {n for name, n in files.items() if name == f"memory-{n}"}
        last = max((number for number in memories if number <= last_round), default=0)
        if last_round and not last and len(memories) >= STORED_ROUNDS:
            raise MessageError(f"this client no longer stores its memory of round {last_round}")
        for number in memories:
            # rounds that the server repeats, unless their answers are stored, too
            if number > last_round and f"answer-{number}-{MAIN}-{frames.STEP}" not in files:
                (self.folder / f"memory-{number}").unlink()
        reset = {"steps": set(), "recorded": 0, "pending": None, "memory": last}
        self.state = self.state.model_copy(update=reset)
        if last:
            self.runtime.memory = self._read(f"memory-{last}")
        self.store()
        joined = self.runtime.join()
        return Frame(frames.ANSWER, {"size": joined.size, **self.statement()})

    def resume(self) -> None:
        """Restores the state that another process has left.

        Raises:
            CheckpointError: the folder is damaged.
        """
        state = self.state
        with damage_is_named(self.folder):
            if state.sigma is not None:
                self.accept(RunTerms(noise_multiplier=state.sigma))
            pending = None
            if state.pending is not None:
                pending = (state.pending, self._read(f"first-{state.pending}"))
            self.runtime.resume_state = ResumeState(state.recorded, pending)
            if state.memory:
                self.runtime.memory = self._read(f"memory-{state.memory}")

    def statement(self) -> dict[str, Any]:
        """Returns the fact that states the client's ledger."""
        return {"history": history_to_json(self.runtime.history())}

    def accept(self, terms: RunTerms) -> None:
        """Accepts the terms, which are the same in all questions of a run.

        Each charge uses the σ that noise is drawn with, so the ledger would be right with another
        σ, too; but the owner has not agreed to such a run.

        Raises:
            MessageError: they are not of this run, or σ is not the one that it was begun with.
            RequestRefusedError: others were received before; or as `ClientRuntime.start`.
            LedgerError: as `ClientRuntime.start`.
        """
        if terms == self._terms:
            return
        if terms.sizes is not None and len(terms.sizes) != self.runtime.context.clients:
            raise MessageError("the terms need the size of every client")
        if self.state.sigma not in (None, terms.noise_multiplier):
            raise MessageError("the run was begun with another noise multiplier")
        self.runtime.start(terms)
        self._terms = terms
        self.state.sigma = terms.noise_multiplier

    def answer(self, frame: Frame) -> Frame:
        """Returns the answer to a question of a round, after storing it and the client's state.

        The ledger is not consulted for a repeated question, because nothing new is released.

        Raises:
            MessageError, RequestRefusedError: the question is invalid.
            OutputError: the state cannot be written.
            Exception: of any kind, whose text may depend on records.
        """
        if frame.kind not in frames.EXCHANGE:
            raise MessageError(f"no client answers {frame.kind!r:.40}")
        question = RoundFacts.of(frame)
        context = self._context(question)
        phase = question.phase
        file = self.folder / f"answer-{context.round}-{phase}-{frame.kind}"
        answer = _stored_answer(file, frame)
        try:
            if answer is None:
                answer = self._new_answer(frame, question, context)
                if answer.kind == frames.ANSWER:
                    sent = answer.to_bytes()
                    self._write(file.name, _digest(frame) + hashlib.sha256(sent).digest() + sent)
            elif frame.kind == frames.STEP:
                self._restore(phase, context)
        finally:
            self.store()
        if frame.kind != frames.STEP or (answer.kind == frames.ANSWER and phase == FIRST):
            return answer
        return replace(answer, facts={**answer.facts, **self.statement()})

    def _context(self, question: RoundFacts) -> RoundContext:
        """Accepts the terms of a question, and returns the context of its round."""
        self.accept(question.terms)
        runtime = self.runtime
        clients = runtime.context.clients
        rounds = runtime.settings.rounds
        participants = tuple(question.participants)
        if list(participants) != sorted(set(participants)) or participants[-1] >= clients:
            raise MessageError(f"participants must be ascending and below {clients}")
        if not 1 <= question.round <= rounds:
            raise RequestRefusedError(f"the run has {rounds} rounds, not {question.round!s:.20}")
        # a sum's smallest number of clients follows from the participants, with privacy and without
        fixed = runtime.private or runtime.sends_sums
        if fixed and participants != self._schedule.in_round(question.round):
            raise RequestRefusedError(f"other clients take part in round {question.round}")
        context = replace(runtime.context, reporter=OwnerReporter(self._node.say))
        return replace(context, round=question.round, participants=participants)

    # ----------------------------------------------------------------------------- an exchange

    def _new_answer(self, frame: Frame, question: RoundFacts, context: RoundContext) -> Frame:
        """Returns the answer to a question that was not asked before."""
        begun = any(number == context.round for number, _ in self.state.steps)
        if frame.kind in (frames.KEYS, frames.STEP) and not begun:
            refusal = self.runtime.prepare(context)
            if refusal is not None:
                return _refused(refusal)
        if frame.kind == frames.STEP:
            return self._step(frame, question, context)
        terms = self._sum_terms(question, context)
        if frame.kind == frames.KEYS:  # discards an unfinished sum and its secrets
            client = SumClient(self._position(context), terms, self._identities(context))
            keys = client.keys()
            self._write(SUM_FILE, client.state.to_bytes())
            return _answered(keys)
        with self._open_sum(terms, context) as client:
            if frame.kind == frames.SHARES:
                return _answered(client.share(Roster.from_bytes(frame.payload)))
            shares = client.unmask(Present.from_bytes(frame.payload))
        (self.folder / SUM_FILE).unlink()
        return _answered(shares)

    def _step(self, frame: Frame, question: RoundFacts, context: RoundContext) -> Frame:
        """Returns the client's upload, masked in a sum, or its refusal."""
        method = self.runtime.method
        phase = question.phase
        if self.runtime.sends_sums and question.sum is None:
            raise RequestRefusedError("this client's uploads are seen only in sums")
        message = declared(method, phase, "downlink").from_bytes(frame.payload)
        self._position(context)
        step = (context.round, phase)
        key = f"{context.round}-{phase}"
        attempts = self.state.attempts.get(key, 0)
        limited = self.runtime.private or question.sum is not None
        if limited and (step in self.state.steps or attempts >= self._max_attempts):
            raise RequestRefusedError(f"round {context.round} was answered before")

        def reply() -> Message | Refusal:
            self.state.steps.add(step)
            self.state.attempts[key] = attempts + 1
            upload = step_alone(self.runtime, phase, message.to(context.device), context)
            if not isinstance(upload, Refusal):
                self._store_memory(phase, context)
            return upload

        if question.sum is None:
            upload = reply()
            return _refused(upload) if isinstance(upload, Refusal) else _answered(upload)
        with self._open_sum(self._sum_terms(question, context), context) as client:
            # first: the step is not charged if the others' shares are too few
            client.receive(Sealed.from_bytes(question.sealed.encode()))
            upload = reply()
            if isinstance(upload, Refusal):
                return _refused(upload)
            return _answered(client.mask(upload_layout(method, phase, context).encode(upload)))

    def _position(self, context: RoundContext) -> int:
        """Returns the client's position among those of the round."""
        if self.runtime.number not in context.active:
            raise RequestRefusedError("this client does not take part in the round")
        return context.active.index(self.runtime.number)

    def _identities(self, context: RoundContext) -> Identities | None:
        """Returns the identities of the round's clients, by their positions among them."""
        identities = self._node.identities
        if identities is None:
            return None
        keys = identities.public_keys
        active = enumerate(context.active)
        return replace(identities, public_keys={p: keys[k] for p, k in active if k in keys})

    def _sum_terms(self, question: RoundFacts, context: RoundContext) -> SumTerms:
        method = self.runtime.method
        if not method.requires_secure_sum:
            raise MessageError(f"{method.name} does not use secure aggregation")
        name = question.sum or ""
        return sum_terms(method, question.phase, context, name, self._agreement)

    @contextmanager
    def _open_sum(self, terms: SumTerms, context: RoundContext) -> Iterator[SumClient]:
        """Opens the sum under way, and stores its state afterwards: no answer leaves before, so
        that no two uploads leave under the same masks.

        Raises:
            SecureSumError: it was not begun here, or is another one.
        """
        file = self.folder / SUM_FILE
        if not file.is_file():
            raise SecureSumError("this client does not take part in such a sum")
        state = SumState.from_bytes(read_regular(file))
        client = SumClient(self._position(context), terms, self._identities(context), state)
        try:
            yield client
        finally:
            self._write(SUM_FILE, client.state.to_bytes())

    # ------------------------------------------------------------------------------- its files

    def _restore(self, phase: str, context: RoundContext) -> None:
        """Restores the client's state after its stored step."""
        name = _memory_file(phase, context)
        memory = self._read(name) if (self.folder / name).is_file() else {}
        self.runtime.store_memory(phase, memory, context)
        self._store_memory(phase, context)
        self.state.steps.add((context.round, phase))

    def _store_memory(self, phase: str, context: RoundContext) -> None:
        """Stores the memory that a step has left."""
        memory = self.runtime.load_memory(MAIN, context)
        if memory or phase == FIRST:
            self._write(_memory_file(phase, context), ClientMemory(memory).to_bytes())
        if memory and phase == MAIN:
            self.state.memory = context.round

    def store(self) -> None:
        """Writes the client's state, and removes the files of all but the last rounds; an answer
        leaves the node only afterwards.

        Raises:
            OSError: it cannot be written.
        """
        resume_state = self.runtime.resume_state
        self.state.recorded = resume_state.recorded
        self.state.pending = resume_state.pending[0] if resume_state.pending else None
        self._write(STATE, self.state.model_dump_json().encode())
        self._stamp = _stamp(self.folder)
        files = self._files()
        stored = sorted(set(files.values()))[-STORED_ROUNDS:]
        for name, number in files.items():
            if number not in stored:
                (self.folder / name).unlink(missing_ok=True)

    def _files(self) -> dict[str, int]:
        """Returns the names of the files of rounds, with their rounds."""
        matches = (_ROUND_FILE.fullmatch(path.name) for path in self.folder.glob("*"))
        return {match[0]: int(match[1]) for match in matches if match}

    def _write(self, name: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(self.folder / name, content, secret=True)

    def _read(self, name: str) -> Memory:
        """Returns a stored memory, on the client's device."""
        stored = ClientMemory.from_bytes(read_regular(self.folder / name, MAX_TENSORS_BYTES))
        return stored.to(self.runtime.context.device).memory


class OwnerReporter(Silent):
    """Reports what happens in a step to the owner.

    Args:
        say: receives the lines.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def note(self, text: str) -> None:
        """Passes a line to the owner."""
        self._say(text)


def _memory_file(phase: str, context: RoundContext) -> str:
    return f"{'first' if phase == FIRST else 'memory'}-{context.round}"


def _digest(question: Frame) -> bytes:
    """Returns a hash of the whole question except its number."""
    facts = {**question.facts, "number": None}
    text = json.dumps([question.kind, facts], sort_keys=True)
    return hashlib.sha256(text.encode() + b"\0" + question.payload).digest()


def _stored_answer(file: Path, question: Frame) -> Frame | None:
    """Returns the stored answer to exactly this question; None: it was not asked before.

    Raises:
        CheckpointError: the file is damaged, so that the answer cannot be repeated.
    """
    if not file.is_file():
        return None
    with damage_is_named(file):
        content = read_regular(file, MAX_TENSORS_BYTES)
        if content[:HASH_BYTES] != _digest(question):
            return None
        sent = content[2 * HASH_BYTES :]
        if hashlib.sha256(sent).digest() != content[HASH_BYTES : 2 * HASH_BYTES]:
            raise ValueError("its hash differs")
        return Frame.from_bytes(sent)


def _answered(message: Message | Parcel | Masked) -> Frame:
    return Frame(frames.ANSWER, {}, message.to_bytes())


def _refused(refusal: Refusal) -> Frame:
    return Frame(frames.REFUSAL, {"reason": refusal.reason, "kind": refusal.kind})


def _stamp(folder: Path) -> tuple[int, int, int] | None:
    """Returns a stamp that changes with each write of the state; None: it was not written yet."""
    try:
        status = (folder / STATE).stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns
