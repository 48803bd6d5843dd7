"""Interrupts a simulation in a round, as Ctrl-C does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fedsynth.simulation.run import Simulation


@contextmanager
def interrupt_in_round(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupts runs in the block before this round's exchange."""
    play = Simulation.play

    def interrupted_play(self: Simulation, context: Any) -> Any:
        if context.round == number:
            raise KeyboardInterrupt
        return play(self, context)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "play", interrupted_play)
        yield
