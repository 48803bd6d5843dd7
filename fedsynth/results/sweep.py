"""Executes the runs of a sweep, each in its own process.

Several runs may be active at once. Each run's folder is below OUTPUT/KEY, where KEY depends on the
run's settings. If a sweep is repeated, finished runs are kept and interrupted runs are resumed. A
run with changed settings is a new run.

A TOML file describes the sweep: settings of all runs, and a grid of values (`docs/sweeps.md`). A
setting without a section belongs to the first section that has it.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from fedsynth.config.loading import code_options, with_own_code
from fedsynth.config.resolve import fingerprint, resolve, section_of
from fedsynth.config.settings import SECTIONS, RunSettings
from fedsynth.errors import FedsynthError, OutputError, short_repr, writing
from fedsynth.files import claim, last_line, open_regular, write_whole
from fedsynth.methods import DEFAULT_METHOD, method_class
from fedsynth.results.file_names import CONFIG, LOCK
from fedsynth.results.finished import finished_run, unfinished_run
from fedsynth.validation import check_number, converted, read_sections, to_toml

MAX_RUNS = 10_000
MAX_JOBS = 1000
SEED = "seed"
Values = Mapping[str, Any]
Sections = Mapping[str, Mapping[str, Any]]


class SweepError(FedsynthError, code="sweep.invalid"):
    """Raised for a sweep file that is invalid."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a sweep. A `Cell` is equal only to itself, even if another `Cell` has the same
    content.

    Attributes:
        values: the values that the grid gives to this run, by axis.
        settings: the settings of the run.
        key: the name of the run's folder.
        code: the options of `fedsynth train` that load the run's custom code.
    """

    values: Values
    settings: RunSettings
    key: str
    code: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """A text with the values that the grid gives to this run. If the grid is empty, the text is
        the run's key.
        """
        return _joined(self.values, " ") or self.key


@dataclass(frozen=True)
class Sweep:
    """A sweep: its settings and all its runs.

    Attributes:
        output: the folder for the runs.
        jobs: the maximum number of active runs.
        metrics: dotted paths in summary.json, which are the columns of the table.
        cells: the runs.
    """

    output: Path
    jobs: int
    metrics: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes of the grid except the seed, in the order of the file."""
        names = dict.fromkeys(name for cell in self.cells for name in cell.values)
        names.pop(SEED, None)
        return tuple(names)


def read_sweep(file: Path) -> Sweep:
    """Reads the file of a sweep, and checks the settings of every run.

    Custom code that the file names as FILE.py:NAME is loaded. A config.toml may be that of a foreign
    run, so it is refused.

    Raises:
        SweepError: the file is a config.toml, or the grid or the settings of a run are invalid. The
            message then names the values of the run.
        SettingError, UnknownNameError: a setting of the sweep is invalid.
    """
    if file.name == CONFIG:
        raise SweepError(
            f"{file} has the name of a run's settings. Copy what you trust to a new file"
        ).with_code("sweep.untrusted")
    sections: dict[str, dict[str, Any]] = read_sections(file)
    sweep = sections.pop("sweep", {})
    grid = sections.pop("grid", {})
    try:
        metrics = _choices("sweep.metrics", sweep.pop("metrics", ["test_accuracy"]))
        cells = _cells(sections, grid)
    except SweepError as error:
        raise SweepError(f"{file}: {error}") from None
    settings = converted("sweep", sweep, {"output": Path, "jobs": int}, "sweep", also=("metrics",))
    jobs = settings.get("jobs", 1)
    check_number("sweep", "jobs", jobs, 1, MAX_JOBS, integer=True)
    output = settings.get("output", Path("sweeps", file.stem))
    return Sweep(output, jobs, tuple(map(str, metrics)), tuple(cells))


