"""Verification of unchanged runs, reports of unfinished runs, public values, and loggers."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedsynth as fs
from fedsynth.data.shared_set import TENSORS
from fedsynth.errors import OutputError, UnaccountedReleaseError, UnknownNameError
from fedsynth.federation import client_runtime
from fedsynth.federation.in_process import InProcess
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy import Ledger, PrivacyError, read_ledger
from fedsynth.privacy.disclosure import Disclosure, public, released, simulation_only
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.report.build import write_report
from fedsynth.privacy.report.file import hash_of_files
from fedsynth.results import loggers
from fedsynth.results.disclosed import ROW, declared_row, disclosed
from fedsynth.results.finished import is_unfinished
from fedsynth.results.later_reports import unfinished_report
from fedsynth.results.loggers import LOGGERS, Logger, Several, make_loggers, numbers_of
from fedsynth.results.verification import verify_run
from tests.quick_runs import folder_of, quick_sections, read_rows
from tests.raising import raises
from tests.results.test_tampering import (
    codes,
    edit_json,
    fit_hashes,
    report_of,
    run,
    settings,
    verify,
)
from tests.simulation.test_resume import interrupted_at, unfinished


def named_clients_runs(output: Path) -> list[Path]:
    train, test = fs.load_dataset("digits")
    spec = replace(train.spec, name="scans", train_size=600)
    data = [fs.from_arrays(raw.images.numpy(), raw.labels.numpy(), spec) for raw in (train, test)]
    clients = {"parts": np.split(np.arange(600), [100, 350]), "names": ["east", "north", "west"]}
    sections = settings(max_records=1000, ledger=str(output / "kept"))
    return [run(output, sections, data=tuple(data), test="private", **clients)]


def runs_of_one_ledger(output: Path) -> list[Path]:
    ledger = str(output / "kept")
    first = run(output, settings(ledger=ledger, noise_multiplier=4.0, sample_rate=1.0))
    sections = settings("fedavg", ledger=ledger, epsilon=8.0, sample_rate=1.0)
    del sections["privacy"]["noise_multiplier"]
    second = run(output, sections)
    heads = json.loads((second / "privacy_report.json").read_text())["ledger_heads"]
    assert {(head["rows_before"], head["rows"]) for head in heads.values()} == {(2, 4)}
    return [first, second]


NOISE = {"privacy": {"noise_multiplier": 1.0}}
ROUND = {"run": {"rounds": 1}, **NOISE}
UNCHANGED_RUNS: dict[str, dict[str, Any] | Callable[[Path], list[Path]]] = {
    "two releases": settings(mechanism="features"),
    "paper": settings(mechanism="paper"),
    "zero-out, four sums": settings(adjacency="zero-out", four_sums=True),
    "replace-one": settings("fedavg", adjacency="replace-one", clip=0.5),
    "participation": quick_sections(
        "fedavg", run={"rounds": 3, "participation": 0.4}, partition={"clients": 5}, **NOISE
    ),
    "local test splits": quick_sections("fedavg", partition={"local_test": 0.2}, **NOISE),
    "architectures": quick_sections("feddf", model={"clients": "convnet,linear"}, **ROUND),
    "generated images": quick_sections(
        "fedkf", method={"generator_width": 4, "generator_batch": 8, "latent": 8}, **NOISE
    ),
    "private test images, named clients": named_clients_runs,
    "permanent ledger, extended and with earlier rows": runs_of_one_ledger,
}


@pytest.mark.parametrize("kind", UNCHANGED_RUNS)
def test_unchanged_runs_are_verified(kind: str, tmp_path: Path) -> None:
    case = UNCHANGED_RUNS[kind]
    for folder in [run(tmp_path, case)] if isinstance(case, dict) else case(tmp_path):
        result = verify_run(folder)
        assert result.problems == []
        assert "were compared with the ledger files" in result.notes[0]
        assert verify(folder / "privacy_report.json") == []


def test_replaced_matrices_and_added_images_are_detected(tmp_path: Path) -> None:
    """Regression: `files` of the report listed the hash of such images."""
    folder = run(tmp_path, quick_sections("fedhydra", **ROUND))
    assert verify(folder) == []
    file = folder / "artefacts.safetensors"
    save_file({name: rows[:-1].clone() for name, rows in load_file(file).items()}, file)
    assert codes(folder) == ["files.artefacts.safetensors"]
    shutil.copy(file, folder / TENSORS)
    assert "files.synthetic.safetensors" in codes(folder)
    fit_hashes(folder)
    assert set(codes(folder)) == {"ledger.files"}


def test_runs_on_shared_ledger_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of both runs are interleaved, and the cap ends one in the middle of a round."""
    prepare = InProcess.prepare

    def prepare_and_charge(self: InProcess, context: fs.RoundContext) -> Any:
        refusals = prepare(self, context)
        for budget in [client.budget for client in self.clients] if context.round == 2 else ():
            ledger = budget.ledger
            other = replace(ledger.releases[-1], quantity="something else", round=7)
            Ledger(ledger.client, ledger.path, dataset=ledger.dataset).charge(other)
        return refusals

    monkeypatch.setattr(InProcess, "prepare", prepare_and_charge)
    capped = settings(ledger=str(tmp_path / "kept"), noise_multiplier=3.0, epsilon=4.0)
    folder = run(tmp_path, capped)
    monkeypatch.undo()
    assert verify(folder) == []
    assert "ended after 1 of 2 rounds" in (folder / "privacy_report.md").read_text()
    row = json.loads((folder / "metrics.jsonl").read_text())
    (folder / "metrics.jsonl").write_text(json.dumps({**row, "epsilon": 1.0}) + "\n")
    assert "metrics.jsonl.epsilon" in codes(folder)


