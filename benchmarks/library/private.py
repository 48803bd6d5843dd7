"""Settings of the table of private accuracy, whose tuning has a cost of its own."""

from __future__ import annotations

from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings

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
    budget: dict[str, float],
    clip: float,
    rate: float,
    *,
    seed: int,
    device: str = "cpu",
    quick: bool = False,
) -> RunSettings:
    """Returns the settings of one run; `clip` and `rate` multiply the mechanism's own."""
    local = mechanism == "dp-sgd"
    method = dict(METHODS[mechanism])
    method["lr" if local else "image_lr"] *= rate
    if quick:
        method |= {"local_epochs": 1} if local else {"iterations": 2, "server_epochs": 1}
    run = {"method": "fedavg" if local else "feddm", "rounds": 1 if quick else 2}
    return resolve(
        {
            "run": {**run, "seed": seed, "device": device},
            "data": {"dataset": dataset},
            "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 10},
            "model": {"width": 16},
            "method": method,
            "privacy": {"mechanism": mechanism, "clip": CLIP[mechanism] * clip, **budget},
        }
    )
