"""The trial of a private run's client steps: what the method's clients compute, and nothing else; its
doubts are in the report's verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsynth import RunSettings, resolve, simulate
from fedsynth.data.registry import dataset_spec
from fedsynth.features.feature_map import two_sided
from fedsynth.federation import position_leak_check
from fedsynth.federation.context import public_context
from fedsynth.federation.position_leak_check import (
    MIN_RECORDS,
    check_private_steps,
    records_of_step,
)
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.methods import feddm
from fedsynth.models import on_features as feature_linear
from fedsynth.privacy import dpsgd
from fedsynth.results.verification import verify_run
from fedsynth.synthesizer.condensation.matching import NetworkFeatures
from tests.families import by_family
from tests.quick_settings import quick_settings

WORDS = "position of an example"
CPU = torch.device("cpu")
Rows = Callable[..., Tensor]


def settings(
    method: str, dataset: str = "digits", privacy: dict[str, Any] | None = None, **model: Any
) -> RunSettings:
    given = {
        "run": {"method": method, "rounds": 1 if method == "dense" else 2},
        "method": {} if method == "fedstats" else quick_settings(method),
        "model": model,
        "partition": {"clients": 2},
        "privacy": {"noise_multiplier": 1.0} if privacy is None else privacy,
    }
    return replace(resolve(given), dataset=dataset)


def warned(run: RunSettings, device: torch.device = CPU) -> list[str]:
    return check_private_steps(run, public_context(run, dataset_spec(run.dataset), device))


def by_position(rows: Rows, bits: float = 2**-20) -> Rows:
    """Rows of a machine whose kernels add up every other one in another order."""

    def moved(*args: Any, **kwargs: Any) -> Tensor:
        found = rows(*args, **kwargs).clone()
        found[1::2] *= 1 + bits
        return found

    return moved


def moving(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "gradients":
        moved = by_position(dpsgd._per_example_gradients)
        monkeypatch.setattr(dpsgd, "_per_example_gradients", moved)
    if what == "features":
        monkeypatch.setattr(NetworkFeatures, "real", by_position(NetworkFeatures.real))


@pytest.mark.parametrize("private", [True, False])
def test_a_doubt_is_on_the_console_and_in_the_verdict(
    private: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    moving(monkeypatch, "gradients")
    privacy: dict[str, Any] | None = None if private else {}
    result = simulate(settings("fedavg", privacy=privacy, width=8, depth=2), output=tmp_path)
    assert capsys.readouterr().err.count(WORDS) == private
    if result.privacy is None or result.folder is None:
        return
    [warning] = result.privacy["verdict"]["warnings"]  # type: ignore[index]
    assert WORDS in warning
    monkeypatch.undo()  # on another machine
    assert verify_run(result.folder).problems == []
    start = json.loads((result.folder / "privacy_start.json").read_text())
    (result.folder / "privacy_start.json").write_text(json.dumps({**start, "warnings": []}))
    [problem] = verify_run(result.folder).problems
    assert "verdict.warnings" in problem


@pytest.mark.parametrize(
    "method",
    by_family(["feddm", "fedaf", "fedsum", "fedavg", "fedstats"], ("feddm", "fedavg", "fedstats")),
)
@pytest.mark.parametrize("what", ["gradients", "features", "nothing"])
def test_what_the_methods_clients_compute_is_what_is_tried(
    method: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a trial of the plain forward pass, which is no client's: condensing methods sum
    features of channels-last passes, methods that train gradients, FedStats neither."""
    moving(monkeypatch, what)
    mine = {"fedavg": "gradients", "fedstats": "factors"}.get(method, "features")
    assert len(warned(settings(method, width=8, depth=2))) == (what == mine)


