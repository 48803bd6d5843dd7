"""Models of users and libraries, and models on fixed feature maps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedsynth as fs
from fedsynth.core.client import ExactClientView
from fedsynth.core.feature_cache import feature_table
from fedsynth.data.images import normalise
from fedsynth.errors import ForbiddenLayerError, SettingError, UnknownNameError
from fedsynth.evaluation.accuracy import predict, scores
from fedsynth.features import feature_map
from fedsynth.features.feature_map import Shape
from fedsynth.methods import METHODS, method_class
from fedsynth.models.flat import flatten
from fedsynth.models.layers import check_embedding, has_batch_norm
from fedsynth.models.registry import build_model, build_network, has_given_weights, model_names
from fedsynth.privacy.report.pages import render_markdown
from tests.digits import SPEC, digits
from tests.quick_runs import by_family, quick_settings
from tests.raising import raises


class Net(nn.Module):
    def __init__(self, image_shape: Shape, classes: int, norm: str = "none") -> None:
        super().__init__()
        norms = [nn.GroupNorm(1, 4)] if norm == "group" else []
        self.body = nn.Sequential(nn.Conv2d(image_shape[0], 4, 3, 2), *norms, nn.Flatten())
        size = self.body(torch.zeros(1, *image_shape)).shape[1]
        self.classifier = nn.Linear(size, classes)

    def embed(self, x: Tensor) -> Any:
        return self.body(x)

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.embed(x))


def flat(image_shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(image_shape[1] * image_shape[2], classes))


def subclass(**functions: Any) -> type[Net]:
    return type("Net", (Net,), functions)


def test_registered_classes_work_like_built_in_models() -> None:
    rng_state = torch.get_rng_state()
    settings = fs.register_model("own-net", Net, norms=("none", "group"))
    assert fs.resolve({"model": {"name": "own-net"}}).model.name == settings.name
    first, repeated, other = (build_model(settings, (1, 8, 8), 10, seed) for seed in (0, 0, 1))
    assert torch.equal(flatten(first), flatten(repeated))
    assert not torch.equal(flatten(first), flatten(other))
    assert first.embedding_size == 4 * 3 * 3
    check_embedding("feddm", first)
    grouped = build_model(fs.ModelSettings("own-net", norm="group"), (1, 8, 8), 10, 0)
    assert any(isinstance(m, nn.GroupNorm) for m in grouped.modules())
    assert "own-net" not in model_names()
    assert torch.equal(rng_state, torch.get_rng_state())


def test_runs_start_from_module_weights_and_keep_the_module() -> None:
    module = flat((1, 8, 8), 10)
    weights = flatten(module)
    settings = fs.RunSettings(fs.FedAvg(local_steps=1, lr=0.0), rounds=1, model=module)  # type: ignore[arg-type]
    assert has_given_weights(settings.model)
    result = fs.simulate(settings, quiet=True)
    assert torch.equal(flatten(result.model), weights)
    trained = fs.RunSettings(fs.FedAvg(local_steps=3, lr=0.1), rounds=1, model=module)  # type: ignore[arg-type]
    assert trained.model.name == settings.model.name  # equal weights, equal name
    fs.simulate(trained, quiet=True)
    assert torch.equal(flatten(module), weights)
    other = fs.RunSettings(fs.FedAvg(), model=flat((1, 8, 8), 10))  # type: ignore[arg-type]
    assert other.model.name != settings.model.name


def test_invalid_models_raise_one_line_errors() -> None:
    plain_forward = lambda self, x: self.classifier(self.body(x))  # noqa: E731
    for model, message in (
        (Mock(side_effect=ValueError("no\nluck")), "no luck$"),
        (lambda shape, classes: 3, "torch.nn.Module"),
        (lambda shape, classes: nn.Flatten(), "no parameters to train"),
        (lambda shape, classes: flat(shape, 7), r"\[N, 10\].*\[2, 7\]"),
        (lambda: flat((1, 8, 8), 10), "positional arguments"),
        (3, "must be an nn.Module, or a function"),
        (subclass(embed=lambda self, x: self.body(x)[:, :5], forward=plain_forward), r"\[2, 5\]"),
    ):
        with pytest.raises(SettingError, match=message) as error:
            build_model(fs.register_model("own-wrong", model), (1, 8, 8), 10, 0)
        assert "\n" not in str(error.value)
        assert error.value.key == "name"


def with_fault(add_fault: Callable[[Any], object]) -> Any:
    """Returns a builder of networks with a fault that would show only at the end of a run."""

    def build(image_shape: Shape, classes: int) -> nn.Module:
        network = Net(image_shape, classes)
        add_fault(network)
        return network

    return build


def with_attribute(value: Any) -> Any:
    return with_fault(lambda self: setattr(self, "odd", value))


def share_buffers(network: nn.Module) -> None:
    network.register_buffer("a", torch.zeros(4))
    network.register_buffer("b", network.a[:2])  # type: ignore[index]


def rename(network: nn.Module) -> None:
    network.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
        lambda module, state, prefix, _: state.update({"x..y": state.pop("classifier.bias")})
    )


def constant(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def use_weight_outside(self: Any, x: Tensor) -> Tensor:
    """Uses the last weight outside of its layer, which Opacus does not see."""
    return nn.functional.linear(self.embed(x), self.classifier.weight, self.classifier.bias)


class GrowingBuffers(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.register_buffer("seen", torch.zeros(len(x)))
        return super().forward(x)


CONDENSING, TRAINING = fs.FedDM(ipc=1, iterations=1), fs.FedAvg(local_steps=1)


def test_faults_are_detected_before_charges(tmp_path: Path) -> None:
    """Undetected, they end a run with a traceback after its last round, with charged ledgers."""
    for method, model, message in (
        (CONDENSING, with_fault(lambda net: setattr(net, "twin", net.classifier)), "tied weights"),
        (CONDENSING, with_fault(share_buffers), "tied weights"),
        (CONDENSING, subclass(get_extra_state=lambda self: {"epoch": 3}), "_extra_state"),
        (CONDENSING, with_fault(rename), "saved and loaded"),
        (CONDENSING, with_attribute(threading.Lock()), "cannot be copied"),
        (CONDENSING, GrowingBuffers, "changes tensor names"),
        (CONDENSING, subclass(forward=torch.no_grad()(Net.forward)), "cannot be trained"),
        (CONDENSING, with_attribute(constant(torch.zeros(2).cfloat())), "torch.complex64"),
        (CONDENSING, with_attribute(constant(torch.zeros(2).double())), "torch.float64"),
        (CONDENSING, with_attribute(constant(torch.eye(2).to_sparse())), "cannot be copied"),
        (CONDENSING, with_attribute(nn.Linear(2, 2, device="meta")), "no values"),
        (CONDENSING, with_attribute(nn.Parameter(torch.tensor([torch.nan]))), "not finite"),
        (CONDENSING, with_attribute(nn.LazyLinear(2)), "has no values yet"),
        (CONDENSING, subclass(forward=lambda net, x: 1 - Net.forward(net, x)), r"must return cl"),
        (CONDENSING, flat, r"embed\(x\)"),  # not an AttributeError in the first step
        (CONDENSING, with_fault(lambda net: net.body.requires_grad_(False)), "freezes body.0.we"),
        (TRAINING, with_attribute(nn.Linear(2, 2)), "odd.weight"),
        (TRAINING, subclass(forward=use_weight_outside), "classifier.weight"),
        (CONDENSING, lambda *args: torch.jit.script(flat(*args)), "cannot be trained"),
    ):
        privacy = fs.PrivacySettings(noise_multiplier=3.0, ledger=str(tmp_path / "ledger"))
        settings = fs.RunSettings(method, rounds=1, model=model, privacy=privacy)
        kind = SettingError if method is CONDENSING else ForbiddenLayerError
        with pytest.raises(kind, match=message) as error:
            fs.simulate(settings, quiet=True, output=tmp_path / "runs")
        assert kind is ForbiddenLayerError or "\n" not in str(error.value)
        assert list(tmp_path.iterdir()) == []


def test_unregistered_and_taken_names_are_errors() -> None:
    with pytest.raises(SettingError, match=r"--model PATH/mynet\.py:Net"):
        fs.ModelSettings("mynet.py:Net@1234")
    fs.register_model("mynet.py:Net@5678", Net)
    with pytest.raises(SettingError, match="not loaded or has changed"):
        fs.ModelSettings("mynet.py:Net@1234")
    with raises(UnknownNameError, "model.name"):
        fs.ModelSettings("nett")
    for name in ("convnet", ""):
        with pytest.raises(SettingError, match="built-in"):
            fs.register_model(name, Net)


def test_report_names_user_model_and_initial_weights() -> None:
    """Given weights may come from any training, so the report must not call them random."""
    values: Any = {"rounds": 1, "privacy": fs.PrivacySettings(noise_multiplier=3.0)}
    for model, origin in ((flat((1, 8, 8), 10), "declares public"), (Net, "run's seed")):
        settings: Any = fs.RunSettings(fs.FedAvg(local_steps=1), model=model, **values)
        report: Any = fs.simulate(settings, quiet=True).privacy
        assert origin in report["public_items"]["architecture and initial weights"]
        name = f"the model {settings.model.name}"
        assert report["own_code"] == [name]
        assert f"{name}, supplied by the operator" in render_markdown(report)


def test_logits_equal_timm_network(tmp_path: Path) -> None:
    network = timm.create_model("test_resnet", num_classes=0).eval()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    settings = fs.ModelSettings("timm:test_resnet", weights=str(tmp_path / "weights.safetensors"))
    assert has_given_weights(settings)
    built = build_model(settings, (1, 20, 20), classes=3, seed=0).eval()
    x = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embedded = network(x.expand(-1, 3, -1, -1))
        torch.testing.assert_close(built.embed(x), embedded)
        torch.testing.assert_close(built(x), built.classifier(embedded))
    seeded = partial(build_model, fs.ModelSettings("timm:test_resnet"), (3, 20, 20), 3)
    first, same, other = (seeded(seed).classifier.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_group_norm_replaces_all_batch_norms() -> None:
    privacy, model = fs.PrivacySettings(epsilon=8.0), fs.ModelSettings("timm:test_resnet")
    settings: Any = fs.RunSettings(fs.FedAvg(), rounds=1, model=model, privacy=privacy)
    with raises(ForbiddenLayerError, "model.mixes_examples"):
        fs.simulate(settings, quiet=True)
    settings = fs.ModelSettings("timm:test_resnet", norm="group")
    assert not has_batch_norm(build_model(settings, (1, 20, 20), classes=3, seed=0))


PIXELS = feature_map("pixels", SPEC.image_shape)
IMAGES = digits(np.arange(40) % 10)
Z = PIXELS(IMAGES.images).double().numpy() / PIXELS.radius
Z /= np.maximum(1, np.linalg.norm(Z, axis=1, keepdims=True))  # clip₁(φ/R) of `pixels`


def network(name: str = "linear", **other: Any) -> Any:
    return build_network(fs.ModelSettings(name, features="pixels", **other), SPEC, 3)


def test_images_and_vectors_have_equal_logits() -> None:
    linear, x = network(), normalise(IMAGES.images, SPEC)
    w = linear.classifier.weight.detach().double().numpy()
    with torch.no_grad():
        np.testing.assert_allclose(linear(x).numpy(), Z @ w.T, atol=1e-5)
        vectors = torch.tensor(Z, dtype=torch.float32)
        np.testing.assert_allclose(linear(vectors).numpy(), Z @ w.T, atol=1e-6)
        small = network("mlp", width=7)
        parameters = (*small.hidden.parameters(), *small.classifier.parameters())
        a, b, c, d = (p.double().numpy() for p in parameters)
        hidden = np.maximum(0, 8 * Z @ a.T + b)
        np.testing.assert_allclose(small(x).numpy(), hidden @ c.T + d, atol=1e-4)
    is_correct = (Z @ w.T).argmax(axis=1) == IMAGES.labels.numpy()
    actual = scores(predict(linear, IMAGES, among=torch.tensor([3, 5])), IMAGES.labels[[3, 5]])
    assert actual.tolist() == is_correct[[3, 5]].tolist()


class Ridge(fs.TrainsLocally):
    name = "ridge"

    def task(self, *arguments: Any) -> fs.LocalObjective:
        return fs.LocalObjective(penalty=lambda model: model.classifier.weight.square().sum())


@pytest.mark.parametrize(("kind", "ridge"), [(fs.FedAvg, 0.0), (Ridge, 1.0)])
def test_local_training_is_softmax_regression(kind: type[fs.TrainsLocally], ridge: float) -> None:
    method = kind(local_epochs=1, batch=100, lr=2.0, momentum=0.0)
    parts = fs.PartitionSettings(clients=1, alpha=100.0, min_size=1)
    model = fs.ModelSettings(features="pixels")
    settings = fs.RunSettings(method, rounds=1, model=model, partition=parts)
    result = fs.simulate(settings, data=(IMAGES, None))
    start: Any = build_network(settings.model, SPEC, settings.seed)
    w = start.classifier.weight.detach().double().numpy()
    p = np.exp(Z @ w.T)
    r = p / p.sum(axis=1, keepdims=True) - np.eye(10)[IMAGES.labels.numpy()]
    actual = result.model.state_dict()["classifier.weight"].double().numpy()
    np.testing.assert_allclose(actual, w - 2.0 * (r.T @ Z / len(Z) + 2 * ridge * w), atol=1e-5)
    clients = ExactClientView([0], IMAGES, [torch.arange(40)], network=start)
    np.testing.assert_allclose(clients.images(torch.tensor([4])), Z[4:5], atol=1e-6)


def test_maps_of_equal_names_do_not_share_vectors() -> None:
    """A cache by name and dimension would give the second map the first map's vectors."""
    records = torch.arange(4)
    for shift in (0.5, 0.25):
        function = partial(lambda shift, x: x.flatten(1) - shift, shift)
        features = replace(PIXELS, name="own-shifted", function=function)
        expected = IMAGES.images[:4].flatten(1) / 255 - shift
        torch.testing.assert_close(feature_table(IMAGES, features, records)(records), expected)


