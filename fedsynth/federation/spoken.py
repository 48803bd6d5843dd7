"""What `simulate` says where nobody else listens: a line on stderr for each note and each round."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fedsynth.federation.observer import Observer
from fedsynth.privacy.formatting import format_epsilon


class Spoken(Observer):
    """Lines on stderr.

    Args:
        rounds: of the run.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def note(self, text: str) -> None:
        """The text, whose settings are named as in Python."""
        with suppress(OSError):  # a closed pipe does not end a run
            print(text, file=sys.stderr, flush=True)

    def round_ended(self, row: Mapping[str, Any]) -> None:
        """Accuracy, ε, and what was uploaded."""
        parts = [f"round {row['round']}/{self._rounds}"]
        if row.get("test_accuracy") is not None:
            parts.append(f"test accuracy {100 * row['test_accuracy']:.2f} %")
        if "epsilon" in row:
            parts.append(f"ε {format_epsilon(row['epsilon'])}")
        parts.append(f"uploads {row['upload_bytes'] / 1e6:.2f} MB")
        self.note(" · ".join(parts))
