"""Simulation checkpoints, from which a killed run resumes after its last complete round.

    simulation_only/checkpoint/
        checkpoint.json              the metrics of the finished rounds, and a list of the files
        state-ROUND.safetensors      the server's state
        client_state-CLIENT-ROUND.…  a client's state after the last round in which it took part
        upload-CLIENT-ROUND.…        the synthetic images that a client sent in the last round
        steps-ROUND-NAME             a long loop within a round (see `LoopCheckpoints`)

`checkpoint.json` is replaced last, and atomically. There is therefore always one complete
checkpoint, even if the run is killed or the disk is full. Files that `checkpoint.json` does not
name are removed afterwards. All files are safetensors or JSON, and reading them executes no code.

A checkpoint contains the clients' states and exact accuracies. It is therefore stored in
`simulation_only`, and is deleted when the run ends. A checkpoint contains no keys for noise or
masks, and no privacy ledger. A ledger is never rewound: if a round is repeated after its noise was
drawn, the ledger is charged again.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsynth import files
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import ServerState
from fedsynth.core.messages import Message, Packed, Tensors
from fedsynth.core.method import ClientState, Method
from fedsynth.data.images import ImageData
from fedsynth.errors import CheckpointError, MessageError, writing
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.results.file_names import CONFIG
from fedsynth.results.run_folder import RunFolder
from fedsynth.training.loop import TRAINED, LoopCheckpointer, MakeTensors
from fedsynth.validation import read_sections

FORMAT = 1
POINTER = "checkpoint.json"
MAX_POINTER_BYTES = 2**30
_PRUNED = re.compile(r"(state|client_state|upload|steps)-.*|.*\.partial")


@dataclass(frozen=True)
class StoredClientState(Packed):
    """The tensors that a client keeps between rounds.

    Args:
        client_state: the tensors by name.
    """

    client_state: Tensors


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run resumes.

    Args:
        rows: the metrics of the finished rounds, one row per round. They include the values that
            only a simulation may show.
        state: the server's state after the last finished round.
        client_states: the clients' states, by client index. In a checkpoint that was read from
            disk,
            this mapping is empty: `CheckpointFolder.client_state` reads each client state from its
            file.
        uploads: the synthetic images that each client sent in the last finished round, by client
            index.
    """

    rows: tuple[dict[str, Any], ...]
    state: ServerState
    client_states: Mapping[int, ClientState] = field(default_factory=dict)
    uploads: Mapping[int, Message] = field(default_factory=dict)

    @property
    def round(self) -> int:
        """The number of the last complete round."""
        return len(self.rows)


