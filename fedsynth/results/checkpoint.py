"""Checkpoints of a simulation, from which a killed run resumes after its last complete round.

    simulation_only/checkpoint/
        checkpoint.json              the metrics of the finished rounds, and a list of the files
        state-ROUND.safetensors      the server's state
        memory-CLIENT-ROUND.…        a client's memory after the last round in which it took part
        upload-CLIENT-ROUND.…        the synthetic images that a client sent in the last round
        steps-ROUND-NAME             a long loop within a round (see `run_checkpoints.py`)

`checkpoint.json` is replaced last, and atomically. There is therefore always one complete
checkpoint, even if the run is killed or the disk is full. Files that `checkpoint.json` does not
name are removed afterwards. All files are safetensors or JSON, and reading them executes no code.

A checkpoint contains the clients' memories and exact accuracies. It is therefore stored in
`simulation_only`, and is deleted when the run ends. A checkpoint contains no keys for noise or
masks, and no privacy ledger. A ledger is never rewound: if a round is repeated after its noise was
drawn, the ledger is charged again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import ServerState
from fedsynth.core.messages import Message, Packed
from fedsynth.core.method import Memory, Method
from fedsynth.data.images import ImageData
from fedsynth.errors import CheckpointError, MessageError, OutputError
from fedsynth.privacy.files import (
    MAX_TENSORS_BYTES,
    decode_json,
    read_regular,
    read_text,
    sync_folder,
    write_whole,
)

FORMAT = 1
POINTER = "checkpoint.json"
MAX_POINTER_BYTES = 2**30
_NAME = re.compile(r"(state|memory-[0-9]+|upload-[0-9]+)-[0-9]+\.safetensors")
_PRUNED = re.compile(r"(state|memory|upload|steps)-.*|.*\.partial")


@dataclass(frozen=True)
class ClientMemory(Packed):
    """The tensors that a client keeps between rounds.

    Args:
        memory: the tensors by name.
    """

    memory: Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run resumes.

    Args:
        rows: the metrics of the finished rounds, one row per round. They include the values that
            only a simulation may show.
        state: the server's state after the last finished round.
        memories: the clients' memories, by client index. In a checkpoint that was read from disk,
            this mapping is empty: `CheckpointFolder.memory` reads each memory from its file.
        uploads: the synthetic images that each client sent in the last finished round, by client
            index.
    """

    rows: tuple[dict[str, Any], ...]
    state: ServerState
    memories: Mapping[int, Memory] = field(default_factory=dict)
    uploads: Mapping[int, Message] = field(default_factory=dict)

    @property
    def round(self) -> int:
        """The number of the last complete round."""
        return len(self.rows)


