"""The checkpoints of a simulation: when they are written, how a run resumes from them, and which
clients' memories are in files, namely those of clients that do not take part in the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Memory
from fedsynth.errors import CheckpointError
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.results.checkpoint import Checkpoint, CheckpointFolder, without_place
from fedsynth.results.loop_checkpoints import LoopCheckpoints
from fedsynth.results.run_folder import RunFolder
from fedsynth.toml_file import read_sections

STEP_SECONDS = 60.0
"""Seconds between two writes of the checkpoints of long loops within a round."""


class RunCheckpoints:
    """The checkpoints of one run; a run without a folder has none.

    Args:
        settings: the run's settings.
        identity: returns the hash of its settings and data (`run_identity`), which is slow.
        shared: the folder in which a one-shot run shares its clients' training results; None:
            no sharing.
    """

    def __init__(
        self, settings: RunSettings, identity: Callable[[], str], shared: Path | None = None
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._shared = shared
        self._folder: CheckpointFolder | None = None

    def begin(self, run: RunFolder) -> None:
        """Opens the checkpoint folder of a new run."""
        self._folder = CheckpointFolder(run.checkpoints, self._identity())

    def read(self, run: RunFolder) -> Checkpoint | None:
        """Returns the checkpoint from which a run resumes, or None if it starts from the beginning.

        Raises:
            CheckpointError: it is damaged, or of other settings or data.
        """
        config = read_sections(run.path / "config.toml")
        if without_place(config) != without_place(self._settings.to_mapping()):
            raise CheckpointError(f"the run in {run.path} has other settings in its config.toml")
        self._folder = CheckpointFolder(run.checkpoints, self._identity())
        checkpoint = self._folder.read(self._settings.method)
        if checkpoint is None and run.has_rounds:
            reason = "resuming it would charge its rounds again"
            raise CheckpointError(f"in {run.path}, the run's checkpoint is missing: {reason}")
        return checkpoint

    def give_memories(self, clients: Sequence[ClientRuntime], device: torch.device) -> None:
        """Registers with the clients their memories in the checkpoint, which stay in its files
        until needed.
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
            checkpoint: the checkpoint of the round, without clients' memories.
            clients: all clients, by index.
            context: the context of the round.
            following: the clients that take part in the next round; empty after the last.
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
        """Returns the keeper of checkpoints of the loops within a round, or None
        without a folder.
        """
        if self._folder is None:
            return None
        return LoopCheckpoints(self._folder, number, STEP_SECONDS, self._shared)

    @staticmethod
    def discard(run: RunFolder) -> None:
        """Removes the checkpoint of a run that has ended and whose folder has its final name."""
        CheckpointFolder(run.checkpoints, "").discard()

    @staticmethod
    def _store(folder: CheckpointFolder, client: ClientRuntime, device: torch.device) -> None:
        """Removes a client's memory from RAM; it stays in its file."""

        def load() -> Memory:
            memory = folder.memory(client.number)
            return {name: tensor.to(device) for name, tensor in memory.items()}

        client.store(load)
