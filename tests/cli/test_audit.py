"""`fedsynth privacy audit`: the line beside ε, the exit code, and the entry in a run's report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.randomness import SecretGenerator

OPEN = (
    "--method feddm --clients 2 --width 32 --set iterations=4 --set server_epochs=1 --ipc 2 "
    "--device cpu"
)
FEDDM = f"{OPEN} --rounds 1 --dp-sigma 1"
Run = Callable[..., Any]


def test_the_bound_is_printed_next_to_epsilon(fedsynth: Run) -> None:
    told = fedsynth(f"privacy audit {FEDDM} --canaries 500")
    assert told.code == 0
    first, second = told.stdout.splitlines()
    assert first.startswith("ε = 10 claimed (δ = 1e-05) · audited lower bound ")
    assert "at 99.9 % confidence from 500 canaries, 200 guesses, " in first
    assert "cannot prove privacy" in second
    assert not told.output.exists()


def test_a_refuted_claim_is_exit_code_1(fedsynth: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SecretGenerator.normal
    monkeypatch.setattr(
        SecretGenerator,
        "normal",
        lambda self, shape, deviation, device="cpu": original(self, shape, deviation / 9, device),
    )
    told = fedsynth(f"privacy audit {OPEN} --rounds 1 --dp-sigma 9 --json")
    facts = json.loads(told.stdout)
    assert told.code == 1
    assert facts["fault"]
    assert facts["epsilon_lower_bound"] > facts["epsilon"] > 0
    assert "refuted" in told.stderr


@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_a_runs_report_gets_its_audit(fedsynth: Run, kind: str, tmp_path: Path) -> None:
    folder = fedsynth(f"train {FEDDM} --output {tmp_path / 'out'}").folder
    options = f"--canaries 300 --canaries-as {kind} --guesses 100 --dp-sigma 1"
    told = fedsynth(f"privacy audit --run {folder} {options}")
    assert told.code == 0
    report = json.loads((folder / "privacy_report.json").read_text())
    entry = report["audit"]
    assert list(entry) == [
        "command", "method", "mechanism", "canaries", "guesses", "correct", "confidence",
        "delta", "epsilon_lower_bound",
    ]  # fmt: skip
    assert (entry["method"], entry["mechanism"]) == ("feddm", "residual")
    assert (entry["canaries"], entry["guesses"]) == (300, 100)
    assert entry["command"] == (
        f"fedsynth privacy audit --run {folder.name} --canaries 300 --guesses 100 "
        f"--canaries-as {kind} --confidence 0.999"
    )
    for ending in ("md", "html"):
        shown = (folder / f"privacy_report.{ending}").read_text()
        assert "--canaries 300" in shown
    assert fedsynth(f"privacy verify {folder}").code == 0


def test_only_the_runs_own_settings_go_into_its_report(fedsynth: Run, tmp_path: Path) -> None:
    folder = fedsynth(f"train {FEDDM} --output {tmp_path / 'out'}").folder
    audit = f"privacy audit --run {folder}"
    before = (folder / "privacy_report.json").read_bytes()
    for option in ("--dp-clip 2", "--rounds 2"):
        told = fedsynth(f"{audit} {option}")
        assert told.code == 2
        assert "has other settings" in told.stderr
    told = fedsynth(f"{audit} --config other.toml")
    assert "use only one of them" in told.stderr
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("iterations = 4", "iterations = 2"))
    told = fedsynth(f"{audit} --canaries 20")
    assert told.code == 2
    assert "has other settings than the privacy report" in told.stderr
    assert (folder / "privacy_report.json").read_bytes() == before


def test_a_run_is_audited_with_the_noise_and_the_rounds_that_it_had(
    fedsynth: Run, tmp_path: Path
) -> None:
    """A cap ends the run after one of three rounds; a kept ledger had something in it."""
    places = f"--output {tmp_path / 'out'} --dp-ledger {tmp_path / 'kept'}"
    told = fedsynth(f"train {OPEN} --rounds 3 --dp-sigma 1 --dp-epsilon 12 {places}")
    report = json.loads((told.folder / "privacy_report.json").read_text())
    assert report["rounds_done"] == 1
    found = fedsynth(f"privacy audit --run {told.folder} --canaries 20 --json")
    assert json.loads(found.stdout)["epsilon"] == pytest.approx(report["guarantee"]["epsilon"])
