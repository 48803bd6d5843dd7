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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from library.machine import run_cases, timing_options

PROGRAM = (sys.executable, "-c", "from fedsynth.cli.app import main; main()")
FEDSTATS = "train --method fedstats --dataset fashion-mnist --dp-epsilon 1 --rounds 32"
SMALL = "train --method fedavg --model linear --rounds 1 --dp-epsilon 8"


def cpu_seconds(*arguments: str) -> float:
    """Returns the CPU seconds of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*PROGRAM, *arguments],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def start(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the median seconds of commands that train nothing."""
    cpu_seconds(*SMALL.split(), "--output", str(folder))
    (run,) = map(str, folder.iterdir())
    commands = [["--help"], ["methods"], ["runs", run], ["privacy", "report", run]]
    times = {}
    for command in commands:
        repeats = [cpu_seconds(*command) for _ in range(1 if options.quick else options.repeats)]
        times[" ".join(command).removesuffix(f" {run}")] = statistics.median(repeats)
    return {"CPU seconds": times}


def fedstats(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the seconds of a run that stores its vectors, and of a run that reads them."""
    command = [*FEDSTATS.split(), "--output", str(folder), "--encoder-cache", str(folder / "cache")]
    if options.quick:
        command += ["--subset", "0.01"]
    return {"CPU seconds": {name: cpu_seconds(*command) for name in ("first run", "second run")}}


CASES = {"start": start, "FedStats on Fashion-MNIST": fedstats}


def measure(
    case: Callable[[argparse.Namespace, Path], dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return case(options, Path(folder))


def main() -> None:
    options = timing_options(__doc__).parse_args()
    run_cases("commands", options, CASES, measure)


if __name__ == "__main__":
    main()
