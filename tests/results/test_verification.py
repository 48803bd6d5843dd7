"""Tests of the verification of unchanged run folders, and of reports of unfinished runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import from_arrays, load_dataset
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.federation import client_runtime, server
from fedsynth.federation.in_process import InProcess
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.report.build import write_report
from fedsynth.results.finished import is_unfinished
from fedsynth.results.verification import unfinished_report, verify_run
from fedsynth.simulation.simulate import simulate
from tests.quick_settings import quick_settings
from tests.results.private_runs import run, settings, verify

# --------------------------------------------------------------------------------- unchanged runs


def named_clients_run(output: Path) -> Path:
    train, test = load_dataset("digits")
    spec = replace(train.spec, name="scans", train_size=600)
    data = [from_arrays(raw.images.numpy(), raw.labels.numpy(), spec) for raw in (train, test)]
    return run(
        output,
        settings(max_records=1000, ledger=str(output / "kept")),
        data=(data[0], data[1]),
        parts=np.split(np.arange(600), [100, 350]),
        names=["east", "north", "west"],
        test="private",
    )


def extended_ledger_run(output: Path) -> Path:
    ledger = str(output / "kept")
    first = run(output, settings(ledger=ledger))
    run(output, settings("fedavg", ledger=ledger))
    return first


def continued_ledger_run(output: Path) -> Path:
    ledger = str(output / "kept")
    run(output, settings(ledger=ledger, noise_multiplier=4.0, sample_rate=1.0))
    second = settings("fedavg", ledger=ledger, epsilon=8.0, sample_rate=1.0)
    del second["privacy"]["noise_multiplier"]
    folder = run(output, second)
    heads = json.loads((folder / "privacy_report.json").read_text())["ledger_heads"]
    assert {(head["rows_before"], head["rows"]) for head in heads.values()} == {(2, 4)}
    return folder


def updated(method: str, clients: int = 3, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run, updated by these sections."""
    base = settings(method, clients)
    return {name: {**values, **sections.get(name, {})} for name, values in base.items()}


ROUND = {"rounds": 1}
UNCHANGED_RUNS: dict[str, dict[str, Any] | Callable[[Path], Path]] = {
    "two releases": settings(mechanism="features"),
    "paper": settings(mechanism="paper"),
    "zero-out, four sums": settings(adjacency="zero-out", four_sums=True),
    "replace-one": settings("fedavg", adjacency="replace-one", clip=0.5),
    "participation": updated(
        "fedavg", 5, run={"rounds": 3, "participation": 0.4}, privacy={"sample_rate": 1.0}
    ),
    "local test splits": updated("fedavg", 2, partition={"local_test": 0.2, "subset": 0.5}),
    "architectures": updated(
        "feddf", run=ROUND, model={"clients": "convnet,linear"}, method=quick_settings("feddf")
    ),
    "generated images": updated(
        "fedkf", method={"generator_width": 4, "generator_batch": 8, "latent": 8}
    ),
    "private test images, named clients": named_clients_run,
    "extended permanent ledger": extended_ledger_run,
    "permanent ledger with earlier rows": continued_ledger_run,
}


@pytest.mark.parametrize("kind", UNCHANGED_RUNS)
def test_unchanged_runs_are_verified(kind: str, tmp_path: Path) -> None:
    case = UNCHANGED_RUNS[kind]
    folder = run(tmp_path, case) if isinstance(case, dict) else case(tmp_path)
    result = verify_run(folder)
    assert result.problems == []
    assert "were compared with the ledger files" in result.notes[0]
    assert verify_run(folder / "privacy_report.json").problems == []


def test_shapes_of_matrices_are_verified(tmp_path: Path) -> None:
    folder = run(tmp_path, updated("fedhydra", 2, run=ROUND, method=quick_settings("fedhydra")))
    assert verify(folder) == []
    file = folder / "artefacts.json"
    matrices = json.loads(file.read_text())
    file.write_text(json.dumps({name: rows[:-1] for name, rows in matrices.items()}))
    assert "has shape (9, 2), but must be [10, clients]" in " ".join(verify(folder))
    file.write_text('{"stratification": "?"}')
    assert "artefacts.json cannot be read" in " ".join(verify(folder))


