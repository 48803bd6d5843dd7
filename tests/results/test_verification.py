"""Tests of the verification of unchanged run folders, and of reports of unfinished runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from fedsynth import from_arrays, load_dataset
from fedsynth.core.context import RoundContext
from fedsynth.federation import client_runtime
from fedsynth.federation.in_process import InProcess
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.report.build import write_report
from fedsynth.results.finished import is_unfinished
from fedsynth.results.verification import unfinished_report, verify_run
from tests.quick_runs import quick_sections
from tests.results.test_tampering import run, settings, verify
from tests.simulation.test_resume import interrupted_at, unfinished


def named_clients_runs(output: Path) -> list[Path]:
    train, test = load_dataset("digits")
    spec = replace(train.spec, name="scans", train_size=600)
    data = [from_arrays(raw.images.numpy(), raw.labels.numpy(), spec) for raw in (train, test)]
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


def test_shapes_of_matrices_are_verified(tmp_path: Path) -> None:
    folder = run(tmp_path, quick_sections("fedhydra", **ROUND))
    assert verify(folder) == []
    file = folder / "artefacts.safetensors"
    save_file({name: rows[:-1].clone() for name, rows in load_file(file).items()}, file)
    assert "is [9, 3], but must be [10, clients]" in " ".join(verify(folder))
    file.write_text("x")
    assert "artefacts.safetensors cannot be read" in " ".join(verify(folder))


def test_runs_on_shared_ledger_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of both runs are interleaved, and the cap ends one in the middle of a round."""
    prepare = InProcess.prepare

    def prepare_and_charge(self: InProcess, context: RoundContext) -> Any:
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
    assert any("must be between" in problem for problem in verify(folder))


def test_injected_noise_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = partial(SecretGenerator, test_only=np.random.default_rng(0))
    monkeypatch.setattr(client_runtime, "SecretGenerator", secret)
    folder = run(tmp_path, settings())
    monkeypatch.undo()
    assert "not private" in (folder / "privacy_report.md").read_text()
    assert verify(folder) == []


def stopped_run(output: Path, ledger: Path) -> Path:
    """Returns a run that is interrupted in round 2 after the clients' releases."""
    with interrupted_at(2, replacing=True):
        run(output, settings(ledger=str(ledger)))
    return unfinished(output)


def test_stopped_runs_can_be_reported(tmp_path: Path) -> None:
    run(tmp_path, settings("fedavg", ledger=str(tmp_path / "kept")))
    folder = stopped_run(tmp_path, tmp_path / "kept")
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


def test_torn_metrics_and_moved_ledgers_are_accepted(tmp_path: Path) -> None:
    folder = stopped_run(tmp_path, tmp_path / "kept")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "epsi')
    (tmp_path / "kept").rename(tmp_path / "moved")
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
    folder = run(tmp_path, quick_sections("fedavg"))
    (folder / "summary.json").unlink()
    assert is_unfinished(folder)
    with pytest.raises(PrivacyError, match="no differential privacy"):
        unfinished_report(folder)
