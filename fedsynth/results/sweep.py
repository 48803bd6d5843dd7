"""Executes a sweep's runs, several at once within a memory limit, each in its own process; resumes
an interrupted sweep.

A run's folder is below OUTPUT/KEY, where KEY is derived from its settings. A finished run is not
repeated, an interrupted one is resumed, and one with changed settings is a different run.
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
"""Memory of a process in addition to its steps: the interpreter, torch and the data set."""
DEFAULT_GB = 4.0
"""Limit for a run's steps if run.memory_gb is not set."""
POLL_SECONDS = 0.1
"""Seconds between checks whether a run has ended."""
STOP_SECONDS = 60.0
"""Seconds that a run has to stop after SIGTERM."""
REPORT_SECONDS = 30.0
"""Seconds between reports of the active runs' progress."""
LOG = "log.txt"
Command = Callable[[Path, Path, Path | None], Sequence[str]]
"""Returns a run's command line: (config, parent of the run's folder, folder of the interrupted run
to resume, or None) → arguments."""


@dataclass(frozen=True)
class SweepResult:
    """The outcome of a sweep.

    Attributes:
        completed: runs that finished in this call.
        existing: runs that an earlier call finished.
        failed: runs that failed, with the last line that each printed.
    """

    completed: list[Cell] = field(default_factory=list)
    existing: list[Cell] = field(default_factory=list)
    failed: list[tuple[Cell, str]] = field(default_factory=list)


def finished(sweep: Sweep, cell: Cell) -> Path | None:
    """Returns the folder of a cell's finished run, or None."""
    folders = run_folders(sweep.output / cell.key)
    return folders[-1] if folders else None


def memory_of(cell: Cell) -> float:
    """Returns the memory that is reserved for a run, in 2^30 bytes."""
    return (cell.settings.memory_gb or DEFAULT_GB) + OVERHEAD_GB


def run_sweep(sweep: Sweep, command: Command, report: Callable[[str], None]) -> SweepResult:
    """Executes all runs that have not finished.

    Args:
        sweep: the runs.
        command: returns the command line of a run.
        report: receives a line when a run begins or ends, and the progress every half minute.

    Raises:
        SweepError: a run needs more memory than the sweep may use.
        KeyboardInterrupt: re-raised after the active runs were stopped cleanly; a sweep of the same
            file resumes them.
    """
    _check_memory(sweep)
    result = SweepResult()
    waiting: list[Cell] = []
    for cell in sweep.cells:
        (result.existing if finished(sweep, cell) else waiting).append(cell)
    report(f"{len(sweep.cells)} runs in {sweep.output}, {len(result.existing)} already finished")
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
                f"the run of {cell.label} needs {memory_of(cell):g} GB ({OVERHEAD_GB:g} GB plus "
                f"run.memory_gb, by default {DEFAULT_GB:g}), but the sweep may use {limit:g} "
                "GB: raise sweep.memory_gb or lower run.memory_gb"
            )


def _startable(sweep: Sweep, waiting: Sequence[Cell], running: Mapping[Cell, object]) -> list[Cell]:
    """Returns the runs that may begin now, in the file's order: a job and memory are free for them,
    and no active run charges the same ledgers."""
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
    """Returns the folder of ledgers that a run charges."""
    privacy = cell.settings.privacy
    return privacy.ledger_folder if privacy is not None else cell.settings.ledger


def _start(sweep: Sweep, cell: Cell, command: Command) -> subprocess.Popen[bytes]:
    """Starts a run, or resumes an interrupted one."""
    folder = sweep.output / cell.key
    config = folder / "config.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        interrupted = max(folder.glob(f"*{INCOMPLETE}"), default=None)
        config.write_text(to_toml(cell.settings.to_mapping()), encoding="utf-8")
        log = open_regular(folder / LOG, writing=True, create=True)
    except OSError as error:
        raise OutputError(f"cannot write the sweep's {folder}: {error.strerror}") from None
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
    """Returns the runs' environment: they share the cores, unless the user has set the threads of
    each."""
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
    """Sends SIGTERM to runs, which then stop cleanly, and kills those that have not stopped after
    `STOP_SECONDS`."""
    for process in processes:
        process.terminate()  # does nothing if it has ended
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
