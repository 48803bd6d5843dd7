"""Tests of private selection: what it charges, what leaves it, and that broken versions are found."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedsynth import FedAvg
from fedsynth.cli.app import app
from fedsynth.data.load import load_dataset
from fedsynth.errors import (
    BudgetExceededError,
    DivergedError,
    FedsynthError,
    LedgerError,
    SettingError,
)
from fedsynth.evaluation.accuracy import predict
from fedsynth.experiments import read_sweep, select_privately, selection
from fedsynth.experiments.runner import run_sweep
from fedsynth.experiments.selection import RESULT, plan_selection, result_folder
from fedsynth.federation import run_data
from fedsynth.models.registry import own_model
from fedsynth.privacy.accounting import Totals
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.selection import Selection
from fedsynth.results import charges
from fedsynth.results.verification import verify_run
from fedsynth.simulation.trial import Trial, score_row
from tests.raising import raises

FILE = """
[sweep]
output = "{folder}/out"
[run]
method = "fedstats"
device = "cpu"
[data]
dataset = "digits"
[method]
features = "pixels"
[partition]
kind = "iid"
clients = 2
local_test = 0.3
seed = 0
[privacy]
epsilon = 4.0
ledger = "{folder}/ledger"
[selection]
law = "negative-binomial"
trials = 3
[grid]
"run.rounds" = [1, 2]
"""
Change = Callable[[str], str]


def write(folder: Path, change: Change = str) -> Path:
    file = folder / "choice.toml"
    file.write_text(change(FILE.format(folder=folder)))
    return file


def select(folder: Path, trials: int, change: Change = str) -> tuple[dict[str, Any], list[str]]:
    """Selects with this number of trials. Returns the result and the lines of output."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Selection, "number_of_trials", lambda *_: trials)
        return select_privately(read_sweep(write(folder, change)), lines.append), lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("selection")
    result, lines = select(folder, 4)
    assert len(lines) == 1  # on the plan, and none on a trial
    return folder, result


def run_of(folder: Path) -> Path:
    (run,) = (folder / "out").glob("best-*/2*")
    return run


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((run_of(folder) / "privacy_report.json").read_text())
    return report


def hides_trials(folder: Path) -> bool:
    """True if nothing of a losing trial is left, and the best one does not tell its number."""
    run = run_of(folder)
    names = {path.name for path in (folder / "out").iterdir()}
    single = names == {".lock", run.parent.name}
    files = {path.name for path in run.parent.iterdir()} == {RESULT, run.name}
    stated = json.loads((run / "summary.json").read_text())["folder"]
    times = {path.stat().st_mtime for path in (run, *run.rglob("*"))}
    rows = [len(read_ledger(path).releases) for path in (folder / "ledger").glob("*.jsonl")]
    return single and files and stated == str(run) and len(times) == 1 and rows == [1, 1]


