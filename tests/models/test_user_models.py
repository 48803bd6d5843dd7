"""Models of a user's own: registered, given as modules, looked at before they run."""

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
from fedsynth.models.registry import build_model, has_given_weights, model_names
from fedsynth.privacy.errors import ForbiddenLayerError
from fedsynth.privacy.report.pages import render_markdown
from fedsynth.validation import check_embedding

Shape = tuple[int, int, int]


class Net(nn.Module):
    """A network that methods can look into."""

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


def test_a_registered_class_is_a_model_like_others() -> None:
    before = torch.get_rng_state()
    settings = register_model("own-net", Net, norms=("none", "group"))
    assert resolve({"model": {"name": "own-net"}}).model.name == settings.name
    first, again, other = (build_model(settings, (1, 8, 8), 10, seed) for seed in (0, 0, 1))
    assert torch.equal(flatten(first), flatten(again))
    assert not torch.equal(flatten(first), flatten(other))
    assert first.embedding_size == 4 * 3 * 3
    check_embedding("feddm", first)
    grouped = build_model(ModelSettings("own-net", norm="group"), (1, 8, 8), 10, 0)
    assert any(isinstance(m, nn.GroupNorm) for m in grouped.modules())
    assert "own-net" not in model_names()
    assert torch.equal(before, torch.get_rng_state())


def test_a_module_starts_with_its_weights_and_stays_as_it_is() -> None:
    """Catches: the user's own module trained in place; fresh weights in place of the given ones."""
    module = flat((1, 8, 8), 10)
    before = flatten(module)
    settings = RunSettings(FedAvg(local_steps=1, lr=0.0), rounds=1, model=module)  # type: ignore[arg-type]
    assert has_given_weights(settings.model)
    result = simulate(settings, quiet=True)
    assert torch.equal(flatten(result.model), before)
    trained = RunSettings(FedAvg(local_steps=3, lr=0.1), rounds=1, model=module)  # type: ignore[arg-type]
    assert trained.model.name == settings.model.name  # the same weights, the same name
    simulate(trained, quiet=True)
    assert torch.equal(flatten(module), before)
    other = RunSettings(FedAvg(), model=flat((1, 8, 8), 10))  # type: ignore[arg-type]
    assert other.model.name != settings.model.name


def fails(image_shape: Shape, classes: int) -> nn.Module:
    raise ValueError("no\nluck")


class Mismatched(Net):
    """A network whose classifier is not of its embedding."""

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)[:, :5]
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x))
        return logits


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (fails, "no luck$"),
        (lambda image_shape, classes: 3, "torch.nn.Module"),
        (lambda image_shape, classes: nn.Flatten(), "no parameters"),
        (lambda image_shape, classes: flat(image_shape, 7), r"\[N, 10\].*\[2, 7\]"),
        (lambda: flat((1, 8, 8), 10), "positional arguments"),
        (3, "must be a module, or a function"),
        (Mismatched, r"but returns \[2, 5\]"),
    ],
)
def test_an_invalid_model_is_one_line(model: Any, text: str) -> None:
    with pytest.raises(SettingError, match=text) as caught:
        build_model(register_model("own-wrong", model), (1, 8, 8), 10, 0)
    assert "\n" not in str(caught.value)
    assert caught.value.key == "name"


def with_fault(spoil: Callable[[Any], object]) -> Any:
    """A network with a fault that a run would meet in its last round, or after it."""

    def build(image_shape: Shape, classes: int) -> nn.Module:
        network = Net(image_shape, classes)
        spoil(network)
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


class Grows(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.register_buffer("seen", torch.zeros(len(x)))
        return super().forward(x)


class NoGradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (with_fault(lambda self: setattr(self, "twin", self.classifier)), "tied weights"),
        (with_fault(share_buffers), "tied weights"),
        (ExtraState, "_extra_state"),
        (with_fault(rename), "saved and loaded"),
        (with_fault(lambda self: setattr(self, "lock", threading.Lock())), "cannot be copied"),
        (Grows, "changes the names"),
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
def test_faults_show_before_anything_is_charged(model: Any, why: str, tmp_path: Path) -> None:
    """They ended a run with a traceback after its last round, with its ledgers charged."""
    privacy = PrivacySettings(noise_multiplier=3.0, ledger=str(tmp_path / "ledger"))
    settings = RunSettings(FedDM(ipc=1, iterations=1), rounds=1, model=model, privacy=privacy)
    with pytest.raises(SettingError, match=why) as caught:
        simulate(settings, quiet=True, output=tmp_path / "runs")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class Elsewhere(Net):
    """Its last layer's weight is used outside of this layer, which Opacus does not see."""

    def forward(self, x: Tensor) -> Tensor:
        last = self.classifier
        return nn.functional.linear(self.embed(x), last.weight, last.bias)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (with_fault(lambda self: self.body.requires_grad_(False)), "body.0.weight"),
        (with_fault(lambda self: setattr(self, "more", nn.Linear(2, 2))), "more.weight"),
        (Elsewhere, "classifier.weight"),
        (
            lambda shape, classes: torch.jit.script(flat(shape, classes)),
            "per-example gradients of the model failed",
        ),
    ],
)
def test_what_dp_sgd_cannot_train_is_refused_before_anything_is_charged(
    model: Any, why: str, tmp_path: Path
) -> None:
    privacy = PrivacySettings(noise_multiplier=3.0, ledger=str(tmp_path / "ledger"))
    settings = RunSettings(FedAvg(local_steps=1), rounds=1, model=model, privacy=privacy)
    with pytest.raises(ForbiddenLayerError, match=why):
        simulate(settings, quiet=True, output=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_not_registered_or_taken_are_said() -> None:
    with pytest.raises(SettingError, match=r"model\.name=PATH/mynet\.py:Net"):
        ModelSettings("mynet.py:Net@1234")
    register_model("mynet.py:Net@5678", Net)
    with pytest.raises(SettingError, match="the file that you named is"):
        ModelSettings("mynet.py:Net@1234")
    with pytest.raises(UnknownNameError, match="nett"):
        ModelSettings("nett")
    for name in ("convnet", ""):
        with pytest.raises(SettingError, match="built-in"):
            register_model(name, Net)


@pytest.mark.parametrize(
    ("model", "words"), [(flat((1, 8, 8), 10), "declares public"), (Net, "run's seed")]
)
def test_a_report_names_the_users_model_and_its_initial_weights(model: Any, words: str) -> None:
    """Catches: "drawn from the run's seed" of weights that were trained on who knows what."""
    privacy = resolve({"privacy": {"noise_multiplier": 3.0}}).privacy
    settings = RunSettings(FedAvg(local_steps=1), rounds=1, model=model, privacy=privacy)
    report: Any = simulate(settings, quiet=True).privacy
    assert words in report["public_items"]["architecture and initial weights"]
    name = f"the model {settings.model.name}"
    assert report["own_code"] == [name]
    assert f"{name}, supplied by the operator" in render_markdown(report)
