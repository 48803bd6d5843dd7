"""Many clients and many rounds: memory and time of runs with 10 to 1,000 clients, and of 200
rounds.

    python benchmarks/load.py [--quick] [--only soak]

Each case is a process of its own. FedAvg with two local steps on the digits (iid, a ConvNet-64 of
two blocks), three rounds; ten clients a round, a tenth, or all. (The rows of MNIST are those of
`git show 04719c52:benchmarks/load.py`.) Memory is the peak of the run over what is resident before
it, with data and libraries loaded; time is the processor's. The soak is of tiny runs of 300 rounds
with a run folder: the slope of resident memory over the rounds 100 to 300, least squares, and the
open files. Linux only; cases whose rows are there are not measured again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsynth.cli.process import keep_large_allocations
from fedsynth.config.resolve import resolve
from fedsynth.data.load import load_dataset
from fedsynth.federation.observer import Observer
from fedsynth.simulation.simulate import simulate
from library.machine import run_cases, timing_options

Sections = dict[str, dict[str, Any]]
SETTLED = 100  # rounds before which memory may still grow: caches, arenas
MIB = 2**20
SOAKED: Sections = {
    "fedavg": {"local_steps": 1, "batch": 32},
    "feddm": {"ipc": 1, "iterations": 1, "server_epochs": 1},
}


def resident(field: str = "VmRSS") -> int:
    """Returns the bytes that are resident now; "VmHWM": at most since the peak was forgotten."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status does not have {field}")


def loaded(clients: int, active: str) -> Sections:
    """Returns the settings of a run with many clients."""
    share = {"10": 10 / clients, "tenth": 0.1, "all": 1.0}[active]
    run = {"method": "fedavg", "rounds": 3, "evaluate_every": 3, "device": "cpu"}
    return {
        "run": {**run, "participation": share},
        "partition": {"clients": clients, "kind": "iid"},
        "model": {"width": 64, "depth": 2},
        "method": {"local_steps": 2, "batch": 32},
    }


def soaked(method: str, private: bool) -> Sections:
    """Returns the settings of a run with many rounds."""
    return {
        "run": {"method": method, "rounds": 300, "device": "cpu"},
        "partition": {"clients": 4, "kind": "iid"},
        "model": {"width": 8, "depth": 2},
        "method": SOAKED[method],
        **({"privacy": {"noise_multiplier": 20.0}} if private else {}),
    }


CASES = {
    **{
        f"digits, {clients} clients, {active} a round": loaded(clients, active)
        for active in ("10", "tenth", "all")
        for clients in (10, 100, 300, 1000)
    },
    **{
        f"soak {method}{' private' if private else ''}": soaked(method, private)
        for method in SOAKED
        for private in (False, True)
    },
}


class Sampler(Observer):
    """Looks at the process at the end of each round."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.files: list[int] = []

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.bytes.append(resident())
        self.files.append(len(os.listdir("/proc/self/fd")))


def measured(sections: Sections, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one case in this process."""
    keep_large_allocations()
    soak = sections["run"]["rounds"] > 3
    short = {"rounds": 60 if soak else 1} if options.quick else {}
    settings = resolve({**sections, "run": {**sections["run"], **short}})
    data = load_dataset(settings.dataset)
    _warm_up(data)
    sampler = Sampler()
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        simulate(settings, data=data, observer=sampler, output=Path(folder) if soak else None)
    clients = settings.partition.clients
    row: dict[str, Any] = {
        "clients": clients,
        "active": max(1, round(settings.participation * clients)),
        "rounds": settings.rounds,
        "seconds": round(time.process_time() - started, 3),
        "before_mib": round(before / MIB, 1),
        "peak_mib": round((resident("VmHWM") - before) / MIB, 1),
        "files": [sampler.files[0], sampler.files[-1]],
    }
    return {**row, **_growth(sampler.bytes)} if soak else row


def _growth(sizes: list[int]) -> dict[str, Any]:
    """Returns the slope of resident memory over rounds, by least squares."""
    first = min(SETTLED, len(sizes) // 2)
    rounds = np.arange(len(sizes))[first:]
    slope = np.polyfit(rounds, np.array(sizes[first:]) / 1024, 1)[0]
    return {
        "kib_a_round": round(float(slope), 2),
        "mib": [round(size / MIB, 1) for size in sizes[first::25]],
    }


def _warm_up(data: Any) -> None:
    """Runs once, so that first imports and allocations are not measured."""
    run = {"method": "fedavg", "rounds": 1, "device": "cpu"}
    simulate(resolve({**loaded(3, "all"), "run": run}), data=data)


def main() -> None:
    options = timing_options(__doc__).parse_args()
    run_cases("load", options, CASES, measured, once=True, apart=True)


if __name__ == "__main__":
    main()
