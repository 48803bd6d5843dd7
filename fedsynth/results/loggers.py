"""Logs the rounds of a run to TensorBoard or Weights & Biases.

The loggers receive the same values as metrics.jsonl. For a private run, values that only a
simulation may show are excluded. The loggers add a time stamp to each entry, and the duration of a
round may reveal something about private data. The logs are therefore written outside the run
folder, and a private run prints a warning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fedsynth.config.settings import RunSettings
from fedsynth.errors import OutputError, one_line
from fedsynth.federation.protocol import Observer
from fedsynth.validation import check_choice, flattened

TIMES = (
    "warning: logging to {names} records the time of each round. Times may reveal information "
    "about private data, so the privacy guarantee does not cover these logs"
)
Numbers = Mapping[str, float]


def numbers_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Collects all numbers from a round's metrics, and returns them by name, for loggers.

    A number in a nested dictionary gets a name such as "local/amp". Values that are not numbers are
    left out.

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


class Several(Observer):
    """An observer that forwards a run's events to several other observers.

    A logger may fail after the run has begun, for example because of a full disk or a service that
    does not answer. The logger is then removed, the other observers receive a note, and the run
    continues.

    Args:
        observers: the observers, in the order in which they receive events.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)

    def started(self, settings: RunSettings, folder: Path | None) -> None:
        self._send("started", settings, folder)

    def note(self, text: str) -> None:
        self._send("note", text)

    def step(self, round: int, stage: str, completed: int, total: int) -> None:
        self._send("step", round, stage, completed, total)

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self._send("round_ended", row)

    def ended(self, summary: Mapping[str, Any] | None) -> None:
        self._send("ended", summary)

    def _send(self, event: str, *values: Any) -> None:
        for observer in list(self._observers):
            try:
                getattr(observer, event)(*values)
            except Exception as error:
                if not isinstance(observer, Logger) or event == "started":
                    raise
                self._observers.remove(observer)
                self.note(f"warning: {type(observer).__name__} has stopped logging: {error}")


class Logger(Observer):
    """Base class for loggers, which copy a run's metrics to another tool.

    Args:
        base: the parent folder of the logs. Each logger writes into its own folder below it.

    Attributes:
        name: the logger's name for the option `--log`.
        module: the Python module that the logger needs, or an empty string.

    Raises:
        OutputError: the logger's library is not installed, or cannot be imported.
    """

    name = ""
    module = ""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._log: Any = None
        with self._setup_errors():
            self._library: Any = import_module(self.module) if self.module else None

    def started(self, settings: RunSettings, folder: Path | None) -> None:
        """Opens the log.

        Raises:
            OutputError: the log cannot be opened, for example because a file cannot be written, an
                API key is missing or a server does not answer.
        """
        name = "run" if folder is None else folder.name
        with self._setup_errors():
            self._log = self._open(name, flattened(settings.to_mapping()))

    @contextmanager
    def _setup_errors(self) -> Iterator[None]:
        try:
            yield
        except ImportError:
            raise OutputError(
                f"{self.name} is not installed. Run pip install 'fedsynth[{self.name}]'"
            ) from None
        except Exception as error:  # of any library
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise OutputError(
                f"cannot log to {self.name}: {reason}. Correct its settings"
            ) from error

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self._write(numbers_of(row), int(row["round"]))

    def ended(self, summary: Mapping[str, Any] | None) -> None:
        if self._log is not None:
            self._close(numbers_of(summary or {}), finished=summary is not None)

    def _open(self, name: str, settings: Mapping[str, Any]) -> Any:
        """Opens a run's log, and returns an object for writing to the log."""
        raise NotImplementedError  # abstract

    def _write(self, values: Numbers, round: int) -> None:
        raise NotImplementedError  # abstract

    def _close(self, summary: Numbers, *, finished: bool) -> None:
        """Closes the log."""


class TensorBoardLogger(Logger):
    """Logs to the folder BASE/tensorboard/RUN.

    The command `tensorboard --logdir BASE/tensorboard` shows all runs.
    """

    name = "tensorboard"
    module = "torch.utils.tensorboard"

    def _open(self, name: str, settings: Mapping[str, Any]) -> Any:
        writer = self._library.SummaryWriter(log_dir=str(self.base / "tensorboard" / name))
        lines = "".join(f"    {key} = {json.dumps(value)}\n" for key, value in settings.items())
        writer.add_text("settings", lines)
        return writer

    def _write(self, values: Numbers, round: int) -> None:
        for key, value in values.items():
            self._log.add_scalar(key, value, round)
        self._log.flush()

    def _close(self, summary: Numbers, *, finished: bool) -> None:
        self._log.close()


class WandbLogger(Logger):
    """Logs to Weights & Biases, in the project fedsynth, with files below BASE/wandb.

    The library's environment variables, such as WANDB_MODE and WANDB_PROJECT, apply.
    """

    name = "wandb"
    module = "wandb"

    def _open(self, name: str, settings: Mapping[str, Any]) -> Any:
        self.base.mkdir(parents=True, exist_ok=True)
        run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", "fedsynth"),
            name=name,
            dir=str(self.base),
            config=dict(settings),
            reinit="finish_previous",
        )
        run.define_metric("*", step_metric="round")
        return run

    def _write(self, values: Numbers, round: int) -> None:
        self._log.log({**values, "round": round})

    def _close(self, summary: Numbers, *, finished: bool) -> None:
        self._log.summary.update({f"final/{key}": value for key, value in summary.items()})
        self._log.finish(exit_code=0 if finished else 1)


LOGGERS: Mapping[str, type[Logger]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def make_loggers(
    names: Sequence[str], base: Path, *, private: bool, note: Callable[[str], None]
) -> list[Logger]:
    """Creates the loggers with the given names.

    Args:
        names: names in `LOGGERS`. A repeated name has no effect.
        base: the parent folder of the logs.
        private: whether the run has differential privacy.
        note: receives a warning about time stamps if the run is private.

    Raises:
        UnknownNameError: there is no logger with such a name.
        OutputError: the library of a logger is not installed.
    """
    for name in names:
        check_choice(None, "--log", name, tuple(LOGGERS))
    loggers = [LOGGERS[name](base) for name in dict.fromkeys(names)]
    if private and loggers:
        note(TIMES.format(names=", ".join(logger.name for logger in loggers)))
    return loggers
