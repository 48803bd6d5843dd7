"""Executes runs that have no result yet, and resumes interrupted runs.

`Runner` executes published tables' runs one after another in its own process, until a deadline, and
stores a row for each finished run. `run_sweep` executes a sweep's runs in other processes.

An interrupted run leaves a run folder with checkpoints (docs/decisions/resuming.md). The next call
resumes it, with the same numbers as an uninterrupted run. A run in use by another process is left
alone.

A deadline stops a run at the end of a round. Some loops are also checkpointed every minute during a
round, so that the deadline can stop them there: condensation without privacy, local training of one
client after another, and the server's distillation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from fedsynth import rank
from fedsynth.config.settings import RunSettings
from fedsynth.errors import DivergedError, FedsynthError, OutputError, SettingError, writing
from fedsynth.experiments.rows import (
    Row,
    Rows,
    changed_setting,
    commit,
    current,
    environment,
    interrupted,
    round_summary,
    settings_hash,
)
from fedsynth.experiments.sweep import Cell, Sweep, SweepError
from fedsynth.federation.protocol import Observer
from fedsynth.files import claim, last_line, open_regular, read_regular, write_whole
from fedsynth.results.file_names import CONFIG, LOCK, METRICS
from fedsynth.results.finished import finished_run, read_rows, run_folders
from fedsynth.results.loggers import Several
from fedsynth.simulation.simulate import simulate
from fedsynth.validation import to_toml

# The loops that write checkpoints during a round.
CHECKPOINTED = ("condense", "local training", "distillation")
# The keys in every row of a published table.
NEEDED = {
    *("preset", "cell", "seed", "settings", "changes", "precision", "seconds"),
    *("curve", "upload_floats", "client_upload_bytes", "commit", "version"),
}


class OutOfTimeError(KeyboardInterrupt):
    """Raised at the deadline. It stops a run in the same way as Ctrl-C."""


@dataclass(frozen=True)
class Job:
    """One run of a published table.

    Attributes:
        name: a description of the run in one line.
        settings: the settings of the run.
        entries: the row's entries that identify the run, with its preset's name.
    """

    name: str
    settings: RunSettings
    entries: Row

    @property
    def hash(self) -> str:
        """A hash of the settings that determine the result.

        The precision is left out, because it changes results only by rounding. The row states it,
        and tables show it with the numbers.
        """
        return settings_hash(self.settings, without=("precision",))


@dataclass(frozen=True)
class Outcome:
    """A job's result.

    Args:
        status: "finished", "existing" (an earlier call finished the run), "stopped" (at the
            deadline), "not begun", or "failed".
        text: details of the status in words. It may be empty.
        error: the error of a failed run. Otherwise None.
    """

    status: str
    text: str = ""
    error: FedsynthError | None = None


@dataclass
class Deadline(Observer):
    """Stops a run at a given time, unless the last round has ended."""

    time: float
    rounds: int

    def step(self, round: int, stage: str, completed: int, total: int) -> None:
        if stage in CHECKPOINTED:
            self._check()

    def round_ended(self, row: Mapping[str, Any]) -> None:
        if row["round"] < self.rounds:
            self._check()

    def _check(self) -> None:
        if time.monotonic() >= self.time:
            raise OutOfTimeError


def rows_by_hash(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the result rows of all finished runs, by run hash.

    Tables that need the same run share it, such as FedKF's Tables V and VIII.

    Raises:
        OutputError: a file cannot be read, or a line is not the row of a finished run.
    """
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in Rows(path).all():
            if not row.keys() >= NEEDED:
                raise OutputError(
                    f"{path} contains a row without {', '.join(sorted(NEEDED - row.keys()))}. "
                    "Remove the row"
                )
            if row.get("date", "") >= rows.get(row["settings"], {}).get("date", ""):
                rows[row["settings"]] = row
    return rows