def test_the_cost_is_that_of_the_selection(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, result = finished
    guarantee = report_of(folder)["guarantee"]
    assert 3.98 < result["epsilon"] <= 4.0
    assert guarantee["epsilon"] == pytest.approx(result["epsilon"])
    assert result["trial_epsilon"] < 0.8 * result["epsilon"]
    metrics = (run_of(folder) / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["epsilon"] for line in metrics} == {guarantee["epsilon"]}
    assert verify_run(run_of(folder)).problems == []
    text = (run_of(folder) / "privacy_report.md").read_text()
    assert "## Private selection" in text
    assert "Theorem 2" in text


def test_only_the_best_trial_is_left(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, result = finished
    assert hides_trials(folder)
    assert result["run"] == run_of(folder).name
    assert result["values"]["rounds"] in (1, 2)
    assert "trials" not in {*result} - {"expected_trials"}


def test_a_result_is_not_charged_again(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, result = finished
    again = CliRunner().invoke(app, ["sweep", str(folder / "choice.toml")])
    assert again.exit_code == 0, again.output
    assert f"{result['score']:.3f}" in again.output
    assert hides_trials(folder)
    (folder / "out" / ".lock").touch()
    with raises(BudgetExceededError, "budget.spent"):
        select(folder, 1, lambda text: text.replace("trials = 3", "trials = 4"))


def test_a_shown_losing_trial_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((shutil, "rmtree"), (tempfile.TemporaryDirectory, "_rmtree")):
        monkeypatch.setattr(owner, name, lambda *_, **__: None)
    select(tmp_path, 3)
    assert not hides_trials(tmp_path)


@pytest.mark.parametrize("claimed", ["one trial", "another plan", "no selection"])
def test_a_smaller_charge_is_found(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, claimed: str
) -> None:
    folder, result = finished
    copied = tmp_path / run_of(folder).name
    shutil.copytree(run_of(folder), copied)
    file = copied / "privacy_report.json"
    report = json.loads(file.read_text())
    if claimed == "one trial":
        report["guarantee"]["epsilon"] = result["trial_epsilon"]
    if claimed == "another plan":
        config = copied / "config.toml"
        config.write_text(config.read_text().replace("noise_multiplier = ", "noise_multiplier = 0"))
    if claimed == "no selection":
        report["ledger"][0]["selection"] = None
    file.write_text(json.dumps(report))
    assert verify_run(copied, ledger=folder / "ledger").problems


def test_a_run_beyond_the_charge_is_found(
    finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = Totals.of([(9.0, 1.0, 1)])
    monkeypatch.setattr(charges, "Totals", lambda steps: smaller)
    codes = {problem.code for problem in verify_run(run_of(finished[0])).problems}
    assert "ledger.missing" in codes


def test_the_best_score_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [0.2, 0.9, 0.4]
    remaining = iter(scores)
    measure = Trial.measure

    def ranked(self: Trial, *arguments: Any) -> None:
        measure(self, *arguments)
        self.score = next(remaining)

    monkeypatch.setattr(Trial, "measure", ranked)
    result, _ = select(tmp_path, 3)
    assert result["score"] == pytest.approx(max(scores) / held_out(tmp_path))


def held_out(folder: Path) -> float:
    sweep = read_sweep(write(folder, lambda text: text.replace('ledger"', 'fresh"')))
    return plan_selection(sweep).held_out


def has_noise(folder: Path) -> bool:
    """True if scores of one released model differ as the charged noise does."""
    found: list[float] = []
    exact: list[float] = []
    measure = Trial.measure

    def repeated(self: Trial, model: Any, clients: Any, context: Any) -> None:
        measure(self, model, clients, context)
        found.append(self.score)
        right = 0.0
        for client in clients:
            images = client.data.resident.subset(client.data.held_out)
            right += float((predict(model, images).argmax(1) == images.labels).sum())
        exact.append(right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "measure", repeated)
        result, _ = select(folder, 12, lambda text: text.replace("[1, 2]", "[1]"))
    errors = (np.array(found) - np.array(exact)) / (result["score_noise"] * held_out(folder))
    return bool(0.3 < errors.std() < 2)


@pytest.mark.usefixtures("repeatable_noise")
def test_the_score_has_the_charged_noise(tmp_path: Path) -> None:
    assert has_noise(tmp_path)


def test_a_score_without_noise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = GaussianSumMechanism.release

    def exact(self: GaussianSumMechanism) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if self._release.mechanism == "score":
                patch.setattr(SecretGenerator, "normal", lambda *_: torch.zeros(1, 1))
            return release(self)

    monkeypatch.setattr(GaussianSumMechanism, "release", exact)
    assert not has_noise(tmp_path)


def test_the_draws_are_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[float] = []
    uniform = SecretGenerator.uniform

    def recorded(self: SecretGenerator) -> float:
        assert self.is_secret
        draws.append(uniform(self))
        return draws[-1]

    monkeypatch.setattr(SecretGenerator, "uniform", recorded)
    select(tmp_path, 2)
    assert len(draws) == len(set(draws)) == 3  # the number of trials, and a candidate for each


@pytest.mark.parametrize("outcome", ["none drawn", "diverged"])
def test_no_run_may_be_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    def diverged(*_: Any) -> None:
        raise DivergedError("not finite")

    if outcome == "diverged":
        monkeypatch.setattr(Trial, "measure", diverged)
    monkeypatch.setattr(Selection, "number_of_trials", lambda *_: 2 * (outcome == "diverged"))
    shown = CliRunner().invoke(app, ["sweep", str(write(tmp_path))])
    assert shown.exit_code == 1
    assert "The charge remains" in shown.output
    assert [path.name for path in (tmp_path / "out").glob("best-*/*")] == [RESULT]
    assert [len(read_ledger(p).releases) for p in (tmp_path / "ledger").glob("*.jsonl")] == [1, 1]


def test_an_interrupted_selection_keeps_only_its_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "measure", interrupted)
    (tmp_path / "out" / f"{selection.STAGING}old").mkdir(parents=True)  # of a killed selection
    with pytest.raises(KeyboardInterrupt):
        select(tmp_path, 2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    with raises(BudgetExceededError, "budget.spent"):
        select(tmp_path, 2)


def test_rows_of_other_runs_do_not_tell_which_trial_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Trial.measure
    scores = iter([1.0, 2.0])

    def charged_meanwhile(self: Trial, *arguments: Any) -> None:
        measure(self, *arguments)
        self.score = next(scores)  # the second trial wins
        for path in (tmp_path / "ledger").glob("*.jsonl"):
            other = read_ledger(path)
            other.charge(score_row(500.0))
            other.charge_id = "other"
            other.note_files("0" * 64)

    monkeypatch.setattr(Trial, "measure", charged_meanwhile)
    select(tmp_path, 2)
    report = report_of(tmp_path)
    assert [head["rows"] for head in report["ledger_heads"].values()] == [1, 1]
    assert [entry["mechanism"] for entry in report["ledger"]] == ["private selection"]
    assert verify_run(run_of(tmp_path)).problems == []
    for path in (tmp_path / "ledger").glob("*.jsonl"):
        lines = read_ledger(path).lines
        assert [run for run, _ in lines.files] == ["other", lines.runs[0]]


def test_records_that_change_after_the_charge_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = selection._Trials._executed

    def on_other_records(self: Any, *arguments: Any) -> Any:
        def other(*names: Any, **options: Any) -> Any:
            train, test = load_dataset(*names, **options)
            return replace(train, images=train.images.flip(-1)), test

        monkeypatch.setattr(run_data, "load_dataset", other)
        return executed(self, *arguments)

    monkeypatch.setattr(selection._Trials, "_executed", on_other_records)
    with raises(LedgerError, "ledger.new_records"):
        select(tmp_path, 1)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("local_test = 0.3", "", "partition.local_test"),
        ("epsilon = 4.0", "noise_multiplier = 2.0", "privacy.epsilon"),
        (
            "[privacy]\nepsilon = 4.0",
            "[privacy]\nepsilon=4.0\nnoise_multiplier=2.0",
            "privacy.epsilon",
        ),
        ("[sweep]", "[sweep]\njobs = 2", "sweep.jobs"),
        ('"run.rounds" = [1, 2]', "local_test = [0.2, 0.3]", "grid.settings"),
        ('"run.rounds" = [1, 2]', "epsilon = [2.0, 3.0]", "grid.settings"),
        ("trials = 3", "trials = 1", "selection.trials"),
        ("trials = 3", "trials = 3\neta = -1", "selection.eta"),
        ("trials = 3", "trials = 3\nscore_share = 0", "selection.score_share"),
        ("negative-binomial", "fixed", "selection.law"),
        ("trials = 3", "number = 3", "selection.number"),
        ("ledger = ", "max_records = 9000 #", "privacy.ledger"),
    ],
)
def test_refusals(tmp_path: Path, old: str, new: str, code: str) -> None:
    with raises(FedsynthError, code):
        select(tmp_path, 1, lambda text: text.replace(old, new))
    assert not (tmp_path / "ledger").exists()


def test_seeds_that_would_change_the_clients_are_refused(tmp_path: Path) -> None:
    def change(text: str) -> str:
        return text.replace("seed = 0\n", "").replace('"run.rounds" = [1, 2]', "seed = [0, 1]")

    with raises(FedsynthError, "partition.seed"):
        select(tmp_path, 1, change)


OWN_CODE = """
from dataclasses import dataclass

from torch import nn

from fedsynth import FedAvg
from fedsynth.features import FeatureMap

built = []


class Counted(nn.Sequential):
    def __init__(self, image_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))
        built.append(1)
        self[1].bias.data += 1000 * len(built)  # the same for all classes: no other prediction


@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine-of-a-selection"


def rows(shape):
    return FeatureMap("rows", shape, 8, 3.0, 3.0, "a test", lambda x: x.mean(dim=(1, 3)))
"""


def with_own_code(folder: Path, old: str, new: str) -> Change:
    (folder / "own.py").write_text(OWN_CODE)
    return lambda text: text.replace(old, new.format(f"{folder}/own.py"))


COUNTED = (
    'method = "fedstats"\ndevice = "cpu"',
    'method = "fedavg"\ndevice = "cpu"\n[model]\nname = "{}:Counted"',
)


def fedavg(text: str) -> str:
    return text.replace('features = "pixels"', "local_epochs = 1")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ('method = "fedstats"', 'method = "{}:Mine"', "run.method"),
        (*COUNTED, "model.name"),
        ('features = "pixels"', 'features = "{}:rows"', "method.features"),
        ('dataset = "digits"', 'dataset = "digits"\nencoder = "{}:rows"', "data.encoder"),
    ],
)
def test_own_code_is_refused(tmp_path: Path, old: str, new: str, code: str) -> None:
    change = with_own_code(tmp_path, old, new)
    without_features = code in ("run.method", "model.name")
    with raises(SettingError, code):
        select(tmp_path, 1, lambda text: change(fedavg(text) if without_features else text))
    assert not (tmp_path / "ledger").exists()


