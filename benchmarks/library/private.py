"""Settings of the table of private accuracy, whose tuning has a cost of its own."""

from __future__ import annotations

from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings

EPSILONS = (1.0, 3.0, 10.0)
CLIPS = (0.5, 1.0, 2.0)
RATES = (1.0, 3.0)
TUNE_ON = "fashion-mnist"
FEDDM: dict[str, Any] = {"ipc": 5, "server_epochs": 60, "image_lr": 20.0}
METHODS: dict[str, dict[str, Any]] = {
    "features": {**FEDDM, "iterations": 40, "networks": 4},
    "residual": {**FEDDM, "iterations": 40, "batch": 32},
    "gradient": {**FEDDM, "iterations": 15, "batch": 6},
    "dp-sgd": {"local_epochs": 1, "batch": 256, "lr": 0.1},
}
CLIP: dict[str, float] = {"features": 6.0, "residual": 6.0, "gradient": 1.0, "dp-sgd": 1.0}


def settings_for(
    dataset: str,
    mechanism: str,
    seed: int,
    device: str,
    budget: dict[str, float],
    clip: float,
    rate: float,
    quick: bool,
) -> RunSettings:
    """One run; `clip` and `rate` multiply the mechanism's own."""
    method = dict(METHODS[mechanism])
    key = "lr" if mechanism == "dp-sgd" else "image_lr"
    method[key] *= rate
    if quick:
        method |= (
            {"local_epochs": 1} if mechanism == "dp-sgd" else {"iterations": 2, "server_epochs": 1}
        )
    return resolve(
        {
            "run": {
                "method": "fedavg" if mechanism == "dp-sgd" else "feddm",
                "rounds": 1 if quick else 2,
                "seed": seed,
                "device": device,
            },
            "data": {"dataset": dataset},
            "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 10},
            "model": {"width": 16},
            "method": method,
            "privacy": {"mechanism": mechanism, "clip": CLIP[mechanism] * clip, **budget},
        }
    )
