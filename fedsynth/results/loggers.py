"""Observers that write a run's rounds down for other tools: CSV, TensorBoard, Weights & Biases,
MLflow.

They get what metrics.jsonl gets: of a private run nothing that only a simulation may show. But the
last three stamp the time on each entry, and time may tell of private data; so their files do not
stand in the run folder, and a private run says so.
"""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from fedsynth.config.settings import RunSettings
from fedsynth.data.files import one_line
from fedsynth.errors import OutputError, SettingError
from fedsynth.federation.observer import Observer

STEP_SECONDS = 30.0
"""Steps within a round are written so often, where they are at all."""
TIMES = (
    "warning: {names} stamp the time on each entry, and how long a round takes may tell of private "
    "data: the guarantee does not cover these logs"
)
Numbers = Mapping[str, float]


def numbers_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a round's row, by their paths; what is no number is left out.

    >>> numbers_of({"round": 1, "local": {"amp": 0.5}, "participants": [0, 1], "note": "x"})
    {'round': 1.0, 'local/amp': 0.5}
    """
    numbers: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            numbers.update(numbers_of(value, f"{prefix}{key}/"))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers


def settings_of(settings: RunSettings) -> dict[str, str | int | float | bool]:
    """All settings that a run's config.toml has, by "section.key"."""
    sections = settings.to_mapping()
    return {
        f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()
    }


