"""The methods that are compared at one budget: every registered one, with its family's settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fedsynth.core.method import Method
from fedsynth.methods import METHODS as REGISTERED
from fedsynth.methods import method_class
from fedsynth.methods.shared.ensemble import DataFreeEnsembleDistillation, EnsembleDistillation
from fedsynth.methods.shared.local import TrainsLocally

Values = dict[str, Any]
LOCAL: Values = {"local_epochs": 5, "batch": 32, "momentum": 0.0}
IMAGES: Values = {"ipc": 10, "server_epochs": 100}
CONDENSE: Values = {"ipc": 10, "iterations": 50, "batch": 64, "server_epochs": 100}
ONCE: Values = {**LOCAL, "local_epochs": 100}
SERVER: Values = {
    "server_epochs": 15,
    "generator_steps": 30,
    "generator_batch": 32,
    "generator_width": 8,
    "generator_lr": 0.01,
    "start": "average",
}
METHOD_SETTINGS: dict[str, Values] = {  # in addition to the family's
    "fedkf": {"generator_width": 8, "generator_batch": 32},
    "fedaf": {  # from single images, as few steps need, and as FedDM starts
        "server_lr": 0.01,
        "start_average": 1,
        "local_weight": 1e-3,
        "global_weight": 2.0,
    },
    "feddf": {"server_steps": 200, "server_batch": 64, "proxy": "mnist"},
}
ROWS = {"fedfa-plus": "fedfa+"}
"""A method: its name in the table, where that is another."""
VARIANTS: dict[str, tuple[str, Values]] = {  # name in the table: method, what differs
    "fedfm, l2": ("fedfm", {"matching": "l2"}),
    "fedfm, from round 3": ("fedfm", {"start_round": 3}),
    "fedgen, α = β = 1": ("fedgen", {"alpha": 1.0, "beta": 1.0}),
    "fedfa-l": ("fedfa-plus", {"parts": "augmentation"}),
    "fedfa-h": ("fedfa-plus", {"parts": "alignment"}),
    "fedavg, one shot": ("fedavg", ONCE),
}


def family(method: type[Method]) -> Values:
    """Returns the settings of methods of this kind."""
    if issubclass(method, DataFreeEnsembleDistillation):
        return {**ONCE, **SERVER}
    if issubclass(method, EnsembleDistillation):
        return ONCE
    if issubclass(method, TrainsLocally):
        return LOCAL
    if not method.learns_from_images:
        return {}
    names = {f.name for f in fields(method)}
    settings = CONDENSE if "iterations" in names else IMAGES
    return {key: value for key, value in settings.items() if key in names}


def _settings(method: str, changes: Values) -> tuple[str, Values]:
    return method, {**family(method_class(method)), **METHOD_SETTINGS.get(method, {}), **changes}


METHODS: dict[str, tuple[str, Values]] = {
    **{ROWS.get(name, name): _settings(name, {}) for name in REGISTERED},
    **{name: _settings(method, changes) for name, (method, changes) in VARIANTS.items()},
}
"""Name in the table: method, settings."""
PERSONAL = tuple(name for name, (method, _) in METHODS.items() if method_class(method).personal)
"""Whose clients end with models of their own."""
SINGLE_ROUND = tuple(
    name
    for name, (method, values) in METHODS.items()
    if issubclass(method_class(method), EnsembleDistillation) or values == ONCE
)
TAKE_FEDAVGS_RATE = (*PERSONAL, *SINGLE_ROUND)
