"""Checkpoints of the long loops within a round, next to the checkpoint of the previous round; and
finished loops that several runs share, in a common folder.

A file is a `StepsDone` preceded by its hash, which also covers the run's settings and data. A file
that is damaged or of another run is ignored, and the loop starts from scratch.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedsynth.core.messages import Packed
from fedsynth.errors import MessageError
from fedsynth.keeping import StepKeeper
from fedsynth.privacy.files import MAX_TENSORS_BYTES, read_regular, write_whole
from fedsynth.results.checkpoint import CheckpointFolder

FORMAT = 1
"""Version of the files; files of another version are ignored."""
HASH_BYTES = 32
LONG = 0.1
"""A loop that took at least this share of the time between two writes is worth sharing."""
SPARING = 20
"""The time between two writes is at least this many times the duration of the last write, …"""
SELDOM = 10
"""… but at most this many times the usual time between writes."""
Tensors = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class StepsDone(Packed):
    """The checkpoint of a loop.

    Args:
        tensors: the loop's state, by name.
        step: the number of finished steps.
        seconds: the time that these steps have taken.
    """

    tensors: Mapping[str, Tensor]
    step: int
    seconds: float


@dataclass(frozen=True)
class _Loop:
    """A loop of this process: its file, and the time at which it would have begun without
    interruption.
    """

    path: Path
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class KeptSteps:
    """The loop checkpoints of one round.

    Args:
        folder: the run's checkpoint folder.
        number: the round number.
        seconds: the minimum time between two writes.
        shared: the folder of training results that several runs share; None: no sharing.

    Attributes:
        shared: keeps loops whose names determine their results, also for other runs.
        earlier: seconds that other processes have spent on the loops found, also for this run.
    """

    def __init__(
        self, folder: CheckpointFolder, number: int, seconds: float, shared: Path | None = None
    ) -> None:
        self.earlier = 0.0
        self.shared = None if shared is None else _SharedLoops(self, shared, LONG * seconds)
        self._folder = folder
        self._number = number
        self._seconds = seconds
        self._pause = seconds
        self._last = time.monotonic()
        self._begun: dict[str, int] = {}
        self._loops: dict[str, _Loop] = {}
        self._ended: list[tuple[Path, StepsDone]] = []

    def found(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns the saved step and tensors of a loop, or None, and starts its clock. A second
        loop with the same name is a different one.
        """
        count = self._begun[name] = self._begun.get(name, 0) + 1
        suffix = f"-{count}" if count > 1 else ""
        path = self._folder.path / f"steps-{self._number}-{name}{suffix}"
        saved = read_steps(path, self._folder.identity)
        self._loops[name] = _Loop(path, time.monotonic() - (saved.seconds if saved else 0.0))
        return None if saved is None else self.taken(saved)

    def offer(self, name: str, step: int, tensors: Tensors) -> None:
        """Writes the tensors, and those of finished loops, if the last write was long enough ago.

        Raises:
            OutputError: they cannot be written.
        """
        if time.monotonic() - self._last >= self._pause:
            loop = self._loops[name]
            self._write([*self._ended, (loop.path, StepsDone(tensors(), step, loop.seconds))])

    def ended(self, name: str, steps: int, tensors: Tensors) -> None:
        """Queues a finished loop's tensors for the next write.

        Raises:
            OutputError: they cannot be written.
        """
        loop = self._loops[name]
        self._ended.append((loop.path, StepsDone(tensors(), steps, loop.seconds)))
        if time.monotonic() - self._last >= self._pause:
            self._write(self._ended)

    def seconds_of(self, name: str) -> float:
        """Returns the time in seconds that a loop has taken so far."""
        return self._loops[name].seconds

    def taken(self, saved: StepsDone) -> tuple[int, Mapping[str, Tensor]]:
        """Returns the step and tensors from which a loop resumes, and counts their seconds."""
        self.earlier += saved.seconds
        return int(saved.step), saved.tensors

    def _write(self, files: list[tuple[Path, StepsDone]]) -> None:
        began = time.monotonic()
        with self._folder.writing():
            self._folder.path.mkdir(parents=True, exist_ok=True)
            for path, saved in files:
                write_whole(path, _with_hash(saved, self._folder.identity))
        self._ended = []
        self._last = time.monotonic()
        sparing = min(SPARING * (self._last - began), SELDOM * self._seconds)
        self._pause = max(self._seconds, sparing)


class _SharedLoops:
    """Loops whose names determine their results: finished ones are read from, and written to, the
    shared folder.

    Args:
        own: keeps the checkpoints of unfinished loops.
        folder: the shared folder.
        least: the minimum seconds of a loop that is shared.
    """

    shared: StepKeeper | None = None

    def __init__(self, checkpoints: KeptSteps, folder: Path, min_seconds: float) -> None:
        self._own = checkpoints
        self._folder = folder
        self._least = min_seconds
        self._whole: set[str] = set()

    def found(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns the finished loop, or else this run's checkpoint of it."""
        saved = read_steps(self._folder / name, "")
        if saved is None:
            return self._own.found(name)
        self._whole.add(name)
        return self._own.taken(saved)

    def offer(self, name: str, step: int, tensors: Tensors) -> None:
        """Writes the checkpoint for this run only."""
        self._own.offer(name, step, tensors)

    def ended(self, name: str, steps: int, tensors: Tensors) -> None:
        """Shares the finished loop with all runs if it was long; if the folder cannot be written,
        keeps it for this run only.
        """
        if name in self._whole:
            return
        seconds = self._own.seconds_of(name)
        if seconds >= self._least:
            content = _with_hash(StepsDone(tensors(), steps, seconds), "")
            temporary = (
                self._folder / f"{name}.{os.getpid()}"
            )  # another process may write the same file
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_whole(temporary, content)
                os.replace(temporary, self._folder / name)
                return
            except OSError:
                with suppress(OSError):
                    temporary.unlink()
        self._own.ended(name, steps, tensors)


def read_steps(path: Path, identity: str) -> StepsDone | None:
    """Returns the content of a file, or None if it is missing, damaged, or of another run."""
    try:
        content = read_regular(path, MAX_TENSORS_BYTES)
        if _hash_of(content[HASH_BYTES:], identity) != content[:HASH_BYTES]:
            return None
        return StepsDone.from_bytes(content[HASH_BYTES:])
    except (OSError, MessageError):
        return None


def _with_hash(saved: StepsDone, identity: str) -> bytes:
    content = saved.to_bytes()
    return _hash_of(content, identity) + content


def _hash_of(content: bytes, identity: str) -> bytes:
    return hashlib.sha256(f"{FORMAT} {identity}\n".encode() + content).digest()