@pytest.mark.parametrize("rounds", [1, 3])
def test_equal_runs_at_once_on_one_ledger_are_verified(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the files' hash of the other run was expected, because both runs' rows are equal.

    A later equal run, which stops before its note, does not allow another hash.
    """
    equal = settings("fedavg", ledger=str(tmp_path / "kept"), noise_multiplier=3.0)
    equal["run"]["rounds"] = rounds
    waiting = [equal]
    folders = []
    note_files = InProcess.note_files

    def note_after_other_run(self: InProcess, sha256: str) -> None:
        if waiting:
            folders.append(run(tmp_path / "inner", waiting.pop()))
        note_files(self, sha256)

    monkeypatch.setattr(InProcess, "note_files", note_after_other_run)
    folders.append(run(tmp_path / "outer", equal))
    for folder in folders:
        assert verify(folder) == []
    for taken, other in (folders, folders[::-1]):
        start = (taken / "privacy_start.json").read_bytes()
        edit_json("privacy_start.json", partial(with_id_of, other))(taken)
        assert "ledger.files" in codes(taken)
        (taken / "privacy_start.json").write_bytes(start)
    folder = run(tmp_path / "alone", settings("fedavg", ledger=str(tmp_path / "other")))
    (folder / "artefacts.safetensors").write_bytes(b"x")
    fit_hashes(folder)
    for path in sorted((tmp_path / "other").glob("*.jsonl")):
        ledger = Ledger(None, path, dataset=None)
        for release in ledger.releases:
            ledger.charge(release)
        ledger.note_files(hash_of_files(report_of(folder)["files"]))
    assert "ledger.files" in codes(folder)


@pytest.mark.parametrize("own", [True, False])
def test_unplanned_charges_of_the_run_are_found(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a kept ledger hid a second charge of the run, because other runs may charge, too.

    The ledger of a client that is not in the run has no note of the run's files.
    """
    kept = tmp_path / "kept"
    prepare = InProcess.prepare

    def charge_again(self: InProcess, context: fs.RoundContext) -> Any:
        ledger = self.clients[0].ledger
        if context.round == 2 and ledger is not None:
            another = ledger if own else Ledger(None, ledger.path, dataset=None)
            another.charge(ledger.releases[0])
        return prepare(self, context)

    monkeypatch.setattr(InProcess, "prepare", charge_again)
    folder = run(tmp_path, settings("fedavg", ledger=str(kept), noise_multiplier=3.0))
    release = read_ledger(min(kept.glob("*.jsonl"))).releases[0]
    Ledger("another", kept / "another.jsonl", dataset="another").charge(release)
    assert codes(folder) == (["ledger.foreign"] if own else [])


def test_charges_of_the_run_before_its_start_are_found(tmp_path: Path) -> None:
    """A start that is moved behind a charge would present it as one of an earlier run."""
    kept = tmp_path / "kept"
    folder = run(tmp_path, settings("fedavg", ledger=str(kept), noise_multiplier=3.0))

    def moved(start: dict[str, Any]) -> None:
        for client, place in start["ledgers"].items():
            place |= {"rows": 1, "chain": read_ledger(kept / f"{client}.jsonl").lines.chains[1]}

    edit_json("privacy_start.json", moved)(folder)
    assert "ledger.foreign" in codes(folder)


def with_id_of(other: Path, start: dict[str, Any]) -> None:
    """Claims that a run's charges are those of another run."""
    start["charge_id"] = json.loads((other / "privacy_start.json").read_text())["charge_id"]


def test_run_resumed_after_its_last_charge_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: another run's charge in between was taken for the last one of the resumed run."""
    sections = settings("fedavg", ledger=str(tmp_path / "kept"))

    def killed(self: InProcess, sha256: str) -> None:
        raise OSError("killed")

    monkeypatch.setattr(InProcess, "note_files", killed)
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "outer", sections)
    monkeypatch.undo()
    other = run(tmp_path / "inner", sections)
    resumed = fs.simulate(fs.resolve(sections), resume=unfinished(tmp_path / "outer"))
    assert verify(other) == verify(folder_of(resumed)) == []


