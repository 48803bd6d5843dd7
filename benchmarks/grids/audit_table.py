"""Canary audits of correct mechanisms and of broken twins: the lower bounds, and what is refuted.

Each row is one audit as `fedsynth privacy audit` makes it, with small networks and few steps. The
bounds depend on the networks only in that a release needs unused directions. Coins, sampling and
noise are secret and differ from call to call. A twin is the product with one fault planted. A claim
of ε = 1 is audited with 10,000 canaries (in several runs), a claim of 3 with 1,000.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import cache
from typing import Any
from unittest.mock import patch

from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.privacy import mechanisms
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.simulation.audit import audit_run
from library.grid import Cell, Grid, Row

Sections = dict[str, dict[str, Any]]
CONDENSE = {"iterations": 2, "ipc": 1, "server_epochs": 1}
TRAIN = {"local_steps": 8, "batch": 20}
SAMPLED = "DP-SGD, q = 0.1"
# The canaries of one run, which are at most half the coordinates of a release, so that there are as
# many unused directions, and the settings.
MECHANISMS: dict[str, tuple[int, Sections]] = {
    "statistics": (
        250,
        {
            "run": {"method": "fedstats"},
            "method": {
                "features": "pixels", "second_moments": "yes", "centre_share": 0.01,
                "moment_share": 0.97,
            },
        },
    ),
    "residual": (
        500,
        {"run": {"method": "feddm"}, "method": CONDENSE, "privacy": {"mechanism": "residual"}},
    ),
    "gradient": (
        250,
        {
            "run": {"method": "feddm"},
            "method": {**CONDENSE, "iterations": 1},
            "model": {"width": 8},
            "privacy": {"mechanism": "gradient"},
        },
    ),
    "features": (
        500,
        {
            "run": {"method": "feddm"},
            "method": {**CONDENSE, "count_noise": 10.0},
            "privacy": {"mechanism": "features"},
        },
    ),
    "DP-SGD": (
        1000,
        {
            "run": {"method": "fedavg"},
            "method": TRAIN,
            "model": {"width": 16},
            "privacy": {"sample_rate": 1.0},
        },
    ),
    SAMPLED: (
        1000,
        {
            "run": {"method": "fedavg"},
            "method": TRAIN,
            "model": {"width": 16},
            "privacy": {"sample_rate": 0.1},
        },
    ),
}  # fmt: skip
normal: Any = SecretGenerator.normal
clip_factors = mechanisms.clip_factors
SHARED = "shared mask"


class OneMask:
    """A sampler that draws one Poisson sample, and returns it at every step."""

    def __init__(self) -> None:
        self._drawn: Tensor | None = None
        self._draw = SecretGenerator.poisson_sample

    def __get__(self, secret: SecretGenerator, owner: type) -> Any:
        def sample(records: int, rate: float) -> Tensor:
            if self._drawn is None:
                self._drawn = self._draw(secret, records, rate)
            return self._drawn

        return sample


def faults(twin: str) -> dict[str, Any]:
    """Returns the fault of a twin, as a mapping from what is replaced to its replacement."""
    clip, secret = "fedsynth.privacy.mechanisms.clip_factors", "fedsynth.privacy.randomness"
    planted: dict[str, dict[str, Any]] = {
        "honest": {},
        "half the noise": {
            f"{secret}.SecretGenerator.normal": lambda *a: normal(*a[:2], a[2] / 2, *a[3:])
        },
        "√2 sensitivity": {clip: lambda squares, norm: clip_factors(squares, 2**0.5 * norm)},
        "no clip": {clip: lambda squares, norm: squares**0},
        SHARED: {f"{secret}.SecretGenerator.poisson_sample": OneMask()},
    }
    return planted[twin]


@cache
def settings_of(name: str, epsilon: float) -> RunSettings:
    _, sections = MECHANISMS[name]
    rounds = 1 if epsilon == 1 else 2  # with ten or more runs, which are audited together
    return resolve(
        {
            **sections,
            "run": {**sections["run"], "rounds": rounds, "device": "cpu"},
            "partition": {"clients": 1},
            "model": {"width": 32, **sections.get("model", {})},
            "privacy": {"epsilon": epsilon, "nominal_size": 20, **sections.get("privacy", {})},
        }
    )


def audit(cell: Cell) -> Row:
    """Returns what one audit finds."""
    each, _ = MECHANISMS[cell.name]
    canaries = 10_000 if cell.epsilon == 1 else 1000
    started = time.perf_counter()
    with ExitStack() as planted:
        for target, fault in faults(cell.twin).items():
            planted.enter_context(patch(target, fault))
        result = audit_run(
            settings_of(cell.name, cell.epsilon),
            canaries=100 if cell.quick else each,
            repeats=1 if cell.quick else canaries // each,
        )
    return {
        "epsilon": result.epsilon,
        "canaries": result.canaries,
        "confidence": result.confidence,
        "delta": result.delta,
        "bounds": {
            "Steinke et al.": round(result.epsilon_lower_bound, 4),
            **{bound.name: round(bound.epsilon, 4) for bound in result.bounds},
        },
        "refuted": result.fault,
        "seconds": round(time.perf_counter() - started, 1),
    }


def include(cell: Cell) -> bool:
    """Returns False for twins without a fault: one mask is no fault if all data are used."""
    if cell.twin == SHARED and cell.name != SAMPLED:
        return False
    honest = cell.twin == "honest"
    return (cell.batch == 0 or honest) and (cell.epsilon == 3 or (honest and cell.batch == 0))


GRID = Grid(
    axes={
        "name": tuple(MECHANISMS),
        "twin": ("honest", "half the noise", "√2 sensitivity", "no clip", SHARED),
        "epsilon": (1.0, 3.0),
        "batch": (0, 1, 2, 3),
    },
    key="{name}, {twin}, ε = {epsilon:g}, batch {batch}",
    work=audit,
    include=include,
    repeats=10,
)
