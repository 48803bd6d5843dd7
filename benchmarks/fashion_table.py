"""FedDM, REAL and FedAvg on Fashion-MNIST, 10 clients, Dir(0.1): the README's table, at a size that two CPU cores can do.

    FEDSYNTH_DATA=... python benchmarks/fashion_table.py [--quick] [--json] [--device cuda]

FedAvg's learning rate is chosen from the comparison papers' grid by 5,000 training images held out of everything else, with a seed that
the table does not use and the table's number of rounds. The test set is read after each round, for the curves; nothing is chosen by it.
FedDM and REAL keep the papers' settings where two cores allow, and start from the same real images. Each finished run is a line in the
results file, under its name and a hash of its settings; a second call goes on from there, and `--only` shares the work among processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.errors import DivergedError
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.federation.settings import RunSettings, resolve
from fedsynth.federation.simulation import simulate
from fedsynth.privacy.settings import PrivacySettings

RESULTS = Path(__file__).parent / "results"
PRESET: dict[str, dict[str, Any]] = {
    "run": {"rounds": 5, "evaluate_every": 1},
    "data": {"dataset": "fashion-mnist"},
    "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 10},
    "model": {"width": 16},
}
METHODS: dict[str, dict[str, Any]] = {
    "feddm": {"ipc": 10, "iterations": 100, "batch": 64, "server_epochs": 100},
    "real": {"ipc": 10, "server_epochs": 100},
    "fedavg": {"local_epochs": 10, "batch": 256},
}
FEDAVG_GRID = (0.001, 0.01, 0.1)
TUNING_SEED = 1000


def settings_for(method: str, seed: int, device: str, **changes: Any) -> RunSettings:
    """The table's settings of one run."""
    run = {**PRESET["run"], "method": method, "seed": seed, "device": device}
    return resolve({**PRESET, "run": run, "method": {**METHODS[method], **changes}})


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
        self.path, self._only, self._machine = path, only, machine()
        self._end = time.monotonic() + budget

    def get(
        self, name: str, settings: RunSettings, data: tuple[ImageData, ImageData]
    ) -> dict[str, Any] | None:
        """The run's row, made if need be; None if `only` or the time leaves it to another call."""
        key = f"{name} {fingerprint(settings)}"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}
        if key in rows or self._only not in name or time.monotonic() > self._end:
            return rows.get(key)
        row = {"key": key, **one_run(settings, data), **self._machine}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row


def fingerprint(settings: RunSettings) -> str:
    """Eight hexadecimal digits of the settings that decide a result."""
    config = json.dumps(_distinctive(settings), sort_keys=True)
    return hashlib.blake2b(config.encode(), digest_size=4).hexdigest()


def _distinctive(settings: RunSettings) -> dict[str, dict[str, Any]]:
    """What differs from defaults and decides the result: a setting that a later version adds does not make old rows strangers.

    So who changes a default deletes the rows that were made with the old one.
    """
    method = type(settings.method)()
    defaults = RunSettings(
        method, privacy=None if settings.privacy is None else PrivacySettings(epsilon=1.0)
    ).to_mapping()
    speed = ("compile", "memory_gb", "device")
    return {
        section: {
            k: v
            for k, v in values.items()
            if k not in speed and (k == "method" or v != defaults.get(section, {}).get(k))
        }
        for section, values in settings.to_mapping().items()
    }


def one_run(settings: RunSettings, data: tuple[ImageData, ImageData]) -> dict[str, Any]:
    try:
        result = simulate(settings, data=data)
    except DivergedError as error:  # a rate that is too high is an answer, too
        return {"accuracy": 0.0, "diverged": str(error)}
    curve = [row["test_accuracy"] for row in result.metrics if "test_accuracy" in row]
    domains = {
        key: result.metrics[-1][key]
        for key in ("domain_average", "domain_accuracy")
        if key in result.metrics[-1]
    }
    rows = (
        {"rows": [_kept(row) for row in result.metrics]} if "models" in result.metrics[-1] else {}
    )
    generator = {key: result.summary[key] for key in (GENERATOR,) if key in result.summary}
    return {
        "accuracy": result.accuracy,
        **domains,
        **generator,
        **rows,
        **(
            {"local": _without_clients(result.metrics[-1]["local"])}
            if "local" in result.metrics[-1]
            else {}
        ),
        "bytes": result.summary["upload_bytes"],
        "curve": curve,
        "floats": result.summary["upload_floats_per_round"],
        "seconds": round(sum(row["seconds"] for row in result.metrics), 3),
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round and few steps, to see that it runs"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only",
        default="",
        help="make only the runs whose name contains this, such as 'seed=1' or 'tune'",
    )
    options = parser.parse_args()
    keep_large_allocations()
    train, test = load_dataset("fashion-mnist")
    results = Results(
        RESULTS / f"fashion_table{'_quick' if options.quick else ''}.jsonl", options.only
    )
    quick = {
        "feddm": {"iterations": 2, "server_epochs": 2},
        "real": {"server_epochs": 2},
        "fedavg": {"local_epochs": 1},
    }

    def run(
        name: str, method: str, seed: int, data: tuple[ImageData, ImageData], **changes: Any
    ) -> dict[str, Any] | None:
        settings = settings_for(
            method, seed, options.device, **changes, **(quick[method] if options.quick else {})
        )
        return results.get(name, replace(settings, rounds=1) if options.quick else settings, data)

    rows: dict[str, list[dict[str, Any] | None]] = {}
    for method in ("feddm", "real"):
        rows[method] = [run(f"{method} seed={s}", method, s, (train, test)) for s in options.seeds]
    tuning = held_out(train, 5000)
    tried = {
        lr: run(f"tune fedavg lr={lr}", "fedavg", TUNING_SEED, tuning, lr=lr) for lr in FEDAVG_GRID
    }
    held = {lr: row["accuracy"] for lr, row in tried.items() if row is not None}
    if len(held) < len(FEDAVG_GRID):
        return
    best = max(held, key=lambda rate: held[rate])
    rows["fedavg"] = [
        run(f"fedavg seed={s}", "fedavg", s, (train, test), lr=best) for s in options.seeds
    ]
    finished = {
        name: [100 * row["accuracy"] for row in made if row is not None]
        for name, made in rows.items()
    }
    if any(len(values) < len(options.seeds) for values in finished.values()):
        return
    finished["feddm - real, same start images"] = [
        a - b for a, b in zip(finished["feddm"], finished["real"], strict=True)
    ]
    finished["feddm - fedavg"] = [
        a - b for a, b in zip(finished["feddm"], finished["fedavg"], strict=True)
    ]
    table = {name: summarise(values) for name, values in finished.items()}
    if options.json:
        print(json.dumps({"held-out accuracy by FedAvg learning rate": held, **table}, indent=2))
        return
    print(f"FedAvg's accuracy on 5,000 held-out training images, by learning rate: {held}")
    for name, row in table.items():
        print(f"{name:35} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['values']}")


def summarise(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "sd": sd, "values": [round(v, 2) for v in values]}


if __name__ == "__main__":
    main()
