"""`fedsynth privacy plan` and `train --dry-run`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report_text import up

FAST = (
    "--rounds",
    "2",
    "--set",
    "iterations=2",
    "--set",
    "server_epochs=1",
    "--set",
    "ipc=1",
    "--width",
    "4",
)


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})


def test_a_budget_gives_sigma_for_each_mechanism() -> None:
    """Every plan's ε is what the accountant says of its σ, q and releases, at or just below the
    budget."""
    plans = json.loads(
        call(
            "privacy",
            "plan",
            "--epsilon",
            "3",
            "--rounds",
            "2",
            "--steps",
            "50",
            "--n",
            "6000",
            "--json",
        ).stdout
    )
    assert [p["mechanism"] for p in plans] == ["residual", "gradient", "features"]
    residual, _, features = plans
    row = Release(
        1,
        "x",
        "m",
        "c",
        residual["noise_multiplier"],
        1.0,
        residual["sample_rate"],
        "poisson",
        100,
        1,
    )
    assert epsilon([row], 1e-5) == pytest.approx(residual["epsilon"]["2"], rel=1e-9)
    assert residual["sample_rate"] == pytest.approx(2560 / 6000)
    assert features["releases"] == 17
    sigma = features["noise_multiplier"]
    rows = [
        Release(1, "x", "m", "c", sigma, 1.0, 1.0, "full", 32, 1),
        Release(1, "n", "m", "c", sigma * 3 / 4, 1.0, 1.0, "full", 2, 1),
    ]
    assert epsilon(rows, 1e-5) == pytest.approx(features["epsilon"]["2"], rel=1e-9)
    assert all(2.97 < p["epsilon"]["2"] <= 3 for p in plans)


def test_a_plan_tells_the_signal_to_noise_of_releases_that_have_a_public_case() -> None:
    """σ = 2, four clients of 100, 324 features of the digits: centre Σ norm 400, moments
    (with privacy without second ones) and steps 400/√10, over 2·√share⁻¹·√4·√D."""
    public = ("--n", "100", "--clients", "4", "--rounds", "3", "--dataset", "digits")
    words = ("privacy", "plan", "--method", "fedstats", "--sigma", "2", *public)
    (plan,) = json.loads(call(*words, "--json").stdout)
    expected = [
        40 * 10**0.5 / (2 * (3 / 0.96) ** 0.5 * 2 * 3240**0.5),
        400 / (2 * 0.04**-0.5 * 2 * 324**0.5),
        40 * 10**0.5 / (2 * (3 / 0.96) ** 0.5 * 2 * 3240**0.5),
    ]
    assert [row["signal_to_noise"] for row in plan["rows"]] == pytest.approx(expected)
    shown = call(*words).stdout
    assert "S/N" in shown
    assert f"{expected[1]:.3g}" in shown
    assert "S/N" not in call("privacy", "plan", "--sigma", "2", "--rounds", "1").stdout


def test_a_plan_speaks_of_the_settings_that_it_used() -> None:
    """Catches: δ, or the budget, of the options alone, where --set says another."""
    options = ("privacy", "plan", "--method", "fedavg", "--rounds", "2", "--dataset", "digits")
    shown = call(*options, "--sigma", "2", "--set", "privacy.delta=6e-4")
    assert "δ = 0.0006" in shown.stdout
    (plan,) = json.loads(
        call(
            *options, "--set", "privacy.noise_multiplier=2", "--set", "privacy.delta=6e-4", "--json"
        ).stdout
    )
    assert plan["delta"] == 6e-4
    (plain,) = json.loads(call(*options, "--sigma", "2", "--json").stdout)
    assert (plain["delta"], plain["epsilon"]["2"] > plan["epsilon"]["2"]) == (1e-5, True)
    both = call(*options, "--sigma", "2", "--set", "privacy.epsilon=1")
    assert "exceeds ε = 1 in round" in both.output


def test_sigma_gives_epsilon_by_round_as_a_table_and_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "plan.svg"
    run = call(
        "privacy",
        "plan",
        "--sigma",
        "3",
        "--method",
        "fedavg",
        "--rounds",
        "3",
        "--n",
        "6000",
        "--plot",
        str(plot),
    )
    assert run.exit_code == 0, run.output
    assert "dp-sgd" in run.stdout
    assert "ε after round" in run.stdout
    assert plot.read_text().startswith("<svg")
    doubled = [
        json.loads(
            call(
                "privacy",
                "plan",
                "--sigma",
                "3",
                "--rounds",
                "1",
                "--mechanism",
                "features",
                "--adjacency",
                a,
                "--json",
            ).stdout
        )
        for a in ("add-remove", "zero-out", "replace-one")
    ]
    first, second, third = (d[0]["epsilon"]["1"] for d in doubled)
    assert first == second < third


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--epsilon", "0"), "error: --epsilon must be a positive number"),
        (("--sigma", "-1"), "error: --sigma must be a positive number"),
        (("--epsilon", "1", "--n", "0"), "error: --n must be positive"),
        (
            ("--epsilon", "1", "--method", "real", "--steps", "5"),
            "cannot run with differential privacy",
        ),
        (("--epsilon", "1", "--mechanism", "paper"), "gives no guarantee"),
        ((), "needs --epsilon"),
        (("--epsilon", "1", "--method", "real"), "cannot run with differential privacy"),
        (("--epsilon", "1", "--mechanism", "residul"), "did you mean residual"),
        (("--sigma", "1", "--mechanism", "paper"), "gives no guarantee"),
        (("--epsilon", "1", "--adjacency", "swap"), "adjacency must be one of"),
    ],
)
def test_bad_plans_are_one_line(words: tuple[str, ...], text: str) -> None:
    run = call("privacy", "plan", *words)
    assert run.exit_code == 2
    assert text in run.output
    assert "Traceback" not in run.output


def test_a_dry_run_says_what_the_run_then_does(tmp_path: Path) -> None:
    words = ("train", *FAST, "--dp-sigma", "3", "--output", str(tmp_path))
    dry = call(*words, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert list(tmp_path.iterdir()) == []
    run = call(*words)
    assert run.exit_code == 0, run.output
    (folder,) = tmp_path.iterdir()
    spent = json.loads((folder / "privacy_report.json").read_text())["guarantee"]["epsilon"]
    assert f"ε = {up(spent, 3)} at" in dry.stdout
    as_json = json.loads(call(*words, "--dry-run", "--json").stdout)
    assert as_json["epsilon"]["2"] == pytest.approx(spent)
    assert "no differential privacy" in call("train", "--dry-run").stdout
    assert json.loads(call("train", "--dry-run", "--json").stdout) == {"guarantee": False}


def test_a_dry_run_makes_no_ledger_and_refuses_what_the_run_would(tmp_path: Path) -> None:
    words = (
        "train",
        *FAST,
        "--dp-ledger",
        str(tmp_path / "kept"),
        "--output",
        str(tmp_path / "out"),
    )
    assert call(*words, "--dp-sigma", "3", "--dry-run").exit_code == 0
    assert not (tmp_path / "kept").exists()
    capped = (*words, "--dp-sigma", "1", "--dp-epsilon", "0.1")
    for run in (call(*capped, "--dry-run"), call(*capped)):
        assert run.exit_code == 2
        assert "above the cap" in run.output


def test_a_plan_shows_the_last_round_and_a_budget_that_is_too_small() -> None:
    run = call(
        "privacy",
        "plan",
        "--sigma",
        "3",
        "--rounds",
        "13",
        "--epsilon",
        "2",
        "--steps",
        "10",
        "--mechanism",
        "residual",
    )
    assert run.exit_code == 0, run.output
    shown = re.findall(r"│ (\d+) +│ [\d.]+ +│$", run.stdout, re.MULTILINE)
    assert shown[-2:] == ["12", "13"]
    assert "…" not in run.stdout  # no figure is cut at 80 columns
    assert "exceeds ε = 2 in round" in run.output
