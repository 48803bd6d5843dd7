"""Memory and time of runs with 10 to 1,000 clients: the table of docs/reliability.md.

    python benchmarks/load.py [--quick] [--only "1000 clients"]

Each case is a separate process. FedAvg with two local steps on the digits (iid, a ConvNet-64 of two
blocks), three rounds; ten clients a round, a tenth, or all. Memory is the peak of the run over what
is resident before it, with data and libraries loaded; time is the processor's. Linux only.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from fedsynth.cli.application import keep_large_allocations
from fedsynth.config.resolve import resolve
from fedsynth.data.load import load_dataset
from fedsynth.simulation.simulate import simulate
from library.machine import peak_growth, run_cases, timing_options

CASES = {}
for clients in (10, 100, 300, 1000):
    for active, share in (("10", 10 / clients), ("tenth", 0.1), ("all", 1.0)):
        CASES[f"digits, {clients} clients, {active} a round"] = (clients, share)


def measure(case: tuple[int, float], options: argparse.Namespace) -> dict[str, Any]:
    """Measures one case in this process, after a small run that loads and allocates."""
    keep_large_allocations()
    clients, share = case
    rounds = 1 if options.quick else 3
    run = {"method": "fedavg", "rounds": rounds, "evaluate_every": 3, "device": "cpu"}
    sections: dict[str, dict[str, Any]] = {
        "run": {**run, "participation": share},
        "partition": {"clients": clients, "kind": "iid"},
        "model": {"width": 64, "depth": 2},
        "method": {"local_steps": 2, "batch": 32},
    }
    data = load_dataset("digits")
    small = {"run": {**run, "rounds": 1}, "partition": {"clients": 3, "kind": "iid"}}
    simulate(resolve({**sections, **small}), data=data)
    started = time.process_time()
    peak = peak_growth(lambda: simulate(resolve(sections), data=data))
    return {
        "clients": clients,
        "active": max(1, round(share * clients)),
        "rounds": rounds,
        "seconds": round(time.process_time() - started, 3),
        "peak_mib": round(peak, 1),
    }


if __name__ == "__main__":
    arguments = timing_options(__doc__).parse_args()
    run_cases("load", arguments, CASES, measure, separate_processes=True)
