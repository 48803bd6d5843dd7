"""`fedsynth train` where all is well: what it prints, and what it leaves."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

CASES: dict[str, tuple[str, ...]] = {
    "feddm": ("feddm",),
    "fedavg": ("fedavg",),
    "real": ("real",),
    "feddm sigma": ("feddm", "--dp-sigma", "3"),
    "feddm gradient": ("feddm", "--dp-sigma", "3", "--dp-mechanism", "gradient"),
    "feddm epsilon": ("feddm", "--dp-epsilon", "4"),
    "feddm paper": ("feddm", "--dp-sigma", "3", "--dp-mechanism", "paper"),
    "fedavg sigma": ("fedavg", "--dp-sigma", "3", "--set", "batch=719"),
}
FILES = {"config.toml", "metrics.jsonl", "summary.json", "model.safetensors"}
SIMULATION_ONLY = {
    f"simulation_only/{name}"
    for name in ("README.txt", "partition.txt", "partition.png", "partition.json")
}
IMAGES = {"synthetic.safetensors", "synthetic.png", "synthetic_by_round/round-00001.png"}
PRIVACY = {
    *(f"privacy_report.{e}" for e in ("json", "md", "html")),
    "ledger/client-000.jsonl",
    "ledger/client-001.jsonl",
    "privacy_start.json",
}


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, train_into: Callable[..., Any]
) -> Callable[[str], Any]:
    """Each case, run once, when it is first asked for."""
    done: dict[str, Any] = {}

    def outcome(case: str) -> Any:
        if case not in done:
            done[case] = train_into(
                tmp_path_factory.mktemp("runs") / "new" / "folder", *CASES[case]
            )
        return done[case]

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


@pytest.mark.parametrize("case", CASES)
def test_a_run_leaves_exactly_the_files_of_the_run_folder(
    outcomes: Callable[[str], Any], case: str
) -> None:
    run = outcomes(case)
    assert run.code == 0, run.stderr
    files = {p.relative_to(run.folder).as_posix() for p in run.folder.rglob("*") if p.is_file()}
    expected = FILES | SIMULATION_ONLY
    expected |= IMAGES if CASES[case][0] != "fedavg" else set()
    expected |= PRIVACY | {"simulation_only/rounds.jsonl"} if len(CASES[case]) > 1 else set()
    assert files == expected
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{CASES[case][0]}-digits", run.folder.name)


@pytest.mark.parametrize("case", CASES)
def test_a_run_tells_its_result_on_stdout_and_its_progress_on_stderr(
    outcomes: Callable[[str], Any], case: str
) -> None:
    run = outcomes(case)
    assert "round 1/1 · test accuracy" in run.stderr
    assert "round 1/1" not in run.stdout
    assert "test accuracy" in run.stdout
    assert run.stdout.splitlines()[-1] == f"run folder: {run.folder}"
    assert ("privacy budget" in run.stdout) == (len(CASES[case]) > 1)


@pytest.mark.parametrize("case", CASES)
def test_summary_metrics_and_config_agree(outcomes: Callable[[str], Any], case: str) -> None:
    folder = outcomes(case).folder
    summary = read_json(folder / "summary.json")
    (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    assert summary["method"] == config["run"]["method"] == CASES[case][0]
    assert (summary["rounds"], summary["test_accuracy"]) == (1, row["test_accuracy"])
    assert summary["upload_bytes"] == row["upload_bytes"] >= 4 * row["upload_floats"] > 0
    assert summary["folder"] == str(folder)
    assert ("privacy" in config) == ("differential_privacy" in summary) == (len(CASES[case]) > 1)


def test_synthetic_images_are_the_uploads(outcomes: Callable[[str], Any]) -> None:
    folder = outcomes("feddm").folder
    tensors, summary = (
        load_file(folder / "synthetic.safetensors"),
        read_json(folder / "summary.json"),
    )
    assert tensors["images"].shape[1:] == (1, 8, 8)
    assert len(tensors["images"]) == len(tensors["labels"]) == len(tensors["client"])
    assert tensors["images"].numel() == summary["upload_floats_per_round"]


@pytest.mark.parametrize("case", ["feddm sigma", "feddm gradient", "feddm epsilon", "fedavg sigma"])
def test_a_private_run_reports_its_epsilon_first(outcomes: Callable[[str], Any], case: str) -> None:
    run = outcomes(case)
    report, summary = (
        read_json(run.folder / "privacy_report.json"),
        read_json(run.folder / "summary.json"),
    )
    epsilon = report["guarantee"]["epsilon"]
    assert report["verdict"]["formal"]
    assert 0 < epsilon < 10
    assert summary["differential_privacy"]["epsilon"] == pytest.approx(epsilon)
    for text in (
        run.stderr,
        run.stdout,
        (run.folder / "privacy_report.md").read_text(encoding="utf-8"),
    ):
        assert text.index("ε") < text.index("σ" if "σ" in text else "noise multiplier")
    expected = {
        "feddm sigma": "residual",
        "feddm gradient": "gradient",
        "feddm epsilon": "residual",
        "fedavg sigma": "dp-sgd",
    }
    assert report["mechanism"] == expected[case]


def test_epsilon_alone_finds_the_noise(outcomes: Callable[[str], Any]) -> None:
    privacy = read_json(outcomes("feddm epsilon").folder / "summary.json")["differential_privacy"]
    assert 3.6 < privacy["epsilon"] <= 4
    assert privacy["noise_multiplier"] > 0


def test_the_printed_mechanism_has_no_guarantee_and_no_epsilon(
    outcomes: Callable[[str], Any],
) -> None:
    run = outcomes("feddm paper")
    report, markdown = (
        read_json(run.folder / "privacy_report.json"),
        (run.folder / "privacy_report.md").read_text(encoding="utf-8"),
    )
    assert report["guarantee"] is None
    for text in (markdown, run.stdout, run.stderr, report["verdict"]["text"]):
        assert "no differential privacy guarantee" in text.lower()
        assert not re.search(r"(ε|epsilon)\W{0,8}\d", text)
    assert any("clip" in reason for reason in report["verdict"]["reasons"])
    everything = [
        report,
        read_json(run.folder / "summary.json"),
        json.loads((run.folder / "metrics.jsonl").read_text()),
    ]
    assert not [
        (name, n) for name, n in numbers(everything) if "epsilon" in name.lower() or "ε" in name
    ]


@pytest.mark.parametrize("method", ["feddm", "fedavg", "real"])
def test_the_config_fed_back_repeats_the_run(
    outcomes: Callable[[str], Any], fedsynth: Callable[..., Any], method: str
) -> None:
    first = outcomes(method).folder
    again = fedsynth(
        "train",
        "--config",
        str(first / "config.toml"),
        "--output",
        str(first.parents[2] / f"again {method}"),
    )
    assert again.code == 0, again.stderr
    second = Path(again.stdout.splitlines()[-1].removeprefix("run folder: "))
    assert (second / "config.toml").read_bytes() == (first / "config.toml").read_bytes()
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    one, two = (
        {k: v for k, v in read_json(f / "summary.json").items() if k not in ("seconds", "folder")}
        for f in (first, second)
    )
    assert one == two


def test_options_win_over_the_config(
    outcomes: Callable[[str], Any], train: Callable[..., Any]
) -> None:
    config = outcomes("feddm").folder / "config.toml"
    run = train("fedavg", "--config", str(config), "--seed", "7")
    written = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
    assert (written["run"]["method"], written["run"]["seed"]) == ("fedavg", 7)
    assert "ipc" not in written["method"]  # feddm's settings went with feddm


def test_json_is_all_that_stdout_has(train: Callable[..., Any]) -> None:
    run = train("real", "--json")
    assert json.loads(run.stdout) == read_json(run.folder / "summary.json")
    assert "round 1/1" in run.stderr


def test_two_runs_of_the_same_second_have_two_folders(train: Callable[..., Any]) -> None:
    assert train("real").code == train("real").code == 0
    runs = list(train("real").output.iterdir())
    assert len(runs) == 3
    assert not [run for run in runs if run.name.endswith(".incomplete")]


def test_noise_is_not_repeated_by_the_seed(
    outcomes: Callable[[str], Any], train: Callable[..., Any]
) -> None:
    first, again = outcomes("feddm sigma"), train(*CASES["feddm sigma"])
    images = [load_file(run.folder / "synthetic.safetensors")["images"] for run in (first, again)]
    assert not images[0].equal(images[1])


def test_a_cap_ends_the_run_in_order(train: Callable[..., Any]) -> None:
    run = train("feddm", "--dp-sigma", "1", "--dp-epsilon", "5", "--rounds", "4")
    assert run.code == 0, run.stderr
    summary, report = (
        read_json(run.folder / "summary.json"),
        read_json(run.folder / "privacy_report.json"),
    )
    assert summary["rounds"] == 1
    assert summary["test_accuracy"] is not None
    assert report["guarantee"]["epsilon"] <= 5
    assert report["budget"]["epsilon_cap"] == 5
    markdown = (run.folder / "privacy_report.md").read_text(encoding="utf-8")
    for text in (run.stderr, markdown, " ".join(report["deviations"])):
        assert "ended after 1 of 4 rounds" in text


def test_a_kept_ledger_counts_earlier_runs(train: Callable[..., Any], tmp_path: Path) -> None:
    private = ("feddm", "--dp-sigma", "3", "--dp-ledger", str(tmp_path / "ledger"), "--json")
    first, second = (
        json.loads(train(*private).stdout)["differential_privacy"]["epsilon"] for _ in range(2)
    )
    assert second > first
    assert {p.name for p in (tmp_path / "ledger").iterdir()} == {
        "client-000.jsonl",
        "client-001.jsonl",
        "private",
    }
