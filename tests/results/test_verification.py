"""Honest run folders verify, of every kind; and a run that did not finish can be reported."""

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
from fedsynth.results.verification import is_unfinished, unfinished_report, verify_run
from fedsynth.simulation.simulate import simulate
from tests.quick_settings import quick_settings
from tests.results.private_runs import found, run, settings

# ----------------------------------------------------------------------- honest runs of many kinds


def with_private_test_images_and_named_clients(output: Path) -> Path:
    train, test = load_dataset("digits")
    spec = replace(train.spec, name="scans", train_size=600)
    made = [from_arrays(one.images.numpy(), one.labels.numpy(), spec) for one in (train, test)]
    return run(
        output,
        settings(max_records=1000, ledger=str(output / "kept")),
        data=(made[0], made[1]),
        parts=np.split(np.arange(600), [100, 350]),
        names=["east", "north", "west"],
        test="private",
    )


def kept_twice(output: Path) -> Path:
    kept = str(output / "kept")
    first = run(output, settings(ledger=kept))
    run(output, settings("fedavg", ledger=kept))
    return first


def kept_after_another(output: Path) -> Path:
    kept = str(output / "kept")
    run(output, settings(ledger=kept, noise_multiplier=4.0, sample_rate=1.0))
    both = settings("fedavg", ledger=kept, epsilon=8.0, sample_rate=1.0)
    del both["privacy"]["noise_multiplier"]
    folder = run(output, both)
    heads = json.loads((folder / "privacy_report.json").read_text())["ledger_heads"]
    assert {(head["rows_before"], head["rows"]) for head in heads.values()} == {(2, 4)}
    return folder