def test_injected_noise_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = partial(SecretGenerator, test_only=np.random.default_rng(0))
    monkeypatch.setattr(client_runtime, "SecretGenerator", secret)
    folder = run(tmp_path, settings())
    monkeypatch.undo()
    assert "not private" in (folder / "privacy_report.md").read_text()
    assert verify(folder) == []


def test_stopped_private_runs_can_be_reported(tmp_path: Path) -> None:
    """The last row is torn, and the ledgers have earlier rows and were moved."""
    ledger, moved = str(tmp_path / "kept"), tmp_path / "moved"
    run(tmp_path, settings("fedavg", ledger=ledger))
    with interrupted_at(2, replacing=True):  # after the clients' releases
        run(tmp_path, settings(ledger=ledger))
    folder = unfinished(tmp_path)
    assert is_unfinished(folder)
    with pytest.raises(PrivacyError, match="To build a report, run fedsynth privacy report"):
        verify_run(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "epsi')
    (tmp_path / "kept").rename(moved)
    with pytest.raises(PrivacyError, match="with --ledger"):
        unfinished_report(folder)
    report: Any = unfinished_report(folder, ledger=moved)
    write_report(report, folder)
    assert verify(folder, ledger=moved) == []
    assert "abandoned after 1 of 2 rounds" in (folder / "privacy_report.md").read_text()
    head = report["ledger_heads"]["client-000"]
    assert (head["rows_before"], head["rows"]) == (2, 4)
    entries = [entry for entry in report["ledger"] if entry["mechanism"] == "residual"]
    assert [entry["rounds"] for entry in entries] == [[1, 2]]
    write_report({**report, "abandoned": False}, folder)
    assert verify(folder, ledger=moved) == ["abandoned is False, but True is expected"]
    (folder / "metrics.jsonl").unlink()
    assert any("rounds_done" in problem for problem in verify(folder))
    (moved / "client-001.jsonl").unlink()
    with raises(PrivacyError, "ledger.unusable"):
        unfinished_report(folder, ledger=moved)
    public_run = run(tmp_path, quick_sections("fedavg"))
    (public_run / "summary.json").unlink()
    assert is_unfinished(public_run)
    with pytest.raises(PrivacyError, match="no differential privacy"):
        unfinished_report(public_run)


def settings_with(method: Any, key: str = "clean_loss", **privacy: Any) -> fs.RunSettings:
    sections = quick_sections("fedavg", method={"key": key}, privacy=privacy)
    del sections["run"]["method"]
    return fs.resolve(sections, own_method=method)


def test_rows_are_split_by_declaration() -> None:
    models = {"aca": {"test_accuracy": 0.4, "local": {"amp": 0.3}}}
    row = {"round": 3, "test_accuracy": 0.5, "seconds": 1.0, "models": models}
    split = disclosed(row, ROW)
    public_row = {"round": 3, "test_accuracy": 0.5, "models": {"aca": {"test_accuracy": 0.4}}}
    assert split.public == public_row
    assert split.simulation_only == {"seconds": 1.0, "models": models}
    open_run = disclosed({**row, "anything": 1}, None)
    assert (open_run.public, open_run.simulation_only) == ({**row, "anything": 1}, {})
    for undeclared in ({"loss": 0.5}, {"models": {"aca": {"loss": 0.5}}}):
        with raises(UnaccountedReleaseError, "release.unaccounted"):
            disclosed({"round": 1, **undeclared}, ROW)


@dataclass(frozen=True)
class Undeclared(fs.FedAvg):
    name: ClassVar[str] = "undeclared"
    key: str = "clean_loss"

    def facts(self, state: fs.ServerState, context: fs.RoundContext) -> Mapping[str, Any]:
        return {**super().facts(state, context), self.key: 0.25}


@dataclass(frozen=True)
class Declared(Undeclared):
    name: ClassVar[str] = "declared"
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **fs.FedAvg.metric_privacy,
        "clean_loss": released("computed from uploads"),
        "seconds": public("of the engine, which shows it in simulations only"),
    }


