"""Files that say where a round's long loops stand, beside the checkpoint of the round before; of
loops that other runs have as well, in a folder that they share.

A file is its own SHA-256 and a `StepsDone`. One that is damaged is none: the loop then begins anew.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedsynth.core.messages import Packed
from fedsynth.errors import MessageError
from fedsynth.federation.outputs.checkpoint import CheckpointFolder, write_whole

HASH_BYTES = 32
LONG = 0.1
"""A loop that has ended is kept if it took this share of the time between two writings."""


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


class KeptSteps:
    """Those of one round.

    Args:
        folder: the run's checkpoints.
        number: the round.
        seconds: at least so many between two writings of loops that go on.
        shared: where loops that have ended go, for other runs; None: beside the checkpoint.
    """

    def __init__(
        self, folder: CheckpointFolder, number: int, seconds: float, shared: Path | None = None
    ) -> None:
        self._folder = folder
        self._number = number
        self._seconds = seconds
        self._shared = shared
        self.shares = shared is not None
        self._last = time.monotonic()
        self._began: dict[str, float] = {}
        self.earlier = 0.0
        """Seconds that other processes have spent on what was found: the round's own, too."""

    def found(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Where the loop stood; its time begins."""
        kept = next((one for path in self._places(name) if (one := _read(path)) is not None), None)
        self._began[name] = time.monotonic() - (0.0 if kept is None else kept.seconds)
        if kept is None:
            return None
        self.earlier += kept.seconds
        return int(kept.step), kept.tensors

    def offer(self, name: str, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Writes the tensors, if the last writing was long enough ago.

        Raises:
            OutputError: they cannot be written.
        """
        if time.monotonic() - self._last >= self._seconds:
            self._write(self._folder.path / self._own(name), name, step, tensors())
            self._last = time.monotonic()

    def ended(self, name: str, steps: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Writes the tensors, if the loop was long.

        Raises:
            OutputError: they cannot be written.
        """
        path = self._places(name)[0]
        if self._took(name) >= LONG * self._seconds and not (self.shares and path.exists()):
            self._write(path, name, steps, tensors())

    def _places(self, name: str) -> list[Path]:
        """Where a loop's file is looked for."""
        own = self._folder.path / self._own(name)
        return [own] if self._shared is None else [self._shared / name, own]

    def _own(self, name: str) -> str:
        return f"steps-{self._number}-{name}"

    def _took(self, name: str) -> float:
        now = time.monotonic()
        return now - self._began.get(name, now)

    def _write(self, path: Path, name: str, step: int, tensors: Mapping[str, Tensor]) -> None:
        content = StepsDone(tensors, step, self._took(name)).to_bytes()
        with self._folder.writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, hashlib.sha256(content).digest() + content)


def _read(path: Path) -> StepsDone | None:
    """What a file says; None: it is not there, or damaged."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[HASH_BYTES:]).digest() != content[:HASH_BYTES]:
            return None
        return StepsDone.from_bytes(content[HASH_BYTES:])
    except (OSError, MessageError):
        return None