class CheckpointFolder:
    """A run's checkpoint folder.

    Args:
        path: the folder. It is created when the first checkpoint is written.
        identity: a string that identifies the run's settings and data. A checkpoint that was
            written with a different identity is refused.
        trained: the folder in which runs share finished trainings, or None.
    """

    def __init__(self, path: Path, identity: str, trained: Path | None = None) -> None:
        self.path = path
        self.identity = identity
        self.trained = trained
        self._files: dict[str, str] = {}  # the checkpoint's files, with their SHA-256

    @property
    def rounds(self) -> int:
        """The number of rounds before the checkpoint that was last written or read."""
        states = [name for name in self._files if name.startswith("state-")]
        return max((int(Path(name).stem.partition("-")[2]) for name in states), default=0)

    def write(self, checkpoint: Checkpoint, stored: Iterable[int] = ()) -> None:
        """Writes a round's checkpoint, which replaces the previous one.

        Args:
            checkpoint: the state after a round.
            stored: the clients whose client states are only in files and not in RAM. These files
                are kept unchanged.

        Raises:
            OutputError: the checkpoint cannot be written. The previous checkpoint is then still
                intact.
        """
        number = checkpoint.round
        contents: dict[str, Packed] = {f"state-{number}.safetensors": checkpoint.state}
        hashes: dict[str, str] = {}
        state_files = self._client_states()
        for client in stored:
            hashes[state_files[client]] = self._files[state_files[client]]
        for client, client_state in checkpoint.client_states.items():
            contents[f"client_state-{client}-{number}.safetensors"] = StoredClientState(
                client_state
            )
        for client, upload in checkpoint.uploads.items():
            contents[f"upload-{client}-{number}.safetensors"] = upload
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for name, packed in contents.items():
                content = packed.to_bytes()
                files.write_whole(self.path / name, content, lasting=False)
                hashes[name] = hashlib.sha256(content).hexdigest()
            files.sync_folder(self.path)  # all files at once, before the pointer names them
            pointer: dict[str, Any] = {
                "format": FORMAT,
                "identity": self.identity,
                "rows": list(checkpoint.rows),
                "files": hashes,
            }
            content = json.dumps(pointer, allow_nan=False).encode()
            files.write_whole(self.path / POINTER, files.with_hash(content))
            self._files = hashes
            self._prune()

    def read(self, method: Method) -> Checkpoint | None:
        """Returns the checkpoint, or None if the run was killed before its first round ended.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another run.
        """
        if not (self.path / POINTER).exists():
            return None
        try:
            return self._read(method)
        except (OSError, ValueError, KeyError, TypeError, MessageError) as error:
            raise self._damaged(f"{error!r:.200}") from None

    def _read(self, method: Method) -> Checkpoint:
        pointer = self._pointer()
        self._files = pointer["files"]
        rows = tuple(pointer["rows"])
        state = method.state.from_bytes(self._content(f"state-{len(rows)}.safetensors"))
        for client in self.clients:
            self.client_state(client)
        uploads = {}
        for name in self._files:
            if name.startswith("upload-"):
                uploads[_client(name)] = method.upload.from_bytes(self._content(name))
        return Checkpoint(rows, state, {}, uploads)

    def _pointer(self) -> dict[str, Any]:
        stored = files.read_regular(self.path / POINTER, MAX_POINTER_BYTES)
        pointer: dict[str, Any] = files.decode_json(files.without_hash(stored))
        if pointer["format"] != FORMAT:
            raise self._damaged(f"{POINTER} has another format than {FORMAT}")
        if pointer["identity"] != self.identity:
            raise CheckpointError(
                f"{self.path} was written with other settings or data. Restore the settings and "
                "data"
            )
        return pointer

    def _content(self, name: str) -> bytes:
        content = files.read_regular(self.path / name, files.MAX_TENSORS_BYTES)
        if hashlib.sha256(content).hexdigest() != self._files[name]:
            raise self._damaged(f"the content of {name} does not match its hash")
        return content

    @property
    def clients(self) -> list[int]:
        """The indices of clients with a stored state."""
        return sorted(self._client_states())

    def client_state(self, client: int) -> ClientState:
        """Reads one client's state from the checkpoint.

        Raises:
            CheckpointError: the file with the client state is damaged or missing.
        """
        name = self._client_states()[client]
        try:
            return StoredClientState.from_bytes(self._content(name)).client_state
        except (OSError, MessageError) as error:
            raise self._damaged(str(error)) from None

    def _client_states(self) -> dict[int, str]:
        """Returns the clients' state-file names."""
        return {_client(name): name for name in self._files if name.startswith("client_state-")}

    def resume(self, run: RunFolder, settings: RunSettings) -> Checkpoint | None:
        """Returns the checkpoint from which a run resumes, or None for a run that starts from the
        beginning.

        Raises:
            CheckpointError: the checkpoint is damaged or missing, or was made with other settings
                or data.
        """
        if without_place(read_sections(run.path / CONFIG)) != without_place(settings.to_mapping()):
            raise CheckpointError(
                f"{run.path / CONFIG} does not match this run's settings. Restore the settings"
            )
        checkpoint = self.read(settings.method)
        if checkpoint is None and run.has_rounds:
            reason = "and a restart would charge the ledgers twice. Restore it from a backup"
            raise CheckpointError(f"the checkpoint in {run.path} is missing, {reason}")
        return checkpoint

    def give_states(self, clients: Sequence[ClientRuntime], device: torch.device) -> None:
        """Restores the clients' states from the checkpoint.

        A client state stays in its file until the client needs it.
        """

        def load(number: int) -> ClientState:
            return {name: tensor.to(device) for name, tensor in self.client_state(number).items()}

        for number in self.clients:
            clients[number].store(partial(load, number))

    def keep(
        self, checkpoint: Checkpoint, clients: Sequence[ClientRuntime], device: torch.device
    ) -> None:
        """Writes a round's checkpoint, and removes the clients' states from RAM.

        A client state stays in its file until the client needs it again.

        Args:
            checkpoint: the checkpoint of the round, without the clients' states.
            clients: all clients, in the order of their indices.
            device: the device of the run.
        """
        stored: list[int] = []
        client_states: dict[int, ClientState] = {}
        for client in clients:
            if client.stored:
                stored.append(client.number)
            elif client.client_state:
                client_states[client.number] = client.client_state
        self.write(replace(checkpoint, client_states=client_states), stored)
        self.give_states(clients, device)

    def steps_of(self, number: int) -> LoopCheckpoints:
        """Returns an object that reads and writes the checkpoints of loops in one round."""
        return LoopCheckpoints(self, number, STEP_SECONDS)

    def _prune(self) -> None:
        """Removes files that the current checkpoint does not list. Ignores errors."""
        for path in self.path.iterdir():
            if path.name not in self._files and _PRUNED.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint in {self.path} is damaged: {why}. Restore it from a backup"
        )


# Settings that determine on which hardware and from which data folder a run computes. They do not
# change the result.
PLACE = {
    "run": ("device", "memory_gb", "compile"),
    "data": ("data_root", "encoder_weights", "encoder_cache"),
}


