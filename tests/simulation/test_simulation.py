"""The round loop: reproducible by its seed, accounted where it is private, refusing what it
must."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData, from_arrays, normalise
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError, DivergedError, PartitionError, SettingError
from fedsynth.methods.feddm import FedDM
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.errors import BudgetExceededError, PrivacySettingError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.releases import Release
from fedsynth.simulation.simulate import simulate
from tests.observers import NoteRecorder


def tiny(method: str = "feddm", **privacy: Any) -> RunSettings:
    fast = {
        "feddm": {"iterations": 2, "ipc": 1, "server_epochs": 2},
        "fedavg": {"local_epochs": 1},
        "real": {"server_epochs": 2},
    }
    return resolve(
        {
            "run": {"method": method, "rounds": 2, "device": "cpu"},
            "partition": {"clients": 3},
            "model": {"width": 4},
            "method": fast[method],
            "privacy": privacy,
        }
    )


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def random_images(labels: np.ndarray) -> ImageData:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 1, 8, 8)).astype(np.uint8)
    return from_arrays(images, labels, dataset_spec("digits"))


@pytest.mark.parametrize("method", ["feddm", "fedavg"])
def test_a_run_is_reproduced_by_its_seed_unless_it_is_private(method: str) -> None:
    first, second = simulate(tiny(method)), simulate(tiny(method))
    assert same(first.model, second.model)
    accuracies = [[row["test_accuracy"] for row in run.metrics] for run in (first, second)]
    assert accuracies[0] == accuracies[1]
    assert not same(first.model, simulate(replace(tiny(method), seed=5)).model)
    private = tiny(method, noise_multiplier=3.0)
    assert not same(simulate(private).model, simulate(private).model)


def test_nothing_touches_the_global_generators() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    simulate(tiny())
    simulate(tiny("fedavg", noise_multiplier=3.0))
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


def test_charged_rows_are_the_rounds_that_ran_and_the_report_holds_them(tmp_path: Path) -> None:
    result = simulate(tiny(noise_multiplier=3.0), output=tmp_path)
    assert result.folder is not None
    ledgers = sorted((result.folder / "ledger").iterdir())
    assert len(ledgers) == 3
    dataset = json.loads(ledgers[0].read_text().splitlines()[0])["dataset"]
    rows = Ledger("client-000", ledgers[0], dataset=dataset).releases
    assert [(r.round, r.steps) for r in rows] == [(1, 2), (2, 2)]
    spent = epsilon(rows, 1e-5)
    assert result.metrics[-1]["epsilon"] == pytest.approx(spent)
    assert result.summary["differential_privacy"]["epsilon"] == pytest.approx(spent)


def test_a_hard_cap_ends_the_run_in_order() -> None:
    rows = [Release(1, "x", "x", "x", 3.0, 1.0, 1.0, "full", 2, 1)]
    cap = epsilon(rows, 1e-5) * 1.05  # one round fits, two do not
    result = simulate(tiny(noise_multiplier=3.0, epsilon=cap))
    assert len(result.metrics) == 1
    assert result.summary["differential_privacy"]["epsilon"] <= cap
    with pytest.raises(BudgetExceededError):
        simulate(tiny(noise_multiplier=3.0, epsilon=cap / 3))


def test_fewer_records_than_the_data_set_declares_are_refused() -> None:
    with pytest.raises(PrivacySettingError, match="must be at least 1438"):
        simulate(tiny(noise_multiplier=3.0, max_records=1000))


def test_a_class_without_examples_is_refused_only_without_privacy() -> None:
    """With DP on, class presence is private: no rule may look at it."""
    train = random_images(np.arange(200) % 9)
    with pytest.raises(DataError, match="class"):
        simulate(tiny(), data=(train, train))
    simulate(tiny(noise_multiplier=3.0), data=(train, train))


@pytest.mark.parametrize(("method", "name"), [("fedavg", "parameters.*"), ("solo", ".*weight")])
def test_a_diverged_run_names_the_client_and_has_no_finished_folder(
    method: str, name: str, tmp_path: Path
) -> None:
    """An upload's parameters, and a model that stays with its client."""
    diverging = {"local_epochs": 1, "lr": 1e38, "momentum": 0.0}
    settings = resolve(
        {"run": {"method": method, "rounds": 1}, "model": {"width": 4}, "method": diverging}
    )
    with pytest.raises(DivergedError, match=rf"round 1: {name} of client 0 is not finite"):
        simulate(settings, output=tmp_path)
    assert all(folder.name.endswith(".incomplete") for folder in tmp_path.iterdir())