def test_runs_on_shared_ledger_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of both runs are interleaved, and the cap ends one in the middle of a round."""
    ledger_folder = tmp_path / "kept"
    prepare = InProcess.prepare

    def prepare_and_charge(self: InProcess, context: RoundContext) -> Any:
        refusals = prepare(self, context)
        budgets = [client.budget for client in self.clients if client.budget is not None]
        for ledger in [client.ledger for client in budgets] if context.round == 2 else ():
            Ledger(ledger.client, ledger.path, dataset=ledger.dataset).charge(
                replace(ledger.releases[-1], quantity="something else", round=7)
            )
        return refusals

    monkeypatch.setattr(InProcess, "prepare", prepare_and_charge)
    capped = settings(ledger=str(ledger_folder), noise_multiplier=3.0, epsilon=4.0)
    folder = run(tmp_path, capped)
    monkeypatch.undo()
    assert verify(folder) == []
    assert "ended after 1 of 2 rounds" in (folder / "privacy_report.md").read_text()
    row = json.loads((folder / "metrics.jsonl").read_text())
    (folder / "metrics.jsonl").write_text(json.dumps({**row, "epsilon": 1.0}) + "\n")
    assert any("must be between" in problem for problem in verify(folder))


def test_injected_noise_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def secret(**options: Any) -> SecretGenerator:
        return SecretGenerator(test_only=np.random.default_rng(0))

    monkeypatch.setattr(client_runtime, "SecretGenerator", secret)
    folder = run(tmp_path, settings())
    monkeypatch.undo()
    assert "not private" in (folder / "privacy_report.md").read_text()
    assert verify(folder) == []


# ---------------------------------------------------------------------------------- unfinished runs


class StoppedError(Exception):
    """Simulates the end of a process."""


def stopped_run(output: Path, run_settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a run that crashes in round 2 after the clients' releases."""
    check = server.check_finite

    def crash(tensors: Mapping[str, torch.Tensor], owner: str, number: int) -> None:
        if number == 2:
            raise StoppedError
        check(tensors, owner, number)

    monkeypatch.setattr(server, "check_finite", crash)
    with pytest.raises(StoppedError):
        simulate(run_settings, output=output)
    monkeypatch.undo()
    (folder,) = output.glob("*.incomplete")
    return folder


def test_stopped_runs_can_be_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = str(tmp_path / "kept")
    run(tmp_path, settings("fedavg", ledger=ledger))
    folder = stopped_run(tmp_path, resolve(settings(ledger=ledger)), monkeypatch)
    assert is_unfinished(folder)
    with pytest.raises(PrivacyError, match="To build a report, run fedsynth privacy report"):
        verify_run(folder)
    report: Any = unfinished_report(folder)
    write_report(report, folder)
    assert verify(folder) == []
    text = (folder / "privacy_report.md").read_text()
    assert "abandoned after 1 of 2 rounds" in text
    head = report["ledger_heads"]["client-000"]
    assert (head["rows_before"], head["rows"]) == (2, 4)
    entries = [entry for entry in report["ledger"] if entry["mechanism"] == "residual"]
    assert [entry["rounds"] for entry in entries] == [[1, 2]]
    write_report({**report, "abandoned": False}, folder)
    assert verify(folder) == ["abandoned is False, but should be True"]


def test_torn_metrics_and_moved_ledgers_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger_folder = tmp_path / "kept"
    folder = stopped_run(tmp_path, resolve(settings(ledger=str(ledger_folder))), monkeypatch)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "epsi')
    ledger_folder.rename(tmp_path / "moved")
    with pytest.raises(PrivacyError, match="with --ledger"):
        unfinished_report(folder)
    write_report(unfinished_report(folder, ledger=tmp_path / "moved"), folder)
    assert verify(folder, ledger=tmp_path / "moved") == []
    (folder / "metrics.jsonl").unlink()
    assert any("rounds_done" in problem for problem in verify(folder))
    (tmp_path / "moved" / "client-001.jsonl").unlink()
    with pytest.raises(PrivacyError, match="client-001"):
        unfinished_report(folder, ledger=tmp_path / "moved")


def test_runs_without_privacy_have_no_report(tmp_path: Path) -> None:
    sections = settings()
    del sections["privacy"]
    folder = run(tmp_path, sections)
    (folder / "summary.json").unlink()
    assert is_unfinished(folder)
    with pytest.raises(PrivacyError, match="no differential privacy"):
        unfinished_report(folder)