def changed(method: str, clients: int = 3, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run whose sections have these values, too."""
    given = settings(method, clients)
    return {name: {**values, **sections.get(name, {})} for name, values in given.items()}


ROUND = {"rounds": 1}
HONEST: dict[str, dict[str, Any] | Callable[[Path], Path]] = {
    "two releases": settings(mechanism="features"),
    "paper": settings(mechanism="paper"),
    "zero-out, four sums": settings(adjacency="zero-out", four_sums=True),
    "replace-one": settings("fedavg", adjacency="replace-one", clip=0.5),
    "participation": changed(
        "fedavg", 5, run={"rounds": 3, "participation": 0.4}, privacy={"sample_rate": 1.0}
    ),
    "own test splits": changed("fedavg", 2, partition={"local_test": 0.2, "subset": 0.5}),
    "architectures": changed(
        "feddf", run=ROUND, model={"clients": "convnet,linear"}, method=quick_settings("feddf")
    ),
    "generated images": changed(
        "fedkf", method={"generator_width": 4, "generator_batch": 8, "latent": 8}
    ),
    "private test images, named clients": with_private_test_images_and_named_clients,
    "a kept ledger that has grown since": kept_twice,
    "a kept ledger with earlier rows": kept_after_another,
}


@pytest.mark.parametrize("kind", HONEST)
def test_honest_runs_verify(kind: str, tmp_path: Path) -> None:
    made = HONEST[kind]
    folder = run(tmp_path, made) if isinstance(made, dict) else made(tmp_path)
    result = verify_run(folder)
    assert result.problems == []
    assert "were compared with the ledger files" in result.notes[0]
    assert verify_run(folder / "privacy_report.json").problems == []


def test_matrices_are_verified_by_their_shape(tmp_path: Path) -> None:
    folder = run(tmp_path, changed("fedhydra", 2, run=ROUND, method=quick_settings("fedhydra")))
    assert found(folder) == []
    file = folder / "artefacts.json"
    matrices = json.loads(file.read_text())
    file.write_text(json.dumps({name: rows[:-1] for name, rows in matrices.items()}))
    assert "has shape (9, 2), but must be [10, clients]" in " ".join(found(folder))
    file.write_text('{"stratification": "?"}')
    assert "artefacts.json cannot be read" in " ".join(found(folder))


def test_two_runs_on_a_shared_ledger_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run's rows come between this one's, and its cap ends this one in the middle of a
    round."""
    kept = tmp_path / "kept"
    prepare = InProcess.prepare

    def charged_meanwhile(self: InProcess, context: RoundContext) -> Any:
        refusals = prepare(self, context)
        budgets = [one.budget for one in self.clients if one.budget is not None]
        for ledger in [one.ledger for one in budgets] if context.round == 2 else ():
            Ledger(ledger.client, ledger.path, dataset=ledger.dataset).charge(
                replace(ledger.releases[-1], quantity="something else", round=7)
            )
        return refusals

    monkeypatch.setattr(InProcess, "prepare", charged_meanwhile)
    capped = settings(ledger=str(kept), noise_multiplier=3.0, epsilon=4.0)
    folder = run(tmp_path, capped)
    monkeypatch.undo()
    assert found(folder) == []
    assert "ended after 1 of 2 rounds" in (folder / "privacy_report.md").read_text()
    row = json.loads((folder / "metrics.jsonl").read_text())
    (folder / "metrics.jsonl").write_text(json.dumps({**row, "epsilon": 1.0}) + "\n")
    assert any("must be between" in problem for problem in found(folder))


def test_noise_that_a_test_injected_leaves_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def secret(**options: Any) -> SecretGenerator:
        return SecretGenerator(test_only=np.random.default_rng(0))

    monkeypatch.setattr(client_runtime, "SecretGenerator", secret)
    folder = run(tmp_path, settings())
    monkeypatch.undo()
    assert "not private" in (folder / "privacy_report.md").read_text()
    assert found(folder) == []


# ------------------------------------------------------------------------- runs that did not finish


class StoppedError(Exception):
    """Stands for whatever ends a process."""


def stopped(output: Path, chosen: RunSettings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that ends in round 2 after the clients' releases, as a crash would end it."""
    check = server.check_finite

    def crash(tensors: Mapping[str, torch.Tensor], whose: str, number: int) -> None:
        if number == 2:
            raise StoppedError
        check(tensors, whose, number)

    monkeypatch.setattr(server, "check_finite", crash)
    with pytest.raises(StoppedError):
        simulate(chosen, output=output)
    monkeypatch.undo()
    (folder,) = output.glob("*.incomplete")
    return folder


def test_a_run_that_was_stopped_can_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = str(tmp_path / "kept")
    run(tmp_path, settings("fedavg", ledger=kept))
    folder = stopped(tmp_path, resolve(settings(ledger=kept)), monkeypatch)
    assert is_unfinished(folder)
    with pytest.raises(PrivacyError, match="To build a report, run fedsynth privacy report"):
        verify_run(folder)
    report: Any = unfinished_report(folder)
    write_report(report, folder)
    assert found(folder) == []
    text = (folder / "privacy_report.md").read_text()
    assert "abandoned after 1 of 2 rounds" in text
    head = report["ledger_heads"]["client-000"]
    assert (head["rows_before"], head["rows"]) == (2, 4)
    entries = [entry for entry in report["ledger"] if entry["mechanism"] == "residual"]
    assert [entry["rounds"] for entry in entries] == [[1, 2]]
    write_report({**report, "abandoned": False}, folder)
    assert found(folder) == ["abandoned is False, but should be True"]


def test_an_abandoned_runs_metrics_may_be_torn_and_its_ledgers_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    folder = stopped(tmp_path, resolve(settings(ledger=str(kept))), monkeypatch)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "epsi')
    kept.rename(tmp_path / "moved")
    with pytest.raises(PrivacyError, match="with --ledger"):
        unfinished_report(folder)
    write_report(unfinished_report(folder, ledger=tmp_path / "moved"), folder)
    assert found(folder, ledger=tmp_path / "moved") == []
    (folder / "metrics.jsonl").unlink()
    assert any("rounds_done" in problem for problem in found(folder))
    (tmp_path / "moved" / "client-001.jsonl").unlink()
    with pytest.raises(PrivacyError, match="client-001"):
        unfinished_report(folder, ledger=tmp_path / "moved")


def test_nothing_can_be_reported_of_a_run_without_privacy(tmp_path: Path) -> None:
    chosen = settings()
    del chosen["privacy"]
    folder = run(tmp_path, chosen)
    (folder / "summary.json").unlink()
    assert is_unfinished(folder)
    with pytest.raises(PrivacyError, match="no differential privacy"):
        unfinished_report(folder)