@dataclass(eq=False)
class Runner:
    """Executes published tables' runs in the current process.

    Args:
        folder: the folder of the results. `TABLE.jsonl` has a row for each finished run of a table,
            and `runs` has the run folders.
        deadline: the time after which no run begins or continues, as by `time.monotonic`.
        report: receives one line of text on each job.
        watch: a function from a run's settings to a context manager with an observer.
        download: True lets torchvision download missing data sets.
    """

    folder: Path
    deadline: float
    _: KW_ONLY
    report: Callable[[str], None]
    watch: Callable[[RunSettings], AbstractContextManager[Observer]]
    download: bool = False

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Executes the jobs one after another, and yields each outcome."""
        for job in jobs:
            try:
                outcome = self._run_unless_existing(job)
            except FedsynthError as error:
                outcome = Outcome("failed", str(error), error)
            self.report(": ".join(filter(None, (job.name, outcome.status, outcome.text))))
            yield outcome

    def run_folder(self, job: Job) -> Path:
        """Returns the folder for a job's run folders. Each precision has its own folder."""
        return self._runs_of(job.hash, job.settings.precision)

    def _runs_of(self, settings: str, precision: str) -> Path:
        return self.folder / "runs" / f"{settings}-{precision}"

    @property
    def trained(self) -> Path | None:
        """The folder in which one-round runs share trained clients.

        It is None if the code is not a clean git commit, because another version's trained clients
        must not be used.
        """
        version = commit()
        if version is None or version.endswith("+"):
            return None
        return self.folder / "runs" / f"trained-{version}"

    def _run_unless_existing(self, job: Job) -> Outcome:
        row = rows_by_hash(self.folder).get(job.hash)
        if row is not None:
            run = finished_run(self._runs_of(job.hash, row["precision"]))
            changed = "" if run is None else changed_setting(run, job.settings)
            if not changed:
                return Outcome("existing")
            self.report(f"{job.name}: its row is outdated, because {changed}")
        folder = self.run_folder(job)
        has_finished = current(run_folders(folder), job.settings) is not None
        if not has_finished and time.monotonic() >= self.deadline:
            return Outcome("not begun", "the time budget is exhausted")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock = claim(folder / LOCK, BlockingIOError())
            except BlockingIOError:
                return Outcome("not begun", "another process is running it")
        with lock:
            complete = current(run_folders(folder), job.settings)
            if complete is not None:  # a call was killed before it wrote the row
                return self._append(job, read_rows(complete / METRICS))
            return self._simulate(job, folder)

    def _simulate(self, job: Job, folder: Path) -> Outcome:
        settings = job.settings
        with self.watch(settings) as inner:
            try:
                result = simulate(
                    settings,
                    output=folder,
                    observer=Several([inner, Deadline(self.deadline, settings.rounds)]),
                    download=self.download,
                    resume=interrupted(folder, settings),
                    trained=self.trained,
                )
            except (OutOfTimeError, DivergedError) as error:
                run = interrupted(folder, settings) or folder
                rows = read_rows(run / METRICS)
                if isinstance(error, DivergedError):
                    return self._append(job, rows, diverged=str(error))
                rounds = f"{len(rows)} of {settings.rounds} rounds"
                return Outcome("stopped", f"after {rounds}. Repeat the command to resume")
        return self._append(job, result.metrics)

    def _append(self, job: Job, rounds: list[dict[str, Any]], **more: Any) -> Outcome:
        settings = job.settings
        row = {
            "key": f"{job.name} {job.hash}",
            **job.entries,
            "settings": job.hash,
            "precision": settings.precision,
            "compile": settings.compile,
            **round_summary(rounds, settings.partition.kind == "domain"),
            **more,
            **environment(),
        }
        Rows(self.folder / f"{row['preset'].replace(':', '-', 1)}.jsonl").append(row)
        return Outcome("finished", f"{row['seconds']:.0f} s, {settings.rounds} rounds")


POLL_SECONDS = 0.1  # time between two checks whether a run has ended, in seconds
STOP_SECONDS = 60.0  # time that a run has to stop after SIGTERM, in seconds
LOG = "log.txt"
COMMAND = (sys.executable, "-c", "from fedsynth.cli.app import main; main()", "train")


