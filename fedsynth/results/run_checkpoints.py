"""Decides when a simulation writes checkpoints, and resumes a simulation from a checkpoint.

The checkpoints of loops within a round are stored next to the checkpoint of the previous round.
Finished trainings that several runs can reuse are stored in a common folder. Each file contains a
`LoopState` after a hash that also covers the run's settings and data. A file that is damaged or
belongs to another run is ignored, and the loop then starts from the beginning.

The memories of clients that do not take part in the next round are kept in the checkpoint's files
instead of in RAM.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Packed
from fedsynth.core.method import Memory
from fedsynth.errors import CheckpointError, MessageError
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.privacy.files import MAX_TENSORS_BYTES, read_regular, write_whole
from fedsynth.results.checkpoint import Checkpoint, CheckpointFolder, without_place
from fedsynth.results.run_folder import RunFolder
from fedsynth.training.loop import LoopCheckpointer, Tensors
from fedsynth.validation import read_sections

FORMAT = 1
"""The version of the file format. Files of other versions are ignored."""
HASH_BYTES = 32
SHARED_TIME_RATIO = 0.1
"""A finished training is stored in the common folder if it took at least this fraction of the time
between two writes.
"""


@dataclass(frozen=True)
class LoopState(Packed):
    """The state of a long loop within a round, such as a training, from which the loop can be
    resumed.

    Args:
        tensors: the tensors from which the loop can resume, by name.
        step: the number of finished steps.
        seconds: the time that these steps took, in seconds.
    """

    tensors: Mapping[str, Tensor]
    step: int
    seconds: float


class LoopCheckpoints:
    """Reads and writes the checkpoints of the loops within one round.

    Args:
        folder: the folder with the run's checkpoint.
        number: the round number.
        seconds: the minimum time between two writes.
        shared: the folder with trainings that several runs can reuse, or None if there is no such
            folder.

    Attributes:
        shared: the `TrainingCache` of the folder `shared`, or None.
        resumed_seconds: the time in seconds that other processes have spent on the loops that were
            resumed. It includes earlier processes of the same run.
    """

    def __init__(
        self, folder: CheckpointFolder, number: int, seconds: float, shared: Path | None = None
    ) -> None:
        self.resumed_seconds = 0.0
        self.shared = None
        if shared is not None:
            self.shared = TrainingCache(self, shared, SHARED_TIME_RATIO * seconds)
        self._folder = folder
        self._number = number
        self._seconds = seconds
        self._next_write = time.monotonic() + seconds
        self._paths: dict[str, Path] = {}
        self._started: dict[str, float] = {}
        self._finished: dict[Path, LoopState] = {}

    def load(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns the step and the tensors from which a loop resumes, or None if nothing was saved.

        The call also starts the clock that measures the duration of the loop.

        If the same name is loaded twice, the second call is for a different loop.
        """
        path = self._folder.path / f"steps-{self._number}-{name}"
        if name in self._paths:
            path = self._paths[name].with_name(f"{self._paths[name].name}-again")
        self._paths[name] = path
        self._started[name] = time.monotonic()
        state = read_loop_state(path, self._folder.identity)
        if state is None:
            return None
        self._started[name] -= state.seconds
        return self.resume_from(state)

    def offer(self, name: str, step: int, tensors: Tensors) -> None:
        """Writes a checkpoint of a loop if enough time has passed since the last write.

        The states of finished loops that still wait to be written are written at the same time.

        Raises:
            OutputError: the files cannot be written.
        """
        if self._is_due():
            state = LoopState(tensors(), step, self.seconds_of(name))
            self._write({**self._finished, self._paths[name]: state})

    def finish(self, name: str, steps: int, tensors: Tensors) -> None:
        """Keeps the result of a finished loop, so that a resumed run does not repeat the loop.

        The result is written at once if enough time has passed since the last write. Otherwise, it
        is written together with the next checkpoint of another loop.

        Raises:
            OutputError: the files cannot be written.
        """
        state = LoopState(tensors(), steps, self.seconds_of(name))
        self._finished[self._paths[name]] = state
        if self._is_due():
            self._write(self._finished)

    def seconds_of(self, name: str) -> float:
        """Returns the time that a loop has taken so far, in seconds."""
        return time.monotonic() - self._started[name]

    def resume_from(self, state: LoopState) -> tuple[int, Mapping[str, Tensor]]:
        """Returns the step and the tensors of a saved loop, and adds the loop's duration to
        `resumed_seconds`.
        """
        self.resumed_seconds += state.seconds
        return int(state.step), state.tensors

    def _is_due(self) -> bool:
        return time.monotonic() >= self._next_write

    def _write(self, states: Mapping[Path, LoopState]) -> None:
        with self._folder.writing():
            self._folder.path.mkdir(parents=True, exist_ok=True)
            for path, state in states.items():
                write_whole(path, _with_hash(state, self._folder.identity))
        self._finished = {}
        self._next_write = time.monotonic() + self._seconds


