"""Observers: objects that the engine calls on a run's events.

The command line uses one to print progress; tests and notebooks can use their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsynth.config.settings import RunSettings


class Observer:
    """Receives the events of a run. Every method does nothing; override those that you need.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, simulate
    >>> class Bytes(Observer):
    ...     def round_ended(self, row):
    ...         print(f"round {row['round']}: {row['upload_floats']} numbers were sent")
    >>> settings = RunSettings(FedAvg(local_steps=1), rounds=2, model=ModelSettings("linear"))
    >>> result = simulate(settings, observer=Bytes())
    round 1: 6500 numbers were sent
    round 2: 6500 numbers were sent
    """

    def started(self, settings: RunSettings, folder: Path | None) -> None:
        """The run is about to start or to resume with these settings.

        Args:
            settings: the run's, resolved.
            folder: what the run's folder is called once it has finished; None: it leaves none.
        """

    def note(self, text: str) -> None:
        """A line for people: what the run is about to do, a warning, why it ended."""

    def step(self, round: int, phase: str, completed: int, total: int) -> None:
        """Inside a round: `completed` of `total` steps of a phase. Called often; must be cheap."""

    def round_ended(self, row: Mapping[str, Any]) -> None:
        """A round's metrics, as they go to metrics.jsonl: with differential privacy without what
        only a simulation may show."""

    def ended(self, summary: Mapping[str, Any] | None) -> None:
        """The run has ended; `summary` is the content of summary.json, or None if it failed."""
