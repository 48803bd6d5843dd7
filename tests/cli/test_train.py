"""`fedsynth train`: its messages, its files, and the values that stay private."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.cli.options import from_preset, merged
from fedsynth.config.resolve import resolve
from fedsynth.results import run_messages
from fedsynth.results.run_messages import LONG_PHASE, StderrObserver, round_line
from tests.cli.conftest import Call, call_train

CASES = {  # line: mechanism
    "feddm": "",
    "fedavg": "",
    "feddm --dp-epsilon 4": "residual",
    "feddm --dp-sigma 3 --dp-mechanism paper": "paper",
    "fedavg --dp-sigma 3 --set batch=719": "dp-sgd",
}
PAPER = "feddm --dp-sigma 3 --dp-mechanism paper"
FILES = {"config.toml", "metrics.jsonl", "summary.json", "model.safetensors"} | {
    f"simulation_only/{name}" for name in ("README.txt", "partition.txt", "partition.png")
}
IMAGES = {"synthetic.safetensors", "synthetic.png", "synthetic_by_round/round-00001.png"}
PRIVACY = {
    *(f"privacy_report.{e}" for e in ("json", "md", "html")),
    *("ledger/client-000.jsonl", "ledger/client-001.jsonl", "privacy_start.json"),
    "simulation_only/rounds.jsonl",
}
SECONDS = re.compile(r"\d\.\d+ ?s\b|\btime\b|seconds")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Returns a cache of runs: each case, with accuracy on local splits, runs at its first use."""
    runs: dict[str, Any] = {}

    def outcome(line: str) -> Any:
        if line not in runs:
            folder = tmp_path_factory.mktemp("runs") / "new" / "folder"
            runs[line] = call_train(folder, f"{line} --local-test 0.2")
        return runs[line]

    return outcome


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("line", CASES)
def test_run_writes_and_prints_expected_results(outcomes: Callable[[str], Any], line: str) -> None:
    run, method, private = outcomes(line), line.split()[0], "--dp" in line
    assert run.code == 0, run.stderr
    files = {p.relative_to(run.folder).as_posix() for p in run.folder.rglob("*") if p.is_file()}
    expected = FILES | (PRIVACY if private else set()) | (IMAGES if method == "feddm" else set())
    assert files == expected
    assert "round 1/1 · test accuracy" in run.stderr
    assert "round 1/1" not in run.stdout
    assert run.stdout.splitlines()[-1] == f"run folder: {run.folder}"
    assert ("privacy budget" in run.stdout) == private

    summary = run.summary
    row = read_json(run.folder / "metrics.jsonl")
    config = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
    assert summary["method"] == config["run"]["method"] == method
    assert (summary["rounds"], summary["test_accuracy"]) == (1, row["test_accuracy"])
    assert summary["upload_bytes"] == row["upload_bytes"] >= 4 * row["upload_floats"] > 0
    assert ("privacy" in config) == ("differential_privacy" in summary) == private
    shared = [run.folder / name for name in files if "simulation_only" not in name]
    # AMP and WLP are exact functions of private data
    assert any(b'"wlp"' in path.read_bytes() for path in shared) != private
    assert ("local" in summary) == ("WLP" in run.stderr + run.stdout) != private


@pytest.mark.parametrize("line", [case for case in CASES if "--dp" in case])
def test_private_runs_report_epsilon_first(outcomes: Callable[[str], Any], line: str) -> None:
    run = outcomes(line)
    report = read_json(run.folder / "privacy_report.json")
    markdown = (run.folder / "privacy_report.md").read_text(encoding="utf-8")
    assert report["mechanism"] == CASES[line]
    if line == PAPER:
        assert report["guarantee"] is None
        for text in (markdown, run.stdout, run.stderr):
            assert "no differential privacy guarantee" in text.lower()
            assert not re.search(r"(ε|epsilon)\W{0,8}\d", text)
        for name in ("summary.json", "metrics.jsonl", "privacy_report.json"):
            assert not re.search(r'epsilon[^"]*": *\d', (run.folder / name).read_text())
        return
    epsilon = report["guarantee"]["epsilon"]
    assert report["verdict"]["formal"]
    assert run.summary["differential_privacy"]["epsilon"] == pytest.approx(epsilon)
    for text in (run.stderr, run.stdout, markdown):
        assert text.index("ε") < text.index("σ" if "σ" in text else "noise multiplier")
    assert 0 < epsilon < 10
    assert "--dp-epsilon" not in line or 3.6 < epsilon <= 4  # the noise is computed


