"""Tests that a private run's metrics, summary and logs contain declared values only, and of
loggers, which write with the real libraries, without a network, and are skipped where one is not
installed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock, call

import pytest

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.errors import OutputError, UnknownNameError
from fedsynth.federation.protocol import Observer
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fedavg import FedAvg
from fedsynth.privacy.disclosure import Disclosure, public, released
from fedsynth.privacy.errors import UnaccountedReleaseError
from fedsynth.results import loggers
from fedsynth.results.disclosed import ROW, declared_row, disclosed
from fedsynth.results.loggers import LOGGERS, Logger, Several, make_loggers, numbers_of
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate
from tests.quick_runs import folder_of, quick_sections, read_rows


def settings(method: type[FedAvg], key: str = "clean_loss", **privacy: Any) -> RunSettings:
    sections = quick_sections("fedavg", method={"key": key}, privacy=privacy)
    del sections["run"]["method"]
    return resolve(sections, own_method=method)


def test_rows_are_split_by_declaration() -> None:
    row = {
        "round": 3,
        "test_accuracy": 0.5,
        "seconds": 1.0,
        "models": {"aca": {"test_accuracy": 0.4, "local": {"amp": 0.3}}},
    }
    split = disclosed(row, ROW)
    public_row = {"round": 3, "test_accuracy": 0.5, "models": {"aca": {"test_accuracy": 0.4}}}
    assert split.public == public_row
    assert split.simulation_only == {"seconds": 1.0, "models": row["models"]}
    open_run = disclosed({**row, "anything": 1}, None)
    assert (open_run.public, open_run.simulation_only) == ({**row, "anything": 1}, {})
    for undeclared in ({"loss": 0.5}, {"models": {"aca": {"loss": 0.5}}}):
        with pytest.raises(UnaccountedReleaseError, match="must declare metric 'loss'"):
            disclosed({"round": 1, **undeclared}, ROW)


@dataclass(frozen=True)
class Undeclared(FedAvg):
    name: ClassVar[str] = "undeclared"
    key: str = "clean_loss"

    def facts(self, state: ServerState, context: RoundContext) -> Mapping[str, Any]:
        return {**super().facts(state, context), self.key: 0.25}


@dataclass(frozen=True)
class Declared(Undeclared):
    name: ClassVar[str] = "declared"
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **FedAvg.metric_privacy,
        "clean_loss": released("computed from uploads"),
        "seconds": public("of the engine, which shows it in simulations only"),
    }


def test_undeclared_metrics_are_rejected(tmp_path: Path) -> None:
    recorder = Mock(spec=Observer)
    undeclared = settings(Undeclared, noise_multiplier=3.0)
    with pytest.raises(UnaccountedReleaseError, match="'clean_loss'"):
        simulate(undeclared, output=tmp_path / "private", observer=recorder)
    recorder.round_ended.assert_not_called()
    assert not list((tmp_path / "private").glob("*/metrics.jsonl"))
    public_run = simulate(settings(Undeclared), observer=recorder)
    assert [call.args[0] for call in recorder.round_ended.mock_calls] == public_run.metrics
    assert public_run.metrics[0]["clean_loss"] == 0.25
    declared, logger = settings(Declared, noise_multiplier=3.0), ListLogger(tmp_path)
    run = simulate(declared, output=tmp_path / "declared", observer=logger)
    assert logger._log == [numbers_of(row) for row in read_rows(folder_of(run))]
    assert "seconds" not in logger._log[0]
    assert [row["clean_loss"] for row in read_rows(folder_of(run))] == [0.25, 0.25]
    assert verify_run(folder_of(run), method=Declared).problems == []


def test_methods_cannot_declare_engine_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not declared_row(Declared)["seconds"].may_be_shown
    declared = {"test_accuracy": public("by the method")}
    monkeypatch.setattr(Undeclared, "metric_privacy", declared)
    with pytest.raises(UnaccountedReleaseError, match="'test_accuracy'"):
        simulate(settings(Undeclared, "test_accuracy", noise_multiplier=3.0))
    for method in map(method_class, METHODS):
        assert all(rule.reason for rule in declared_row(method).values())
        assert not method.metric_privacy.keys() & ROW.keys()


TINY = quick_sections("fedavg", partition={"local_test": 0.2})


class ListLogger(Logger):
    name = "list"

    def _open(self, name: str, settings: Mapping[str, Any]) -> list[dict[str, float]]:
        return []

    def _write(self, values: Mapping[str, float], round: int) -> None:
        self._log.append(dict(values))


def test_observers_receive_all_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that fails is left out."""
    first, second, logger = Mock(spec=Observer), Mock(spec=Observer), ListLogger(tmp_path)
    monkeypatch.setattr(logger, "_write", Mock(side_effect=OutputError("no place")))
    observer = Several([logger, first, second])
    result = simulate(resolve(TINY), output=tmp_path, observer=observer)
    assert first.mock_calls == second.mock_calls
    stopped = call("warning: ListLogger has stopped logging: no place")
    assert first.note.mock_calls.count(stopped) == 1
    started, *_, ended = first.mock_calls
    assert started == call.started(result.settings, result.folder)
    first.step.assert_called()
    assert first.round_ended.mock_calls == [call(row) for row in result.metrics]
    assert ended == call.ended(result.summary)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine")])
