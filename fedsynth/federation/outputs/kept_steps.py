"""Files that say where a round's long loops stand, beside the checkpoint of the round before; and
those of loops that other runs have as well, in a folder that they share.

A file is a `StepsDone` behind its hash, in which the run's settings and data are, too: one that is
damaged, or of another run, is none, and the loop begins anew.
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
from fedsynth.federation.outputs.checkpoint import CheckpointFolder, write_whole
from fedsynth.keeping import StepKeeper
from fedsynth.privacy.files import MAX_TENSORS_BYTES, read_regular

FORMAT = 1
"""Of what loops keep; another one is not gone on with."""
HASH_BYTES = 32
LONG = 0.1
"""A loop that took this share of the time between two writings is worth sharing."""
SPARING = 20
"""The time between two writings is at least so many times what the last one took, …"""
SELDOM = 10
"""… but no more than so many times the usual."""
Tensors = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class StepsDone(Packed):
    """Where a loop stands.

    Args:
        tensors: its own, by name.
        step: how many steps are done.
        seconds: that they have taken.
    """

    tensors: Mapping[str, Tensor]
    step: int
    seconds: float


@dataclass(frozen=True)
class _Loop:
    """A loop of this process: its file, and when it would have begun without a break."""

    path: Path
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class KeptSteps:
    """Those of one round.

    Args:
        folder: the run's checkpoints.
        number: the round.
        seconds: at least so many between two writings.
        shared: where trainings go that other runs have as well; None: nowhere.

    Attributes:
        shared: keeps loops whose names say all that they depend on, for other runs as well.
        earlier: seconds that other processes have spent on what was found: the round's own, too.
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
        """Where the loop stood; its time begins. A second loop of the name is another one."""
        count = self._begun[name] = self._begun.get(name, 0) + 1
        again = f"-{count}" if count > 1 else ""
        path = self._folder.path / f"steps-{self._number}-{name}{again}"
        kept = read_steps(path, self._folder.identity)
        self._loops[name] = _Loop(path, time.monotonic() - (kept.seconds if kept else 0.0))
        return None if kept is None else self.taken(kept)

    def offer(self, name: str, step: int, tensors: Tensors) -> None:
        """Writes the tensors, and those of loops that have ended, if the last writing was long
        enough ago.

        Raises:
            OutputError: they cannot be written.
        """
        if time.monotonic() - self._last >= self._pause:
            loop = self._loops[name]
            self._write([*self._ended, (loop.path, StepsDone(tensors(), step, loop.seconds))])

    def ended(self, name: str, steps: int, tensors: Tensors) -> None:
        """Writes the tensors with the next ones that are written.

        Raises:
            OutputError: they cannot be written.
        """
        loop = self._loops[name]
        self._ended.append((loop.path, StepsDone(tensors(), steps, loop.seconds)))
        if time.monotonic() - self._last >= self._pause:
            self._write(self._ended)

    def seconds_of(self, name: str) -> float:
        """What a loop has taken so far."""
        return self._loops[name].seconds

    def taken(self, kept: StepsDone) -> tuple[int, Mapping[str, Tensor]]:
        """What a loop goes on from; its seconds count."""
        self.earlier += kept.seconds
        return int(kept.step), kept.tensors

    def _write(self, files: list[tuple[Path, StepsDone]]) -> None:
        began = time.monotonic()
        with self._folder.writing():
            self._folder.path.mkdir(parents=True, exist_ok=True)
            for path, done in files:
                write_whole(path, _with_hash(done, self._folder.identity))
        self._ended = []
        self._last = time.monotonic()
        sparing = min(SPARING * (self._last - began), SELDOM * self._seconds)
        self._pause = max(self._seconds, sparing)


class _SharedLoops:
    """Loops whose names say all that they depend on: whole ones are looked for in the shared
    folder first, and go there.

    Args:
        own: keeps where those stand that are not whole.
        folder: the shared one.
        least: seconds of a loop that is worth it.
    """

    shared: StepKeeper | None = None

    def __init__(self, own: KeptSteps, folder: Path, least: float) -> None:
        self._own = own
        self._folder = folder
        self._least = least
        self._whole: set[str] = set()

    def found(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """The whole loop, or where this run's stood."""
        kept = read_steps(self._folder / name, "")
        if kept is None:
            return self._own.found(name)
        self._whole.add(name)
        return self._own.taken(kept)

    def offer(self, name: str, step: int, tensors: Tensors) -> None:
        """For this run alone."""
        self._own.offer(name, step, tensors)

    def ended(self, name: str, steps: int, tensors: Tensors) -> None:
        """For all runs, if it was long; a folder that cannot be written shares nothing."""
        if name in self._whole:
            return
        seconds = self._own.seconds_of(name)
        if seconds >= self._least:
            content = _with_hash(StepsDone(tensors(), steps, seconds), "")
            mine = self._folder / f"{name}.{os.getpid()}"  # another process may write the same
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_whole(mine, content)
                os.replace(mine, self._folder / name)
                return
            except OSError:
                with suppress(OSError):
                    mine.unlink()
        self._own.ended(name, steps, tensors)


def read_steps(path: Path, identity: str) -> StepsDone | None:
    """What a file says; None: it is not there, damaged, or of another run."""
    try:
        content = read_regular(path, MAX_TENSORS_BYTES)
        if _hash_of(content[HASH_BYTES:], identity) != content[:HASH_BYTES]:
            return None
        return StepsDone.from_bytes(content[HASH_BYTES:])
    except (OSError, MessageError):
        return None


def _with_hash(done: StepsDone, identity: str) -> bytes:
    content = done.to_bytes()
    return _hash_of(content, identity) + content


def _hash_of(content: bytes, identity: str) -> bytes:
    return hashlib.sha256(f"{FORMAT} {identity}\n".encode() + content).digest()
