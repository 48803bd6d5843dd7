"""Tests of checkpoints of long loops within a round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsynth.results import checkpoint
from fedsynth.results.checkpoint import CheckpointFolder, LoopCheckpoints

WEIGHTS = {"w": torch.ones(3)}


def checkpoints(folder: Path, seconds: float = 60.0) -> LoopCheckpoints:
    return LoopCheckpoints(CheckpointFolder(folder, "this run"), 1, seconds)


class Clock:
    """A manual clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(checkpoint.time, "monotonic", lambda: self.seconds)


def test_finished_loops_are_written_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: of a hundred clients of half a minute each, every second one was trained again."""
    clock = Clock(monkeypatch)
    writer = checkpoints(tmp_path)
    for client in range(4):
        assert writer.load(f"train-{client}") is None
        clock.seconds += 19.0
        writer.offer(f"train-{client}", 1, lambda: WEIGHTS)
        writer.finish(f"train-{client}", 2, lambda: WEIGHTS)
    reader = checkpoints(tmp_path)
    loaded = [reader.load(f"train-{client}") for client in range(4)]
    assert [state and state[0] for state in loaded] == [2, 2, 2, 1]  # written at 76 seconds
    assert reader.resumed_seconds == 4 * 19.0


def test_loops_of_equal_name_are_separate(tmp_path: Path) -> None:
    """Regression: if a method trained a client twice in a round, the second training was skipped."""
    writer = checkpoints(tmp_path, 0.0)
    for weights in (1.0, 2.0):
        assert writer.load("train-0") is None
        writer.finish("train-0", 1, lambda weights=weights: {"w": torch.tensor([weights])})
    reader = checkpoints(tmp_path, 0.0)
    for weights in (1.0, 2.0):
        loaded = reader.load("train-0")
        assert loaded is not None
        assert loaded[1]["w"].item() == weights


def test_damaged_or_foreign_checkpoints_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = checkpoints(tmp_path, 0.0)
    writer.load("train-0")
    writer.offer("train-0", 1, lambda: WEIGHTS)
    path = tmp_path / "steps-1-train-0"
    intact = path.read_bytes()
    assert checkpoints(tmp_path).load("train-0") is not None
    other_run = LoopCheckpoints(CheckpointFolder(tmp_path, "that run"), 1, 0.0)
    assert other_run.load("train-0") is None
    for content in (intact[:-1] + bytes([intact[-1] ^ 1]), intact[:-5], b""):
        path.write_bytes(content)
        assert checkpoints(tmp_path).load("train-0") is None
    path.write_bytes(intact)
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    assert checkpoints(tmp_path).load("train-0") is None
