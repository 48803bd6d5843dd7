"""CPU seconds of commands: their start, and a run of FedStats without and with stored vectors.

    FEDSYNTH_DATA=DIR python benchmarks/commands.py [--quick] [--repeats N] [--only start]

Seconds are those of a new process with one thread, in user and in system mode.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from library.machine import run_cases, timing_options

PROGRAM = (sys.executable, "-c", "from fedsynth.cli.app import main; main()")
FIRST = "train --method feddm --dp-sigma 3"  # the README's first command
FEDSTATS = "train --method fedstats --dataset fashion-mnist --dp-epsilon 1 --rounds 32"


def cpu_seconds(command: str, folder: str) -> float:
    """Returns the CPU seconds of one command, which runs in a folder."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*PROGRAM, *command.split()],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the median seconds of short commands."""
    repeats = range(1 if options.quick else options.repeats)
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for command in ("--help", "methods", FIRST):
            times[command] = statistics.median(cpu_seconds(command, folder) for _ in repeats)
    return {"CPU seconds": times}


def fedstats(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of a run that stores its vectors, and of a run that reads them."""
    with tempfile.TemporaryDirectory() as folder:
        command = f"{FEDSTATS} --encoder-cache cache{' --subset 0.01' if options.quick else ''}"
        runs = ("first run", "second run")
        return {"CPU seconds": {name: cpu_seconds(command, folder) for name in runs}}


CASES = {"start": start, "FedStats on Fashion-MNIST": fedstats}


if __name__ == "__main__":
    arguments = timing_options(__doc__).parse_args()
    run_cases("commands", arguments, CASES, lambda case, options: case(options))