def test_own_code_of_python_is_refused(tmp_path: Path) -> None:
    class Unregistered(FedAvg):
        name = "fedavg"

    sweep = read_sweep(write(tmp_path))
    model = own_model(lambda image_shape, classes: torch.nn.Linear(64, classes))
    changes = {"run.method": {"method": Unregistered()}, "model.name": {"model": model}}
    for code, change in changes.items():
        cells = tuple(replace(c, settings=replace(c.settings, **change)) for c in sweep.cells)
        with raises(SettingError, code):
            plan_selection(replace(sweep, cells=cells))


def test_without_the_refusal_a_module_tells_the_number_of_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last(self: Any, best: Any, new: Any) -> Any:
        return new

    monkeypatch.setattr(selection, "settings_with_own_code", lambda _: [])
    monkeypatch.setattr(selection._Trials, "_better", last)
    counts = []
    for trials in (1, 3):
        folder = tmp_path / str(trials)
        folder.mkdir()
        change = with_own_code(folder, *COUNTED)
        for name in [name for name in sys.modules if name.startswith("fedsynth_own_own_")]:
            monkeypatch.delitem(sys.modules, name)  # as in a new process
        select(folder, trials, lambda text, change=change: change(fedavg(text)))
        counts.append(load_file(run_of(folder) / "model.safetensors")["1.bias"].mean().item())
    assert counts[0] + 1000 < counts[1]


def test_a_selection_is_no_ordinary_sweep(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path))
    with raises(FedsynthError, "selection.law"):
        run_sweep(sweep, print)
    shown = CliRunner().invoke(app, ["sweep", str(tmp_path / "choice.toml"), "--dry-run"])
    assert shown.exit_code == 0
    assert "3 trials are expected" in shown.output
    assert not (tmp_path / "ledger").exists()
    missing = CliRunner().invoke(app, ["sweep", str(tmp_path / "choice.toml"), "--only-table"])
    assert missing.exit_code != 0
    assert not result_folder(sweep).exists()
    assert math.isfinite(plan_selection(sweep).score_noise)
