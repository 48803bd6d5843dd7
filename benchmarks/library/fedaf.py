"""Settings of FedAF's table, and of its readings, which have the table's size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings

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


Changes = dict[str, Any]
AVERAGED: Changes = {"image_lr": 1.0, "start_average": 10}
OFF: Changes = {"global_weight": 0.0}
SERVER: Changes = {"server_epochs": 500, "server_lr": 1e-3}
LONG: Changes = {**SERVER, "iterations": 200}
REAL: Changes = {
    "iterations": 1,
    "image_lr": 0.0,
    "start_average": 1,
    "restart": False,
    "local_weight": 0.0,
    "batch": 8,
}
MATCHING: dict[str, Changes] = {
    "without LGKM": OFF,
    "mean": {},
    "sum": {"matching_reduction": "sum"},
    **{f"mean, τ = {t}": {"temperature": float(t)} for t in (4, 8, 16)},
    "mean, once an epoch": {"server_matching": "epoch"},
    "mean, T by running statistics": {"matching_norm": "running"},
    "mean, λ = 0.2": {"global_weight": 0.2},
}
LATE: dict[str, Changes] = {
    "image rate = 0.2": {"image_lr": 0.2, "start_average": 10},
    "image rate = 0.2, from real images": {"image_lr": 0.2, "start_average": 1},
}
FEW = ("without LGKM", "mean", "mean, τ = 4")
# row of the table, rounds, what differs
READINGS: dict[str, dict[str, tuple[str, int, Changes]]] = {
    "rates": {
        **{
            f"image rate = {r:g}": ("without LGKM", 5, {**AVERAGED, "image_lr": r})
            for r in (0.2, 1.0, 2.0, 5.0)
        },
        **{
            f"FedDM, image rate = {r:g}": ("FedDM", 5, {**AVERAGED, "image_lr": r})
            for r in (0.2, 1.0, 5.0)
        },
    },
    "real": {
        **{f"real: {name}": ("FedAF", 10, {**REAL, **c}) for name, c in MATCHING.items()},
        **{
            f"real, long: {name}": ("FedAF", 10, {**REAL, **SERVER, **MATCHING[name]})
            for name in FEW
        },
    },
    "matching": {
        **{
            f"condensed: {name}": ("FedAF", 10, {**AVERAGED, **MATCHING[name]})
            for name in (*FEW, "mean, once an epoch", "sum", "mean, τ = 16")
        },
        "condensed: mean, V from a first phase": (
            "FedAF",
            10,
            {**AVERAGED, "knowledge_from": "first-phase"},
        ),
    },
    "late": {
        f"late: {name}, {title}": ("FedAF", 10, {**MATCHING[name], **changes})
        for title, changes in LATE.items()
        for name in ("without LGKM", "mean")
    }
    | {
        f"late: mean, τ = 4, {title}": ("FedAF", 10, {**MATCHING["mean, τ = 4"], **LATE[title]})
        for title in ("image rate = 0.2, from real images",)
    }
    | {
        f"late: FedDM, image rate = {r:g}, from real images": (
            "FedDM",
            10,
            {"image_lr": r, "start_average": 1},
        )
        for r in (0.2, 1.0)
    },
    "skew": {
        "skew: FedDM": ("FedDM", 10, {}),
        **{
            f"skew: {name}": ("FedAF", 10, MATCHING[name])
            for name in ("without LGKM", "mean", "mean, τ = 4", "mean, once an epoch")
        },
    },
    "steps": {
        f"condensed, long: {name}": ("FedAF", 10, {**LONG, **MATCHING[name]}) for name in FEW
    },
}
WIDTH = {"real": 8, "steps": 8}
ALPHA = {"skew": 0.02}
"""Of groups that are not of Dir(0.1)."""
READING_SEEDS = {"skew": (0, 1, 2)}
"""Of groups that have others than seeds 0 and 1."""


def reading(
    group: str, name: str, alpha: float, seed: int, device: str, quick: bool
) -> RunSettings:
    row, rounds, changes = READINGS[group][name]
    settings = settings_for("fashion", row, alpha, seed, device, quick)
    model = replace(settings.model, width=WIDTH.get(group, settings.model.width))
    small: Changes = {"iterations": 2, "server_epochs": 1} if quick else {}
    method = replace(settings.method, **{**changes, **small})
    return replace(settings, method=method, model=model, rounds=1 if quick else rounds)