def noted(observer: Any, text: str) -> bool:
    return any(text in call.args[0] for call in observer.note.mock_calls)


def test_undeclared_metrics_are_left_out(tmp_path: Path) -> None:
    """Regression: they ended the run after its first round was charged."""
    recorder = Mock(spec=fs.Observer)
    undeclared = settings_with(Undeclared, noise_multiplier=3.0)
    private = fs.simulate(undeclared, output=tmp_path / "private", observer=recorder)
    assert noted(recorder, "metric clean_loss: it is not declared")
    assert all("clean_loss" not in row for row in read_rows(folder_of(private)))
    assert "clean_loss" not in str(recorder.round_ended.mock_calls)
    recorder = Mock(spec=fs.Observer)
    public_run = fs.simulate(settings_with(Undeclared), observer=recorder)
    assert [call.args[0] for call in recorder.round_ended.mock_calls] == public_run.metrics
    assert public_run.metrics[0]["clean_loss"] == 0.25
    declared, logger = settings_with(Declared, noise_multiplier=3.0), ListLogger(tmp_path)
    run = fs.simulate(declared, output=tmp_path / "declared", observer=logger)
    assert logger._log == [numbers_of(row) for row in read_rows(folder_of(run))]
    assert "seconds" not in logger._log[0]
    assert [row["clean_loss"] for row in read_rows(folder_of(run))] == [0.25, 0.25]
    assert verify_run(folder_of(run), method=Declared).problems == []