def _cells(shared: Sections, grid: Values) -> list[Cell]:
    axes = _common_axes(grid)
    method_axes = {name: values for name, values in grid.items() if isinstance(values, Mapping)}
    default_method = shared.get("run", {}).get("method", DEFAULT_METHOD)
    names = list(map(str, axes.get("method", [default_method])))
    for name in method_axes:
        if name not in names:
            raise SweepError(f"no run has the method {name!r}. The methods are {', '.join(names)}")
    # counted before settings are resolved, which takes half a minute for ten thousand runs
    points = list(itertools.islice(_points(axes, method_axes, default_method), MAX_RUNS + 1))
    if len(points) > MAX_RUNS:
        raise SweepError(f"the grid has more than {MAX_RUNS:,} runs")
    cells = list(itertools.starmap(partial(_cell, shared), points))
    for cell in cells:
        name = cell.settings.method.name
        if method_class(name) is not type(cell.settings.method):
            raise SweepError(f"two files define a method with the name {name!r}. Rename one")
    if len({cell.key for cell in cells}) < len(cells):
        raise SweepError("two runs of the grid have the same settings. Remove repeated values")
    return cells


def _points(
    axes: Mapping[str, list[Any]], method_axes: Values, default_method: str
) -> Iterator[tuple[Values, Values]]:
    """Yields all combinations of the values in the grid, one for each run.

    Each item consists of the values of the axes that all methods have, and the values of the axes
    that only the run's method has.
    """
    for values in _product(axes):
        method = str(values.get("method", default_method))
        for method_values in _product(method_axes.get(method, {})):
            yield values, method_values


def _common_axes(grid: Values) -> dict[str, list[Any]]:
    """Returns the axes of the grid that apply to all methods.

    "run.seed" is renamed to "seed", the name that the results table uses.
    """
    axes: dict[str, list[Any]] = {}
    names: dict[tuple[str, str], str] = {}  # by the setting that an axis varies
    for name, values in grid.items():
        if isinstance(values, Mapping):
            continue
        first = names.setdefault(setting_of(name), name)
        if first != name:
            raise SweepError(f"{first!r} and {name!r} are the same setting. Remove {name!r}")
        axes[name.removeprefix("run.")] = _choices(name, values)
    return axes


def _cell(shared: Sections, values: Values, method_values: Values) -> Cell:
    """Returns one run of the sweep, after checking the run's settings.

    Values of the grid override the common settings.
    """
    sections = {name: dict(section) for name, section in shared.items()}
    for name, value in values.items():
        section, key = setting_of(name)
        sections.setdefault(section, {})[key] = value
    sections.setdefault("method", {}).update(method_values)
    all_values = {**values, **method_values}
    try:
        settings = resolve(with_own_code(sections))
        code = tuple(code_options(settings))
    except FedsynthError as error:
        run = _joined(all_values, ", ") or "without a grid"
        raise SweepError(f"the settings of the run {run} are invalid: {error}") from None
    return Cell(all_values, settings, _key(all_values, settings), code)


def setting_of(name: str) -> tuple[str, str]:
    """Returns the section and the key of the setting that one axis of the grid varies.

    A name without a section belongs to the first section that has this key. If no section has it,
    the name belongs to the method.

    >>> setting_of("alpha"), setting_of("model.width"), setting_of("seed")
    (('partition', 'alpha'), ('model', 'width'), ('run', 'seed'))

    Raises:
        SweepError: the name begins with a section that does not exist.
    """
    section, dot, key = name.partition(".")
    if not dot:
        return "run" if name == "method" else section_of(name) or "method", name
    if section not in SECTIONS:
        raise SweepError(f"{section!r} is not a section. The sections are {', '.join(SECTIONS)}")
    return section, key