def test_a_run_in_which_no_client_sends_an_image_is_refused() -> None:
    many = replace(tiny(), partition=replace(tiny().partition, clients=500, min_size=0))
    with pytest.raises(SettingError, match="no client sends an image"):
        simulate(many)


def test_accuracy_is_the_test_sets() -> None:
    """Test labels that are the model's own predictions give 1, others 0."""
    train, test = load_dataset("digits")
    model = simulate(tiny(), data=(train, test)).model
    with torch.no_grad():
        predicted = model(normalise(test.images, test.spec)).argmax(dim=1)
    for shift, expected in ((0, 1.0), (1, 0.0)):
        labelled = ImageData(test.images, (predicted + shift) % 10, test.spec)
        assert simulate(tiny(), data=(train, labelled)).accuracy == expected


def test_memories_go_from_round_to_round() -> None:
    """Images of the last round move twice; restarted ones are set back first."""
    settings = tiny()
    restarting = replace(settings, method=replace(settings.method, restart=True))  # type: ignore[call-arg]
    kept, restarted = (
        dict(simulate(each).uploads[0].arrays())["images"] for each in (settings, restarting)
    )
    assert not torch.allclose(kept, restarted, atol=1e-3)


def test_your_own_clients() -> None:
    labels = np.arange(200) % 10
    data = random_images(labels)
    parts = [np.flatnonzero(labels < 3), np.flatnonzero(labels >= 3)]
    uploads = simulate(tiny(), data=(data, data), parts=parts).uploads
    sent = [dict(uploads[k].arrays())["labels"].tolist() for k in (0, 1)]
    assert sent == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
    for bad, text in (
        ([[0, 1], [1, 2]], "client 1 has an example twice"),
        ([[0, 200]], r"must be in \[0, 20"),
        ([[0.5]], "whole numbers"),
        ([], "at least one client"),
    ):
        with pytest.raises(PartitionError, match=text):
            simulate(tiny(), data=(data, data), parts=bad)  # type: ignore[arg-type]


def test_a_class_that_no_client_sends_is_noted() -> None:
    data = random_images(np.concatenate([np.arange(180) % 9, [9, 9]]))
    notes = NoteRecorder()
    simulate(tiny(), data=(data, data), parts=[np.arange(182)], observer=notes)
    assert notes.lines[0].startswith("no differential privacy")
    assert "no client sends images of these classes: 9" in notes.lines[1]


def test_the_memory_bound_splits_clients_and_changes_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--memory-gb: a bound of 0.2 MB lets one client go at a time; the uploads are the same."""
    sizes: list[int] = []
    step = FedDM.client_step

    def watched(self: FedDM, message: Any, clients: Any, memories: Any, context: Any) -> Any:
        sizes.append(len(clients.ids))
        return step(self, message, clients, memories, context)

    monkeypatch.setattr(FedDM, "client_step", watched)
    given: dict[str, dict[str, Any]] = {
        "run": {"rounds": 1},
        "method": {"server_epochs": 1, "iterations": 3},
    }
    wide = simulate(resolve(given)).uploads
    narrow = simulate(resolve({**given, "run": {"rounds": 1, "memory_gb": 0.0002}})).uploads
    assert sizes == [5, 1, 1, 1, 1, 1]
    for k, upload in wide.items():
        for name, tensor in upload.arrays():
            torch.testing.assert_close(tensor, dict(narrow[k].arrays())[name], atol=1e-4, rtol=1e-4)
