"""Settings of the servers that distil in one shot, without data."""

from __future__ import annotations

from typing import Any

SERVER: dict[str, Any] = {
    "server_epochs": 15,
    "generator_steps": 30,
    "generator_batch": 32,
    "generator_width": 8,
    "generator_lr": 0.01,
    "start": "average",
}