class CheckpointFolder:
    """The folder with the checkpoint of one run.

    Args:
        path: the folder. It is created when the first checkpoint is written.
        identity: a string that identifies the run's settings and data. A checkpoint that was
            written with a different identity is refused.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self.identity = identity
        self._files: dict[str, str] = {}  # the checkpoint's files, with their SHA-256

    def write(
        self, checkpoint: Checkpoint, changed: frozenset[int], stored: frozenset[int] = frozenset()
    ) -> None:
        """Writes the checkpoint of a round, which replaces the previous checkpoint in the folder.

        Args:
            checkpoint: the state after a round.
            changed: the clients whose memories have changed since the previous checkpoint.
            stored: the clients whose memories are only in files and not in RAM. These files are
                kept unchanged.

        Raises:
            OutputError: the checkpoint cannot be written. The previous checkpoint is then still
                intact.
        """
        number = checkpoint.round
        contents: dict[str, Packed] = {f"state-{number}.safetensors": checkpoint.state}
        files: dict[str, str] = {}
        memory_files = self._memories()
        unchanged = (stored | checkpoint.memories.keys() - changed) & memory_files.keys()
        for client in sorted(unchanged):
            files[memory_files[client]] = self._files[memory_files[client]]
        for client, memory in checkpoint.memories.items():
            if client not in unchanged:
                contents[f"memory-{client}-{number}.safetensors"] = ClientMemory(memory)
        for client, upload in checkpoint.uploads.items():
            contents[f"upload-{client}-{number}.safetensors"] = upload
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            for name, packed in contents.items():
                content = packed.to_bytes()
                write_whole(self.path / name, content, lasting=False)
                files[name] = hashlib.sha256(content).hexdigest()
            sync_folder(self.path)  # all files at once, before the pointer names them
            pointer: dict[str, Any] = {
                "format": FORMAT,
                "identity": self.identity,
                "rows": list(checkpoint.rows),
                "files": files,
            }
            pointer["sha256"] = _hash_of(pointer)
            write_whole(self.path / POINTER, json.dumps(pointer, allow_nan=False).encode())
            self._files = files
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
        state: ServerState | None = None
        uploads: dict[int, Message] = {}
        for name, sha256 in pointer["files"].items():
            if not _NAME.fullmatch(name):
                raise self._damaged(f"{POINTER} lists the unknown file {name!r:.80}")
            content = self._content(name, sha256)
            if name.startswith("state-"):
                state = method.state.from_bytes(content)
            elif name.startswith("memory-"):
                ClientMemory.from_bytes(content)
            else:
                uploads[_client(name)] = method.upload.from_bytes(content)
        if state is None:
            raise self._damaged("the server's state is missing")
        self._files = pointer["files"]
        return Checkpoint(tuple(pointer["rows"]), state, {}, uploads)

    def _pointer(self) -> dict[str, Any]:
        pointer: dict[str, Any] = decode_json(read_text(self.path / POINTER, MAX_POINTER_BYTES))
        if pointer["format"] != FORMAT:
            raise self._damaged(f"{POINTER} does not have format {FORMAT}")
        if pointer.pop("sha256") != _hash_of(pointer):
            raise self._damaged(f"{POINTER} was changed after it was written")
        if pointer["identity"] != self.identity:
            raise CheckpointError(
                f"the settings or data differ from those of the run that wrote {self.path}"
            )
        numbers = [row["round"] for row in pointer["rows"]]
        if not numbers or numbers != list(range(1, len(numbers) + 1)):
            raise self._damaged(f"the rounds in {POINTER} are not numbered 1, 2, …")
        return pointer

    def _content(self, name: str, sha256: str) -> bytes:
        content = read_regular(self.path / name, MAX_TENSORS_BYTES)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise self._damaged(f"the content of {name} does not match its hash")
        return content

    @property
    def clients(self) -> list[int]:
        """The indices of the clients whose memories are stored in the checkpoint."""
        return sorted(self._memories())

    def memory(self, client: int) -> Memory:
        """Reads the memory of one client from the checkpoint.

        Raises:
            CheckpointError: the file with the memory is damaged or missing.
        """
        name = self._memories()[client]
        try:
            return ClientMemory.from_bytes(self._content(name, self._files[name])).memory
        except (OSError, MessageError) as error:
            raise self._damaged(str(error)) from None

    def _memories(self) -> dict[int, str]:
        """Returns, for each client, the name of the file that contains the client's memory."""
        return {_client(name): name for name in self._files if name.startswith("memory-")}

    def _prune(self) -> None:
        """Removes files that the current checkpoint does not list. A file that cannot be removed is
        left in the folder, because it does no harm.
        """
        for path in self.path.iterdir():
            if path.name not in self._files and _PRUNED.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"cannot write a checkpoint into {self.path}: {error.strerror or error}. Correct "
                "this problem, and then resume the run"
            ) from None

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"the checkpoint in {self.path} is damaged: {why}")


PLACE = {
    "run": ("device", "memory_gb", "compile"),
    "data": ("data_root", "encoder_weights", "encoder_cache"),
}
"""Settings that determine on which hardware and from which data folder a run computes. They do not
change the result.
"""


def without_place(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a run's settings without the settings that `PLACE` lists.

    The settings are grouped by section, as in config.toml.
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


def _hash_of(pointer: Mapping[str, Any]) -> str:
    text = json.dumps(pointer, sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _client(name: str) -> int:
    """Returns the index of the client, which is a part of the given file name."""
    return int(name.split("-")[1].split(".")[0])
