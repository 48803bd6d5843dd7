"""Executes a sweep's runs, several at once within a memory limit, each in its own process; resumes
an interrupted sweep.

A run's folder is below OUTPUT/KEY, where KEY is derived from its settings. A finished run is not
repeated, an interrupted one is resumed, and one with changed settings is a different run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedsynth.config.settings import RunSettings
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
PAUSE = 0.1
"""Seconds between checks whether a run has ended."""
PATIENCE = 60.0
"""Seconds that a run has to stop after SIGTERM."""
NEWS_SECONDS = 30.0
LOG = "log.txt"
Command = Callable[[Path, Path, Path | None], Sequence[str]]
"""Returns a run's command line: (config, parent of the run's folder, folder of the interrupted run
to resume, or None) → arguments."""


@dataclass(frozen=True)
class Ended:
    """The outcome of a sweep.

    Attributes:
        made: runs that finished in this call.
        before: runs that had finished before.
        failed: runs that failed, with the last line that each printed.
    """

    made: list[Cell] = field(default_factory=list)
    before: list[Cell] = field(default_factory=list)
    failed: list[tuple[Cell, str]] = field(default_factory=list)


def finished(sweep: Sweep, cell: Cell) -> Path | None:
    """Returns the folder of a cell's finished run, or None."""
    folders = run_folders(sweep.output / cell.key)
    return folders[-1] if folders else None


def memory_of(settings: RunSettings) -> float:
    """Returns the memory that is reserved for a run, in 2^30 bytes."""
    return (settings.memory_gb or DEFAULT_GB) + OVERHEAD_GB


def run_sweep(sweep: Sweep, command: Command, tell: Callable[[str], None]) -> Ended:
    """Executes all runs that have not finished.

    Args:
        sweep: the runs.
        command: returns the command line of a run.
        tell: receives a line when a run begins or ends, and the progress every half minute.

    Raises:
        SweepError: a run needs more memory than the sweep may use.
        KeyboardInterrupt: re-raised after the active runs were stopped cleanly; a sweep of the same
            file resumes them.
    """
    _check_memory(sweep)
    ended = Ended()
    waiting: list[Cell] = []
    for cell in sweep.cells:
        (ended.before if finished(sweep, cell) else waiting).append(cell)
    tell(
        f"{len(sweep.cells)} runs in {sweep.output}, of which {len(ended.before)} had finished "
        "before"
    )
    going: dict[Cell, subprocess.Popen[bytes]] = {}
    reported = time.monotonic()
    try:
        while waiting or going:
            for cell in _next(sweep, waiting, going):
                waiting.remove(cell)
                going[cell] = _begin(sweep, cell, command)
                tell(f"begins: {cell.words or cell.key}")
            time.sleep(PAUSE)
            if time.monotonic() - reported > NEWS_SECONDS:
                reported = time.monotonic()
                for cell in going:
                    tell(f"{cell.words or cell.key}: {last_line(sweep.output / cell.key / LOG)}")
            for cell, process in list(going.items()):
                if process.poll() is not None:
                    del going[cell]
                    _note_end(sweep, cell, process.returncode, ended, tell)
    finally:
        _stop(going.values())
    return ended


def _check_memory(sweep: Sweep) -> None:
    bound = sweep.settings.memory_gb
    for cell in sweep.cells:
        need = memory_of(cell.settings)
        if bound and need > bound:
            raise SweepError(
                f"the run of {cell.words} needs {need:g} GB ({OVERHEAD_GB:g} GB plus "
                f"run.memory_gb, by default {DEFAULT_GB:g}), but the sweep may use {bound:g} "
                "GB: raise sweep.memory_gb or lower run.memory_gb"
            )


def _next(sweep: Sweep, waiting: Sequence[Cell], going: Mapping[Cell, object]) -> list[Cell]:
    """Returns the runs that may begin now, in the file's order: a job and memory are free for them,
    and no active run charges the same ledgers."""
    bound = sweep.settings.memory_gb
    running = list(going)
    chosen: list[Cell] = []
    for cell in waiting:
        used = sum(memory_of(other.settings) for other in running)
        if len(running) >= sweep.settings.jobs:
            break
        if bound and used + memory_of(cell.settings) > bound:
            break
        if _ledger(cell) is not None and _ledger(cell) in {_ledger(other) for other in running}:
            continue
        chosen.append(cell)
        running.append(cell)
    return chosen


def _ledger(cell: Cell) -> Path | None:
    """Returns the folder of ledgers that a run charges."""
    privacy = cell.settings.privacy
    return privacy.ledger_folder if privacy is not None else cell.settings.ledger


def _begin(sweep: Sweep, cell: Cell, command: Command) -> subprocess.Popen[bytes]:
    """Starts a run, or resumes an interrupted one."""
    place = sweep.output / cell.key
    config = place / "config.toml"
    try:
        place.mkdir(parents=True, exist_ok=True)
        stopped = sorted(place.glob(f"*{INCOMPLETE}"))
        config.write_text(to_toml(cell.settings.to_mapping()), encoding="utf-8")
        log = open_regular(place / LOG, writing=True, create=True)
    except OSError as error:
        raise OutputError(f"cannot write the sweep's {place}: {error.strerror}") from None
    with log:
        return subprocess.Popen(
            list(command(config, place, stopped[-1] if stopped else None)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(sweep.settings.jobs),
            start_new_session=True,  # only the sweep receives Ctrl-C, and stops its runs cleanly
        )


def _environment(jobs: int) -> dict[str, str]:
    """Returns the runs' environment: they share the cores, unless the user has set the threads of
    each."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    return {"OMP_NUM_THREADS": threads, **os.environ} if jobs > 1 else dict(os.environ)


def _note_end(
    sweep: Sweep, cell: Cell, code: int, ended: Ended, tell: Callable[[str], None]
) -> None:
    completed = len(ended.before) + len(ended.made) + len(ended.failed) + 1
    position = f"{completed}/{len(sweep.cells)} {cell.words or cell.key}"
    if code == 0 and finished(sweep, cell) is not None:
        ended.made.append(cell)
        tell(f"done: {position}")
        return
    last = last_line(sweep.output / cell.key / LOG)
    ended.failed.append((cell, last))
    tell(f"failed (exit code {code}): {position}: {last}")


def _stop(processes: object) -> None:
    """Sends SIGTERM to runs, which then stop cleanly, and kills those that have not stopped after
    `PATIENCE` seconds."""
    going = [child for child in list(processes) if child.poll() is None]  # type: ignore[call-overload]
    for process in going:
        process.send_signal(signal.SIGTERM)
    for process in going:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
