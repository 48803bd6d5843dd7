"""Simulated clients in several processes, the ranks, which torchrun has started.

Rank 0 is the server. It also has every client's ledger and state, and writes all files. In each
exchange, the clients of the round are shared out over all ranks by their estimated cost. Rank 0
charges the clients of another rank and then sends their states and the request to this rank. The
rank computes the clients' steps, as `InProcess` does, and sends the uploads and the new states
back. A client's step depends neither on the rank nor on the number of ranks.

In a private run, a rank draws the noise of its clients with its own secret keys. It has ledgers in
memory only, which mirror the charges that rank 0 has made before.

Messages go through a gloo group of torch.distributed, also between ranks with GPUs, since packed
messages are bytes in main memory. A message is a safetensors file, whose reading executes no code.
Threads receive the messages, so the main thread can always be interrupted:

    rank 0 sends    start {sizes, noise_multiplier}, step {round, participants, exchange, clients}
                    with the request and the states, end {results} with the model, stop {reason}
    others send     hello {versions, data}, progress {stage, completed, total}, note {text},
                    answer {refusals, lost, rejected} with uploads and states, error {text, code},
                    gone {reason}, if a signal ends the process

Frames of the kinds end, stop and gone are answered by bye {}.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import Any, cast

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from fedsynth import rank
from fedsynth.config.participation import CRASHED, TIMED_OUT
from fedsynth.core.capabilities import exchange_of
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, Packed, Tensors
from fedsynth.core.method import Method
from fedsynth.data.files import unpack_tensors
from fedsynth.errors import (
    BudgetExceededError,
    DivergedError,
    FedsynthError,
    MessageError,
    SettingError,
    one_line,
)
from fedsynth.federation import protocol
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.federation.in_process import InProcess
from fedsynth.privacy.plans import MAIN
from fedsynth.training.loop import LoopCheckpointer
from fedsynth.validation import MAX_SECONDS, check_number
from fedsynth.version import __version__

# The environment variable with the number of seconds after which a rank without a sign is lost.
SECONDS = "FEDSYNTH_RANK_SECONDS"
DEFAULT_SECONDS = 1800.0
# The number of seconds between two reports of a rank's progress, and between two checks.
REPORT_SECONDS = 1.0
# The number of seconds that a rank waits for the others at the end of a run that has failed.
STOP_SECONDS = 5.0
FOREVER = timedelta(days=1000)  # for gloo: the server may compute for days


class RankError(FedsynthError, code="ranks.failed"):
    """Raised if the ranks of a run cannot work together, or if another rank has failed."""


@dataclass(frozen=True)
class NamedTensors(Packed):
    """Tensors that one rank sends to another: a client's state or the final model.

    Args:
        tensors: the tensors by name.
    """

    tensors: Tensors


@dataclass(frozen=True)
class Frame:
    """What one rank sends to another.

    Args:
        peer: the rank that has sent the frame.
        run: the number of the run in the program.
        kind: the kind of the frame, as described at the top of this module.
        facts: values that JSON can encode.
        parts: packed messages by name.
    """

    peer: int
    run: int
    kind: str
    facts: Mapping[str, Any]
    parts: Mapping[str, bytes]


class Links:
    """The connections between rank 0 and the other ranks.

    Attributes:
        rank, size: the number of this rank, and the number of ranks.
        lost: the ranks whose connection was closed.
        locate: a function that names the clients whose step this rank computes.

    Raises:
        RankError: not all ranks can be connected in time.
        SettingError: the environment variable `SECONDS` is not a number of seconds.
    """

    def __init__(self) -> None:
        self._seconds = _seconds()
        if torch.cuda.is_available():
            torch.cuda.set_device(rank.local_rank() % torch.cuda.device_count())
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=timedelta(seconds=self._seconds))
            group = dist.new_group(backend="gloo", timeout=FOREVER)
        except (RuntimeError, ValueError) as error:  # a port that is taken, a missing rank
            raise RankError(
                f"rank {rank.this_rank()} cannot connect all {rank.num_ranks()} ranks: "
                f"{one_line(error)}. Start all ranks with the same free port"
            ).with_code("ranks.connection") from None
        self._group = cast(dist.ProcessGroup, group)  # all ranks are in it
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.lost: set[int] = set()
        self.locate: Callable[[], str] = str
        self._run = 0
        self._frames: SimpleQueue[Frame | None] = SimpleQueue()
        self._heard: dict[int, float] = {}
        self._sending: dict[int, list[tuple[Any, Tensor]]] = {}
        self._readers: dict[int, Thread] = {}
        rank.connected = True

    @property
    def peers(self) -> range:
        """The ranks to which this rank is connected."""
        return range(1, self.size) if self.rank == 0 else range(1)

    def _read(self, peer: int) -> None:
        """Receives the frames of a rank in a run, in a thread.

        The thread ends with the run, as a thread in C++ would abort a Python that ends.
        """
        with suppress(RuntimeError):  # the connection was closed
            while True:
                length = torch.empty(1, dtype=torch.int64)
                dist.recv(length, peer, group=self._group)
                content = torch.empty(int(length), dtype=torch.uint8)
                dist.recv(content, peer, group=self._group)
                tensors, metadata = unpack_tensors(content.numpy().tobytes())
                parts = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
                frame = Frame(peer, **json.loads(metadata["header"]), parts=parts)
                self._heard[peer] = time.monotonic()
                if frame.run == self._run:  # otherwise of a run that has failed
                    self._frames.put(frame)
                    if frame.kind in ("end", "stop", "gone"):
                        self.send(peer, "bye")
                    if frame.kind in ("end", "stop", "gone", "bye"):
                        return
        self.lost.add(peer)
        self._frames.put(None)

    def send(
        self,
        peer: int,
        kind: str,
        facts: Mapping[str, Any] = MappingProxyType({}),
        parts: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Sends a frame without waiting until it has arrived."""
        header = json.dumps({"run": self._run, "kind": kind, "facts": dict(facts)})
        tensors = {name: _bytes(part) for name, part in parts.items()}
        content = _bytes(safetensors.torch.save(tensors, {"header": header}))
        sending = self._sending.setdefault(peer, [])  # gloo reads the tensors later
        with suppress(RuntimeError):  # the connection is closed, which `_read` notices
            for tensor in (torch.tensor([len(content)]), content):
                sending.append((dist.isend(tensor, peer, group=self._group), tensor))
        self._heard[peer] = time.monotonic()

    def poll(self, seconds: float = 0.0) -> Frame | None:
        """Returns the next frame, or None if none arrives within `seconds`.

        Raises:
            DivergedError: training has diverged at another rank.
            RankError: a rank is lost or has failed.
        """
        try:
            frame = self._frames.get(timeout=seconds) if seconds else self._frames.get_nowait()
        except Empty:
            frame = None
            if not self.lost:
                return None
        if frame is None:
            raise self.lost_error()
        if frame.kind in ("step", "answer"):  # the peer has received all that was sent to it
            self._sending.pop(frame.peer, None)
        if frame.kind == "gone":
            reason = f"rank {frame.peer} was interrupted. Start again with --resume"
            raise RankError(reason).with_code("ranks.lost")
        if frame.kind == "error":
            text, code = f"rank {frame.peer}{frame.facts['text']}", frame.facts["code"]
            if code == DivergedError.code:
                raise DivergedError(text)
            raise RankError(text).with_code(code)
        if frame.kind == "stop":
            reason = f"rank 0 has ended the run: {frame.facts['reason']}. Read its message"
            raise RankError(reason).with_code("ranks.stopped")
        return frame

    def next(self, waiting: Sequence[int] = ()) -> Frame:
        """Waits for the next frame.

        Args:
            waiting: the ranks that are expected to send a frame in time.

        Raises:
            DivergedError, RankError: as for `poll`, or a rank has given no sign in time.
        """
        while True:
            frame = self.poll(REPORT_SECONDS)
            if frame is not None:
                return frame
            for peer in waiting:
                if time.monotonic() - self._heard[peer] > self._seconds:
                    raise RankError(
                        f"rank {peer} has given no sign for {self._seconds:g} seconds. Start again "
                        f"with --resume, or increase {SECONDS}"
                    ).with_code("ranks.silent")

    def lost_error(self) -> RankError:
        """Returns the error that names a lost rank."""
        peer = min(self.lost)
        code = "ranks.lost" if peer else "ranks.server"
        return RankError(
            f"rank {peer} has ended unexpectedly. Read its last lines, then start again with "
            "--resume"
        ).with_code(code)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Returns a context manager for one run, which tells the other ranks if it fails."""
        self._run += 1
        self._frames = SimpleQueue()
        self.locate = str
        for peer in self.peers:
            if peer not in self.lost:
                self._readers[peer] = Thread(target=self._read, args=(peer,), daemon=True)
                self._readers[peer].start()
        seconds = STOP_SECONDS
        try:
            yield
            seconds = self._seconds
        except KeyboardInterrupt:
            lost = bool(self.lost)
            self._tell("gone" if self.rank else "stop", "it was interrupted")
            if lost and self.rank == 0:  # which is why torchrun ends this rank
                raise self.lost_error() from None
            raise
        except Exception as error:
            if self.rank == 0:
                self._tell("stop", one_line(error))
            elif not isinstance(error, RankError):  # which came from rank 0
                self._report_failure(error, self.locate())
            raise
        finally:
            for reader in self._readers.values():
                reader.join(seconds)

    def _tell(self, kind: str, reason: str) -> None:
        for peer in self.peers:
            self.send(peer, kind, {"reason": reason})

    def _report_failure(self, error: Exception, location: str) -> None:
        """Sends an error to rank 0, and waits until rank 0 has read it."""
        text, code = one_line(error, 1000), "ranks.failed"
        if isinstance(error, FedsynthError):
            code = error.code
        else:
            text = f"{type(error).__name__}: {text}"
        self.send(0, "error", {"text": f"{location}: {text}", "code": code})
        with suppress(RankError):
            while True:
                self.next()


def _seconds() -> float:
    text = os.environ.get(SECONDS, str(DEFAULT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        raise SettingError(
            None, SECONDS, f"must be a number of seconds, got {text!r:.80}"
        ) from None
    check_number(None, SECONDS, seconds, 0, MAX_SECONDS)
    return seconds


def _bytes(content: bytes) -> Tensor:
    """Returns bytes as a tensor, uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