def _choices(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values or {list, dict} & set(map(type, values)):
        raise SweepError(f"{name} must list numbers, strings or booleans, got {short_repr(values)}")
    return values


def _product(axes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*itertools.starmap(_choices, axes.items())):
        yield dict(zip(axes, values, strict=True))


def _joined(values: Values, separator: str) -> str:
    return separator.join(f"{name}={value}" for name, value in values.items())


def _key(values: Values, settings: RunSettings) -> str:
    """Returns a readable folder name for a run. Runs with different settings have different names."""
    parts = []
    for name, value in values.items():
        prefix = "" if name == "method" else name.rpartition(".")[2]
        parts.append(f"{prefix}{value}")
    readable = re.sub(r"[^\w.+=-]", "_", "-".join(parts))[:80]
    return f"{readable}-{fingerprint(settings)}".lstrip("-.")


POLL_SECONDS = 0.1  # time between two checks whether a run has ended, in seconds
STOP_SECONDS = 60.0  # time that a run has to stop after SIGTERM, in seconds
LOG = "log.txt"
COMMAND = (sys.executable, "-c", "from fedsynth.cli.app import main; main()", "train")


def run_sweep(sweep: Sweep, report: Callable[[str], None]) -> list[Cell]:
    """Executes all runs of a sweep that have not finished. Returns the runs that failed.

    Args:
        sweep: the sweep.
        report: receives a line when a run begins or ends.

    Raises:
        KeyboardInterrupt: raised again after the active runs have been stopped cleanly. If the
            sweep is repeated, it resumes these runs.
        OutputError: another sweep is active in the folder, or the folder cannot be written.
    """
    with writing(sweep.output):
        sweep.output.mkdir(parents=True, exist_ok=True)
        place = sweep.output / LOCK
        busy = OutputError(
            f"another sweep, or a run of a killed sweep, is active in {sweep.output}. Wait until it "
            f"ends (fuser {place} shows its processes)"
        ).with_code("sweep.lock")
        lock = claim(place, busy)
    with lock:
        return _run_waiting(sweep, report, lock)


def _run_waiting(sweep: Sweep, report: Callable[[str], None], lock: FileIO) -> list[Cell]:
    waiting = [cell for cell in sweep.cells if finished_run(sweep.output / cell.key) is None]
    report(f"{len(sweep.cells)} runs in {sweep.output}, {len(sweep.cells) - len(waiting)} finished")
    failed: list[Cell] = []
    running: dict[Cell, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            for cell in _startable(sweep, waiting, running):
                waiting.remove(cell)
                running[cell] = _start(sweep, cell, lock)
                report(f"begins: {cell.label}")
            time.sleep(POLL_SECONDS)
            for cell, process in list(running.items()):
                if process.poll() is not None:
                    del running[cell]
                    result = "done"
                    if process.returncode or finished_run(sweep.output / cell.key) is None:
                        failed.append(cell)
                        message = last_line(sweep.output / cell.key / LOG)
                        result = f"failed (exit code {process.returncode}): {message}"
                    ended = len(sweep.cells) - len(waiting) - len(running)
                    report(f"{ended}/{len(sweep.cells)} {cell.label}: {result}")
    finally:
        _stop(list(running.values()))
    return failed


def _startable(sweep: Sweep, waiting: Sequence[Cell], running: Mapping[Cell, object]) -> list[Cell]:
    """Returns those waiting runs that may begin now, in the order of the sweep's file.

    A run may begin if a job is free, and no active run charges the same ledgers.
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
    """Returns the folder of the ledgers that a run charges."""
    privacy = cell.settings.privacy
    return privacy.ledger_folder if privacy is not None else cell.settings.ledger


def _start(sweep: Sweep, cell: Cell, lock: FileIO) -> subprocess.Popen[bytes]:
    """Starts a run, or resumes it if it was interrupted.

    The run inherits the lock, because it outlives a killed sweep.
    """
    folder = sweep.output / cell.key
    config = folder / CONFIG
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(config, to_toml(cell.settings.to_mapping()).encode())
    arguments = ["--config", str(config), "--output", str(folder)]
    if (interrupted := unfinished_run(folder)) is not None:
        arguments = ["--resume", str(interrupted)]
    with open_regular(folder / LOG, writing=True, create=True) as log:
        return subprocess.Popen(
            [*COMMAND, *arguments, *cell.code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(sweep.jobs),
            pass_fds=[lock.fileno()],
            start_new_session=True,  # only the sweep receives Ctrl-C, and stops its runs cleanly
        )


def _environment(jobs: int) -> dict[str, str]:
    """Returns the environment variables of the runs.

    The runs share the CPU cores, unless the user has set the number of threads.
    """
    if jobs == 1:
        return dict(os.environ)
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stops the processes of runs with SIGTERM, so that the runs can be resumed.

    A process that has not stopped after `STOP_SECONDS` is killed.
    """
    for process in processes:
        process.terminate()  # does nothing if it has ended
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
