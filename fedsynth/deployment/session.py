"""One run at a data owner's node, from one message to the next.

A node's state is in files of the owner's folder, and not in the transport: it persists across
processes, and never leaves the machine. The client memory of the last rounds is kept, so that a
server that resumes from its checkpoint finds the memory of that round.

    HOME/runs/RUN/session.json           the proposal, the terms, and the completed steps
    HOME/runs/RUN/memory-ROUND           the client's memory after that round
    HOME/runs/RUN/first-ROUND            its memory of that round's first exchange
    HOME/runs/RUN/answer-ROUND-EXCHANGE-QUESTION    its answer, for a server that repeats the
                                         question: that costs nothing and releases nothing new
    HOME/runs/RUN/sum.json               the state of an unfinished secure sum, with its secrets
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedsynth.core.context import Reporter
from fedsynth.core.method import Memory
from fedsynth.data.images import ImageData
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.proposal import Proposal
from fedsynth.deployment.remote_client import RemoteClient
from fedsynth.deployment.response_cache import KeptAnswers
from fedsynth.deployment.secure_aggregation.client import Identities
from fedsynth.deployment.secure_exchange import STEP
from fedsynth.errors import CheckpointError, MessageError, OutputError
from fedsynth.federation.client_runtime import ClientRuntime, OwnData, Standing
from fedsynth.federation.context import public_context, resolve_device, with_proxy
from fedsynth.federation.protocol import Terms
from fedsynth.federation.run_data import divided
from fedsynth.privacy.files import MAX_TENSORS_BYTES, load_json, read_regular, write_whole
from fedsynth.privacy.guard import Cap
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.results.checkpoint import Kept

STATE = "session.json"
SUM_FILE = "sum.json"
MOST_ANSWERS = 3
"""How often an exchange of a private run is answered, over all joins: a server that was killed
resumes from its checkpoint and repeats a round. Each answer is charged; without a cap, only one is
given."""
KEPT_ROUNDS = 3
"""The number of rounds whose memory is kept: a resumed server lacks at most the last one."""
_MEMORY = re.compile(r"memory-([0-9]+)")


class Session:
    """A client of one run, whose state is in a folder.

    Args:
        folder: of this run.
        proposal: the proposal that the owner has accepted.
        number: the client's index, from 0.
        data: its records.
        ledger: its own.
        cap: its owner's budget.
        device: as in a run's settings.
        secret: the generator of its noise; None: one with a fresh key.
        reporter: receives errors.
        identities: of all clients, for secure sums; None: see `SumDesk`.

    Attributes:
        remote: answers the server's frames.
        context: of the run.
        history: the ledger when the client first joined the run.
        warnings: the warnings of the trial of the client's step when it joined.
    """

    def __init__(
        self,
        folder: Path,
        proposal: Proposal,
        number: int,
        data: ImageData,
        ledger: Ledger,
        cap: Cap | None = None,
        device: str = "auto",
        secret: SecretGenerator | None = None,
        reporter: Reporter | None = None,
        identities: Identities | None = None,
    ) -> None:
        self.folder = folder
        self.proposal = proposal
        settings = proposal.settings
        torch_device = resolve_device(device)
        context = with_proxy(public_context(settings, proposal.spec, torch_device), settings)
        settings.method.check_model(context.architecture)
        self.context = context
        partition = [torch.arange(len(data))]
        training, held_out = divided(settings, partition, data)
        client_data = OwnData(data.to(torch_device), training[0], held_out[0])
        runtime = ClientRuntime(
            number, settings, context, client_data, ledger, secret=secret, cap=cap, apart=True
        )
        self.remote = RemoteClient(runtime, context, reporter, identities)
        self._answers = KeptAnswers(folder)
        self._saved = 0
        self._stamp = _stamp(folder)
        privacy = settings.privacy  # without it, a second sum of the same uploads reveals one
        capped = privacy is not None and (cap is not None or privacy.epsilon is not None)
        self._most = MOST_ANSWERS if capped else 1
        self._answered = answered(folder)
        self._counted: set[tuple[int, str]] = set()
        self._spend()
        history = ledger.history()
        with damage_is_named(folder):
            state = read_state(folder) or {"warnings": [], "sigma": None, "held": None}
            self.warnings: list[str] = state["warnings"]
            self._sigma: float | None = state["sigma"]
            self.history = replace(history, releases=history.releases[: state["held"]])

    def _spend(self) -> None:
        """Blocks the exchanges that have reached their limit of answers."""
        over = {question for question, times in self._answered.items() if times >= self._most}
        self.remote.spent = over

    def _count(self) -> None:
        """Counts the answers since the last write."""
        for question in self.remote.done - self._counted:
            self._answered[question] = self._answered.get(question, 0) + 1
        self._counted = set(self.remote.done)
        self._spend()

    @property
    def current(self) -> bool:
        """Returns whether no other process has answered for this client since this one did."""
        return self._stamp == _stamp(self.folder)

    @property
    def round(self) -> int:
        """The last round that the client has completed; 0: none."""
        return max((number for number, phase in self.remote.done if phase == MAIN), default=0)

    def told(self, facts: Mapping[str, Any]) -> bool:
        """Returns whether these are the terms that the client has already received."""
        terms = self._terms()
        return terms is not None and terms == {name: facts.get(name) for name in terms}

    def _terms(self) -> dict[str, Any] | None:
        """Returns the terms in JSON form; None: it has not received them yet."""
        terms = self.remote.terms
        if terms is None:
            return None
        sizes = None if terms.sizes is None else list(terms.sizes)
        return {"sizes": sizes, "noise_multiplier": terms.noise_multiplier}

    def check_terms(self, facts: Mapping[str, Any]) -> None:
        """Refuses a σ that differs from the run's: σ is calibrated once, and a resumed server has
        it on file.

        Each charge uses the σ that noise is drawn with, so the ledger would be right with another
        σ, too; but the owner has not agreed to such a run.

        Raises:
            MessageError: σ differs.
        """
        if self._sigma is not None and facts.get("noise_multiplier") != self._sigma:
            raise MessageError("the run was begun with another noise multiplier")

    def begin(self, completed: int) -> None:
        """Begins after a round: 0, or the one after which a restarted server resumes.

        The client continues with the memory of its last round until then. That may be an earlier
        one: it takes part in some rounds only, and may have been lost in others.

        Raises:
            MessageError: the memory of its last round until then was pruned.
        """
        rounds = self._rounds()
        last = max((number for number in rounds if number <= completed), default=0)
        if last:
            self.remote.runtime.memory = self._read(f"memory-{last}")
            self._saved = last
        elif completed and len(rounds) >= KEPT_ROUNDS:
            raise MessageError(
                f"this client keeps its memories of rounds {sorted(rounds)}, and the server "
                f"resumes after round {completed}"
            )
        for obsolete in rounds:
            # rounds that the server repeats, unless their answers are stored, too
            if obsolete > completed and not self._answers.has(obsolete, MAIN):
                (self.folder / f"memory-{obsolete}").unlink(missing_ok=True)

    def resume(self) -> None:
        """Restores the state that another process has left.

        Raises:
            CheckpointError: the folder is damaged.
        """
        with damage_is_named(self.folder):
            state = load_json(self.folder / STATE)
            self.remote.joined = True  # a folder is written when it has
            if state["terms"] is not None:
                sizes = state["terms"]["sizes"]
                sigma = state["terms"]["noise_multiplier"]
                self.remote.take(Terms(None if sizes is None else tuple(sizes), sigma))
            self.remote.done = {(int(number), str(phase)) for number, phase in state["done"]}
            self._counted = set(self.remote.done)
            runtime = self.remote.runtime
            pending = state["pending"]
            first = None if pending is None else (pending, self._read(f"first-{pending}"))
            runtime.standing = Standing(state["recorded"], first)
            if state["memory"]:
                runtime.memory = self._read(f"memory-{state['memory']}")
            self._saved = state["memory"]
            if (self.folder / SUM_FILE).is_file():
                self.remote.sums.standing = load_json(self.folder / SUM_FILE)

    def again(self, question: Frame) -> Frame | None:
        """Returns the stored answer to a repeated question and restores the client's state after
        it.

        The ledger is not consulted, because nothing new is released. None: it is a new question.

        Raises:
            CheckpointError: the stored answer is damaged.
        """
        if question.kind in ("prepare", "begin") and self._answers.has(
            question.facts.get("round"), FIRST, MAIN
        ):
            return Frame("answer", {})  # its step may be stored; if not, its charge is checked
        cached = self._answers.of(question)
        if cached is None or question.kind != STEP:
            return cached
        number = int(question.facts["round"])
        phase = str(question.facts["phase"])
        runtime = self.remote.runtime
        stem = f"{'first' if phase == FIRST else 'memory'}-{number}"
        memory = self._read(stem) if (self.folder / stem).is_file() else {}
        runtime.remember(phase, memory, replace(runtime.context, round=number))
        if (number, phase) not in self.remote.done:
            self.remote.done.add((number, phase))
            self._counted.add((number, phase))
        return cached

    def answer(self, question: Frame, sent: bytes) -> bytes:
        """Returns the client's answer to a frame, after storing the answer and the client's state.

        Args:
            question: the frame.
            sent: the frame's bytes as received.

        Raises:
            OutputError: they cannot be stored.
        """
        answer = self.remote.answer(sent)
        try:
            self._keep_sum()  # first: an upload is never masked twice with the same masks
            self._answers.keep(question, Frame.from_bytes(answer))
        except OSError as error:
            raise OutputError(f"cannot write {self.folder}: {error.strerror or error}") from None
        self.keep()
        return answer

    def keep(self) -> None:
        """Writes the client's state; an answer leaves the node only afterwards.

        Raises:
            OutputError: it cannot be written.
        """
        self._count()
        runtime = self.remote.runtime
        standing = runtime.standing
        number = self.round
        terms = self.remote.terms
        try:
            if number and runtime.memory:
                self._write(f"memory-{number}", Kept(runtime.memory).to_bytes())
                self._saved = number
            if standing.pending is not None:
                self._write(f"first-{standing.pending[0]}", Kept(standing.pending[1]).to_bytes())
            state: dict[str, Any] = {
                "proposal": self.proposal.to_json(),
                "held": len(self.history.releases),
                "terms": self._terms(),
                "sigma": self._sigma if terms is None else terms.noise_multiplier,
                "done": sorted(self.remote.done),
                "answered": [
                    [*question, times] for question, times in sorted(self._answered.items())
                ],
                "recorded": standing.recorded,
                "pending": None if standing.pending is None else standing.pending[0],
                "memory": self._saved,
                "warnings": self.warnings,
            }
            self._write(STATE, json.dumps(state).encode())
            self._stamp = _stamp(self.folder)
            self._keep_sum()
            self._prune(standing)
        except OSError as error:
            raise OutputError(f"cannot write {self.folder}: {error.strerror or error}") from None

    def _keep_sum(self) -> None:
        """Stores the state of a secure sum, and removes that of a completed one."""
        stated = self.remote.sums.standing
        if stated is not None:
            self._write(SUM_FILE, json.dumps(stated).encode())
        else:
            for name in (SUM_FILE, f"{SUM_FILE}.partial"):
                (self.folder / name).unlink(missing_ok=True)

    def _prune(self, standing: Standing) -> None:
        """Removes all memories but the last rounds', the pending one, and those of stored
        answers.
        """
        self._answers.prune()
        for number in sorted(self._rounds())[:-KEPT_ROUNDS]:
            (self.folder / f"memory-{number}").unlink(missing_ok=True)
        pending = None if standing.pending is None else standing.pending[0]
        for path in self.folder.glob("first-*"):
            of_round = path.name.removeprefix("first-")
            has_first = of_round.isdecimal() and self._answers.has(int(of_round), FIRST)
            if not has_first and path.name != f"first-{pending}":
                path.unlink(missing_ok=True)

    def _rounds(self) -> set[int]:
        """Returns the rounds whose memory is kept."""
        if not self.folder.is_dir():
            return set()
        matches = (_MEMORY.fullmatch(path.name) for path in self.folder.iterdir())
        return {int(match.group(1)) for match in matches if match is not None}

    def _write(self, name: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(self.folder / name, content, secret=True)

    def _read(self, name: str) -> Memory:
        """Returns a stored memory, on the client's device."""
        device = self.remote.runtime.context.device
        memory = Kept.from_bytes(read_regular(self.folder / name, MAX_TENSORS_BYTES)).memory
        return {key: tensor.to(device) for key, tensor in memory.items()}


