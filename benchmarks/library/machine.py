"""Timing, and rows that say where, when and with what they were made."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedsynth.cli.process import keep_large_allocations
from library import RESULTS

Case = TypeVar("Case")
ONE_ROUND = "one round and few steps, to see that it runs"


def machine() -> dict[str, Any]:
    """The fields that every row of `benchmarks/results/` ends with."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return {
        "date": str(date.today()),
        "machine": device,
        "torch": torch.__version__,
        "commit": commit,
        "command": " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """One timed call, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def alternating(
    runs: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each run, one after the other in turns, after a first turn that is thrown away."""
    times: dict[str, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats + 1):
        for key, run in runs.items():
            value = seconds(run, device)
            if repeat:
                times[key].append(value)
    return times


def medians(runs: dict[str, Callable[[], object]], options: argparse.Namespace) -> dict[str, float]:
    """Returns the median seconds of each run, timed alternately; one repeat with --quick."""
    repeats = 1 if options.quick else options.repeats
    times = alternating(runs, repeats, torch.device(options.device))
    return {key: statistics.median(values) for key, values in times.items()}


def run_cases(
    name: str,
    parser: argparse.ArgumentParser,
    cases: Iterable[Case],
    measure: Callable[[Case, argparse.Namespace], dict[str, Any]],
) -> None:
    """Measures each case and appends its row to the results file.

    Args:
        name: of the results file.
        parser: of the script's options.
        cases: each is an argument of `measure`.
        measure: returns the row of a case.
    """
    options = parser.parse_args()
    keep_large_allocations()
    save = saver(name, options)
    for case in cases:
        save({**measure(case, options), **machine()})


def saver(name: str, options: argparse.Namespace) -> Callable[[dict[str, Any]], None]:
    """Appends rows to results/NAME.jsonl (NAME_quick.jsonl with --quick) and prints them (one line
    each with --json).
    """
    path = rows_file(name, options)

    def save(row: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row) if options.json else json.dumps(row, indent=2), flush=True)

    return save


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every timing benchmark has."""
    parser = plain_options(description)
    parser.add_argument(
        "--quick", action="store_true", help="a narrow network and one repeat, to see that it runs"
    )
    parser.add_argument("--json", action="store_true", help="print results as JSON lines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def table_options(description: str | None, quick: str = ONE_ROUND) -> argparse.ArgumentParser:
    """Those of a script that makes a table: --quick, --json and --device.

    Args:
        description: the script's docstring.
        quick: what --quick does.
    """
    parser = plain_options(description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    return parser


def plain_options(description: str | None) -> argparse.ArgumentParser:
    """None yet; the description is shown as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def rows_file(name: str, options: argparse.Namespace) -> Path:
    """Where a script's rows stand; those of --quick apart."""
    return RESULTS / f"{name}{'_quick' if options.quick else ''}.jsonl"
