"""Timing, options, and rows that record where, when and with what they were made."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import torch

from library import RESULTS

Case = TypeVar("Case")


def machine() -> dict[str, Any]:
    """Returns the fields that every row of `benchmarks/results/` ends with."""
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
    """Returns the seconds of one call, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def medians(
    runs: Mapping[str, Callable[[], object]], options: argparse.Namespace
) -> dict[str, float]:
    """Returns the median seconds of each run, timed in turns after a first turn that is thrown
    away; one repeat with --quick."""
    device = torch.device(options.device)
    times: dict[str, list[float]] = {key: [] for key in runs}
    for repeat in range((1 if options.quick else options.repeats) + 1):
        for key, run in runs.items():
            value = seconds(run, device)
            if repeat:
                times[key].append(value)
    return {key: statistics.median(values) for key, values in times.items()}


def run_cases(
    name: str,
    options: argparse.Namespace,
    cases: Mapping[str, Case],
    measure: Callable[[Case, argparse.Namespace], dict[str, Any]],
    once: bool = False,
    apart: bool = False,
) -> None:
    """Measures each case and appends its row to a results file.

    Args:
        name: of the results file.
        options: of the command line.
        cases: by name; each is an argument of `measure`.
        measure: returns the row of a case.
        once: a case whose row is there is not measured again.
        apart: each case is measured in a process of its own.
    """
    if options.case is not None:
        if options.case in cases:
            print(json.dumps(measure(cases[options.case], options)))
        return
    path = rows_file(name, options.quick)
    there = {row["case"] for row in read(path)} if once else set()
    for title, case in cases.items():
        if title not in there and options.only in title:
            row = _in_a_process(title) if apart else measure(case, options)
            append(path, {"case": title, **row, **machine()})


def _in_a_process(title: str) -> dict[str, Any]:
    """Returns the row of a case that the same script measures in another process."""
    words = [sys.executable, *sys.argv, "--case", title]
    ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return row


def timing_options(description: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """Returns the parser of a script that measures time."""
    parser = plain_options(description)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, printed
    return parser


def plain_options(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser without options, which shows the description as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def rows_file(name: str, quick: bool) -> Path:
    """Returns the file of a script's rows; those of --quick are apart."""
    return RESULTS / f"{name}{'_quick' if quick else ''}.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file; none where there is no file yet."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if _READ.get(path, ("", []))[0] != text:
        _READ[path] = text, [json.loads(line) for line in text.splitlines()]
    return _READ[path][1] if text else []


_READ: dict[Path, tuple[str, list[dict[str, Any]]]] = {}
"""The text of each file that was read last, and its rows."""


def append(path: Path, row: dict[str, Any]) -> None:
    """Appends a row to a file, and prints it."""
    line = json.dumps(row, ensure_ascii=False)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)
