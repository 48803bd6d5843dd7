"""Many clients and many rounds: memory and time of runs with 10 to 1,000 clients, and of 200
rounds.

    FEDSYNTH_DATA=... python benchmarks/load.py [--quick] [--json] [--only soak]

Each case is a process of its own. FedAvg with two local steps on the digits (iid, a ConvNet-64 of
two blocks) and on MNIST (Dirichlet, α = 1, LeNet-5), three rounds; ten clients a round, a tenth, or
all. Memory is the peak of the run over what is resident before it, with data and libraries loaded;
time is the processor's. The soak is of tiny runs of 300 rounds with a run folder: the slope of
resident memory over the rounds 100 to 300, least squares, and the open files. Linux only; cases
that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsynth.cli.process import keep_large_allocations
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.data.load import load_dataset
from fedsynth.federation.observer import Observer
from fedsynth.simulation.simulate import simulate
from library import RESULTS
from library.machine import ONE_ROUND, machine, plain_options
from library.rows import lines

NAME = "load"
CLIENTS = (10, 100, 300, 1000)
ACTIVE = ("10", "tenth", "all")
SOAK_ROUNDS = 300
SETTLED = 100  # rounds before which memory may still grow: caches, arenas
MIB = 2**20
DATA: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "digits": ({"kind": "iid"}, {"width": 64, "depth": 2}),
    "mnist": ({"kind": "dirichlet", "alpha": 1.0}, {"name": "lenet5"}),
}
"""Of each data set the partition and the network."""
Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A process of its own.

    Args:
        name: "digits iid, 100 clients, 10 a round", or "soak feddm private".
        sections: the run's settings.
    """

    name: str
    sections: Sections


def resident() -> int:
    """Bytes that are resident now."""
    return _status("VmRSS")


def peak() -> int:
    """The most bytes that were resident since `forget_peak`, or since the start."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Begins to look for a new peak."""
    Path("/proc/self/clear_refs").write_text("5")


def open_files() -> int:
    """Open file descriptors."""
    return len(os.listdir("/proc/self/fd"))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status does not have {field}")


def load_cases() -> list[Case]:
    found = []
    for dataset, (split, model) in DATA.items():
        for active in ACTIVE:
            for clients in CLIENTS:
                share = {"10": 10 / clients, "tenth": 0.1, "all": 1.0}[active]
                sections: Sections = {
                    "run": {
                        "method": "fedavg",
                        "rounds": 3,
                        "evaluate_every": 3,
                        "device": "cpu",
                        "participation": share,
                    },
                    "data": {"dataset": dataset},
                    "partition": {"clients": clients, **split},
                    "model": model,
                    "method": {"local_steps": 2, "batch": 32},
                }
                found.append(Case(f"{dataset}, {clients} clients, {active} a round", sections))
    return found


def soak_cases() -> list[Case]:
    methods: Mapping[str, dict[str, Any]] = {
        "fedavg": {"local_steps": 1, "batch": 32},
        "feddm": {"ipc": 1, "iterations": 1, "server_epochs": 1},
    }
    found = []
    for name, settings in methods.items():
        for private in (False, True):
            sections: Sections = {
                "run": {"method": name, "rounds": SOAK_ROUNDS, "device": "cpu"},
                "partition": {"clients": 4, "kind": "iid"},
                "model": {"width": 8, "depth": 2},
                "method": settings,
                "privacy": {"noise_multiplier": 20.0} if private else {},
            }
            found.append(Case(f"soak {name}{' private' if private else ''}", sections))
    return found


class Sampler(Observer):
    """Looks at the process at the end of each round."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.files: list[int] = []

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.bytes.append(resident())
        self.files.append(open_files())


def measured(case: Case, quick: bool) -> dict[str, Any]:
    """The row of one case, in this process."""
    keep_large_allocations()
    sections = {name: dict(values) for name, values in case.sections.items()}
    soak = case.name.startswith("soak")
    if quick:
        sections["run"]["rounds"] = 60 if soak else 1
    settings = resolve({name: values for name, values in sections.items() if values})
    data = load_dataset(settings.dataset)
    _warm_up(data)
    sampler = Sampler()
    before = resident()
    forget_peak()
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        simulate(settings, data=data, observer=sampler, output=Path(folder) if soak else None)
    seconds = time.process_time() - started
    row: dict[str, Any] = {
        "case": case.name,
        "clients": settings.partition.clients,
        "active": max(1, round(settings.participation * settings.partition.clients)),
        "rounds": settings.rounds,
        "seconds": round(seconds, 3),
        "before_mib": round(before / MIB, 1),
        "peak_mib": round((peak() - before) / MIB, 1),
        "files": [sampler.files[0], sampler.files[-1]],
    }
    if soak:
        first = min(SETTLED, settings.rounds // 2)
        rounds = np.arange(len(sampler.bytes))[first:]
        slope = np.polyfit(rounds, np.array(sampler.bytes[first:]) / 1024, 1)[0]
        row["kib_a_round"] = round(float(slope), 2)
        row["mib"] = [round(b / MIB, 1) for b in sampler.bytes[first::25]]
    return row


def _warm_up(data: Any) -> None:
    """What a first run imports and allocates is not the cost of clients."""
    tiny: RunSettings = resolve(
        {
            "run": {"method": "fedavg", "rounds": 1, "device": "cpu"},
            "data": {"dataset": data[0].spec.name},
            "partition": {"kind": "iid", "clients": 3},
            "model": DATA[data[0].spec.name][1],
            "method": {"local_steps": 1, "batch": 32},
        }
    )
    simulate(tiny, data=data)


def main() -> None:
    parser = plain_options(__doc__)
    parser.add_argument("--quick", action="store_true", help=ONE_ROUND)
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    parser.add_argument("--only", default="", help="make only the cases whose name contains this")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case in this process
    options = parser.parse_args()
    cases = {case.name: case for case in (*load_cases(), *soak_cases())}
    if options.case:
        print(json.dumps(measured(cases[options.case], options.quick)))
        return
    name = f"{NAME}{'_quick' if options.quick else ''}"
    done = {row["case"] for row in lines(name)}
    for case in cases:
        if case in done or options.only not in case:
            continue
        command = [sys.executable, __file__, "--case", case]
        ran = subprocess.run(
            command + ["--quick"] * options.quick,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        row = {**json.loads(ran.stdout.splitlines()[-1]), **machine()}
        with (RESULTS / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row) if options.json else json.dumps(row, indent=2), flush=True)


if __name__ == "__main__":
    main()
