"""The Fashion-MNIST table's settings, which other tables share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings

PRESET: dict[str, dict[str, Any]] = {
    "run": {"rounds": 5, "evaluate_every": 1},
    "data": {"dataset": "fashion-mnist"},
    "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 10},
    "model": {"width": 16},
}
METHODS: dict[str, dict[str, Any]] = {
    "feddm": {"ipc": 10, "iterations": 100, "batch": 64, "server_epochs": 100},
    "real": {"ipc": 10, "server_epochs": 100},
    "fedavg": {"local_epochs": 10, "batch": 256},
}
TUNING_SEED = 1000


def settings_for(method: str, seed: int, device: str, **changes: Any) -> RunSettings:
    """The table's settings of one run."""
    run = {**PRESET["run"], "method": method, "seed": seed, "device": device}
    return resolve({**PRESET, "run": run, "method": {**METHODS[method], **changes}})


def short(settings: RunSettings) -> RunSettings:
    """FedDM's run with one round and few steps, for --quick."""
    method: Any = settings.method
    return replace(settings, rounds=1, method=replace(method, iterations=2, server_epochs=2))
