"""How a run ends that is told to: by Ctrl-C, or by SIGTERM, as Slurm and container hosts send
it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came: the run ends in order, as after Ctrl-C."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it SIGTERM raises TerminatedError, once; a second one ends the process at once."""

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
