"""Models of users: registered or given as modules, and checked before runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsynth import (
    FedAvg,
    FedDM,
    ModelSettings,
    PrivacySettings,
    RunSettings,
    register_model,
    resolve,
    simulate,
)
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.models.flat import flatten
from fedsynth.models.layers import check_embedding
from fedsynth.models.registry import build_model, has_given_weights, model_names
from fedsynth.privacy.errors import ForbiddenLayerError
from fedsynth.privacy.report.pages import render_markdown

Shape = tuple[int, int, int]


class Net(nn.Module):
    """A network with an embedding."""

    def __init__(self, image_shape: Shape, classes: int, norm: str = "none") -> None:
        super().__init__()
        norms = [nn.GroupNorm(1, 4)] if norm == "group" else []
        self.body = nn.Sequential(nn.Conv2d(image_shape[0], 4, 3, 2), *norms, nn.Flatten())
        size = self.body(torch.zeros(1, *image_shape)).shape[1]
        self.classifier = nn.Linear(size, classes)

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(x))
        return logits


def flat(image_shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(image_shape[1] * image_shape[2], classes))


def test_registered_classes_work_like_built_in_models() -> None:
    rng_state = torch.get_rng_state()
    settings = register_model("own-net", Net, norms=("none", "group"))
    assert resolve({"model": {"name": "own-net"}}).model.name == settings.name
    first, repeated, other = (build_model(settings, (1, 8, 8), 10, seed) for seed in (0, 0, 1))
    assert torch.equal(flatten(first), flatten(repeated))
    assert not torch.equal(flatten(first), flatten(other))
    assert first.embedding_size == 4 * 3 * 3
    check_embedding("feddm", first)
    grouped = build_model(ModelSettings("own-net", norm="group"), (1, 8, 8), 10, 0)
    assert any(isinstance(m, nn.GroupNorm) for m in grouped.modules())
    assert "own-net" not in model_names()
    assert torch.equal(rng_state, torch.get_rng_state())


def test_runs_start_from_module_weights_and_keep_the_module() -> None:
    """A broken version would train the user's module in place, or draw new weights."""
    module = flat((1, 8, 8), 10)
    weights = flatten(module)
    settings = RunSettings(FedAvg(local_steps=1, lr=0.0), rounds=1, model=module)  # type: ignore[arg-type]
    assert has_given_weights(settings.model)
    result = simulate(settings, quiet=True)
    assert torch.equal(flatten(result.model), weights)
    trained = RunSettings(FedAvg(local_steps=3, lr=0.1), rounds=1, model=module)  # type: ignore[arg-type]
    assert trained.model.name == settings.model.name  # equal weights, equal name
    simulate(trained, quiet=True)
    assert torch.equal(flatten(module), weights)
    other = RunSettings(FedAvg(), model=flat((1, 8, 8), 10))  # type: ignore[arg-type]
    assert other.model.name != settings.model.name


def failing_builder(image_shape: Shape, classes: int) -> nn.Module:
    raise ValueError("no\nluck")


class Mismatched(Net):
    """A network whose classifier has another input than its embedding."""

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)[:, :5]
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x))
        return logits


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (failing_builder, "no luck$"),
        (lambda image_shape, classes: 3, "torch.nn.Module"),
        (lambda image_shape, classes: nn.Flatten(), "at least one parameter"),
        (lambda image_shape, classes: flat(image_shape, 7), r"\[N, 10\].*\[2, 7\]"),
        (lambda: flat((1, 8, 8), 10), "positional arguments"),
        (3, "must be a torch.nn.Module, or a function"),
        (Mismatched, r"but returns \[2, 5\]"),
    ],
)
def test_invalid_models_raise_one_line_errors(model: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message) as error:
        build_model(register_model("own-wrong", model), (1, 8, 8), 10, 0)
    assert "\n" not in str(error.value)
    assert error.value.key == "name"


def with_fault(add_fault: Callable[[Any], object]) -> Any:
    """Returns a builder of networks with a fault that would show only at the end of a run."""

    def build(image_shape: Shape, classes: int) -> nn.Module:
        network = Net(image_shape, classes)
        add_fault(network)
        return network

    return build


def with_parameter(value: Tensor) -> Any:
    return with_fault(lambda self: setattr(self, "odd", nn.Parameter(value, requires_grad=False)))


def share_buffers(network: nn.Module) -> None:
    network.register_buffer("a", torch.zeros(4))
    network.register_buffer("b", network.a[:2])  # type: ignore[index]


