"""A simulation that somebody interrupts in a round, as Ctrl-C does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fedsynth.simulation.run import Simulation


@contextmanager
def interrupted_in_round(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs inside are interrupted before this round's exchange."""
    play = Simulation.play

    def stopped(self: Simulation, context: Any) -> Any:
        if context.round == number:
            raise KeyboardInterrupt
        return play(self, context)

    with monkeypatch.context() as patched:
        patched.setattr(Simulation, "play", stopped)
        yield
