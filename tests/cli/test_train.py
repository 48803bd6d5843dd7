"""`fedsynth train` where all is well: what it prints, and what it leaves."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
CASES = {  # line: mechanism
    "feddm": "",
    "fedavg": "",
    "feddm --dp-epsilon 4": "residual",
    "feddm --dp-sigma 3 --dp-mechanism gradient": "gradient",
    "feddm --dp-sigma 3 --dp-mechanism paper": "paper",
    "fedavg --dp-sigma 3 --set batch=719": "dp-sgd",
}
PAPER = "feddm --dp-sigma 3 --dp-mechanism paper"
FILES = {"config.toml", "metrics.jsonl", "summary.json", "model.safetensors"} | {
    f"simulation_only/{name}"
    for name in ("README.txt", "partition.txt", "partition.png", "partition.json")
}
IMAGES = {"synthetic.safetensors", "synthetic.png", "synthetic_by_round/round-00001.png"}
PRIVACY = {
    *(f"privacy_report.{e}" for e in ("json", "md", "html")),
    "ledger/client-000.jsonl",
    "ledger/client-001.jsonl",
    "privacy_start.json",
    "simulation_only/rounds.jsonl",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, train_into: Call) -> Callable[[str], Any]:
    """Each case, run once, when it is first asked for."""
    done: dict[str, Any] = {}

    def outcome(line: str) -> Any:
        if line not in done:
            done[line] = train_into(tmp_path_factory.mktemp("runs") / "new" / "folder", line)
        return done[line]

    return outcome


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, number) of everything in a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, f"{name}.{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


@pytest.mark.parametrize("line", CASES)
def test_what_a_run_leaves_and_prints(outcomes: Callable[[str], Any], line: str) -> None:
    run, method, private = outcomes(line), line.split()[0], "--dp" in line
    assert run.code == 0, run.stderr
    files = {p.relative_to(run.folder).as_posix() for p in run.folder.rglob("*") if p.is_file()}
    expected = FILES | (PRIVACY if private else set()) | (IMAGES if method == "feddm" else set())
    assert files == expected
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{method}-digits", run.folder.name)

    assert "round 1/1 · test accuracy" in run.stderr
    assert "round 1/1" not in run.stdout
    assert "test accuracy" in run.stdout
    assert run.stdout.splitlines()[-1] == f"run folder: {run.folder}"
    assert ("privacy budget" in run.stdout) == private

    summary = read_json(run.folder / "summary.json")
    (row,) = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    config = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
    assert summary["method"] == config["run"]["method"] == method
    assert (summary["rounds"], summary["test_accuracy"]) == (1, row["test_accuracy"])
    assert summary["upload_bytes"] == row["upload_bytes"] >= 4 * row["upload_floats"] > 0
    assert summary["folder"] == str(run.folder)
    assert ("privacy" in config) == ("differential_privacy" in summary) == private


@pytest.mark.parametrize(
    "line", [line for line, name in CASES.items() if name not in ("", "paper")]
)
def test_a_private_run_reports_its_epsilon_first(outcomes: Callable[[str], Any], line: str) -> None:
    run = outcomes(line)
    report = read_json(run.folder / "privacy_report.json")
    epsilon = report["guarantee"]["epsilon"]
    assert report["verdict"]["formal"]
    assert 0 < epsilon < 10
    privacy = read_json(run.folder / "summary.json")["differential_privacy"]
    assert privacy["epsilon"] == pytest.approx(epsilon)
    for text in (run.stderr, run.stdout, (run.folder / "privacy_report.md").read_text()):
        assert text.index("ε") < text.index("σ" if "σ" in text else "noise multiplier")
    assert report["mechanism"] == CASES[line]
    if "--dp-epsilon" in line:  # the noise is found
        assert 3.6 < epsilon <= 4
        assert privacy["noise_multiplier"] > 0


def test_the_printed_mechanism_has_no_guarantee_and_no_epsilon(
    outcomes: Callable[[str], Any],
) -> None:
    run = outcomes(PAPER)
    report = read_json(run.folder / "privacy_report.json")
    assert report["guarantee"] is None
    markdown = (run.folder / "privacy_report.md").read_text(encoding="utf-8")
    for text in (markdown, run.stdout, run.stderr):
        assert "no differential privacy guarantee" in text.lower()
        assert not re.search(r"(ε|epsilon)\W{0,8}\d", text)
    assert any("clip" in reason for reason in report["verdict"]["reasons"])
    everything = [report, *(read_json(run.folder / n) for n in ("summary.json", "metrics.jsonl"))]
    named = [name for name, _ in numbers(everything) if "epsilon" in name.lower() or "ε" in name]
    assert not named


@pytest.mark.parametrize("method", ["feddm", "fedavg"])
def test_the_config_fed_back_repeats_the_run(
    outcomes: Callable[[str], Any], fedsynth: Call, method: str
) -> None:
    first = outcomes(method).folder
    again = fedsynth(f"train --config {first / 'config.toml'} --output {first.parents[2] / 'two'}")
    assert again.code == 0, again.stderr
    second = Path(again.stdout.splitlines()[-1].removeprefix("run folder: "))
    for name in ("config.toml", "model.safetensors"):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    summaries = [read_json(folder / "summary.json") for folder in (first, second)]
    for summary in summaries:
        del summary["seconds"], summary["folder"]
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize("method", ["fedbn", "fedhydra"])
def test_personal_and_one_shot_methods_leave_a_model(method: str, train: Call) -> None:
    run = train(f"{method} --json --local-test 0.2")
    assert run.code == 0, run.stderr
    summary = json.loads(run.stdout)
    # fedbn has no common model: only its owner sees a result
    assert (summary["test_accuracy"] is None) == (method == "fedbn")
    assert 0 <= summary["local"]["amp"] <= 1
    assert (run.folder / "model.safetensors").is_file()