class Several(Observer):
    """Tells several observers. A logger that fails once the run has begun (a full disk, a service
    that does not answer) is told no more, which the others hear: it may cost no run.

    Args:
        observers: in the order in which they are told.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)

    def started(self, settings: RunSettings, folder: Path | None) -> None:
        for observer in self._observers:
            observer.started(settings, folder)

    def note(self, text: str) -> None:
        for observer in self._observers:
            observer.note(text)

    def step(self, round: int, phase: str, completed: int, total: int) -> None:
        self._tell(lambda observer: observer.step(round, phase, completed, total))

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self._tell(lambda observer: observer.round_ended(row))

    def ended(self, summary: Mapping[str, Any] | None) -> None:
        self._tell(lambda observer: observer.ended(summary))

    def _tell(self, event: Callable[[Observer], None]) -> None:
        for observer in list(self._observers):
            try:
                event(observer)
            except Exception as error:
                if not isinstance(observer, Logger):
                    raise
                self._observers.remove(observer)
                self.note(f"warning: {type(observer).__name__} logs no more: {error}")


class Logger(Observer):
    """Base of the loggers.

    Args:
        base: the folder under which they write, each in one of its own.

    Attributes:
        name: what `--log` calls it.
        library: the module that it needs; empty: none.

    Raises:
        OutputError: the library is not installed, or cannot be imported.
    """

    name = ""
    library = ""
    stamps_times = True

    def __init__(self, base: Path) -> None:
        self.base = base
        self._private = False
        self._last_step = time.monotonic()
        try:
            self._library: Any = import_module(self.library) if self.library else None
        except ImportError:
            raise OutputError(
                f"logging to {self.name} needs its library: pip install 'fedsynth[{self.name}]'"
            ) from None
        except Exception as error:  # a library that is damaged, or of other versions than it needs
            raise self._cannot_begin(error) from error

    def started(self, settings: RunSettings, folder: Path | None) -> None:
        """Begins to log.

        Raises:
            OutputError: the library refuses: no rights, no key, no server.
        """
        self._private = settings.privacy is not None
        try:
            self._open("run" if folder is None else folder.name, settings_of(settings))
        except OutputError:
            raise
        except Exception as error:  # of any library
            raise self._cannot_begin(error) from error

    def _cannot_begin(self, error: Exception) -> OutputError:
        return OutputError(f"cannot log to {self.name}: {type(error).__name__}: {one_line(error)}")

    def step(self, round: int, phase: str, completed: int, total: int) -> None:
        """Logs the progress of a long round; nothing for a private run."""
        if self._private or time.monotonic() - self._last_step < STEP_SECONDS:
            return
        self._last_step = time.monotonic()
        self._write({f"progress/{phase}": completed / max(1, total)}, round)

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self._write(numbers_of(row), int(row["round"]))

    def ended(self, summary: Mapping[str, Any] | None) -> None:
        self._close({} if summary is None else numbers_of(summary), summary is not None)

    def _open(self, name: str, settings: Mapping[str, Any]) -> None:
        raise NotImplementedError  # abstract

    def _write(self, values: Numbers, round: int) -> None:
        raise NotImplementedError  # abstract

    def _close(self, summary: Numbers, finished: bool) -> None:
        raise NotImplementedError  # abstract


class CsvLogger(Logger):
    """BASE/csv/RUN.csv: a line a round, a column for each number that any round has. No times of
    its own."""

    name = "csv"
    stamps_times = False

    def _open(self, name: str, settings: Mapping[str, Any]) -> None:
        self.path = self.base / "csv" / f"{name}.csv"
        self._rows = self._read()

    def _read(self) -> list[dict[str, str]]:
        """The lines of a run that goes on."""
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise OutputError(f"cannot read {self.path}: {error.strerror}") from None

    def step(self, round: int, phase: str, completed: int, total: int) -> None:
        pass

    def _write(self, values: Numbers, round: int) -> None:
        line = {"round": str(round), **{key: f"{value:.10g}" for key, value in values.items()}}
        line["round"] = str(round)
        previous = [
            row for row in self._rows if row["round"].isdigit() and int(row["round"]) < round
        ]
        self._rows = [*previous, line]
        text = StringIO()
        columns = list(dict.fromkeys(key for row in self._rows for key in row))
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text.getvalue(), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from None

    def _close(self, summary: Numbers, finished: bool) -> None:
        pass


class TensorBoardLogger(Logger):
    """BASE/tensorboard/RUN: `tensorboard --logdir BASE/tensorboard` shows all runs."""

    name = "tensorboard"
    library = "torch.utils.tensorboard"
    _writer: Any = None

    def _open(self, name: str, settings: Mapping[str, Any]) -> None:
        self._writer = self._library.SummaryWriter(log_dir=str(self.base / "tensorboard" / name))
        lines = "".join(f"    {key} = {json.dumps(value)}\n" for key, value in settings.items())
        self._writer.add_text("settings", lines)

    def _write(self, values: Numbers, round: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, round)
        self._writer.flush()

    def _close(self, summary: Numbers, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbLogger(Logger):
    """A run of project fedsynth; what WANDB_MODE, WANDB_PROJECT and the like say holds, and files
    stand below BASE/wandb."""

    name = "wandb"
    library = "wandb"
    _run: Any = None

    def _open(self, name: str, settings: Mapping[str, Any]) -> None:
        self.base.mkdir(parents=True, exist_ok=True)
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", "fedsynth"),
            name=name,
            dir=str(self.base),
            config=dict(settings),
            reinit="finish_previous",
        )
        self._run.define_metric("*", step_metric="round")

    def _write(self, values: Numbers, round: int) -> None:
        self._run.log({**values, "round": round})

    def _close(self, summary: Numbers, finished: bool) -> None:
        if self._run is None:
            return
        self._run.summary.update({f"final/{key}": value for key, value in summary.items()})
        self._run.finish(exit_code=0 if finished else 1)


class MlflowLogger(Logger):
    """A run of experiment fedsynth; at MLFLOW_TRACKING_URI where that is set, else in
    BASE/mlflow.db (`mlflow ui --backend-store-uri sqlite:///BASE/mlflow.db`)."""

    name = "mlflow"
    library = "mlflow.tracking"
    _client: Any = None

    def _open(self, name: str, settings: Mapping[str, Any]) -> None:
        self.base.mkdir(parents=True, exist_ok=True)
        place = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = self._library.MlflowClient(
            place or f"sqlite:///{self.base.resolve() / 'mlflow.db'}"
        )
        existing = self._client.get_experiment_by_name("fedsynth")
        experiment = (
            existing.experiment_id if existing else self._client.create_experiment("fedsynth")
        )
        self._id = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._id, key, str(value)[:500])

    def _write(self, values: Numbers, round: int) -> None:
        for key, value in values.items():
            self._client.log_metric(self._id, key, value, step=round)

    def _close(self, summary: Numbers, finished: bool) -> None:
        if self._client is None:
            return
        for key, value in summary.items():
            self._client.log_metric(self._id, f"final/{key}", value)
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


LOGGERS: Mapping[str, type[Logger]] = {
    kind.name: kind for kind in (CsvLogger, TensorBoardLogger, WandbLogger, MlflowLogger)
}


def make_loggers(names: Sequence[str], base: Path, *, private: bool) -> Iterator[Logger | str]:
    """Loggers by name, and what has to be said of them.

    Args:
        names: of `LOGGERS`.
        base: the folder under which they write.
        private: whether the run has differential privacy.

    Raises:
        SettingError: an unknown name. OutputError: its library is not installed.
    """
    stamped = []
    for name in dict.fromkeys(names):
        if name not in LOGGERS:
            raise SettingError(None, "log", f"must be one of {', '.join(LOGGERS)}, got {name!r}")
        if LOGGERS[name].stamps_times:
            stamped.append(name)
        yield LOGGERS[name](base)
    if private and stamped:
        yield TIMES.format(names=", ".join(stamped))
