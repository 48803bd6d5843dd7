"""Tests of observers and loggers: loggers write with the real libraries, without a network, and are
skipped if a library is not installed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.errors import OutputError, UnknownNameError
from fedsynth.federation.protocol import Observer
from fedsynth.results import loggers
from fedsynth.results.loggers import LOGGERS, Logger, Several, make_loggers, numbers_of
from fedsynth.simulation.simulate import simulate

TINY: dict[str, dict[str, Any]] = {
    "run": {"method": "fedavg", "rounds": 2, "device": "cpu"},
    "partition": {"kind": "iid", "clients": 2, "local_test": 0.2},
    "model": {"name": "linear"},
    "method": {"local_steps": 1},
}
PRIVATE = {**TINY, "partition": {"kind": "iid", "clients": 2}, "privacy": {"noise_multiplier": 2.0}}


class EventRecorder(Observer):
    """Lists events; the end of a round may raise an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.events: list[tuple[str, Any]] = []
        self.error = error

    def started(self, settings: RunSettings, folder: Path | None) -> None:
        self.events.append(("started", (settings.rounds, folder)))

    def note(self, text: str) -> None:
        self.events.append(("note", text))

    def step(self, round: int, phase: str, done: int, total: int) -> None:
        self.events.append(("step", round))

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.events.append(("round", row["round"]))
        if self.error is not None:
            raise self.error

    def ended(self, summary: Mapping[str, Any] | None) -> None:
        self.events.append(("ended", summary))


def test_observers_receive_all_events(tmp_path: Path) -> None:
    first, second = EventRecorder(), EventRecorder()
    result = simulate(resolve(TINY), output=tmp_path, observer=Several([first, second]))
    assert first.events == second.events
    assert first.events[0] == ("started", (2, result.folder))
    assert "step" in dict(first.events)
    assert [value for kind, value in first.events if kind == "round"] == [1, 2]
    assert first.events[-1] == ("ended", result.summary)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine")])
def test_observer_errors_end_run(error: BaseException) -> None:
    """An observer is no logger, so its error is raised."""
    recorder = EventRecorder(error)
    with pytest.raises(type(error)):
        simulate(resolve(TINY), observer=Several([recorder]))
    assert recorder.events[-1] == ("ended", None)


def logged(name: str, base: Path, sections: dict[str, Any] = TINY) -> Path:
    (logger,) = make_loggers([name], base, private=False, note=print)
    result = simulate(resolve(sections), output=base / "runs", observer=logger)
    assert result.folder is not None
    return result.folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class ListLogger(Logger):
    """Keeps the numbers of each round in a list."""

    name = "list"

    def _open(self, name: str, settings: Mapping[str, Any]) -> list[dict[str, float]]:
        return []

    def _write(self, values: Mapping[str, float], round: int) -> None:
        self._log.append(dict(values))


def test_private_runs_log_only_published_metrics(tmp_path: Path) -> None:
    logger = ListLogger(tmp_path)
    result = simulate(resolve(PRIVATE), output=tmp_path / "runs", observer=logger)
    assert result.folder is not None
    assert logger._log == [numbers_of(row) for row in rows_of(result.folder)]
    assert "seconds" not in logger._log[0]


def test_tensorboard_logs_metrics_and_settings(tmp_path: Path) -> None:
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed (fedsynth[tensorboard])"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = logged("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard" / folder.name))
    events.Reload()
    pairs = [(event.step, event.value) for event in events.Scalars("test_accuracy")]
    assert pairs == [(row["round"], pytest.approx(row["test_accuracy"])) for row in rows_of(folder)]
    assert "local/amp" in events.Tags()["scalars"]
    (text,) = events.Tensors("settings/text_summary")
    assert b'run.method = "fedavg"' in text.tensor_proto.string_val[0]


def test_wandb_logs_metrics_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (fedsynth[wandb])")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    original_init = wandb.init
    created: list[Any] = []

    def init(**values: Any) -> Any:
        created.append(original_init(**values))
        return created[-1]

    monkeypatch.setattr(wandb, "init", init)
    logged("wandb", tmp_path)
    (run,) = created
    assert run.config["run.method"] == "fedavg"
    (log,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    keys = [b"local/amp", b"final/test_accuracy"]
    deadline = time.monotonic() + 30  # wandb's own process writes the file
    while not all(key in log.read_bytes() for key in keys):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_unknown_loggers_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="'excel'"):
        make_loggers(["excel"], tmp_path, private=False, note=print)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_failed_logger_start_raises_output_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a missing library, key, right or server caused a traceback."""
    refuse = Mock(side_effect=RuntimeError("no API key\nconfigured"))
    fake = SimpleNamespace(init=refuse, SummaryWriter=refuse)
    monkeypatch.setattr(loggers, "import_module", lambda module: fake)
    recorder = EventRecorder()
    with pytest.raises(OutputError) as caught:
        simulate(resolve(TINY), observer=Several([recorder, LOGGERS[name](tmp_path)]))
    assert str(caught.value) == f"cannot log to {name}: RuntimeError: no API key configured"
    assert "round" not in dict(recorder.events)

    for error, message in (
        (ImportError("none"), rf"pip install 'fedsynth\[{name}\]'"),
        (AttributeError("partially"), f"cannot log to {name}: AttributeError: partially"),
    ):
        monkeypatch.setattr(loggers, "import_module", Mock(side_effect=error))
        with pytest.raises(OutputError, match=message):
            LOGGERS[name](tmp_path)


def test_failing_logger_does_not_stop_run(tmp_path: Path) -> None:
    class FailingLogger(ListLogger):
        def _write(self, values: Mapping[str, float], round: int) -> None:
            raise OutputError("no place")

    recorder = EventRecorder()
    simulate(resolve(TINY), observer=Several([recorder, FailingLogger(tmp_path)]))
    assert ("note", "warning: FailingLogger has stopped logging: no place") in recorder.events
    assert recorder.events[-1][0] == "ended"


def test_private_runs_warn_about_time_stamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "LOGGERS", {"list": ListLogger})
    notes: list[str] = []
    make_loggers(["list"], tmp_path, private=False, note=notes.append)
    assert notes == []
    make_loggers(["list"], tmp_path, private=True, note=notes.append)
    assert "logging to list records the time" in notes[0]