@pytest.mark.parametrize("kind", ["rows", "products"])
def test_a_difference_of_one_bit_in_one_position_is_seen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of vectors, and of the factors of FedStats' and of linear models."""
    model = {"name": "linear"} if kind == "rows" else {"name": "linear", "features": "pixels"}
    run = settings("fedavg", **model)
    assert not warned(run)
    name = "_per_example_gradients" if kind == "rows" else "clipped_product"
    original = getattr(dpsgd, name)

    def moved(*args: Any) -> Any:
        found = original(*args)
        rows = found if kind == "rows" else found.column
        rows[5] = torch.nextafter(rows[5], torch.full_like(rows[5], 9.0))
        return found

    monkeypatch.setattr(dpsgd, name, moved)
    assert len(warned(run)) == 1


def test_a_mechanism_without_a_guarantee_gives_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moving(monkeypatch, "features")
    privacy = {"noise_multiplier": 1.0, "mechanism": "paper"}
    assert not warned(settings("feddm", privacy=privacy))


@pytest.mark.parametrize("dataset", by_family(("digits", "mnist", "cifar10"), ("digits",)))
@pytest.mark.parametrize(
    ("method", "model"),
    [("fedstats", {}), ("fedavg", {"features": "whitened-scattering", "name": "linear"})],
)
def test_models_on_features_are_tried_as_they_are_summed(
    method: str, model: dict[str, Any], dataset: str
) -> None:
    """Catches a trial of their plain forward pass, whose width is no multiple of 16: a warning with
    each run."""
    assert not warned(settings(method, dataset, **model))


def test_fedstats_is_tried_with_what_a_server_may_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a trial at the first weights only, where products with T, the identity, are exact."""

    def moved(left: torch.Tensor, rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = two_sided(left, rows, right)
        if not torch.equal(left, torch.eye(len(left))):
            product[5] = torch.nextafter(product[5], torch.full_like(product[5], 9.0))
        return product

    monkeypatch.setattr(feature_linear, "two_sided", moved)
    assert len(warned(settings("fedstats", "mnist"))) == 1


def test_each_kind_of_network_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a trial of the run's own network only, where clients have others."""
    run = settings("dense", "mnist", name="linear", clients="lenet5,mlp")
    tried: list[str] = []
    original = dpsgd._per_example_gradients

    def gradients(model: nn.Module, *args: Any) -> Tensor:
        tried.append(type(model).__name__)
        rows = original(model, *args)
        return by_position(lambda: rows)() if type(model).__name__ == "Mlp" else rows

    monkeypatch.setattr(dpsgd, "_per_example_gradients", gradients)
    assert len(warned(run)) == 1
    assert tried.count("LeNet5") == tried.count("Mlp") > 0
    assert "Linear" not in tried


def test_a_step_ends_with_its_last_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a trial that computes all steps without a release, or whose finding is lost if they
    fail on random images."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("post-processing")

    monkeypatch.setattr(feddm, "split_uploads", fails)
    moving(monkeypatch, "features")
    privacy = {"noise_multiplier": 1.0, "mechanism": "features"}
    [warning] = warned(settings("feddm", privacy=privacy))
    assert WORDS in warning


def test_a_trial_that_fails_is_in_the_verdict_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory\nin a kernel")

    monkeypatch.setattr(position_leak_check, "_trials", fails)
    report: Any = simulate(settings("fedavg", width=8, depth=2)).privacy
    assert "out of memory" in capsys.readouterr().err
    [warning] = report["verdict"]["warnings"]
    assert "out of memory" in warning


def test_as_many_records_are_tried_as_a_step_has_and_memory_allows() -> None:
    def records(**model: Any) -> int:
        run = settings("fedavg", "cifar10", **model)
        run = replace(run, method=replace(run.method, batch=256))  # type: ignore[call-arg]
        context = public_context(run, dataset_spec("cifar10"), CPU)
        return records_of_step(PrivacyPlan.checked(run, context).plans, context)

    assert records(name="linear") > 128  # a pass of DP-SGD, and into the next one
    assert MIN_RECORDS <= records(name="resnet18", norm="group") <= 12  # 11 million numbers each


@pytest.mark.parametrize("name", ["linear", "convnet"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_even_sides_and_widths_of_eight_are_safe_here(name: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert not warned(settings("fedavg", "mnist", name=name, width=8), torch.device(device))
