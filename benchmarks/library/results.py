"""Finished runs as JSON lines, by name and a hash of the settings; a further call resumes there."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedsynth.cli.process import keep_large_allocations
from fedsynth.config.resolve import fingerprint as fingerprint
from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.errors import DivergedError
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.simulation.simulate import simulate
from library.machine import machine, plain_options, rows_file

Data = tuple[ImageData, ImageData]
Run = Callable[[RunSettings, Data], dict[str, Any]]
"""Settings and data -> the measurements of the run."""
HELD_OUT = 5000
"""Training images on which settings are chosen."""


def held_out(train: ImageData, size: int = HELD_OUT) -> Data:
    """Returns (the other training images, `size` random ones)."""
    order = np.random.default_rng(0).permutation(len(train))
    return train.subset(np.sort(order[size:])), train.subset(np.sort(order[:size]))


@cache
def dataset(name: str) -> Data:
    """Returns a data set; the last ones stay in memory."""
    return load_dataset(name)


@cache
def tuning_data(name: str) -> Data:
    """Returns a data set's training images, split by `held_out`."""
    return held_out(dataset(name)[0])


class Results:
    """A JSON-lines file of finished work, by key.

    Args:
        path: the file.
        only: do only work whose key contains this.
        budget: seconds after which no further work begins.
    """

    def __init__(self, path: Path, only: str = "", budget: float = math.inf) -> None:
        self.path = path
        self._only = only
        self._end = time.monotonic() + budget
        self._machine = machine()
        self.shown: dict[str, dict[str, Any]] = {}

    def lines(self) -> list[dict[str, Any]]:
        """Returns all rows, in order."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def append(self, row: dict[str, Any]) -> dict[str, Any]:
        """Appends a row, with the machine and the command, and prints it on stderr."""
        row = {**row, **self._machine}
        line = json.dumps(row, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, file=sys.stderr, flush=True)
        return row

    def measure(self, key: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Returns the row of a key, and measures it if it is missing.

        Args:
            key: identifies the work.
            work: returns its measurements.

        Returns:
            The row; None if `only` or the budget leaves it to another call.
        """
        row = {row["key"]: row for row in self.lines()}.get(key)
        if row is None:
            if self._only not in key or time.monotonic() > self._end:
                return None
            row = self.append({"key": key, **work()})
        self.shown[key] = row
        return row

    def find(self, name: str, settings: RunSettings) -> dict[str, Any] | None:
        """Returns the row of a run; None: it has not been made."""
        return {row["key"]: row for row in self.lines()}.get(f"{name} {fingerprint(settings)}")

    def get(
        self,
        name: str,
        settings: RunSettings,
        data: Data | Callable[[], Data] | None = None,
        run: Run | None = None,
    ) -> dict[str, Any] | None:
        """Returns the row of a run, and makes it if it is missing.

        Args:
            name: of the row, with the seed ("feddm seed=0").
            settings: of the run.
            data: training and test images, or a function that returns them; None: the data set of
                the settings.
            run: makes the run and returns its measurements; None: `one_run`.

        Returns:
            The row; None if `only` or the budget leaves it to another call.
        """

        def work() -> dict[str, Any]:
            images = data() if callable(data) else data
            return (run or one_run)(settings, images or dataset(settings.dataset))

        return self.measure(f"{name} {fingerprint(settings)}", work)

    def show(self, value: str = "accuracy") -> None:
        """Prints the mean and the standard deviation over seeds of each name, in percent."""
        values: dict[str, list[float]] = {}
        for key, row in self.shown.items():
            name = re.sub(r",? seed=\d+.*", "", key)
            if row.get(value) is not None:
                values.setdefault(name, []).append(100 * row[value])
        for name, numbers in values.items():
            deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
            each = ", ".join(f"{number:.2f}" for number in numbers)
            print(f"{name:40} {statistics.mean(numbers):6.2f} ± {deviation:.2f}   {each}")


def start(name: str, parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Results]:
    """Parses the command line of a script and opens its results file."""
    options = parser.parse_args()
    keep_large_allocations()
    only = getattr(options, "only", "")
    budget = getattr(options, "time_budget", math.inf)
    return options, Results(rows_file(name, options), only, budget)


def one_run(settings: RunSettings, data: Data) -> dict[str, Any]:
    """Simulates a run and returns its measurements."""
    try:
        result = simulate(settings, data=data)
    except DivergedError as error:  # a learning rate that is too high is a result, too
        return {"accuracy": 0.0, "diverged": str(error)}
    last = result.metrics[-1]
    row: dict[str, Any] = {"accuracy": result.accuracy}
    for key in ("domain_average", "domain_accuracy"):
        if key in last:
            row[key] = last[key]
    if GENERATOR in result.summary:
        row[GENERATOR] = result.summary[GENERATOR]
    if "models" in last:
        row["rows"] = [_variants(metrics) for metrics in result.metrics]
    if "local" in last:
        row["local"] = _without_clients(last["local"])
    row["bytes"] = result.summary["upload_bytes"]
    row["curve"] = [row["test_accuracy"] for row in result.metrics if "test_accuracy" in row]
    row["floats"] = result.summary["upload_floats_per_round"]
    row["round_seconds"] = [metrics["seconds"] for metrics in result.metrics]
    row["seconds"] = round(sum(row["round_seconds"]), 3)
    return row


def _variants(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns a round's figures of each final model, without the clients' own."""
    row: dict[str, Any] = {"round": metrics["round"], "seconds": metrics["seconds"]}
    if metrics.get("models"):
        row["models"] = {}
        for name, model in metrics["models"].items():
            row["models"][name] = {**model, "local": _without_clients(model.get("local", {}))}
    if GENERATOR in metrics:
        row[GENERATOR] = metrics[GENERATOR]
    return row


def _without_clients(local: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in local.items() if key != "client_accuracy"}


def best_key(rows: dict[Any, dict[str, Any] | None]) -> Any:
    """Returns the key of the most accurate row; None if a row is missing."""
    if any(row is None for row in rows.values()):
        return None
    return max(rows, key=lambda key: (rows[key] or {})["accuracy"])


def table_parser(
    description: str | None, quick: str | None = None, seeds: Sequence[int] = (0, 1, 2)
) -> argparse.ArgumentParser:
    """Returns the parser of a script that makes runs: --quick, --device, --seeds, --only and
    --time-budget.

    Args:
        description: the script's docstring.
        quick: what --quick does; None: one round and few steps.
        seeds: of the runs.
    """
    parser = plain_options(description)
    parser.add_argument(
        "--quick", action="store_true", help=quick or "one round, few steps: a test"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--only", default="", help="make only rows whose name contains this")
    parser.add_argument("--time-budget", type=float, default=math.inf, help="seconds")
    return parser
