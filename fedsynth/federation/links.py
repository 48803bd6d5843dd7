"""The torch.distributed connections between the ranks of a simulation.

Messages go through a gloo group, also between ranks with GPUs, since packed messages are bytes in
main memory. A message is a header in JSON and the contents of its parts, whose reading executes no
code. Threads receive the messages, so that signals always interrupt the main thread.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fedsynth import rank
from fedsynth.errors import DivergedError, FedsynthError, one_line
from fedsynth.validation import MAX_SECONDS, check_number

# The environment variable with the number of seconds after which a rank without a sign is lost.
SECONDS = "FEDSYNTH_RANK_SECONDS"
DEFAULT_SECONDS = "1800"
CHECK_SECONDS = 1.0  # between two looks at the time
# The number of seconds that a rank waits for the others at the end of a run that has failed.
STOP_SECONDS = 5.0
PART = 2**23  # the number of integers in one message of a sum
FOREVER = timedelta(days=1000)  # for gloo: the server may compute for days
FINAL = ("end", "stop", "bye")  # the kinds of the last frame of a run
ALIVE = "alive"  # the kind of a frame that shows only that its sender runs
EMPTY: Mapping[str, Any] = MappingProxyType({})
# The types of the values that JSON can encode, and of the parts (bytes or tensors), by name.
Facts = Mapping[str, Any]
Parts = Mapping[str, Any]
BYTES = "bytes"  # in the place of the dtype of a part that is bytes


class RankError(FedsynthError, code="ranks.failed"):
    """Raised if the ranks of a run cannot work together, or if another rank has failed."""


@dataclass(frozen=True)
class Frame:
    """One message from another rank.

    Args:
        peer: the rank that has sent the frame.
        run: the number of the run in the program.
        kind: the kind of the frame (`fedsynth.federation.ranks`).
        facts: values that JSON can encode.
        parts: bytes, or tensors on the CPU, by name.
    """

    peer: int
    run: int
    kind: str
    facts: Facts
    parts: dict[str, Any]


class Links:
    """The connections between rank 0 and each of the other ranks.

    Attributes:
        rank, size: the number of this rank, and the number of ranks.
        peers: the ranks to which this rank is connected.
        locate: a function that names the clients whose step this rank computes.

    Raises:
        RankError: not all ranks can be connected in time, or this rank's number is too high.
        SettingError: the environment variable `SECONDS` is not a number of seconds.
    """

    def __init__(self) -> None:
        seconds: Any = os.environ.get(SECONDS, DEFAULT_SECONDS)
        with suppress(ValueError):
            seconds = float(seconds)
        check_number(None, SECONDS, seconds, 0, MAX_SECONDS)
        self._seconds = seconds
        if not rank.is_valid():
            raise RankError(
                f"the environment variable RANK is {rank.this_rank()}, but must be below "
                f"WORLD_SIZE, which is {rank.num_ranks()}. Start with torchrun, or unset RANK and "
                "WORLD_SIZE"
            ).with_code("ranks.number")
        if torch.cuda.is_available():
            torch.cuda.set_device(rank.local_rank() % torch.cuda.device_count())
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
            group = dist.new_group(backend="gloo", timeout=FOREVER)
        except (RuntimeError, ValueError) as error:  # a port that is taken, a missing rank
            raise RankError(
                f"rank {rank.this_rank()} cannot connect all {rank.num_ranks()} ranks: "
                f"{one_line(error).rstrip('.')}. Start all ranks with the same free port"
            ).with_code("ranks.connection") from None
        self._group = cast(dist.ProcessGroup, group)  # all ranks are in it
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.peers = range(1, self.size) if self.rank == 0 else range(1)
        self.locate: Callable[[], str] = str
        self._run = 0
        self._lost: set[int] = set()
        self._frames: SimpleQueue[Frame | None] = SimpleQueue()
        self._heard: dict[int, float] = {}
        self._lock = Lock()  # of the messages of a frame
        self._readers: dict[int, Thread] = {}
        # Frames that a peer may not have received yet, and the number of received frames before
        # them. Gloo sends a tensor in the background, unless it is deleted.
        self._sending: dict[int, deque[list[tuple[Any, Tensor]]]] = defaultdict(deque)
        self._confirmed: dict[int, int] = defaultdict(int)
        self._arrived: dict[int, int] = defaultdict(int)
        rank.connected = True

    def _read(self, peer: int) -> None:
        """Receives the frames of a rank in a run.

        The thread ends with the run. A thread that waits in C++ would abort a Python that ends.
        """
        with suppress(RuntimeError):  # the connection was closed
            while True:
                length = torch.empty(1, dtype=torch.int64)
                dist.recv(length, peer, group=self._group)
                content = torch.empty(int(length), dtype=torch.uint8)
                dist.recv(content, peer, group=self._group)
                header = json.loads(content.numpy().tobytes())
                parts: dict[str, Any] = {}
                for name, dtype, shape in header.pop("parts"):
                    kind = torch.uint8 if dtype == BYTES else getattr(torch, dtype)
                    part = torch.empty(shape, dtype=kind)
                    if part.numel():
                        dist.recv(part.view(-1).view(torch.uint8), peer, group=self._group)
                    parts[name] = part.numpy().tobytes() if dtype == BYTES else part
                self._arrived[peer] += 1
                self._confirm(peer, header.pop("received"))
                frame = Frame(peer, **header, parts=parts)
                self._heard[peer] = time.monotonic()
                if frame.run != self._run or frame.kind == ALIVE:  # or of a failed run
                    continue
                if frame.kind != "bye":
                    self._frames.put(frame)
                    if frame.kind in FINAL:
                        self.send(peer, "bye")
                if frame.kind in FINAL:
                    return
        self._lost.add(peer)
        self._frames.put(None)

    def _confirm(self, peer: int, received: int) -> None:
        """Deletes the tensors of the frames that a peer has received."""
        with self._lock:
            while self._confirmed[peer] < received:
                self._sending[peer].popleft()
                self._confirmed[peer] += 1

    def send(self, peer: int, kind: str, facts: Facts = EMPTY, parts: Parts = EMPTY) -> None:
        """Sends a frame without waiting until it has arrived.

        Tensors must be contiguous and on the CPU. They and bytearrays must not change.
        """
        described = []
        contents = []
        for name, part in parts.items():
            is_tensor = isinstance(part, Tensor)
            content = part if is_tensor else _bytes(part)
            dtype = str(part.dtype).removeprefix("torch.") if is_tensor else BYTES
            described.append([name, dtype, list(content.shape)])
            if content.numel():
                contents.append(content.view(-1).view(torch.uint8))
        values = {"run": self._run, "kind": kind, "facts": dict(facts), "parts": described}
        header = _bytes(json.dumps({**values, "received": self._arrived[peer]}).encode())
        sending: list[tuple[Any, Tensor]] = []
        # The connection may be closed, which `_read` notices.
        with suppress(RuntimeError), self._lock:
            self._sending[peer].append(sending)
            for tensor in (torch.tensor([len(header)]), header, *contents):
                sending.append((dist.isend(tensor, peer, group=self._group), tensor))
        if kind != ALIVE:  # a request, to which the peer has as long to answer
            self._heard[peer] = time.monotonic()

    def send_all(self, kind: str, facts: Facts = EMPTY, parts: Parts = EMPTY) -> None:
        """Sends a frame to all peers."""
        for peer in self.peers:
            self.send(peer, kind, facts, parts)

    def _beat(self, ended: Event) -> None:
        """Tells the other ranks until `ended` is set that the process of rank 0 runs.

        Rank 0 may compute for days between two requests.
        """
        while not ended.wait(self._seconds / 4):
            self.send_all(ALIVE)

    def poll(self, seconds: float = 0.0) -> Frame | None:
        """Returns the next frame, or None if none arrives within `seconds`.

        Raises:
            DivergedError: training has diverged at another rank.
            RankError: a rank is lost or has failed.
        """
        frame = None
        try:
            frame = self._frames.get(timeout=seconds) if seconds else self._frames.get_nowait()
        except Empty:
            if not self._lost:
                return None
        if frame is None:
            raise self._loss()
        if "code" not in frame.facts:
            return frame
        text, code = frame.facts["text"], frame.facts["code"]
        raise (DivergedError if code == DivergedError.code else RankError)(text).with_code(code)

    def next(self, waiting: Sequence[int] = ()) -> Frame:
        """Waits for the next frame. Fails if a rank in `waiting` sends nothing for too long.

        Raises:
            DivergedError, RankError: as for `poll`, or a rank has given no sign.
        """
        while True:
            frame = self.poll(CHECK_SECONDS)
            if frame is not None:
                return frame
            for peer in waiting:
                if time.monotonic() - self._heard[peer] > self._seconds:
                    raise RankError(
                        f"rank {peer} has given no sign for {self._seconds:g} seconds. Start again "
                        f"with --resume, or increase {SECONDS}"
                    ).with_code("ranks.silent" if peer else "ranks.server")

    def add(self, integers: Tensor) -> None:
        """Replaces a contiguous tensor of integers on the CPU by its sum over all ranks.

        All ranks must call it.

        Raises:
            DivergedError, RankError: as for `next`.
        """
        for part in integers.view(-1).split(PART):
            if self.rank:
                self.send(0, "sum", parts={"part": part.clone()})
            waiting = set(self.peers)
            while waiting:
                frame = self.next(sorted(waiting))
                waiting.remove(frame.peer)
                received = frame.parts["part"]
                part.copy_(received if self.rank else part + received)
            if self.rank == 0:
                self.send_all("sum", parts={"part": part.clone()})

    def _loss(self) -> RankError:
        """Returns the error that names a lost rank."""
        peer = min(self._lost)
        return RankError(
            f"rank {peer} has ended unexpectedly. Read its last lines, then start again with "
            "--resume"
        ).with_code("ranks.lost" if peer else "ranks.server")

    @contextmanager
    def run(self) -> Iterator[None]:
        """Receives frames during a `with` block, and tells the other ranks if the block fails."""
        self._run += 1
        self._frames = SimpleQueue()
        self._heard = dict.fromkeys(self.peers, time.monotonic())
        self.locate = str
        for peer in sorted(set(self.peers) - self._lost):
            if peer in self._readers:
                self._readers[peer].join(CHECK_SECONDS)
                if self._readers[peer].is_alive():  # a failed run's reader receives this run, too
                    continue
            self._readers[peer] = Thread(target=self._read, args=(peer,), daemon=True)
            self._readers[peer].start()
        seconds = STOP_SECONDS
        ended = Event()
        if self.rank == 0:
            Thread(target=self._beat, args=(ended,), daemon=True).start()
        try:
            yield
            seconds = self._seconds
        except KeyboardInterrupt:
            lost = self.rank == 0 and bool(self._lost)  # which is why torchrun ends this rank
            text = f"rank {self.rank} was interrupted. Start again with --resume"
            self.send_all("stop", {"text": text, "code": "ranks.stopped"})
            if lost:
                raise self._loss() from None
            raise
        except Exception as error:
            self._report(error)
            raise
        finally:
            ended.set()
            for reader in self._readers.values():
                reader.join(seconds)

    def _report(self, error: Exception) -> None:
        """Tells the other ranks that this rank has failed.

        Another rank than 0 waits until rank 0 has read it, since torchrun then ends all ranks.
        """
        text, code = one_line(error, 1000), getattr(error, "code", RankError.code)
        if self.rank == 0:
            text = f"rank 0 has ended the run: {text}"
            self.send_all("stop", {"text": text, "code": "ranks.stopped"})
        elif not isinstance(error, RankError):  # which came from rank 0
            if not isinstance(error, FedsynthError):
                text = f"{type(error).__name__}: {text}"
            self.send(
                0, "error", {"text": f"rank {self.rank}{self.locate()}: {text}", "code": code}
            )
            with suppress(RankError):
                while True:
                    self.next()


def _bytes(content: bytes | bytearray) -> Tensor:
    """Returns bytes as a tensor, uint8. A bytearray is not copied, so that peers can share it."""
    buffer = content if isinstance(content, bytearray) else bytearray(content)
    return torch.frombuffer(buffer, dtype=torch.uint8)


_LINKS: list[Links] = []


def connect() -> Links | None:
    """Connects the ranks that torchrun has started, once for the program.

    Returns None in a program with a single process.

    Raises:
        RankError: not all ranks can be connected in time, or this rank's number is too high.
    """
    if rank.num_ranks() == 1:
        return None
    if not _LINKS:
        _LINKS.append(Links())
    return _LINKS[0]