_LINKS: list[Links] = []


def connect() -> Links | None:
    """Connects the ranks that torchrun has started, once for the program.

    Returns None in a program with a single process.

    Raises:
        RankError: not all ranks can be connected in time.
    """
    if rank.num_ranks() == 1:
        return None
    if not _LINKS:
        _LINKS.append(Links())
    return _LINKS[0]


def owners(
    method: Method, sizes: Mapping[int, int], context: RoundContext, ranks: int
) -> dict[int, int]:
    """Returns the rank of each client, by the longest-processing-time rule.

    The clients with the highest estimated cost are assigned first, each to the rank that has the
    lowest total cost so far.

    Args:
        method: the method, which estimates the cost.
        sizes: the number of training records of each client of the round.
        context: the context of any round.
        ranks: the number of ranks.

    >>> from fedsynth.methods import FedAvg
    >>> owners(FedAvg(batch=10), {0: 100, 1: 30, 2: 40, 3: 20}, None, 2)
    {0: 0, 2: 1, 1: 1, 3: 1}
    """
    costs = {client: method.client_cost(size, context) for client, size in sizes.items()}
    totals = [0.0] * ranks
    assigned = {}
    for client in sorted(costs, key=lambda client: (-costs[client], client)):
        lowest = totals.index(min(totals))
        totals[lowest] += costs[client]
        assigned[client] = lowest
    return assigned


