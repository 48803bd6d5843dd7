"""Settings of one-shot runs: clients that fit their data, servers that distil without any."""

from __future__ import annotations

from typing import Any

LOCAL: dict[str, Any] = {"local_epochs": 60, "batch": 32, "lr": 0.01, "momentum": 0.9}
SERVER: dict[str, Any] = {
    "server_epochs": 15,
    "generator_steps": 30,
    "generator_batch": 32,
    "generator_width": 8,
    "generator_lr": 0.01,
    "start": "average",
}
