"""Settings of methods for quick tests: a few steps instead of the papers' values."""

from __future__ import annotations

from typing import Any

QUICK_SETTINGS: dict[str, dict[str, Any]] = {
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


def quick_settings(method: str) -> dict[str, Any]:
    """Returns a copy of a method's settings for quick tests."""
    return dict(QUICK_SETTINGS.get(method, {"local_epochs": 1}))