# These methods refuse a linear model, since its embedding is not learned.
NEED_LEARNED_EMBEDDING = ("moon", "fedgen", "fedfm", "fedfm-lite", "fpl", "fedsr")


def settings_of(method: str, **model: Any) -> Any:
    partition = {"local_test": 0.2 if method == "solo" else 0.0, "clients": 2}
    sections = {"run": {"method": method, "rounds": 1}, "partition": partition}
    values = {"method": quick_settings(method), "model": {"features": "pixels", **model}}
    return fs.resolve({**sections, **values})


@pytest.mark.parametrize("method", by_family(METHODS, ("fedavg", "moon", "feddm")))
def test_methods_train_on_features_or_refuse_them(method: str) -> None:
    train, test = fs.load_dataset("digits")
    few = train.subset(np.arange(200)), test.subset(np.arange(50))
    cls: Any = method_class(method)
    if not issubclass(cls, fs.TrainsLocally) or cls.features_refusal:
        with raises(SettingError, "model.features"):
            settings_of(method)
        return
    name = "mlp" if method in NEED_LEARNED_EMBEDDING else "linear"
    if method in NEED_LEARNED_EMBEDDING:
        with raises(SettingError, "model.name"):
            fs.simulate(settings_of(method), data=few)
    assert fs.simulate(settings_of(method, name=name), data=few).accuracy is not None
