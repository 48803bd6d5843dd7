"""Tests of the trial of a private run's client steps, and of its warnings in the report's
verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from fedsynth.privacy.dpsgd import ExampleGradients
from fedsynth.results.verification import verify_run
from fedsynth.synthesizer.condensation.matching import NetworkFeatures
from tests.quick_runs import by_family, quick_settings

MESSAGE = "position of an example"
CPU = torch.device("cpu")
Rows = Callable[..., Tensor]


def settings(
    method: str, dataset: str = "digits", privacy: dict[str, Any] | None = None, **model: Any
) -> RunSettings:
    base = {
        "run": {"method": method, "rounds": 1 if method == "dense" else 2},
        "method": {} if method == "fedstats" else quick_settings(method),
        "model": model,
        "partition": {"clients": 2},
        "privacy": {"noise_multiplier": 1.0} if privacy is None else privacy,
    }
    return replace(resolve(base), dataset=dataset)


def warnings_of(run: RunSettings, device: torch.device = CPU) -> list[str]:
    return check_private_steps(run, public_context(run, dataset_spec(run.dataset), device))


def shifted_by_position(rows: Rows, bits: float = 2**-20) -> Rows:
    """Imitates kernels that sum every other row in a different order."""

    def shifted(*args: Any, **kwargs: Any) -> Tensor:
        result = rows(*args, **kwargs).clone()
        result[1::2] *= 1 + bits
        return result

    return shifted


def shift_rows(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "gradients":
        shifted = shifted_by_position(ExampleGradients.__call__)
        monkeypatch.setattr(ExampleGradients, "__call__", shifted)
    if kind == "features":
        monkeypatch.setattr(NetworkFeatures, "real", shifted_by_position(NetworkFeatures.real))


@pytest.mark.parametrize("private", [True, False])
def test_warnings_are_printed_and_reported(
    private: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shift_rows(monkeypatch, "gradients")
    privacy: dict[str, Any] | None = None if private else {}
    result = simulate(settings("fedavg", privacy=privacy, width=8, depth=2), output=tmp_path)
    assert capsys.readouterr().err.count(MESSAGE) == private
    if result.privacy is None or result.folder is None:
        return
    [warning] = result.privacy["verdict"]["warnings"]  # type: ignore[index]
    assert MESSAGE in warning
    monkeypatch.undo()  # on another machine
    assert verify_run(result.folder).problems == []
    start = json.loads((result.folder / "privacy_start.json").read_text())
    (result.folder / "privacy_start.json").write_text(json.dumps({**start, "warnings": []}))
    [problem] = verify_run(result.folder).problems
    assert "verdict.warnings" in problem


PAPER = {"noise_multiplier": 1.0, "mechanism": "paper"}


@pytest.mark.parametrize(
    "method",
    by_family(["feddm", "fedaf", "fedsum", "fedavg", "fedstats"], ("feddm", "fedavg", "fedstats")),
)
def test_trials_compute_client_steps(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken version would try the plain forward pass, but condensation sums features of
    channels-last passes, training sums gradients, and FedStats neither. Mechanisms without a
    guarantee cause no warning."""
    computed = {"fedavg": "gradients", "fedstats": "factors"}.get(method, "features")
    for kind in ("gradients", "features", "nothing"):
        with monkeypatch.context() as patch:
            shift_rows(patch, kind)
            assert len(warnings_of(settings(method, width=8, depth=2))) == (kind == computed), kind
            assert method != "feddm" or not warnings_of(settings(method, privacy=PAPER))


@pytest.mark.parametrize("model", [{}, {"features": "pixels"}], ids=["rows", "products"])
def test_single_bit_differences_are_detected(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers vectors, and the factors of FedStats and of linear models."""
    run = settings("fedavg", name="linear", **model)
    assert not warnings_of(run)
    original = ExampleGradients.__call__

    def shifted(*args: Any) -> Any:
        rows = original(*args)
        rows[5] = torch.nextafter(rows[5], torch.full_like(rows[5], 9.0))
        return rows

    monkeypatch.setattr(ExampleGradients, "__call__", shifted)
    assert len(warnings_of(run)) == 1


WHITENED = {"features": "whitened-scattering", "name": "linear"}


@pytest.mark.parametrize("dataset", by_family(("digits", "mnist", "cifar10"), ("digits",)))
@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedstats", {}),
        ("fedavg", WHITENED),
        ("fedavg", {"name": "linear"}),
        ("fedavg", {"name": "convnet", "width": 8}),
    ],
)
def test_common_models_cause_no_warning(
    method: str, model: dict[str, Any], dataset: str, device: torch.device
) -> None:
    """Regression: the plain forward pass of models on features was tried, whose width is no
    multiple of 16, and each run had a warning."""
    assert not warnings_of(settings(method, dataset, **model), device)


def test_fedstats_is_tried_with_server_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of the initial weights only would miss errors, since products with T = I are exact."""

    def shifted(
        first_factor: torch.Tensor, rows: torch.Tensor, second_factor: torch.Tensor
    ) -> torch.Tensor:
        product = two_sided(first_factor, rows, second_factor)
        if not torch.equal(first_factor, torch.eye(len(first_factor))):
            product[5] = torch.nextafter(product[5], torch.full_like(product[5], 9.0))
        return product

    monkeypatch.setattr(feature_linear, "two_sided", shifted)
    assert len(warnings_of(settings("fedstats", "mnist"))) == 1


def test_kinds_of_networks_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken version would ignore the networks of clients."""
    run = settings("dense", "mnist", name="linear", clients="lenet5,mlp")
    names: list[str] = []
    original = ExampleGradients.__call__

    def gradients(self: ExampleGradients, *args: Any) -> Tensor:
        name = type(self._model).__name__
        names.append(name)
        rows = original(self, *args)
        return shifted_by_position(lambda: rows)() if name == "Mlp" else rows

    monkeypatch.setattr(ExampleGradients, "__call__", gradients)
    assert len(warnings_of(run)) == 1
    assert names.count("LeNet5") == names.count("Mlp") > 0
    assert "Linear" not in names


def test_failures_after_the_last_release_are_ignored_and_others_cause_warnings_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken versions would compute steps without a release, or lose findings if these fail on
    random images."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory\nin a kernel")

    with monkeypatch.context() as patch:
        patch.setattr(feddm.sets, "split_uploads", fails)
        shift_rows(patch, "features")
        privacy = {"noise_multiplier": 1.0, "mechanism": "features"}
        [warning] = warnings_of(settings("feddm", privacy=privacy))
        assert MESSAGE in warning
    monkeypatch.setattr(position_leak_check, "_trials", fails)
    report: Any = simulate(settings("fedavg", width=8, depth=2)).privacy
    assert "out of memory" in capsys.readouterr().err
    [warning] = report["verdict"]["warnings"]
    assert "out of memory" in warning


def test_trial_size_is_limited_by_step_and_memory() -> None:
    def records(**model: Any) -> int:
        run = settings("fedavg", "cifar10", **model)
        run = replace(run, method=replace(run.method, batch=256))  # type: ignore[call-arg]
        context = public_context(run, dataset_spec("cifar10"), CPU)
        return records_of_step(PrivacyPlan.checked(run, context).plans, context)

    assert records(name="linear") > 128  # a pass of DP-SGD, and into the next one
    assert MIN_RECORDS <= records(name="resnet18", norm="group") <= 12  # 11 million numbers each
