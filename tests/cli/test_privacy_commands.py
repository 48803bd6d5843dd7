"""`fedsynth privacy plan` and `train --dry-run`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.formatting import format_epsilon

Call = Callable[..., Any]
FAST = "--rounds 2 --set iterations=2 --set server_epochs=1 --set ipc=1 --width 4"


def plans(fedsynth: Call, line: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(fedsynth(f"privacy plan {line} --json").stdout)
    return found


def test_a_budget_gives_sigma_for_each_mechanism(fedsynth: Call) -> None:
    """Every plan's ε is what the accountant says of its σ, q and releases, at or just below the
    budget."""
    found = plans(fedsynth, "--epsilon 3 --rounds 2 --set iterations=50 --n 6000")
    assert [p["mechanism"] for p in found] == ["residual", "gradient", "features"]
    residual, _, features = found
    sigma, rate = residual["noise_multiplier"], residual["sample_rate"]
    row = Release(1, "x", "m", "c", sigma, 1.0, rate, "poisson", 100, 1)
    assert epsilon([row], 1e-5) == pytest.approx(residual["epsilon"]["2"], rel=1e-9)
    assert rate == pytest.approx(2560 / 6000)
    assert features["releases"] == 17
    sigma = features["noise_multiplier"]
    rows = [
        Release(1, "x", "m", "c", sigma, 1.0, 1.0, "full", 32, 1),
        Release(1, "n", "m", "c", sigma * 3 / 4, 1.0, 1.0, "full", 2, 1),
    ]
    assert epsilon(rows, 1e-5) == pytest.approx(features["epsilon"]["2"], rel=1e-9)
    assert all(2.97 < p["epsilon"]["2"] <= 3 for p in found)


def test_a_plan_tells_the_signal_to_noise_of_releases_that_have_a_public_case(
    fedsynth: Call,
) -> None:
    """σ = 2, four clients of 100, 324 features of the digits: centre Σ norm 400, moments
    (with privacy without second ones) and steps 400/√10, over 2·√share⁻¹·√4·√D."""
    line = "--method fedstats --sigma 2 --n 100 --clients 4 --rounds 3 --dataset digits"
    (plan,) = plans(fedsynth, line)
    centre = 40 * 10**0.5 / (2 * (3 / 0.96) ** 0.5 * 2 * 3240**0.5)
    expected = [centre, 400 / (2 * 0.04**-0.5 * 2 * 324**0.5), centre]
    assert [row["signal_to_noise"] for row in plan["rows"]] == pytest.approx(expected)
    shown = fedsynth(f"privacy plan {line}").stdout
    assert "S/N" in shown
    assert f"{expected[1]:.3g}" in shown
    assert "S/N" not in fedsynth("privacy plan --sigma 2 --rounds 1").stdout


def test_a_plan_is_of_the_settings_that_it_used(fedsynth: Call) -> None:
    """Catches: δ, or the budget, of the options only, where --set says another."""
    line = "--method fedavg --rounds 2 --dataset digits"
    (plan,) = plans(fedsynth, f"{line} --set privacy.noise_multiplier=2 --set privacy.delta=6e-4")
    assert plan["delta"] == 6e-4
    (plain,) = plans(fedsynth, f"{line} --sigma 2")
    assert (plain["delta"], plain["epsilon"]["2"] > plan["epsilon"]["2"]) == (1e-5, True)
    both = fedsynth(f"privacy plan {line} --sigma 2 --set privacy.epsilon=1")
    assert "exceeds ε = 1 in round" in both.stderr


def test_sigma_gives_epsilon_by_round_as_a_table(fedsynth: Call) -> None:
    shown = fedsynth("privacy plan --sigma 3 --method fedavg --rounds 3 --n 6000").stdout
    assert "dp-sgd" in shown
    assert "ε after round" in shown
    line = "--sigma 3 --rounds 1 --mechanism features --adjacency"
    kinds = ("add-remove", "zero-out", "replace-one")
    first, second, third = (plans(fedsynth, f"{line} {a}")[0]["epsilon"]["1"] for a in kinds)
    assert first == second < third


def test_a_dry_run_prints_the_guarantee_of_the_run(fedsynth: Call, tmp_path: Path) -> None:
    line = f"train {FAST} --dp-sigma 3 --output {tmp_path / 'out'}"
    dry = fedsynth(f"{line} --dry-run")
    assert dry.code == 0, dry.stderr
    assert not dry.output.exists()
    run = fedsynth(line)
    assert run.code == 0, run.stderr
    spent = json.loads((run.folder / "privacy_report.json").read_text())["guarantee"]["epsilon"]
    assert f"ε = {format_epsilon(spent)} at" in dry.stdout
    as_json = json.loads(fedsynth(f"{line} --dry-run --json").stdout)
    assert as_json["epsilon"]["2"] == pytest.approx(spent)
    assert "no differential privacy" in fedsynth("train --dry-run").stdout
    assert json.loads(fedsynth("train --dry-run --json").stdout) == {"guarantee": False}


def test_a_dry_run_makes_no_ledger_and_refuses_what_the_run_would(
    fedsynth: Call, tmp_path: Path
) -> None:
    line = f"train {FAST} --dp-ledger {tmp_path / 'kept'} --output {tmp_path / 'out'}"
    assert fedsynth(f"{line} --dp-sigma 3 --dry-run").code == 0
    assert not (tmp_path / "kept").exists()
    capped = f"{line} --dp-sigma 1 --dp-epsilon 0.1"
    for run in (fedsynth(f"{capped} --dry-run"), fedsynth(capped)):
        assert (run.code, "above the cap" in run.stderr) == (2, True)
