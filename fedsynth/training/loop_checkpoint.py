"""Checkpoints of long loops, so that a run that is killed inside a round need not restart them
(docs/decisions/resuming.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

Tensors = Callable[[], Mapping[str, Tensor]]
"""Returns the tensors of a loop's state, by name."""


class LoopCheckpointer(Protocol):
    """Saves checkpoints of a round's long loops: those of open clients, and the server's. Never a
    private client's: its releases are not repeated.

    Attributes:
        shared: a checkpointer that other runs also use; the names of its loops must include
            everything that the loops depend on. None: there is none.
    """

    @property
    def shared(self) -> LoopCheckpointer | None: ...

    def load(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns the number of finished steps of the loop with this name, and its tensors then;
        None: there is no checkpoint."""

    def offer(self, name: str, completed: int, tensors: Tensors) -> None:
        """Receives the number of finished steps; calls `tensors` if a checkpoint is due."""

    def finish(self, name: str, steps: int, tensors: Tensors) -> None:
        """Receives the final tensors of a loop, which no longer change; the next checkpoint includes
        them, because another loop of the round may be interrupted."""


class NullCheckpointer:
    """Saves nothing: a killed round starts from scratch."""

    shared: LoopCheckpointer | None = None

    def load(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns None."""
        return None

    def offer(self, name: str, completed: int, tensors: Tensors) -> None:
        """Does nothing."""

    def finish(self, name: str, steps: int, tensors: Tensors) -> None:
        """Does nothing."""
