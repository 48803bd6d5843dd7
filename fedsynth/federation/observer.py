"""Observers: objects that receive the events of a run.

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
        """Called when a run is about to start or to resume with these settings.

        Args:
            settings: the run's, resolved.
            folder: what the run's folder is called once it has finished; None: it leaves none.
        """

    def note(self, text: str) -> None:
        """Called with a line for the user, such as a warning or the reason why the run ended."""

    def step(self, round: int, phase: str, completed: int, total: int) -> None:
        """Called during a round, after `completed` of `total` steps of a phase. This is called
        often, so it must be cheap."""

    def round_ended(self, row: Mapping[str, Any]) -> None:
        """Called with the metrics of a round, as in metrics.jsonl. In a private run, they do not
        include simulation-only values."""

    def ended(self, summary: Mapping[str, Any] | None) -> None:
        """Called when the run has ended. `summary` is the content of summary.json, or None if the
        run failed."""