class TrainingCache:
    """Reads and writes finished trainings in a folder that several runs share.

    The name of a training must determine its result.

    Args:
        checkpoints: saves unfinished trainings. Only this run can read them.
        folder: the shared folder.
        min_seconds: the minimum duration of a training that is stored in the shared folder.
    """

    shared: LoopCheckpointer | None = None

    def __init__(self, checkpoints: LoopCheckpoints, folder: Path, min_seconds: float) -> None:
        self._checkpoints = checkpoints
        self._folder = folder
        self._min_seconds = min_seconds
        self._cached: set[str] = set()

    def load(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns the result of a finished training from the shared folder.

        If the shared folder does not contain this training, the last checkpoint of the training in
        this run is returned. Returns None if there is no such checkpoint.
        """
        state = read_loop_state(self._folder / name, "")
        if state is None:
            return self._checkpoints.load(name)
        self._cached.add(name)
        return self._checkpoints.resume_from(state)

    def offer(self, name: str, step: int, tensors: Tensors) -> None:
        """Writes a checkpoint of an unfinished training, which only this run can read."""
        self._checkpoints.offer(name, step, tensors)

    def finish(self, name: str, steps: int, tensors: Tensors) -> None:
        """Stores a finished training in the shared folder if it took long enough.

        A shorter training is saved only for this run. If the shared folder cannot be written, every
        training is saved only for this run.
        """
        if name in self._cached:
            return
        seconds = self._checkpoints.seconds_of(name)
        if seconds >= self._min_seconds:
            content = _with_hash(LoopState(tensors(), steps, seconds), "")
            # another process may write the same file
            temporary = self._folder / f"{name}.{os.getpid()}"
            with suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                write_whole(temporary, content)
                os.replace(temporary, self._folder / name)
                return
        self._checkpoints.finish(name, steps, tensors)


def read_loop_state(path: Path, identity: str) -> LoopState | None:
    """Reads the checkpoint of a loop. Returns None if the file is missing, damaged, or belongs to
    another run.
    """
    try:
        content = read_regular(path, MAX_TENSORS_BYTES)
        if _hash_of(content[HASH_BYTES:], identity) != content[:HASH_BYTES]:
            return None
        return LoopState.from_bytes(content[HASH_BYTES:])
    except (OSError, MessageError):
        return None


def _with_hash(state: LoopState, identity: str) -> bytes:
    content = state.to_bytes()
    return _hash_of(content, identity) + content


def _hash_of(content: bytes, identity: str) -> bytes:
    return hashlib.sha256(f"{FORMAT} {identity}\n".encode() + content).digest()


STEP_SECONDS = 60.0
"""The time between two writes of the checkpoints of long loops within a round, in seconds."""


class RunCheckpoints:
    """Reads and writes the checkpoints of one run. A run without a run folder has no checkpoints.

    Args:
        settings: the run's settings.
        identity: a function that returns the hash of the run's settings and data (`run_identity`).
            It is slow, so it is called only when needed.
        shared: the folder in which a one-shot run stores the training results of its clients for
            other runs, or None.
    """

    def __init__(
        self, settings: RunSettings, identity: Callable[[], str], shared: Path | None = None
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._shared = shared
        self._folder: CheckpointFolder | None = None

    def begin(self, run: RunFolder) -> None:
        """Prepares the folder in which the checkpoints of a new run are stored."""
        self._folder = CheckpointFolder(run.checkpoints, self._identity())

    def read(self, run: RunFolder) -> Checkpoint | None:
        """Returns the checkpoint from which a run resumes, or None if the run starts from the
        beginning.

        Raises:
            CheckpointError: the checkpoint is damaged or missing, or was made with other settings
                or data.
        """
        config = read_sections(run.path / "config.toml")
        if without_place(config) != without_place(self._settings.to_mapping()):
            raise CheckpointError(f"{run.path / 'config.toml'} differs from this run's settings")
        self._folder = CheckpointFolder(run.checkpoints, self._identity())
        checkpoint = self._folder.read(self._settings.method)
        if checkpoint is None and run.has_rounds:
            reason = "If the run began again, it would charge its ledgers twice"
            raise CheckpointError(f"the checkpoint in {run.path} is missing. {reason}")
        return checkpoint

    def give_memories(self, clients: Sequence[ClientRuntime], device: torch.device) -> None:
        """Gives the clients the memories that they had when the checkpoint was written.

        A memory stays in its file until the client needs it.
        """
        if self._folder is not None:
            for number in self._folder.clients:
                self._store(self._folder, clients[number], device)

    def keep(
        self,
        checkpoint: Checkpoint,
        clients: Sequence[ClientRuntime],
        context: RoundContext,
        following: Sequence[int],
    ) -> None:
        """Writes a checkpoint after a round.

        Args:
            checkpoint: the checkpoint of the round, without the clients' memories.
            clients: all clients, in the order of their indices.
            context: the context of the round.
            following: the indices of the clients that take part in the next round. Empty after the
                last round.
        """
        if self._folder is None:
            return
        stored: set[int] = set()
        memories: dict[int, Memory] = {}
        for client in clients:
            if client.stored:
                stored.add(client.number)
            elif client.memory:
                memories[client.number] = client.memory
        complete = replace(checkpoint, memories=memories)
        self._folder.write(complete, frozenset(context.active), frozenset(stored))
        if following:
            for number in memories.keys() - set(following):
                self._store(self._folder, clients[number], context.device)

    def steps_of(self, number: int) -> LoopCheckpoints | None:
        """Returns the object that reads and writes the checkpoints of loops within one round.

        Returns None if the run has no run folder.
        """
        if self._folder is None:
            return None
        return LoopCheckpoints(self._folder, number, STEP_SECONDS, self._shared)

    @staticmethod
    def discard(run: RunFolder) -> None:
        """Removes the checkpoint of a finished run, after the run folder has been renamed."""
        shutil.rmtree(run.checkpoints, ignore_errors=True)

    @staticmethod
    def _store(folder: CheckpointFolder, client: ClientRuntime, device: torch.device) -> None:
        """Removes a client's memory from RAM. The memory stays in its file."""

        def load() -> Memory:
            memory = folder.memory(client.number)
            return {name: tensor.to(device) for name, tensor in memory.items()}

        client.store(load)