def test_configs_repeat_runs(
    outcomes: Callable[[str], Any], fedsynth: Call, tmp_path: Path
) -> None:
    first = outcomes("feddm")
    options = f"--config {first.folder / 'config.toml'} --output {tmp_path / 'out'}"
    rerun = fedsynth(f"train --json {options}")
    for name in ("config.toml", "model.safetensors"):
        assert (rerun.folder / name).read_bytes() == (first.folder / name).read_bytes()
    summaries = [first.summary, json.loads(rerun.stdout)]
    for summary in summaries:
        del summary["seconds"], summary["folder"]
    assert summaries[0] == summaries[1]


def test_preset_settings_are_printed(train: Call) -> None:
    # tiny runs set all other options
    run = train("scaffold")
    assert "settings from the preset of digits: model.depth=2\n" in run.stderr
    message = from_preset({"data": {}, "run": {"method": "MOON"}, "partition": {"clients": 3}})
    assert message.endswith(": run.rounds=3, model.width=32, model.depth=2, method.batch=32")
    assert from_preset({"data": {"dataset": "mnist"}, "run": {}}) == ""


def test_ignored_settings_of_other_methods_are_reported() -> None:
    fedprox, other = {"run": {"method": "fedprox"}}, {"run": {"method": "fedavg"}}
    notes: list[str] = []
    settings = {**fedprox, "method": {"mu": 1.0}}
    merged(settings, fedprox, notes.append)
    merged(fedprox, other, notes.append)
    assert notes == []
    assert "method" not in merged(settings, other, notes.append)
    assert "settings of fedprox in the config file are ignored" in notes[0]


def test_fedfm_weight_with_noisy_anchors_warns(train: Call) -> None:
    assert "warning: method.weight=50" in train("fedfm --dp-epsilon 8 --subset 0.2").stderr
    assert "warning" not in train("fedfm --dp-epsilon 8 --subset 0.2 --set weight=0.5").stderr


def test_lost_clients_and_discarded_rounds_are_printed(train: Call) -> None:
    run = train("fedavg --client-failures 1 --seed 1")
    row = read_json(run.folder / "metrics.jsonl")
    needed = -(-len(row["lost"]) // 2)
    assert row["not_counted"] == {"exchange": "main", "uploads": 0, "needed": needed}
    assert "lost 0 (" in run.stderr
    assert "is discarded: 0 uploads, but " in run.stderr
    rejected = {**row, "rejected": {"2": "weight is -1"}}
    assert "rejected 2 (weight is -1)" in round_line(rejected, resolve({}))


@pytest.mark.parametrize("line", ["feddm --dp-epsilon 4", PAPER])
def test_private_runs_show_no_times(outcomes: Callable[[str], Any], train: Call, line: str) -> None:
    """Times depend on the data, so the run folder contains them only in simulation_only."""
    for run in (outcomes(line), train(f"{line} --json")):
        summary = (run.folder / "summary.json").read_text()
        for text in (run.stderr, run.stdout, summary):
            assert text
            assert not SECONDS.search(text.replace(str(run.output), "")), text
        assert '"seconds"' in (run.folder / "simulation_only" / "rounds.jsonl").read_text()
    assert re.search(r"· \d+\.\d s\n", outcomes("feddm").stderr)


def test_private_progress_is_printed_by_steps(capsys: pytest.CaptureFixture[str]) -> None:
    observer = StderrObserver(resolve({"privacy": {"noise_multiplier": 3.0}}), "")
    observer._printed -= 3600
    for total in (LONG_PHASE - 1, LONG_PHASE):
        for step in range(1, total + 1):
            observer.step(1, "condense", step, total)
    steps = [f"{n * LONG_PHASE // 10}/{LONG_PHASE}" for n in range(1, 11)]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"round 1/3 condense {step}" for step in steps]


@pytest.mark.parametrize("private", [False, True])
def test_remaining_time_follows_mean_round(
    private: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A private run shows no times, because they may depend on the data."""
    clock = 0.0
    monkeypatch.setattr(run_messages.time, "monotonic", lambda: clock)
    privacy = {"noise_multiplier": 3.0} if private else {}
    observer = StderrObserver(resolve({"run": {"rounds": 10}, "privacy": privacy}))
    observer.step(1, "train", 1, 10)
    for number, ended in ((1, 100_000.0), (2, 100_060.0)):
        clock = ended
        observer.round_ended({"round": number, "upload_bytes": 0})
    clock += 31.0
    observer.step(3, "train", 1, 10)
    times = [line for line in capsys.readouterr().err.splitlines() if "days" in line]
    if private:
        assert times == []
    else:
        assert "at this speed, the run takes another 10 days, 10:00:00" in times[0]
        assert times[1:] == ["round 3/10 train 1/10, about 4 days, 15:10:40 left"]
