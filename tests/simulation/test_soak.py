"""Tests that long runs leak no memory and inactive clients use none, by counting live objects after
rounds, independently of the allocator."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth import Observer, resolve, simulate

ROUNDS = 30
SETTLED = 12  # rounds after which nothing new may stay
HALFWAY = 21
ROUND_BYTES = {"fedavg": 6_000, "feddm": 3_500}
"""Bytes of Python objects that a round may leave: its row of metrics, and with privacy the
ledgers' rows, whose texts are shared. Measured: 1,300 to 4,200 (of which a cached distribution of
the accountant is the largest part), and 1,000 to 2,400."""
METHODS: Mapping[str, dict[str, Any]] = {
    "fedavg": {"local_steps": 1, "batch": 64},
    "feddm": {"ipc": 1, "iterations": 1, "server_epochs": 1},
}


def live_tensors() -> tuple[int, int]:
    """Returns the number of live tensors and their bytes."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [t for t in gc.get_objects() if type(t) in kinds and t.layout is torch.strided]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class MemoryRecorder(Observer):
    """Records live objects at the end of some rounds."""

    def __init__(self) -> None:
        self.tensors: list[tuple[int, int]] = []
        self.python: list[int] = []
        self.files: list[int] = []

    def round_ended(self, row: Mapping[str, Any]) -> None:
        if row["round"] in (SETTLED, HALFWAY, ROUNDS):
            self.tensors.append(live_tensors())
            self.python.append(tracemalloc.get_traced_memory()[0])
            if sys.platform == "linux":
                self.files.append(open_files())


def settings_of(name: str, private: bool) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {
        "run": {"method": name, "rounds": ROUNDS, "device": "cpu"},
        "partition": {"clients": 3, "kind": "iid"},
        "model": {"width": 4, "depth": 2},
        "method": METHODS[name],
    }
    return {**sections, "privacy": {"noise_multiplier": 50.0}} if private else sections


@pytest.mark.slow
@pytest.mark.parametrize("private", [False, True], ids=["open", "private"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_rounds_leak_no_memory(name: str, private: bool, tmp_path: Path) -> None:
    recorder = MemoryRecorder()
    tracemalloc.start()
    try:
        simulate(resolve(settings_of(name, private)), observer=recorder, output=tmp_path)
    finally:
        tracemalloc.stop()
    assert recorder.tensors[0] == recorder.tensors[1] == recorder.tensors[2]
    assert len(set(recorder.files)) <= 1
    first, second = recorder.python[1] - recorder.python[0], recorder.python[2] - recorder.python[1]
    # one-time allocations (a module, a cache) are in one of the two; leaks of rounds are in both
    assert min(first, second) / (ROUNDS - HALFWAY) < ROUND_BYTES[name]


class FinalMemory(Observer):
    """Records the bytes of live tensors after a run's last round."""

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.bytes = live_tensors()[1]


@pytest.mark.slow
def test_inactive_clients_hold_only_their_indices() -> None:
    """Compares ten of 50 with ten of 800 clients: a model takes 13 kB, an index eight bytes."""
    final_bytes = []
    for clients in (50, 800):
        sections: dict[str, dict[str, Any]] = {
            "run": {"method": "fedavg", "rounds": 2, "participation": 10 / clients},
            "partition": {"clients": clients, "kind": "iid"},
            "model": {"width": 16, "depth": 2},
            "method": {"local_steps": 1, "batch": 4},
        }
        recorder = FinalMemory()
        simulate(resolve(sections), observer=recorder)
        final_bytes.append(recorder.bytes)
    assert abs(final_bytes[1] - final_bytes[0]) < 13_000