@dataclass(frozen=True)
class Shard:
    """A part of a sweep's runs, such as number 2 of 8. Numbers start at 1."""

    number: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str | None, environment: Mapping[str, str]) -> Shard:
        """Parses a shard such as "2/8".

        If `text` is None, each task of a Slurm array has its own shard. Without an array, the
        shard contains all runs.

        Raises:
            SweepError: the shard is invalid.

        >>> Shard.of("2/8", {})
        Shard(number=2, count=8)
        >>> Shard.of(None, {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "4"})
        Shard(number=1, count=4)
        """
        if text is None:
            text = _task_of_array(environment)
            if not text:
                return cls()
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        shard = cls(int(match[1]), int(match[2])) if match else cls(0)
        if not 1 <= shard.number <= shard.count:
            raise SweepError(
                f"the shard {text!r} must have the form i/n with 1 ≤ i ≤ n. Set --shard to a value "
                "such as 1/8"
            ).with_code("sweep.shard")
        return shard

    def cells(self, sweep: Sweep) -> list[Cell]:
        """Returns the runs of the shard.

        All runs that charge the same ledgers are in the same shard.
        """
        groups = list(dict.fromkeys(_ledger(cell) or cell for cell in sweep.cells))
        chosen = set(groups[self.number - 1 :: self.count])
        return [cell for cell in sweep.cells if (_ledger(cell) or cell) in chosen]


def _task_of_array(environment: Mapping[str, str]) -> str:
    """Returns the shard of a Slurm array's task, such as "2/8", or "" without an array.

    Raises:
        SweepError: the array's indices are not evenly spaced.
    """
    prefix = "SLURM_ARRAY_TASK_"
    if prefix + "COUNT" not in environment:
        return ""
    defaults = {"COUNT": 1, "ID": 0, "MIN": 0, "STEP": 1}
    with suppress(ValueError):
        values = (int(environment.get(prefix + name, value)) for name, value in defaults.items())
        count, task, first, step = values
        last = first + step * (count - 1)
        if step > 0 and int(environment.get(prefix + "MAX", last)) == last:
            return f"{(task - first) // step + 1}/{count}"
    raise SweepError(
        "the indices of the Slurm array's tasks must be evenly spaced, as in --array=1-8. Set "
        "--shard"
    ).with_code("sweep.shard")


def run_sweep(
    sweep: Sweep, report: Callable[[str], None], shard: Shard | None = None
) -> list[Cell]:
    """Executes a sweep's unfinished runs, and returns the failed ones.

    Args:
        sweep: the sweep.
        report: receives a line when a run begins or ends.
        shard: the part to execute, or None. Shards, also of other machines, may use the folder at
            the same time. A run that another process executes is left out, and counts as failed
            if it has no result in the end.

    Raises:
        KeyboardInterrupt: raised again after the active runs were stopped cleanly. Repeating the
            sweep resumes them.
        OutputError: another sweep is active in the folder, or the folder cannot be written.
    """
    if sweep.selection is not None:
        reason = "has no effect in run_sweep. Call select_privately, or remove [selection]"
        raise SettingError("selection", "law", reason)
    rank.require_one_process("a sweep")
    shard = shard or Shard()
    with locked(sweep) if shard.count == 1 else nullcontext() as lock:
        return _run_waiting(sweep, report, lock, shard)


@contextmanager
def locked(sweep: Sweep) -> Iterator[FileIO]:
    """Creates and locks a sweep's folder, and yields the locked file.

    Raises:
        OutputError: another sweep is active in the folder, or the folder cannot be written.
    """
    place = sweep.output / LOCK
    with writing(sweep.output):
        sweep.output.mkdir(parents=True, exist_ok=True)
        lock = claim(place, _busy(place))
    with lock:
        lock.truncate(0)
        _note_process(lock, os.getpid())
        yield lock


def _note_process(lock: FileIO, process_id: int) -> None:
    """Appends a process ID to the lock file, for the error messages of other processes."""
    with suppress(OSError):  # the disk is full
        lock.write(f"{process_id}\n".encode())


def _busy(place: Path) -> OutputError:
    """Returns an error with the IDs of the processes that have locked a folder."""
    text = read_regular(place).decode(errors="replace") if place.exists() else ""
    numbers = filter(str.isdecimal, text.split())
    has_list = Path("/proc").exists()  # elsewhere, all processes that have held the lock are named
    active = ", ".join(n for n in numbers if not has_list or Path("/proc", n).exists())
    return OutputError(
        f"another sweep, or a run of a killed sweep, is active in {place.parent} (process id "
        f"{active or 'unknown'}). Wait until it ends"
    ).with_code("sweep.lock")