def rename(network: nn.Module) -> None:
    network.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
        lambda module, state, prefix, _: state.update({"x..y": state.pop("classifier.bias")})
    )


class ExtraState(Net):
    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": 3}


class GrowingBuffers(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.register_buffer("seen", torch.zeros(len(x)))
        return super().forward(x)


class NoGradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_fault(lambda self: setattr(self, "twin", self.classifier)), "tied weights"),
        (with_fault(share_buffers), "tied weights"),
        (ExtraState, "_extra_state"),
        (with_fault(rename), "saved and loaded"),
        (with_fault(lambda self: setattr(self, "lock", threading.Lock())), "cannot be copied"),
        (GrowingBuffers, "change the names"),
        (NoGradients, "cannot be trained"),
        (with_parameter(torch.zeros(2, dtype=torch.complex64)), "torch.complex64"),
        (with_parameter(torch.zeros(2, dtype=torch.float64)), "torch.float64"),
        (with_parameter(torch.eye(2).to_sparse()), "cannot be copied"),
        (with_fault(lambda self: setattr(self, "a", nn.Linear(2, 2, device="meta"))), "no values"),
        (with_parameter(torch.full((2,), float("nan"))), "not finite"),
        (with_fault(lambda self: setattr(self, "more", nn.LazyLinear(2))), "has no values yet"),
        (flat, r"embed\(x\)"),  # not an AttributeError in the first step of condensation
    ],
)
def test_faults_are_detected_before_charges(model: Any, message: str, tmp_path: Path) -> None:
    """Undetected, they end a run with a traceback after its last round, with charged ledgers."""
    privacy = PrivacySettings(noise_multiplier=3.0, ledger=str(tmp_path / "ledger"))
    settings = RunSettings(FedDM(ipc=1, iterations=1), rounds=1, model=model, privacy=privacy)
    with pytest.raises(SettingError, match=message) as error:
        simulate(settings, quiet=True, output=tmp_path / "runs")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


class WeightUsedOutside(Net):
    """A network that uses its last weight outside of the layer, which Opacus does not see."""

    def forward(self, x: Tensor) -> Tensor:
        last = self.classifier
        return nn.functional.linear(self.embed(x), last.weight, last.bias)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_fault(lambda self: self.body.requires_grad_(False)), "body.0.weight"),
        (with_fault(lambda self: setattr(self, "more", nn.Linear(2, 2))), "more.weight"),
        (WeightUsedOutside, "classifier.weight"),
        (
            lambda shape, classes: torch.jit.script(flat(shape, classes)),
            "per-example gradients of the model failed",
        ),
    ],
)
def test_models_without_per_example_gradients_are_refused(
    model: Any, message: str, tmp_path: Path
) -> None:
    privacy = PrivacySettings(noise_multiplier=3.0, ledger=str(tmp_path / "ledger"))
    settings = RunSettings(FedAvg(local_steps=1), rounds=1, model=model, privacy=privacy)
    with pytest.raises(ForbiddenLayerError, match=message):
        simulate(settings, quiet=True, output=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_unregistered_and_taken_names_are_errors() -> None:
    with pytest.raises(SettingError, match=r"model\.name=PATH/mynet\.py:Net"):
        ModelSettings("mynet.py:Net@1234")
    register_model("mynet.py:Net@5678", Net)
    with pytest.raises(SettingError, match="not loaded, or has changed"):
        ModelSettings("mynet.py:Net@1234")
    with pytest.raises(UnknownNameError, match="nett"):
        ModelSettings("nett")
    for name in ("convnet", ""):
        with pytest.raises(SettingError, match="built-in"):
            register_model(name, Net)


@pytest.mark.parametrize(
    ("model", "origin"), [(flat((1, 8, 8), 10), "declares public"), (Net, "run's seed")]
)
def test_report_names_user_model_and_initial_weights(model: Any, origin: str) -> None:
    """Given weights may come from any training, so the report must not call them random."""
    privacy = resolve({"privacy": {"noise_multiplier": 3.0}}).privacy
    settings = RunSettings(FedAvg(local_steps=1), rounds=1, model=model, privacy=privacy)
    report: Any = simulate(settings, quiet=True).privacy
    assert origin in report["public_items"]["architecture and initial weights"]
    name = f"the model {settings.model.name}"
    assert report["own_code"] == [name]
    assert f"{name}, supplied by the operator" in render_markdown(report)