def without_place(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without those that may differ between machines.

    `PLACE` lists the removed settings. The settings are grouped by section, as in config.toml.
    """
    plain: dict[str, Any] = json.loads(json.dumps(settings))  # lists as in TOML, not tuples
    for section, keys in PLACE.items():
        for key in keys:
            plain.get(section, {}).pop(key, None)
    return plain


def run_identity(
    settings: RunSettings, train: ImageData, test: ImageData | None, parts: Sequence[Tensor]
) -> str:
    """Returns a hash of a run's settings, images and partition.

    A checkpoint can be resumed only by a run with the same hash. The hash is an exact function of
    private data, so it is stored only in the checkpoint.
    """
    digest = hashlib.blake2b(digest_size=16)
    facts = [without_place(settings.to_mapping()), train.spec.to_json()]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    tensors = [train.images, train.labels]
    if test is not None:
        tensors += [test.images, test.labels]
    for tensor in (*tensors, *parts):
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def _client(name: str) -> int:
    """Returns the client index in a file name."""
    return int(name.split("-")[1].split(".")[0])


# The time between two writes of the checkpoints of long loops within a round, in seconds.
STEP_SECONDS = 60.0


@dataclass(frozen=True)
class LoopState(Packed):
    """The progress of a long loop within a round, such as local training.

    Args:
        tensors: the tensors from which the loop can resume, by name.
        step: the number of finished steps.
        seconds: the time that these steps took, in seconds.
    """

    tensors: Tensors
    step: int
    seconds: float


class LoopCheckpoints(LoopCheckpointer):
    """Reads and writes one round's loop checkpoints.

    Runs may share finished trainings in `folder.trained`. The name of such a training, which begins
    with `TRAINED`, must determine its result.

    Args:
        folder: the folder with the run's checkpoint.
        number: the round number.
        seconds: the minimum time between two writes.

    Attributes:
        resumed_seconds: the time in seconds that other processes have spent on the loops that were
            resumed. It includes earlier processes of the same run.
    """

    def __init__(self, folder: CheckpointFolder, number: int, seconds: float) -> None:
        self.resumed_seconds = 0.0
        self.shares_trainings = folder.trained is not None
        self._folder = folder
        self._number = number
        self._seconds = seconds
        self._next_write = time.monotonic() + seconds
        self._paths: dict[str, Path] = {}
        self._started: dict[str, float] = {}
        self._finished: dict[Path, LoopState] = {}

    def load(self, name: str) -> tuple[int, Tensors] | None:
        """Loads the checkpoint of a loop, and returns its step and its tensors.

        Returns None if there is no checkpoint. The call also starts the clock that measures the
        duration of the loop.

        If the same name is loaded twice, the second call is for a different loop.
        """
        path = self._folder.path / f"steps-{self._number}-{name}"
        if name in self._paths:
            path = self._paths[name].with_name(f"{self._paths[name].name}-again")
        self._paths[name] = path
        self._started[name] = time.monotonic()
        state = read_loop_state(path, self._folder.identity)
        if state is None and self._folder.trained is not None and name.startswith(TRAINED):
            state = read_loop_state(self._folder.trained / name, "")
        if state is None:
            return None
        self._started[name] -= state.seconds
        self.resumed_seconds += state.seconds
        return int(state.step), state.tensors

    def offer(self, name: str, step: int, tensors: MakeTensors) -> None:
        """Writes a loop's checkpoint if enough time has passed since the last write.

        The states of finished loops that still wait to be written are written at the same time.

        Raises:
            OutputError: the files cannot be written.
        """
        if self._is_due():
            state = LoopState(tensors(), step, time.monotonic() - self._started[name])
            self._write({**self._finished, self._paths[name]: state})

    def finish(self, name: str, steps: int, tensors: MakeTensors) -> None:
        """Stores the result of a finished loop, so that a resumed run does not repeat the loop.

        The result is written at once if enough time has passed since the last write. Otherwise, it
        is written together with the next checkpoint of another loop. A finished training is also
        shared, if the folder for it can be written.

        Raises:
            OutputError: the files cannot be written.
        """
        state = LoopState(tensors(), steps, time.monotonic() - self._started[name])
        self._finished[self._paths[name]] = state
        if self._folder.trained is not None and name.startswith(TRAINED):
            with suppress(OSError):
                self._folder.trained.mkdir(parents=True, exist_ok=True)
                files.write_whole(self._folder.trained / name, _with_hash(state, ""))
        if self._is_due():
            self._write(self._finished)

    def _is_due(self) -> bool:
        return time.monotonic() >= self._next_write

    def _write(self, states: Mapping[Path, LoopState]) -> None:
        with writing(self._folder.path):
            self._folder.path.mkdir(parents=True, exist_ok=True)
            for path, state in states.items():
                files.write_whole(path, _with_hash(state, self._folder.identity))
        self._finished = {}
        self._next_write = time.monotonic() + self._seconds


def read_loop_state(path: Path, identity: str) -> LoopState | None:
    """Reads a loop's checkpoint. Returns None if the file is missing, damaged or from another
    run.
    """
    try:
        stored = files.read_regular(path, files.MAX_TENSORS_BYTES)
        return LoopState.from_bytes(files.without_hash(stored, f"{FORMAT} {identity}"))
    except (OSError, ValueError, MessageError):
        return None


def _with_hash(state: LoopState, identity: str) -> bytes:
    return files.with_hash(state.to_bytes(), f"{FORMAT} {identity}")
