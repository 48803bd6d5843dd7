"""Finished runs as JSON lines, by name and a hash of the settings: a further call goes on from
there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedsynth.data.images import ImageData
from fedsynth.errors import DivergedError
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.fingerprint import fingerprint as fingerprint
from fedsynth.federation.terms.settings import RunSettings
from library.machine import machine
from library.options import rows_file

Run = Callable[[RunSettings, tuple[ImageData, ImageData]], dict[str, Any]]
"""Settings and data -> what a row says of the run."""


def held_out(train: ImageData, size: int) -> tuple[ImageData, ImageData]:
    """(the rest, `size` random training images) for choosing learning rates."""
    order = np.random.default_rng(0).permutation(len(train))
    return train.subset(np.sort(order[size:])), train.subset(np.sort(order[:size]))


class Results:
    """A JSON-lines file of finished runs, by name and settings.

    Args:
        only: make only the runs whose name contains this.
        budget: seconds after which no further run is begun; the table then shows what is finished.
    """

    def __init__(self, path: Path, only: str, budget: float = math.inf) -> None:
        self.path = path
        self._only = only
        self._machine = machine()
        self._end = time.monotonic() + budget

    @classmethod
    def of(cls, name: str, options: argparse.Namespace) -> Self:
        """A script's, with its options."""
        only = getattr(options, "only", "")
        return cls(rows_file(name, options), only, getattr(options, "time_budget", math.inf))

    def found(self, name: str, settings: RunSettings) -> dict[str, Any] | None:
        """The row of a finished run; None: it has not been made."""
        return self._rows().get(f"{name} {fingerprint(settings)}")

    def _rows(self) -> dict[str, dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {row["key"]: row for row in map(json.loads, lines)}

    def get(
        self,
        name: str,
        settings: RunSettings,
        data: tuple[ImageData, ImageData],
        run: Run | None = None,
    ) -> dict[str, Any] | None:
        """The run's row, made if need be (by `one_run`, if nothing else is given); None if `only`
        or the time leaves it to another call."""
        key = f"{name} {fingerprint(settings)}"
        rows = self._rows()
        if key in rows or self._only not in name or time.monotonic() > self._end:
            return rows.get(key)
        row = {"key": key, **(run or one_run)(settings, data), **self._machine}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row


def one_run(settings: RunSettings, data: tuple[ImageData, ImageData]) -> dict[str, Any]:
    try:
        result = simulate(settings, data=data)
    except DivergedError as error:  # a rate that is too high is an answer, too
        return {"accuracy": 0.0, "diverged": str(error)}
    curve = [row["test_accuracy"] for row in result.metrics if "test_accuracy" in row]
    last = result.metrics[-1]
    found: dict[str, Any] = {}
    for key in ("domain_average", "domain_accuracy"):
        if key in last:
            found[key] = last[key]
    if GENERATOR in result.summary:
        found[GENERATOR] = result.summary[GENERATOR]
    if "models" in last:
        found["rows"] = [_kept(row) for row in result.metrics]
    if "local" in last:
        found["local"] = _without_clients(last["local"])
    return {
        "accuracy": result.accuracy,
        **found,
        "bytes": result.summary["upload_bytes"],
        "curve": curve,
        "floats": result.summary["upload_floats_per_round"],
        "seconds": round(sum(row["seconds"] for row in result.metrics), 3),
        "round_seconds": [row["seconds"] for row in result.metrics],
    }


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    """A round's figures of each variant, without the clients' own."""
    models = {
        name: {**one, "local": _without_clients(one.get("local", {}))}
        for name, one in row.get("models", {}).items()
    }
    shown = {"models": models} if models else {}
    facts = {GENERATOR: row[GENERATOR]} if GENERATOR in row else {}
    return {"round": row["round"], "seconds": row["seconds"], **shown, **facts}


def _without_clients(local: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in local.items() if k != "client_accuracy"}


def summarise(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "sd": sd, "values": [round(v, 2) for v in values]}
