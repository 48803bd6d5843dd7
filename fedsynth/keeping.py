"""Where long loops stand, so that a run that is killed inside a round need not begin them anew
(docs/decisions/resuming.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor


class StepKeeper(Protocol):
    """Keeps where a round's long loops stand: those of open clients, and the server's. Never a
    private client's: what it has released is not repeated.

    Attributes:
        shared: keeps loops for other runs as well, whose names have to say all that they depend on;
            None: there is no such place.
    """

    @property
    def shared(self) -> StepKeeper | None: ...

    def found(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """How many steps of the loop with this name were done, and its tensors then; None: it
        begins."""

    def offer(self, name: str, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """So many steps are done; `tensors` is called if it is time to keep them."""

    def ended(self, name: str, steps: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """The loop has ended, and others of the round may be cut off: its tensors, which nobody
        changes any more, are kept with the next that are."""


class KeepsNothing:
    """No step is kept: a round that was killed begins anew."""

    shared: StepKeeper | None = None

    def found(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """None."""
        return None

    def offer(self, name: str, step: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Nothing."""

    def ended(self, name: str, steps: int, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Nothing."""