def _run_waiting(
    sweep: Sweep, report: Callable[[str], None], lock: FileIO | None, shard: Shard
) -> list[Cell]:
    cells = shard.cells(sweep)
    waiting = [cell for cell in cells if sweep.finished(cell) is None]
    part = f" of shard {shard.number}/{shard.count}" if shard.count > 1 else ""
    report(f"{len(cells)} runs{part} in {sweep.output}, {len(cells) - len(waiting)} finished")
    for cell in waiting:
        run = finished_run(sweep.folder(cell))
        if run is not None:
            changed = changed_setting(run, cell.settings)
            report(f"{cell.label}: its run is outdated, because {changed}")
    failed: list[Cell] = []
    left_out: list[Cell] = []
    running: dict[Cell, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            for cell in _startable(sweep, waiting, running):
                waiting.remove(cell)
                try:
                    process = _start(sweep, cell, lock)
                except OutputError as error:
                    failed.append(cell)
                    report(f"{cell.label}: failed: {error}")
                    continue
                if process is None:
                    left_out.append(cell)
                    report(f"left out: {cell.label}, which another process executes")
                    continue
                running[cell] = process
                report(f"begins: {cell.label}")
            time.sleep(POLL_SECONDS)
            for cell, process in list(running.items()):
                if process.poll() is not None:
                    del running[cell]
                    result = "done"
                    if process.returncode or sweep.finished(cell) is None:
                        failed.append(cell)
                        message = last_line(sweep.folder(cell) / LOG)
                        result = f"failed (exit code {process.returncode}): {message}"
                    ended = len(cells) - len(waiting) - len(running)
                    report(f"{ended}/{len(cells)} {cell.label}: {result}")
    finally:
        _stop(list(running.values()))
    return failed + [cell for cell in left_out if sweep.finished(cell) is None]


def _startable(sweep: Sweep, waiting: Sequence[Cell], running: Mapping[Cell, object]) -> list[Cell]:
    """Returns the runs that are ready to start, in sweep-file order.

    A run is ready if a job is free and no active run charges the same ledgers.
    """
    active = list(running)
    for cell in waiting:
        if len(active) >= sweep.jobs:
            break
        ledger = _ledger(cell)
        if ledger is None or ledger not in map(_ledger, active):
            active.append(cell)
    return active[len(running) :]


def _ledger(cell: Cell) -> Path | None:
    """Returns a run's ledger folder."""
    privacy = cell.settings.privacy
    return privacy.ledger_folder if privacy is not None else cell.settings.ledger


def _start(sweep: Sweep, cell: Cell, lock: FileIO | None) -> subprocess.Popen[bytes] | None:
    """Starts or resumes a run, unless another process executes or has finished it.

    Returns None if no process was started. The run inherits the locks of its folder and of the
    sweep, because it outlives a killed sweep.
    """
    folder = sweep.folder(cell)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run_lock = claim(folder / LOCK, BlockingIOError())
        except BlockingIOError:
            return None
    with run_lock:
        if sweep.finished(cell) is not None:  # since the sweep began
            return None
        return _started(sweep, cell, [run_lock, *filter(None, [lock])])


def _started(sweep: Sweep, cell: Cell, locks: Sequence[FileIO]) -> subprocess.Popen[bytes]:
    folder = sweep.folder(cell)
    config = folder / CONFIG
    write_whole(config, to_toml(cell.settings.to_mapping()).encode())
    arguments = ["--config", str(config), "--output", str(folder)]
    if (run := interrupted(folder, cell.settings)) is not None:
        arguments = ["--resume", str(run)]
    with open_regular(folder / LOG, writing=True, create=True) as log:
        process = subprocess.Popen(
            [*COMMAND, *arguments, *cell.code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(sweep.jobs),
            **_separated(locks),
        )
    for lock in locks:
        _note_process(lock, process.pid)
    return process


def _separated(locks: Sequence[FileIO]) -> dict[str, Any]:
    """Returns `Popen` arguments that pass the locks to a run, but not Ctrl-C.

    The sweep receives Ctrl-C and stops its runs cleanly. On Windows a run inherits no lock.
    """
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"pass_fds": [lock.fileno() for lock in locks], "start_new_session": True}


def _environment(jobs: int) -> dict[str, str]:
    """Returns the runs' environment variables.

    The runs share the CPU cores, unless the user has set the number of threads.
    """
    if jobs == 1:
        return dict(os.environ)
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stops runs' processes with SIGTERM, so that the runs can be resumed.

    A process still alive after `STOP_SECONDS` is killed.
    """
    for process in processes:
        process.terminate()  # does nothing if it has ended
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
