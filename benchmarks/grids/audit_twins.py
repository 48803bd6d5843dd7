"""Which faults a canary audit finds: broken twins of mechanisms, each with a claim of ε = 3.

Two rounds on the digits' shape, networks of width 8 (DP-SGD: 48), one client, 1000 canaries. A twin
is the product with one fault planted. Coins, masks and noise differ from call to call.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.simulation.audit.auditing import audit_run
from library.grid import Cell, Grid, Row

CONDENSE = {"iterations": 2, "ipc": 2, "server_epochs": 1}
TRAIN = {"local_steps": 2, "batch": 20}
MECHANISMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "residual": ("feddm", CONDENSE, {"mechanism": "residual"}),
    "gradient": ("feddm", CONDENSE, {"mechanism": "gradient"}),
    "DP-SGD (FedAvg)": ("fedavg", TRAIN, {"sample_rate": 1.0}),
    "DP-SGD (FedAvg), q = 0.1": ("fedavg", TRAIN, {"sample_rate": 0.1}),
    "FedSum": ("fedsum", {"networks": 4, "ipc": 2, "iterations": 2}, {}),
    "FedStats": ("fedstats", {"features": "pixels", "second_moments": "yes"}, {}),
}
normal = SecretGenerator.normal


def less_noise(factor: float) -> dict[str, Any]:
    def scaled(self: SecretGenerator, shape: Any, deviation: float, device: Any = "cpu") -> Any:
        return normal(self, shape, deviation / factor, device)

    return {"fedsynth.privacy.randomness.SecretGenerator.normal": scaled}


def public_mask(self: SecretGenerator, count: int, rate: float) -> torch.Tensor:
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(0)) < rate
    return torch.nonzero(drawn).flatten()


TWINS: dict[str, dict[str, Any]] = {
    "honest": {},
    "no clip": {
        "fedsynth.privacy.mechanisms.clip_rows": lambda rows, clip: rows.double(),
        "fedsynth.privacy.products.Outer._clipped": lambda self: (self.left, self.right),
    },
    "half the noise": less_noise(2.0),
    "a quarter of the noise": less_noise(4.0),
    "public mask": {"fedsynth.privacy.randomness.SecretGenerator.poisson_sample": public_mask},
}


@cache
def settings_of(name: str, quick: bool) -> RunSettings:
    method, options, privacy = MECHANISMS[name]
    sections: dict[str, dict[str, Any]] = {
        "run": {"method": method, "rounds": 1 if quick else 2, "device": "cpu"},
        "partition": {"clients": 1},
        "model": {"width": 48 if method == "fedavg" else 8},
        "method": options,
        "privacy": {"nominal_size": 100, "epsilon": 3.0, **privacy},
    }
    return resolve(sections)


def audit(cell: Cell) -> Row:
    """Returns what one audit finds of a twin."""
    with ExitStack() as planted:
        for target, fault in TWINS[cell.twin].items():
            planted.enter_context(patch(target, fault))
        found = audit_run(
            settings_of(cell.name, cell.quick),
            canaries=100 if cell.quick else 1000,
            canaries_as=cell.kind,
        )
    figures = asdict(found)
    del figures["method"], figures["mechanism"]
    return figures


GRID = Grid(
    axes={"name": tuple(MECHANISMS), "kind": ("vectors", "images"), "twin": tuple(TWINS)},
    key="{name}, {kind}, {twin}",
    work=audit,
    wanted=lambda cell: cell.twin != "public mask" or "q = 0.1" in cell.name,  # else no sampling
)