def test_observer_errors_end_run(error: BaseException) -> None:
    """An observer is no logger, so its error is raised."""
    recorder = Mock(spec=Observer)
    recorder.round_ended.side_effect = error
    with pytest.raises(type(error)):
        simulate(resolve(TINY), observer=Several([recorder]))
    assert recorder.mock_calls[-1] == call.ended(None)


def logged(name: str, base: Path) -> Path:
    (logger,) = make_loggers([name], base, private=False, note=print)
    return folder_of(simulate(resolve(TINY), output=base / "runs", observer=logger))


def test_tensorboard_logs_metrics_and_settings(tmp_path: Path) -> None:
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed (fedsynth[tensorboard])"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = logged("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard" / folder.name))
    events.Reload()
    pairs = [(event.step, event.value) for event in events.Scalars("test_accuracy")]
    assert pairs == [
        (row["round"], pytest.approx(row["test_accuracy"])) for row in read_rows(folder)
    ]
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


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_failed_logger_start_raises_output_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a missing library, key, right or server caused a traceback."""
    refuse = Mock(side_effect=RuntimeError("no API key\nconfigured"))
    fake = SimpleNamespace(init=refuse, SummaryWriter=refuse)
    monkeypatch.setattr(loggers, "import_module", lambda module: fake)
    recorder = Mock(spec=Observer)
    with pytest.raises(OutputError) as caught:
        simulate(resolve(TINY), observer=Several([recorder, LOGGERS[name](tmp_path)]))
    assert str(caught.value) == f"cannot log to {name}: RuntimeError: no API key configured"
    recorder.round_ended.assert_not_called()

    for error, message in (
        (ImportError("none"), rf"pip install 'fedsynth\[{name}\]'"),
        (AttributeError("partially"), f"cannot log to {name}: AttributeError: partially"),
    ):
        monkeypatch.setattr(loggers, "import_module", Mock(side_effect=error))
        with pytest.raises(OutputError, match=message):
            LOGGERS[name](tmp_path)


def test_unknown_loggers_are_rejected_and_private_runs_warned_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "LOGGERS", {"list": ListLogger})
    notes: list[str] = []
    make_loggers(["list"], tmp_path, private=False, note=notes.append)
    assert notes == []
    make_loggers(["list"], tmp_path, private=True, note=notes.append)
    assert "logging to list records the time" in notes[0]
    with pytest.raises(UnknownNameError, match="'excel'"):
        make_loggers(["excel"], tmp_path, private=False, note=print)
