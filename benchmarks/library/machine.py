"""Timing, options, and rows that record where, when and with what they were made."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedsynth.experiments.rows import Rows, environment
from library import RESULTS

Case = TypeVar("Case")


def machine() -> dict[str, Any]:
    """Returns the fields that every row of `benchmarks/results/` ends with.

    The command's --cache, a folder of this machine, is left out.
    """
    command = " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    command = re.sub(r" --cache[ =]\S+", "", command)
    fields = environment()
    del fields["version"]
    return {**fields, "command": command}


def peak_growth(run: Callable[[], object]) -> float:
    """Returns by how many MiB a call raises the resident memory at its peak. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_mib()
    run()
    return peak_mib() - before


def peak_mib() -> float:
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) / 1024


def seconds(
    run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the seconds of one call, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def medians(
    runs: Mapping[str, Callable[[], object]],
    options: argparse.Namespace,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns the median seconds of each run, timed in turns after a first turn that does not
    count; one repeat with --quick."""
    device = torch.device(options.device)
    repeats = 1 if options.quick else options.repeats
    turns = [[seconds(run, device, clock) for run in runs.values()] for _ in range(repeats + 1)]
    return dict(zip(runs, map(statistics.median, zip(*turns[1:], strict=True)), strict=True))


def run_cases(
    name: str,
    options: argparse.Namespace,
    cases: Mapping[str, Case],
    measure: Callable[[Case, argparse.Namespace], dict[str, Any]],
    separate_processes: bool = False,
) -> None:
    """Measures each case and appends its row to a results file.

    Args:
        name: of the results file.
        options: of the command line.
        cases: by name; each is an argument of `measure`.
        measure: returns the row of a case.
        separate_processes: each case is measured in a separate process.
    """
    if options.case is not None:
        if options.case in cases:
            print(json.dumps(measure(cases[options.case], options)))
        return
    path = rows_file(name, options.quick)
    for title, case in cases.items():
        if options.only not in title:
            continue
        if separate_processes:
            command = [sys.executable, *sys.argv, "--case", title]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            row = json.loads(output.splitlines()[-1])
        else:
            row = measure(case, options)
        append(path, {"case": title, **row, **machine()})


def timing_options(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a script that measures time."""
    parser = plain_options(description)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, printed
    return parser


def plain_options(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser without options, which keeps the description's line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def rows_file(name: str, quick: bool) -> Path:
    """Returns the file of a script's rows; those of --quick are in a separate file."""
    return RESULTS / f"{name}{'_quick' if quick else ''}.jsonl"


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Appends a row to a file, and prints it."""
    Rows(path).append(row)
    print(json.dumps(row, ensure_ascii=False), flush=True)
