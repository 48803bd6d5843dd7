"""Tests of the round loop: reproducibility, accounting, refusals and failing figures."""

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
    defaults = {
        "run": {"method": method, "rounds": 2, "device": "cpu"},
        "partition": {"kind": "iid", "clients": 2, "local_test": 0.2},
        "model": {"width": 4, "depth": 1},
        "method": {**quick_settings(method), "ipc": 1} if method == "feddm" else {},
    }
    return resolve({**defaults, **sections})


def tiny(**privacy: Any) -> RunSettings:
    return settings_of("feddm", partition={"clients": 3}, privacy=privacy)


def same_parameters(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_seeds_reproduce_runs_without_privacy() -> None:
    """Runs leave the global generators unchanged."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    first = simulate(tiny()).model
    assert same_parameters(first, simulate(tiny()).model)
    assert not same_parameters(first, simulate(replace(tiny(), seed=5)).model)
    private = tiny(noise_multiplier=3.0)
    assert not same_parameters(simulate(private).model, simulate(private).model)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


def test_budget_caps_end_the_run(tmp_path: Path) -> None:
    rows = [Release(1, "x", "x", "x", 3.0, 1.0, 1.0, "full", 3, 1)]
    cap = epsilon(rows, 1e-5) * 1.05  # one round fits, two do not
    result = simulate(tiny(noise_multiplier=3.0, epsilon=cap))
    assert len(result.metrics) == 1
    assert result.summary["differential_privacy"]["epsilon"] <= cap
    with pytest.raises(BudgetExceededError, match="above the cap"):
        simulate(tiny(noise_multiplier=3.0, epsilon=cap / 3), output=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_max_records_below_the_data_set_are_refused() -> None:
    with pytest.raises(PrivacySettingError, match="must be at least 1438"):
        simulate(tiny(noise_multiplier=3.0, max_records=1000))


def test_missing_classes_are_refused_only_without_privacy() -> None:
    """With DP the presence of a class is private: no rule may depend on it."""
    train = digits(np.arange(200) % 9)
    with pytest.raises(DataError, match="class"):
        simulate(tiny(), data=(train, train))
    simulate(tiny(noise_multiplier=3.0), data=(train, train))


@pytest.mark.parametrize(("method", "name"), [("fedavg", "parameters.*"), ("solo", ".*weight")])
def test_diverged_runs_name_the_client_and_stay_unfinished(
    method: str, name: str, tmp_path: Path
) -> None:
    """Covers an upload's parameters and a client's personal model."""
    diverging = {"local_epochs": 1, "lr": 1e38, "momentum": 0.0}
    settings = resolve(
        {"run": {"method": method, "rounds": 1}, "model": {"width": 4}, "method": diverging}
    )
    with pytest.raises(DivergedError, match=rf"round 1: {name} of client 0 is not finite"):
        simulate(settings, output=tmp_path)
    assert all(folder.name.endswith(".incomplete") for folder in tmp_path.iterdir())


def test_runs_without_any_synthetic_images_are_refused() -> None:
    many = replace(tiny(), partition=replace(tiny().partition, clients=500, min_size=0))
    with pytest.raises(SettingError, match=r"method\.min_examples"):
        simulate(many)


def test_accuracy_uses_the_test_set() -> None:
    """Test labels equal to the model's predictions give 1, others 0."""
    train, test = load_dataset("digits")
    model = simulate(tiny(), data=(train, test)).model
    with torch.no_grad():
        predicted = model(normalise(test.images, test.spec)).argmax(dim=1)
    for shift, expected in ((0, 1.0), (1, 0.0)):
        labelled = ImageData(test.images, (predicted + shift) % 10, test.spec)
        assert simulate(tiny(), data=(train, labelled)).accuracy == expected


def test_custom_partitions_are_validated_and_used() -> None:
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


def test_classes_without_images_are_noted() -> None:
    data = digits(np.concatenate([np.arange(180) % 9, [9, 9]]))
    notes = NoteRecorder()
    simulate(tiny(), data=(data, data), parts=[np.arange(182)], observer=notes)
    assert notes.lines[0].startswith("no differential privacy")
    assert "no client sends images of these classes: 9" in notes.lines[1]


def test_memory_bounds_split_clients_without_changing_uploads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--memory-gb=0.0001 runs one client at a time; the uploads are the same."""
    sizes: list[int] = []
    step = FedDM.client_step

    def counted_step(self: FedDM, message: Any, clients: Any, *others: Any) -> Any:
        sizes.append(len(clients.ids))
        return step(self, message, clients, *others)

    monkeypatch.setattr(FedDM, "client_step", counted_step)
    settings = replace(tiny(), rounds=1)
    wide = simulate(settings).uploads
    narrow = simulate(replace(settings, memory_gb=0.0001)).uploads
    assert sizes == [3, 1, 1, 1]
    for k, upload in wide.items():
        for name, tensor in upload.arrays():
            torch.testing.assert_close(tensor, dict(narrow[k].arrays())[name], atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------- failing figures and observers


def raise_error(*args: object, **kwargs: object) -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("target", "figure"),
    [
        ("fedsynth.results.measure.classification_measures", "test accuracy"),
        ("fedsynth.results.measure.local_metrics", "accuracy on the clients' splits"),
        ("fedsynth.data.picture.image_grid_png", "picture"),
        ("fedsynth.methods.feddm.FedDM.facts", "metrics of the server"),
        ("fedsynth.methods.feddm.FedDM.aggregate_metrics", "metrics of the clients"),
    ],
)
def test_failing_figures_do_not_end_runs(
    target: str, figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an error after the round's charge, so that `--resume` charges and fails again."""
    monkeypatch.setattr(target, raise_error)
    notes = NoteRecorder()
    settings = settings_of("feddm", privacy={"noise_multiplier": 2.0})
    result = simulate(settings, output=tmp_path, observer=notes)
    assert len(result.metrics) == 2
    charged = (verified(result) / "ledger" / "client-000.jsonl").read_text().splitlines()
    assert len(charged) == 3  # the header, and a row for each round
    warnings = [line for line in notes.lines if line.startswith("warning: cannot record the ")]
    assert len(warnings) == 1
    assert f"{figure}: ZeroDivisionError" in warnings[0]


def test_non_finite_figures_are_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: JSON without NaN refuses the row of a charged round."""
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
    "a client of only test records": lambda n: [np.arange(1), np.arange(1, 2), np.arange(2, n)],
    "no test records": lambda n: [np.arange(10), np.arange(10, 20)],
}


@pytest.mark.parametrize("parts", PARTS)
def test_unusual_partitions_do_not_end_runs(parts: str) -> None:
    train, test = load_dataset("digits")
    settings = settings_of("fedavg", partition={"local_test": 0.97})
    divided = PARTS[parts](len(train))
    result = simulate(settings, data=(train, test), parts=divided, quiet=True)
    for row in result.metrics:
        if "local" in row:  # of clients with test records, weighted by all their records
            pairs = zip(divided, row["local"]["client_accuracy"], strict=True)
            tested = [(len(part), a) for part, a in pairs if a is not None]
            size = sum(n for n, _ in tested)
            assert row["local"]["amp"] == pytest.approx(sum(n * a for n, a in tested) / size)
            assert row["local"]["wlp"] == min(a for _, a in tested)


def test_failing_observers_do_not_end_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a closed pipe on stderr or a full disk ends the run."""

    def closed(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("fedsynth.results.run_messages.print", closed, raising=False)
    assert len(simulate(settings_of("fedavg")).metrics) == 2


def test_stratification_of_one_client_is_written(tmp_path: Path) -> None:
    train, test = load_dataset("digits")
    run = {"method": "fedhydra", "rounds": 1}
    settings = settings_of("fedhydra", run=run, method=quick_settings("fedhydra"))
    one_client: dict[str, Any] = {"data": (train, test), "parts": [np.arange(400)]}
    result = simulate(settings, **one_client, output=tmp_path, quiet=True)
    assert result.folder is not None
    assert (result.folder / "artefacts.json").is_file()
