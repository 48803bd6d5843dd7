"""Decides when a simulation writes checkpoints, and resumes a simulation from a checkpoint.

The memories of clients that do not take part in the next round are kept in the checkpoint's files
instead of in RAM.
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
        """Prepares the checkpoint folder of a new run."""
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
            raise CheckpointError(f"the config.toml in {run.path} has other settings than this run")
        self._folder = CheckpointFolder(run.checkpoints, self._identity())
        checkpoint = self._folder.read(self._settings.method)
        if checkpoint is None and run.has_rounds:
            reason = "if the run started again, its ledgers would be charged twice"
            raise CheckpointError(f"the checkpoint in {run.path} is missing: {reason}")
        return checkpoint

    def give_memories(self, clients: Sequence[ClientRuntime], device: torch.device) -> None:
        """Lets the clients read their memories from the checkpoint.

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
        """Returns the object that checkpoints loops inside a round. None: the run has no folder."""
        if self._folder is None:
            return None
        return LoopCheckpoints(self._folder, number, STEP_SECONDS, self._shared)

    @staticmethod
    def discard(run: RunFolder) -> None:
        """Removes the checkpoint of a finished run, after the run folder has been renamed."""
        CheckpointFolder(run.checkpoints, "").discard()

    @staticmethod
    def _store(folder: CheckpointFolder, client: ClientRuntime, device: torch.device) -> None:
        """Removes a client's memory from RAM. The memory stays in its file."""

        def load() -> Memory:
            memory = folder.memory(client.number)
            return {name: tensor.to(device) for name, tensor in memory.items()}

        client.store(load)
