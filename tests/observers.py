"""An observer that records a run's notes."""

from __future__ import annotations

from fedsynth.federation.protocol import Observer


class NoteRecorder(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(str(text))
