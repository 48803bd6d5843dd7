"""The round loop: reproducible by its seed, accounted where it is private, refusing what it
must."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import FedDM, ImageData, RunSettings, load_dataset, resolve, simulate
from fedsynth.data.images import normalise
from fedsynth.errors import DataError, DivergedError, PartitionError, SettingError
from fedsynth.privacy import BudgetExceededError, Release, epsilon
from fedsynth.privacy.errors import PrivacySettingError
from tests.digits import digits
from tests.observers import NoteRecorder
from tests.quick_settings import quick_settings, verified


def settings_of(method: str, /, **sections: Any) -> RunSettings:
    given = {
        "run": {"method": method, "rounds": 2, "device": "cpu"},
        "partition": {"kind": "iid", "clients": 2, "local_test": 0.2},
        "model": {"width": 4, "depth": 1},
        "method": {**quick_settings(method), "ipc": 1} if method == "feddm" else {},
    }
    return resolve({**given, **sections})


def tiny(**privacy: Any) -> RunSettings:
    return settings_of("feddm", partition={"clients": 3}, privacy=privacy)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_run_is_reproduced_by_its_seed_unless_it_is_private() -> None:
    """Without the global generators."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    first = simulate(tiny()).model
    assert same(first, simulate(tiny()).model)
    assert not same(first, simulate(replace(tiny(), seed=5)).model)
    private = tiny(noise_multiplier=3.0)
    assert not same(simulate(private).model, simulate(private).model)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


def test_a_hard_cap_ends_the_run_in_order() -> None:
    rows = [Release(1, "x", "x", "x", 3.0, 1.0, 1.0, "full", 3, 1)]
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
    train = digits(np.arange(200) % 9)
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
    with pytest.raises(SettingError, match=r"method\.min_examples"):
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


def test_your_own_clients() -> None:
    labels = np.arange(200) % 10
    data = digits(labels)
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
    data = digits(np.concatenate([np.arange(180) % 9, [9, 9]]))
    notes = NoteRecorder()
    simulate(tiny(), data=(data, data), parts=[np.arange(182)], observer=notes)
    assert notes.lines[0].startswith("no differential privacy")
    assert "no client sends images of these classes: 9" in notes.lines[1]


def test_the_memory_bound_splits_clients_and_changes_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--memory-gb: a bound of 0.1 MB lets one client go at a time; the uploads are the same."""
    sizes: list[int] = []
    step = FedDM.client_step

    def watched(self: FedDM, message: Any, clients: Any, *others: Any) -> Any:
        sizes.append(len(clients.ids))
        return step(self, message, clients, *others)

    monkeypatch.setattr(FedDM, "client_step", watched)
    settings = replace(tiny(), rounds=1)
    wide = simulate(settings).uploads
    narrow = simulate(replace(settings, memory_gb=0.0001)).uploads
    assert sizes == [3, 1, 1, 1]
    for k, upload in wide.items():
        for name, tensor in upload.arrays():
            torch.testing.assert_close(tensor, dict(narrow[k].arrays())[name], atol=1e-4, rtol=1e-4)


# ------------------------------------- figures about a run never end it, nor charge it twice


def fail(*args: object, **kwargs: object) -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("fedsynth.results.measure.correct", "test accuracy"),
        ("fedsynth.results.measure.local_metrics", "accuracy on the clients' splits"),
        ("fedsynth.results.run_folder.image_grid_png", "picture"),
        ("fedsynth.methods.feddm.FedDM.facts", "metrics of the server"),
        ("fedsynth.methods.feddm.FedDM.aggregate_metrics", "metrics of the clients"),
    ],
)
def test_a_figure_that_fails_costs_only_itself(
    target: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an error after the round's charge, so that `--resume` charges and fails again."""
    monkeypatch.setattr(target, fail)
    notes = NoteRecorder()
    settings = settings_of("feddm", privacy={"noise_multiplier": 2.0})
    result = simulate(settings, output=tmp_path, observer=notes)
    assert len(result.metrics) == 2
    charged = (verified(result) / "ledger" / "client-000.jsonl").read_text().splitlines()
    assert len(charged) == 3  # the header, and a row for each round
    warned = [line for line in notes.lines if line.startswith("warning: cannot record the ")]
    assert len(warned) == 1
    assert f"{what}: ZeroDivisionError" in warned[0]


def test_figures_that_are_no_numbers_are_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: JSON without NaN, which refuses the row of a round that was charged."""
    facts = {"a": math.nan, "b": [1.0, -math.inf], "c": {"d": math.inf}}
    matrix = {"matrix": torch.tensor([[math.nan, 1.0]])}
    monkeypatch.setattr(FedDM, "facts", lambda *args: facts)
    monkeypatch.setattr(FedDM, "artefacts", lambda *args: matrix, raising=False)
    folder = simulate(settings_of("feddm"), output=tmp_path, quiet=True).folder
    assert folder is not None
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert (row["a"], row["b"], row["c"]) == (None, [1.0, None], {"d": None})
    assert json.loads((folder / "artefacts.json").read_text()) == {"matrix": [[None, 1.0]]}


PARTS: dict[str, Callable[[int], list[np.ndarray]]] = {
    "a client without records": lambda n: [np.arange(0), np.arange(n)],
    "one client": lambda n: [np.arange(n)],
    "a client whose records all test": lambda n: [np.arange(1), np.arange(1, 2), np.arange(2, n)],
    "nobody tests": lambda n: [np.arange(10), np.arange(10, 20)],
}


@pytest.mark.parametrize("parts", PARTS)
def test_odd_clients_do_not_end_a_run(parts: str) -> None:
    train, test = load_dataset("digits")
    settings = settings_of("fedavg", partition={"local_test": 0.97})
    divided = PARTS[parts](len(train))
    result = simulate(settings, data=(train, test), parts=divided, quiet=True)
    for row in result.metrics:
        if "local" in row:  # of those that test, by all their records
            pairs = zip(divided, row["local"]["client_accuracy"], strict=True)
            tested = [(len(part), a) for part, a in pairs if a is not None]
            size = sum(n for n, _ in tested)
            assert row["local"]["amp"] == pytest.approx(sum(n * a for n, a in tested) / size)
            assert row["local"]["wlp"] == min(a for _, a in tested)


def test_an_observer_that_fails_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a closed pipe on stderr, a full disk under a log."""

    def closed(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("fedsynth.simulation.run_messages.print", closed, raising=False)
    assert len(simulate(settings_of("fedavg")).metrics) == 2


def test_stratification_of_one_client_and_one_class_is_drawn(tmp_path: Path) -> None:
    train, test = load_dataset("digits")
    run = {"method": "fedhydra", "rounds": 1}
    settings = settings_of("fedhydra", run=run, method=quick_settings("fedhydra"))
    one: dict[str, Any] = {"data": (train, test), "parts": [np.arange(400)]}
    result = simulate(settings, **one, output=tmp_path, quiet=True)
    assert result.folder is not None
    assert list(result.folder.glob("*.png"))
