"""Settings of FedAF's table."""

from __future__ import annotations

from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings

SIZE: dict[str, Any] = {
    "ipc": 10,
    "iterations": 50,
    "batch": 64,
    "server_epochs": 60,
    "server_lr": 0.01,
    "server_weight_decay": 0.0,
    "start_average": 1,
    "min_examples": 1,
    "image_momentum": 0.9,
    "restart": True,
}
# Of images, by data and method: on Fashion-MNIST the paper's.
RATES = {
    "fashion": {"feddm": 0.2, "fedaf": 0.2},
    "office": {"feddm": 1.0, "fedaf": 1.0},
}
FEDDM: dict[str, Any] = {**SIZE, "image_clip": 2.0, "radius": 5.0}
FEDAF: dict[str, dict[str, Any]] = {
    "fashion": {**SIZE, "local_weight": 1e-3, "global_weight": 2.0},
    "office": {**SIZE, "local_weight": 1e-2, "global_weight": 0.1},
}
ROUNDS = {"fashion": 10, "office": 5}
ROWS: dict[str, dict[str, Any] | None] = {  # what differs from FedAF's settings; None: FedDM
    "FedDM": None,
    "FedAF": {},
    "FedAF, τ = 4": {"temperature": 4.0},
    "without CDC": {"local_weight": 0.0},
    "without LGKM": {"global_weight": 0.0},
    "γ = 0.5": {"gamma": 0.5},
    "γ = 1": {"gamma": 1.0},
}
# Four times as many pixels: a narrower network, fewer steps.
SMALLER: dict[str, dict[str, int]] = {
    "fashion": {},
    "office": {"iterations": 20, "batch": 24, "server_epochs": 40},
}
DATASETS = {"fashion": "fashion-mnist", "office": "office-caltech-10"}


def settings_for(
    data: str, name: str, alpha: float, seed: int, device: str, quick: bool
) -> RunSettings:
    changes = ROWS[name]
    method, values = ("feddm", FEDDM) if changes is None else ("fedaf", {**FEDAF[data], **changes})
    dirichlet = {"kind": "dirichlet", "alpha": alpha, "clients": 10}
    small = {"iterations": 2, "server_epochs": 1} if quick else SMALLER[data]
    return resolve(
        {
            "run": {
                "method": method,
                "rounds": 1 if quick else ROUNDS[data],
                "seed": seed,
                "device": device,
            },
            "data": {"dataset": DATASETS[data]},
            "partition": dirichlet if data == "fashion" else {"kind": "domain", "clients": 4},
            "model": {"width": 16 if data == "fashion" else 8, "norm": "batch"},
            "method": {"image_lr": RATES[data][method], **values, **small},
        }
    )