def statement(identity: str) -> dict[str, str]:
    """Returns what must be equal at all ranks, given the identity of the settings and data."""
    return {"fedsynth": __version__, "torch": torch.__version__, "settings and data": identity}


def _refuse_other(peer: int, stated: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raises RankError if a rank has other versions, settings or data than rank 0."""
    for name, value in expected.items():
        theirs = stated[name]
        if theirs == value:
            continue
        text = f"rank {peer} has {name} {theirs}, but rank 0 has {value}. Install one version"
        if name == "settings and data":
            text = f"rank {peer} has other settings or data than rank 0. Start both with the same"
        raise RankError(text).with_code("ranks.differ")


class Ranks(InProcess):
    """Passes the server's requests to the clients at all ranks. It is the `Backend` of rank 0.

    Args:
        clients: all clients in the order of their indices.
        links: the connections to the other ranks.
        identity: the identity of the settings and data.
    """

    def __init__(self, clients: Sequence[ClientRuntime], links: Links, identity: str) -> None:
        super().__init__(clients)
        self._links = links
        self._identity = identity

    def start(self, terms: protocol.RunTerms) -> None:
        """Sends the run terms to all ranks, which must have the same versions and data.

        Raises:
            RankError: a rank differs, has failed, or is lost.
        """
        super().start(terms)
        for peer in self._links.peers:
            self._links.send(peer, "start", asdict(terms))
        waiting = list(self._links.peers)
        while waiting:
            frame = self._links.next(waiting)
            if frame.kind == "hello":
                _refuse_other(frame.peer, frame.facts["stated"], statement(self._identity))
                waiting.remove(frame.peer)

    def step(
        self, exchange: str, message: Message, context: RoundContext, numbers: Sequence[int]
    ) -> protocol.Replies:
        # A group's loops may not resume with another group, and other ranks have no checkpoints.
        context = replace(context, keeper=LoopCheckpointer())
        lost = self._failing(exchange, numbers, context)
        shares = self._shares(context, numbers)
        try:
            self._charge(exchange, context, [n for n in numbers if n not in shares[0]], lost)
        except BudgetExceededError as error:
            return protocol.Replies(refusals=(protocol.Refusal(str(error), spent=error.spent),))
        facts = {"exchange": exchange, "round": context.round, "participants": context.participants}
        request = message.to_bytes()
        for peer, share in enumerate(shares):
            if peer and share:
                parts = {"request": request, **self._states(exchange, context, share)}
                self._links.send(peer, "step", {**facts, "clients": share}, parts)
        progress = Progress(self._links, context, len(numbers), len(shares[0]))
        own = super().step(exchange, message, replace(context, report=progress.report), shares[0])
        messages, refusals = dict(own.messages), [*own.refusals]
        rejected: dict[int, str] = {}
        for answer in progress.answers([peer for peer, s in enumerate(shares) if peer and s]):
            rejected |= {int(n): reason for n, reason in answer.facts["rejected"].items()}
            for reason, kind, spent in answer.facts["refusals"]:
                refusals.append(protocol.Refusal(reason, kind, spent and tuple(spent)))
            if not refusals:
                messages |= self._received(exchange, answer, context, lost, rejected)
        return protocol.Replies(messages, tuple(refusals), lost, rejected)

    def _shares(self, context: RoundContext, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the clients of each rank, among those that are asked for a step."""
        sizes = {number: len(self.clients[number].data.records) for number in context.active}
        assigned = owners(self.clients[0].method, sizes, context, self._links.size)
        shares: list[list[int]] = [[] for _ in range(self._links.size)]
        for number in numbers:
            shares[assigned[number]].append(number)
        return shares

    def _charge(
        self, exchange: str, context: RoundContext, numbers: Sequence[int], lost: Mapping[int, str]
    ) -> None:
        """Charges the clients of other ranks, if the run is private.

        The mechanisms that belong to the charges are not used, since the other ranks draw the
        noise.
        """
        for number in numbers:
            if self.clients[number].private and lost.get(number) != CRASHED:
                self.clients[number].charge(exchange, context)

    def _states(
        self, exchange: str, context: RoundContext, numbers: Sequence[int]
    ) -> dict[str, bytes]:
        return _packed_states(
            {number: self.clients[number].load_state(exchange, context) for number in numbers}
        )

    def _received(
        self,
        exchange: str,
        answer: Frame,
        context: RoundContext,
        lost: Mapping[int, str],
        rejected: dict[int, str],
    ) -> dict[int, Message]:
        """Stores the states in a rank's answer, and returns the uploads.

        An upload of another type than the method declares is added to `rejected`.
        """
        upload = exchange_of(self.clients[0].method, exchange).upload
        messages: dict[int, Message] = {}
        for number in answer.facts["clients"]:
            client = self.clients[number]
            if lost.get(number) == TIMED_OUT:
                client.rollback(client.client_state)
            elif lost.get(number) != CRASHED:
                client.store_state(exchange, _state(answer, number, context.device), context)
            try:
                if f"upload {number}" in answer.parts:
                    sent = upload.from_bytes(answer.parts[f"upload {number}"])
                    messages[number] = sent.to(context.device)
            except MessageError as error:
                rejected[number] = str(error)
        return messages


class Progress:
    """The progress of all ranks in one exchange, as rank 0 reports it.

    Args:
        links: the connections to the other ranks.
        context: the context of the round, which receives the progress and the notes.
        clients: the number of clients at all ranks.
        own: the number of clients at rank 0.
    """

    def __init__(self, links: Links, context: RoundContext, clients: int, own: int) -> None:
        self._links = links
        self._context = context
        self._clients = clients
        self._own = own
        self._finished: dict[int, float] = {}  # by rank, the number of finished clients
        self._answers: list[Frame] = []

    def report(self, stage: str, completed: int, total: int) -> None:
        """Reports progress of rank 0 together with the progress of the other ranks."""
        self._add(0, self._own, stage, completed, total)
        frame = self._links.poll()
        if frame is not None:
            self._process(frame)

    def _add(self, peer: int, clients: int, stage: str, completed: int, total: int) -> None:
        self._finished[peer] = clients * completed / max(1, total)
        steps = total * self._clients // max(1, clients)
        finished = sum(self._finished.values()) / self._clients
        self._context.report(stage, int(finished * steps), steps)

    def _process(self, frame: Frame) -> None:
        if frame.kind == "progress":
            self._add(frame.peer, *frame.facts["progress"])
        elif frame.kind == "note":
            self._context.note(frame.facts["text"])
        elif frame.kind == "answer":
            self._answers.append(frame)

    def answers(self, waiting: list[int]) -> list[Frame]:
        """Waits for the answers of the given ranks, and returns them."""
        while left := sorted(set(waiting) - {answer.peer for answer in self._answers}):
            self._process(self._links.next(left))
        return self._answers


def serve(backend: InProcess, links: Links, started: Frame | None) -> Frame:
    """Computes the steps of clients at another rank than 0, until the run has ended.

    Args:
        backend: the clients.
        links: the connection to rank 0.
        started: the frame with the run terms, if it was received already.

    Returns:
        The frame with the results of the run.
    """
    links.locate = lambda: named_clients(backend.stepping)
    while True:
        frame = started or links.next()
        started = None
        if frame.kind == "start":
            sizes = frame.facts["sizes"]
            sigma = frame.facts["noise_multiplier"]
            backend.start(protocol.RunTerms(None if sizes is None else tuple(sizes), sigma))
        elif frame.kind == "step":
            _answer(backend, links, frame)
        elif frame.kind == "end":
            return frame


def named_clients(numbers: Sequence[int]) -> str:
    """Names the clients of a group, as an error message shows them.

    >>> named_clients([3]), named_clients([3, 5, 6])
    (', client 3', ', one of the clients 3 to 6')
    """
    if len(numbers) > 1:
        return f", one of the clients {numbers[0]} to {numbers[-1]}"
    return "".join(f", client {number}" for number in numbers)


def _answer(backend: InProcess, links: Links, frame: Frame) -> None:
    """Computes the step that rank 0 has requested, and sends the answer."""
    facts = frame.facts
    numbers, exchange = facts["clients"], facts["exchange"]
    participants = facts["participants"]
    reporter = Reporter(links, len(numbers))
    context = replace(
        backend.clients[numbers[0]].context,
        round=facts["round"],
        participants=None if participants is None else tuple(participants),
        report=reporter.report,
        note=lambda text: links.send(0, "note", {"text": text}),
    )
    method = backend.clients[0].method
    request = exchange_of(method, exchange).request.from_bytes(frame.parts["request"])
    for number in numbers:
        backend.clients[number].rollback(_state(frame, number, context.device))
    replies = backend.step(exchange, request.to(context.device), context, numbers)
    parts = {}
    rejected = {}
    for number, message in replies.messages.items():
        try:
            parts[f"upload {number}"] = message.to_bytes()
        except MessageError as error:
            rejected[number] = str(error)
    states = {number: backend.clients[number].load_state(MAIN, context) for number in numbers}
    for number in numbers:
        backend.clients[number].rollback({})  # rank 0 keeps the states
    refusals = [(r.reason, r.kind, r.spent) for r in replies.refusals]
    answer = {"clients": numbers, "refusals": refusals, "rejected": rejected}
    links.send(0, "answer", answer, parts | _packed_states(states))


class Reporter:
    """Sends the progress of another rank to rank 0, which is also its sign of life.

    Args:
        links: the connection to rank 0.
        clients: the number of this rank's clients.
    """

    def __init__(self, links: Links, clients: int) -> None:
        self._links = links
        self._clients = clients
        self._next = 0.0

    def report(self, stage: str, completed: int, total: int) -> None:
        """Sends the progress, at most once in `REPORT_SECONDS`."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_SECONDS
            progress = [self._clients, stage, completed, total]
            self._links.send(0, "progress", {"progress": progress})


def _packed_states(states: Mapping[int, Tensors]) -> dict[str, bytes]:
    return {f"state {k}": NamedTensors(state).to_bytes() for k, state in states.items() if state}


def _state(frame: Frame, client: int, device: torch.device) -> Tensors:
    """Returns a client's state in a frame, which is empty if the frame has none."""
    name = f"state {client}"
    if name not in frame.parts:
        return {}
    return NamedTensors.from_bytes(frame.parts[name]).to(device).tensors
