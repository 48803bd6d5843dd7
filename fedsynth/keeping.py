"""Checkpoints of long loops, so that a run that is killed inside a round need not restart them
(docs/decisions/resuming.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor


class StepKeeper(Protocol):
    """Keeps checkpoints of a round's long loops: those of open clients, and the server's. Never a
    private client's: its releases are not repeated.

    Attributes:
        shared: a keeper that other runs also use; the names of its loops must include everything
            that the loops depend on. None: there is none.
    """

    @property
    def shared(self) -> StepKeeper | None: ...

    def found(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns the number of finished steps of the loop with this name, and its tensors then;
        None: there is no checkpoint."""

    def offer(self, name: str, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Receives the number of finished steps; calls `tensors` if a checkpoint is due."""

    def ended(self, name: str, steps: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Receives the final tensors of a finished loop, which no longer change; the next
        checkpoint includes them, as other loops of the round may be cut off."""


class KeepsNothing:
    """Keeps no checkpoint: a killed round starts from scratch."""

    shared: StepKeeper | None = None

    def found(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns None."""
        return None

    def offer(self, name: str, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Does nothing."""

    def ended(self, name: str, steps: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Does nothing."""
