"""Canary audits of correct runs: the lower bound and ε for each mechanism, on the digits.

Each audit is what `fedsynth privacy audit --method METHOD --dp-epsilon ε` makes (for FedFM with
`--set weight=0.5`), with its own coins, masks and noise, which are secret: the bounds differ from
call to call.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.simulation.audit import audit_run
from library.grid import Cell, Grid, Row

MECHANISMS: dict[str, dict[str, dict[str, Any]]] = {
    "residual": {"run": {"method": "feddm"}, "privacy": {"mechanism": "residual"}},
    "gradient": {"run": {"method": "feddm"}, "privacy": {"mechanism": "gradient"}},
    "features": {"run": {"method": "feddm"}, "privacy": {"mechanism": "features"}},
    "FedAF": {"run": {"method": "fedaf"}},
    "DP-SGD (FedAvg)": {"run": {"method": "fedavg"}},
    "FedFM": {"run": {"method": "fedfm"}, "method": {"weight": 0.5}},
}


def audit(cell: Cell) -> Row:
    """Returns what one audit finds."""
    sections = MECHANISMS[cell.name]
    rounds = {"rounds": 1} if cell.quick else {}
    run = {**sections["run"], "device": cell.device, **rounds}
    privacy = {**sections.get("privacy", {}), "epsilon": cell.epsilon}
    started = time.perf_counter()
    result = audit_run(
        resolve({**sections, "run": run, "privacy": privacy}),
        canaries=100 if cell.quick else 1000,
    )
    figures = asdict(result)
    del figures["method"], figures["mechanism"]
    return {**figures, "seconds": round(time.perf_counter() - started, 1)}


GRID = Grid(
    axes={
        "name": tuple(MECHANISMS),
        "epsilon": (1.0, 3.0, 10.0),
    },
    key="{name}, vectors, ε = {epsilon:g}",
    work=audit,
    repeats=3,
)