@pytest.mark.parametrize(
    ("value", "label", "fault"),
    [
        (math.nan, released("a norm", float), "None or not finite, but declared as float"),
        ("0.5", released("a norm", float), "of type str, but declared as float"),
        ({1, 2}, released("a set"), "JSON cannot store it"),
        (0.5, public("a constant", float), "planned_facts"),
    ],
)
def test_metrics_with_a_fault_are_left_out(
    value: Any, label: Disclosure, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a run ended after its round was charged, with a false reason or none."""
    monkeypatch.setattr(Declared, "metric_privacy", {"clean_loss": label})
    monkeypatch.setattr(Declared, "facts", lambda *_: {"clean_loss": value})
    recorder = Mock(spec=fs.Observer)
    run = fs.simulate(settings_with(Declared, noise_multiplier=3.0), observer=recorder)
    assert all("clean_loss" not in row for row in run.metrics)
    assert noted(recorder, fault)


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (torch.tensor(0.5), released("a norm", float)),
        (np.float32(0.5), released("a norm", float)),
        (np.array([0.5]), released("norms", list[float])),
        (0.5, simulation_only("a norm", str)),
    ],
)
def test_metrics_become_numbers_and_lists(
    value: Any, label: Disclosure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Declared, "metric_privacy", {"clean_loss": label})
    monkeypatch.setattr(Declared, "facts", lambda *_: {"clean_loss": value})
    settings = settings_with(Declared, noise_multiplier=3.0)
    run = fs.simulate(settings, observer=Mock(spec=fs.Observer))
    assert [row["clean_loss"] for row in run.metrics] == [np.asarray(value).tolist()] * 2


@pytest.mark.parametrize(
    "labels",
    [
        {"norm": "released"},
        [("norm", 1)],
        {"norm": released("a norm", torch.Tensor)},
        {"norm": released("norms", [float])},
    ],
)
def test_metrics_need_labels(labels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Declared, "metric_privacy", labels)
    with raises(UnaccountedReleaseError, "release.unaccounted"):
        fs.simulate(settings_with(Declared, noise_multiplier=3.0), output=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "label", "recorded"),
    [
        (np.float32(0.5), public("a constant", float), 0.5),
        (torch.tensor([0.5]), public("constants", list[float]), [0.5]),
        (math.nan, public("a constant", float), None),
        (0.5, released("a norm", float), None),
        (0.5, None, None),
    ],
)
def test_planned_metrics_are_verified(
    value: Any, label: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: the verification failed if a value was converted or left out."""
    monkeypatch.setattr(Declared, "metric_privacy", {} if label is None else {"c": label})
    monkeypatch.setattr(Declared, "facts", lambda *_: {})
    monkeypatch.setattr(Declared, "planned_facts", lambda *_: {"c": value})
    settings = settings_with(Declared, noise_multiplier=3.0)
    run = fs.simulate(settings, output=tmp_path, observer=Mock(spec=fs.Observer))
    assert [row.get("c") for row in read_rows(folder_of(run))] == [recorded] * 2
    assert verify_run(folder_of(run), method=Declared).problems == []


def test_methods_cannot_declare_engine_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not declared_row(Declared)["seconds"].may_be_shown
    declared = {"test_accuracy": public("by the method")}
    monkeypatch.setattr(Undeclared, "metric_privacy", declared)
    recorder = Mock(spec=fs.Observer)
    sections = settings_with(Undeclared, "test_accuracy", noise_multiplier=3.0)
    run = fs.simulate(sections, observer=recorder)
    assert noted(recorder, "metric test_accuracy: its name is reserved")
    assert run.metrics[-1]["test_accuracy"] == run.accuracy != 0.25
    for method in map(method_class, METHODS):
        assert all(rule.reason for rule in declared_row(method).values())
        assert not getattr(method, "metric_privacy", {}).keys() & ROW.keys()


TINY = quick_sections("fedavg", partition={"local_test": 0.2})


class ListLogger(Logger):
    name = "list"

    def _open(self, name: str, settings: Mapping[str, Any]) -> list[dict[str, float]]:
        return []

    def _write(self, values: Mapping[str, float], round: int) -> None:
        self._log.append(dict(values))


def test_observers_receive_all_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that fails is left out."""
    first, second, logger = Mock(spec=fs.Observer), Mock(spec=fs.Observer), ListLogger(tmp_path)
    monkeypatch.setattr(logger, "_write", Mock(side_effect=OutputError("no place")))
    observer = Several([logger, first, second])
    result = fs.simulate(fs.resolve(TINY), output=tmp_path, observer=observer)
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
    recorder = Mock(spec=fs.Observer)
    recorder.round_ended.side_effect = error
    with pytest.raises(type(error)):
        fs.simulate(fs.resolve(TINY), observer=Several([recorder]))
    assert recorder.mock_calls[-1] == call.ended(None)


def logged(name: str, base: Path) -> Path:
    (logger,) = make_loggers([name], base, private=False, note=print)
    return folder_of(fs.simulate(fs.resolve(TINY), output=base / "runs", observer=logger))


def test_tensorboard_logs_metrics_and_settings(tmp_path: Path) -> None:
    reason = "tensorboard is not installed (fedsynth[tensorboard])"
    pytest.importorskip("tensorboard", reason=reason)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = logged("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard" / folder.name))
    events.Reload()
    pairs = [(event.step, event.value) for event in events.Scalars("test_accuracy")]
    rows = read_rows(folder)
    assert pairs == [(row["round"], pytest.approx(row["test_accuracy"])) for row in rows]
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
    assert created[0].config["run.method"] == "fedavg"
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
    recorder = Mock(spec=fs.Observer)
    with pytest.raises(OutputError) as caught:
        fs.simulate(fs.resolve(TINY), observer=Several([recorder, LOGGERS[name](tmp_path)]))
    assert (
        str(caught.value)
        == f"cannot log to {name}: RuntimeError: no API key configured. Correct its settings"
    )
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
    with raises(UnknownNameError, "--log"):
        make_loggers(["excel"], tmp_path, private=False, note=print)
