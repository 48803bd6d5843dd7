"""The least that a method does in a test: a few steps, where its own settings are the paper's."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "feddm": {"iterations": 3, "ipc": 2, "server_epochs": 2},
    "fedaf": {"iterations": 3, "ipc": 2, "server_epochs": 2},
    "fedsum": {"iterations": 3, "ipc": 2, "server_epochs": 2},
    "real": {"ipc": 2, "server_epochs": 2},
    "fedstats": {"features": "pixels"},
    "feddf": {"local_epochs": 1, "server_steps": 3, "proxy": "noise"},
    "dense": {"local_epochs": 1, "server_epochs": 2, "generator_steps": 2},
    "fedhydra": {
        "local_epochs": 1,
        "server_epochs": 2,
        "generator_steps": 2,
        "stratification_steps": 2,
    },
}


def small_settings(method: str) -> dict[str, Any]:
    """Of `METHODS[method]`: a copy, for a test to change."""
    return dict(SMALL.get(method, {"local_epochs": 1}))