@contextmanager
def damage_is_named(folder: Path) -> Iterator[None]:
    """Converts errors from reading a damaged folder to CheckpointError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, MessageError) as error:
        raise CheckpointError(f"{folder} is damaged: {error!r:.120}") from None


def read_state(folder: Path) -> Any:
    """Returns the state in the folder of a run; None: none was written yet."""
    return load_json(folder / STATE) if (folder / STATE).is_file() else None


def answered(folder: Path) -> dict[tuple[int, str], int]:
    """Returns how often each exchange of a folder's run was answered, over all joins.

    Raises:
        CheckpointError: the folder is damaged; that does not count as having no answers.
    """
    with damage_is_named(folder):
        state = read_state(folder) or {"answered": []}
        return {(int(number), str(phase)): int(n) for number, phase, n in state["answered"]}


def kept_proposal(folder: Path) -> Proposal | None:
    """Returns the accepted proposal of a folder's run; None: there is none yet.

    Raises:
        CheckpointError: the folder is damaged.
    """
    with damage_is_named(folder):
        state = read_state(folder)
        return None if state is None else Proposal.from_json(state["proposal"])


def _stamp(folder: Path) -> tuple[int, int, int] | None:
    """Returns a stamp that changes with each write of the state; None: it was not written yet."""
    try:
        status = (folder / STATE).stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns
