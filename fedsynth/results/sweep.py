"""Executes the runs of a sweep, each in its own process.

Several runs may be active at once, within a memory limit. Each run's folder is below OUTPUT/KEY,
where KEY depends on the run's settings. If a sweep is repeated, finished runs are kept and
interrupted runs are resumed. A run with changed settings is a new run.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedsynth.errors import OutputError
from fedsynth.privacy.files import last_line, open_regular
from fedsynth.results.finished import run_folders
from fedsynth.results.run_folder import INCOMPLETE
from fedsynth.results.sweep_file import Cell, Sweep, SweepError
from fedsynth.toml_file import to_toml

OVERHEAD_GB = 1.0
"""Memory that a process needs for the interpreter, torch and the data set, in addition to training.
"""
DEFAULT_GB = 4.0
"""Memory that is assumed for training if run.memory_gb is not set."""
POLL_SECONDS = 0.1
"""Time between two checks whether a run has ended, in seconds."""
STOP_SECONDS = 60.0
"""Time that a run has to stop after SIGTERM, in seconds."""
REPORT_SECONDS = 30.0
"""Time between two reports about the progress of the active runs, in seconds."""
LOG = "log.txt"
Command = Callable[[Path, Path, Path | None], Sequence[str]]
"""A function that returns the command line of a run.

Its arguments are the config file, the parent of the run folder, and the folder of the interrupted
run that is to be resumed, or None.
"""


@dataclass(frozen=True)
class SweepResult:
    """The outcome of a sweep.

    Attributes:
        completed: the runs that finished in this call.
        existing: the runs that had finished before this call.
        failed: the runs that failed, each with the last line that it printed.
    """

    completed: list[Cell] = field(default_factory=list)
    existing: list[Cell] = field(default_factory=list)
    failed: list[tuple[Cell, str]] = field(default_factory=list)


def finished(sweep: Sweep, cell: Cell) -> Path | None:
    """Returns the folder of a finished run in a sweep, or None if the run has not finished."""
    folders = run_folders(sweep.output / cell.key)
    return folders[-1] if folders else None


def memory_of(cell: Cell) -> float:
    """Returns the memory that is reserved for a run, in units of 2^30 bytes."""
    return (cell.settings.memory_gb or DEFAULT_GB) + OVERHEAD_GB


def run_sweep(sweep: Sweep, command: Command, report: Callable[[str], None]) -> SweepResult:
    """Executes all runs of a sweep that have not finished.

    Args:
        sweep: the sweep.
        command: a function that returns the command line of a run.
        report: receives a line when a run begins or ends, and the progress of active runs every 30
            seconds.

    Raises:
        SweepError: a run needs more memory than the sweep may use.
        KeyboardInterrupt: raised again after the active runs have been stopped cleanly. If the
            sweep is repeated, it resumes these runs.
    """
    _check_memory(sweep)
    result = SweepResult()
    waiting: list[Cell] = []
    for cell in sweep.cells:
        (result.existing if finished(sweep, cell) else waiting).append(cell)
    report(f"{len(sweep.cells)} runs in {sweep.output}, {len(result.existing)} are finished")
    running: dict[Cell, subprocess.Popen[bytes]] = {}
    last_report = time.monotonic()
    try:
        while waiting or running:
            for cell in _startable(sweep, waiting, running):
                waiting.remove(cell)
                running[cell] = _start(sweep, cell, command)
                report(f"begins: {cell.label}")
            time.sleep(POLL_SECONDS)
            for cell, process in list(running.items()):
                if process.poll() is not None:
                    del running[cell]
                    _record_end(sweep, cell, process.returncode, result, report)
            if time.monotonic() - last_report > REPORT_SECONDS:
                last_report = time.monotonic()
                for cell in running:
                    report(f"{cell.label}: {last_line(sweep.output / cell.key / LOG)}")
    finally:
        _stop(list(running.values()))
    return result


def _check_memory(sweep: Sweep) -> None:
    limit = sweep.settings.memory_gb
    for cell in sweep.cells:
        if limit and memory_of(cell) > limit:
            raise SweepError(
                f"the run {cell.label} needs {memory_of(cell):g} GB ({OVERHEAD_GB:g} GB plus "
                f"run.memory_gb, by default {DEFAULT_GB:g} GB), but the sweep may use only "
                f"{limit:g} GB: increase sweep.memory_gb or reduce run.memory_gb"
            )


def _startable(sweep: Sweep, waiting: Sequence[Cell], running: Mapping[Cell, object]) -> list[Cell]:
    """Returns the runs that may begin now, in the order of the sweep's file.

    A run may begin if a job and enough memory are free, and no active run charges the same ledgers.
    """
    limit = sweep.settings.memory_gb or math.inf
    active = list(running)
    for cell in waiting:
        memory = sum(map(memory_of, [*active, cell]))
        if len(active) >= sweep.settings.jobs or memory > limit:
            break
        ledger = _ledger(cell)
        if ledger is None or ledger not in map(_ledger, active):
            active.append(cell)
    return active[len(running) :]


def _ledger(cell: Cell) -> Path | None:
    """Returns the folder of the ledgers that a run charges."""
    privacy = cell.settings.privacy
    return privacy.ledger_folder if privacy is not None else cell.settings.ledger


def _start(sweep: Sweep, cell: Cell, command: Command) -> subprocess.Popen[bytes]:
    """Starts a run, or resumes it if it was interrupted."""
    folder = sweep.output / cell.key
    config = folder / "config.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        interrupted = max(folder.glob(f"*{INCOMPLETE}"), default=None)
        config.write_text(to_toml(cell.settings.to_mapping()), encoding="utf-8")
        log = open_regular(folder / LOG, writing=True, create=True)
    except OSError as error:
        raise OutputError(f"cannot write into {folder}: {error.strerror}") from None
    with log:
        return subprocess.Popen(
            command(config, folder, interrupted),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(sweep.settings.jobs),
            start_new_session=True,  # only the sweep receives Ctrl-C, and stops its runs cleanly
        )


def _environment(jobs: int) -> dict[str, str]:
    """Returns the environment variables of the runs.

    The runs share the CPU cores, unless the user has set the number of threads.
    """
    if jobs == 1:
        return dict(os.environ)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def _record_end(
    sweep: Sweep, cell: Cell, code: int, result: SweepResult, report: Callable[[str], None]
) -> None:
    number = len(result.existing) + len(result.completed) + len(result.failed) + 1
    position = f"{number}/{len(sweep.cells)} {cell.label}"
    if code == 0 and finished(sweep, cell) is not None:
        result.completed.append(cell)
        report(f"done: {position}")
        return
    message = last_line(sweep.output / cell.key / LOG)
    result.failed.append((cell, message))
    report(f"failed (exit code {code}): {position}: {message}")


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stops runs cleanly with SIGTERM. Kills those that have not stopped after `STOP_SECONDS`."""
    for process in processes:
        process.terminate()  # does nothing if it has ended
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
