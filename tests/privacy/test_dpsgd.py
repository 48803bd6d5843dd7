"""Tests of DP-SGD: per-example gradients of networks and of models on fixed features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.layers import DPLSTM
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.features import FeatureMap, feature_map, register_features
from fedsynth.methods.fedavg import FedAvg
from fedsynth.models.convnet import ConvNet, channels_last
from fedsynth.models.flat import flatten
from fedsynth.models.registry import ModelSettings, build_model, build_network
from fedsynth.privacy import dpsgd
from fedsynth.privacy.dpsgd import (
    DpSgdSettings,
    ExampleGradients,
    check_example_gradients,
    check_model,
    cross_entropies,
    dp_sgd,
    example_gradients,
    group_norm_twin,
)
from fedsynth.privacy.errors import ForbiddenLayerError, PrivacyError
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.products import LayerGradients
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import forked_rng
from fedsynth.training.sgd import MomentumSgd
from tests.digits import SPEC, convnet
from tests.privacy.support import private_step, series


def linear() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    for i, p in enumerate(model.parameters()):
        p.data = torch.linspace(-1, 1, p.numel()).view_as(p) * (i + 1)
    return model


def run(model: nn.Module, x: Tensor, y: Tensor, lr: float = 0.5, **values: Any) -> None:
    """Trains one step with negligible noise and an expected batch size of eight."""
    parameters = sum(p.numel() for p in model.parameters())
    defaults = {"noise_multiplier": 1e-9, "sensitivity": 1.0, "dimension": parameters}
    options = {name: values.pop(name) for name in ("penalty", "loss") if name in values}
    charged = series(**{**defaults, **values})
    settings = DpSgdSettings(MomentumSgd(lr), 8.0, **options)
    dp_sgd(model, lambda i: x[i], y, charged, settings)
    assert charged.steps_left == 0
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in model.modules())


X8 = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_single_step_equals_numpy() -> None:
    """w ← w − lr · Σ_i clip(∇ℓ_i) / expected batch size for softmax regression, σ → 0."""
    rng = np.random.default_rng(0)
    x, y, clip = rng.normal(size=(5, 4)), np.array([0, 1, 2, 1, 0]), 0.8
    model = linear()
    w, b = (p.detach().numpy().astype(float) for p in (model[1].weight, model[1].bias))
    total_w, total_b = np.zeros_like(w), np.zeros_like(b)
    for xi, yi in zip(x, y, strict=True):
        logits = w @ xi + b
        p = np.exp(logits - logits.max())
        residual = p / p.sum() - np.eye(3)[yi]
        gw, gb = np.outer(residual, xi), residual
        scale = min(1, clip / np.sqrt((gw**2).sum() + (gb**2).sum()))
        total_w, total_b = total_w + scale * gw, total_b + scale * gb
    images = torch.tensor(x, dtype=torch.float32).view(5, 1, 2, 2)
    run(model, images, torch.tensor(y), sensitivity=clip)
    np.testing.assert_allclose(model[1].weight.detach().numpy(), w - 0.5 * total_w / 8, atol=1e-5)
    np.testing.assert_allclose(model[1].bias.detach().numpy(), b - 0.5 * total_b / 8, atol=1e-5)


def test_large_networks_use_small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of parameters limits the per-example gradients in memory."""
    x, y = torch.randn(7, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 3
    sizes, full, split = [], linear(), linear()
    run(full, x, y)
    original = ExampleGradients.__call__

    def recorded(self: ExampleGradients, x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return original(self, x, y)

    monkeypatch.setattr(dpsgd, "PHYSICAL_BYTES", 2 * 4 * 15 * 3)  # 15 parameters, three examples
    monkeypatch.setattr(ExampleGradients, "__call__", recorded)
    run(split, x, y)
    assert sizes == [2, 2, 2, 2]  # a power of two within the bound, the last one filled up
    torch.testing.assert_close(full[1].weight, split[1].weight)


def test_empty_samples_receive_noise_and_nominal_divisor() -> None:
    """A broken version would skip empty batches or divide by the realised batch size."""
    updates = []
    empty = torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64)
    for _ in range(200):
        model = linear()
        run(model, *empty, noise_multiplier=2.0, sample_rate=0.5)
        updates.append((flatten(model) - flatten(linear())).detach())
    assert torch.stack(updates).std() == pytest.approx(0.5 * 2.0 / 8, rel=0.05)


def test_nan_example_does_not_affect_others() -> None:
    x = torch.ones(3, 1, 2, 2)
    expected, actual = linear(), linear()
    run(expected, x[:2], torch.tensor([0, 1]))
    x[2] = float("nan")
    run(actual, x, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(actual[1].weight, expected[1].weight)


def test_group_norm_twin_is_trainable_and_keeps_weights() -> None:
    model = ConvNet((1, 8, 8), 10, width=8, depth=2, norm="batch")
    with pytest.raises(ForbiddenLayerError, match=r"'features\.1' is BatchNorm2d.*group_norm_twin"):
        check_model(model)
    twin = group_norm_twin(model)
    check_model(twin)
    assert twin(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert torch.equal(twin.classifier.weight, model.classifier.weight)  # type: ignore[arg-type,union-attr]
    assert isinstance(model.features[1], nn.BatchNorm2d)  # the model is unchanged


def test_penalty_gradient_is_added_unclipped() -> None:
    """The penalty changes a step by lr times its unclipped gradient."""

    def penalty(network: nn.Module) -> Tensor:
        squares = sum(p.square().sum() for p in network.parameters())
        total: Tensor = 100 * squares + 0 * network(X8).sum()
        return total

    start, plain, penalised = convnet(), convnet(), convnet()
    run(plain, X8, torch.arange(8), lr=0.01)
    run(penalised, X8, torch.arange(8), lr=0.01, penalty=penalty)
    difference = flatten(penalised) - flatten(plain)
    torch.testing.assert_close(difference, -0.01 * 200 * flatten(start), atol=1e-5, rtol=1e-4)


def test_custom_loss_is_clipped_per_example() -> None:
    """The reference is a loop over the examples."""
    x, y = X8[:5], torch.arange(5)
    model = convnet()
    initial = flatten(model)

    def loss(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        z = network.embed(images)  # type: ignore[operator]
        with torch.no_grad():
            target = network.embed(0.5 * images)  # type: ignore[operator]
        plain = nn.functional.cross_entropy(network.classifier(z), labels, reduction="none")  # type: ignore[operator]
        return plain + 3 * (z - target).square().mean(dim=1)  # type: ignore[no-any-return]

    rows = loop_gradients(model, x, y, loss)
    total = (rows * (0.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    run(model, x, y, sensitivity=0.5, loss=loss)
    torch.testing.assert_close(flatten(model) - initial, -0.5 * total / 8, atol=1e-5, rtol=1e-3)


def loop_gradients(network: nn.Module, x: Tensor, y: Tensor, loss: Any = cross_entropies) -> Tensor:
    """Returns the gradient of each example by autograd, [N, P]."""
    weights = [p.requires_grad_() for p in network.train().parameters()]
    rows = []
    for k in range(len(x)):
        gradients = torch.autograd.grad(loss(network, x[k : k + 1], y[k : k + 1]).sum(), weights)
        rows.append(torch.cat([g.reshape(-1) for g in gradients]))
    return torch.stack(rows)


class ChannelsLast(nn.Module):
    """A custom network in channels-last layout, with circular padding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
        self.second = nn.Conv2d(4, 5, 3)
        self.classifier = nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.relu(self.conv(channels_last(x))))
        z: Tensor = self.classifier(h.mean(dim=(2, 3)))
        return z


class Unusual(nn.Module):
    """A network with a layer that is used twice, a linear layer over positions with a hook, a
    recurrent layer, a parameter of its own and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(32, 4)
        self.rows.register_forward_hook(lambda layer, inputs, output: 2 * output)
        self.recurrent = DPLSTM(4, 4, batch_first=True)
        self.twice = nn.Linear(4, 4)
        self.offset = Offset()
        self.classifier = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.recurrent(self.rows(x.flatten(1, 2)).relu_()[:, ::32])[0].mean(dim=1)
        z: Tensor = self.classifier(self.offset(self.twice(self.twice(h)).relu_()))
        return z


class Offset(nn.Module):
    """A layer that Opacus has no sampler for."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset.exp()


@pytest.mark.parametrize(
    "name", ["convnet", "lenet5", "cnn1", "cnn2", "resnet8", "linear", "mlp", "custom", "unusual"]
)
def test_rows_equal_example_gradients(name: str) -> None:
    """Regression: Opacus unfolds channels-last inputs by contiguous strides, and ignores
    padding_mode."""
    shape = (1, 28, 28) if name in ("cnn1", "cnn2") else (3, 32, 32)
    with forked_rng(0, "a network"):
        network: nn.Module = Unusual() if name == "unusual" else ChannelsLast()
        x = torch.randn(4, *shape)
    if name not in ("custom", "unusual"):
        settings = ModelSettings(name, width=8, norm="group" if shape[0] == 1 else "")
        network = build_model(settings, shape, 10, seed=0)
    y = torch.arange(4)
    expected = loop_gradients(network, x, y)
    torch.testing.assert_close(example_gradients(network, x, y), expected, atol=1e-5, rtol=1e-4)


class Scale(nn.Module):
    """A layer that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.factor)


class Faulty(nn.Module):
    """A network that uses its first layer in a given way, and whose last layer is zero."""

    def __init__(self, layer: nn.Module, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.use = use
        self.last = nn.Linear(4, 3)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(self.use(self.layer, x).flatten(1))
        return z


@pytest.mark.parametrize(
    ("layer", "use", "message"),
    [
        (nn.Linear(4, 4), lambda layer, x: layer(x.flatten(1)) @ layer.weight, "weight.*are wrong"),
        (
            nn.Linear(4, 4),
            lambda layer, x: layer(torch.eye(4)).mean(dim=0) * x.flatten(1),
            "one row for",
        ),
        (nn.Linear(4, 4), lambda layer, x: layer(torch.ones(1, 4)) + x.flatten(1), "one row for"),
        (nn.Linear(2, 2), lambda layer, x: layer(x.reshape(-1, 2)).view(4, 4), "one row for"),
        (Scale(), lambda layer, x: layer(x.flatten(1)), "factor.*are wrong"),
        (nn.GRU(4, 4), lambda layer, x: layer(x.flatten(1))[0], "weight_ih_l0.*return one tensor"),
    ],
)
def test_models_with_wrong_gradients_are_refused(layer: nn.Module, use: Any, message: str) -> None:
    """Covers layers with constant inputs, whose rows are no examples."""
    x = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ForbiddenLayerError, match=message):
        check_example_gradients(Faulty(layer, use), x)
    plain = Faulty(nn.Linear(4, 4), lambda layer, x: layer(x.flatten(1)))
    check_example_gradients(plain, x)
    with torch.autocast("cpu", torch.bfloat16):
        check_example_gradients(plain, x)


def test_other_layers_than_for_public_images_are_refused() -> None:
    """A broken version would accept a pass in which all records need the additional layer, but
    refuse it with one other record, which would change the sum by many clips."""

    def use(layer: nn.Module, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for _ in range(1 + bool((h > 5).all())):
            h = layer(h)
        return h

    gradients = ExampleGradients(Faulty(nn.Linear(4, 4), use))
    gradients(torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(PrivacyError, match="other layers"):
        gradients(10 + torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64))


# ----------------------------------------------------------------- models on fixed feature maps

PIXELS = feature_map("pixels", SPEC.image_shape)
NOMINAL = 24.0


def images(n: int, seed: int = 0, kind: int | None = None) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 1, 8, 8)).astype(np.uint8)
    if kind is not None:
        pixels[:, 0, 0, 0] = kind
    return pixels


def labelled(pixels: np.ndarray, last: int | None = None) -> ImageData:
    """Returns the images with cyclic labels, and `last` as the last label."""
    labels = np.arange(len(pixels)) % 10
    if last is not None:
        labels[-1] = last
    return from_arrays(pixels, labels, SPEC)


def hostile(shape: tuple[int, int, int]) -> FeatureMap:
    """Returns a feature map with huge, infinite or undefined values for some images."""

    def function(x: Tensor) -> Tensor:
        flat = x.flatten(1) - 0.5
        kind = (255 * x[:, 0, 0, 0]).round()[:, None]
        flat = torch.where(kind == 1, 1e30 * flat, flat)
        flat = torch.where(kind == 2, torch.full_like(flat, float("inf")), flat)
        return torch.where(kind == 3, torch.full_like(flat, float("nan")), flat)

    return replace(PIXELS, name="own-hostile", function=function)


register_features("own-hostile", hostile)


def feature_context(
    features: str, clip: float, model: str = "", noise: float = 1e-9, rate: float = 1.0
) -> RoundContext:
    network = build_network(ModelSettings(model, 5, features=features), SPEC, 0)
    privacy = PrivacySettings(noise_multiplier=noise, clip=clip, sample_rate=rate)
    return RoundContext(1, 0, torch.device("cpu"), SPEC, network, NOMINAL, privacy, clients=1)


def step_sum(context: RoundContext, data: ImageData, scale: float = 1.0) -> Tensor:
    """Returns the sum of one full step, computed from the uploaded model: (w₀ − w)·n, at rate 1."""
    method = FedAvg(local_steps=1, lr=1.0, momentum=0.0)
    start = {name: scale * value for name, value in context.architecture.state_dict().items()}
    message = method.broadcast(method.initial_state(start), context)
    sent = private_step(method, message, context, data).parameters
    steps = [(start[name] - sent[name]).double().flatten() for name in start]
    return torch.cat(steps) * NOMINAL


HOSTILE = (
    np.zeros((1, 1, 8, 8)),
    np.full((1, 1, 8, 8), 255),
    images(12)[:1],
    images(1, 5, kind=1),
    images(1, 6, kind=2),
    images(1, 7, kind=3),
)


def influence(
    model: str, clip: float, extra: int, label: int, scale: float, features: str = "own-hostile"
) -> float:
    """Returns the change of a step's sum caused by one additional image."""
    context = feature_context(features, clip, model)
    without = labelled(images(12))
    extended = labelled(np.concatenate([images(12), HOSTILE[extra]]).astype(np.uint8), label)
    return float((step_sum(context, extended, scale) - step_sum(context, without, scale)).norm())


@given(
    extra=st.integers(0, len(HOSTILE) - 1),
    label=st.integers(0, 9),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_influence_of_additional_image_is_at_most_clip(
    model: str, extra: int, label: int, scale: float
) -> None:
    """Covers feature values of 1e30, infinity and NaN, and large weights."""
    rounding = 1e-4 + 1e-6 * scale * NOMINAL  # of weights in float32, which the step is read from
    assert influence(model, 0.05, extra, label, scale) <= 0.05 + rounding


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_influence_exceeds_clip_without_clipping(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.04 < influence(model, 0.05, 1, 3, 1.0, "pixels") < 0.0502
    ones = torch.ones
    monkeypatch.setattr(LayerGradients, "_factors", lambda self: ones(len(self)).double())
    assert influence(model, 0.05, 1, 3, 1.0, "pixels") > 0.5


def test_step_uses_poisson_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """At q = 1/2 about half of the records participate in each step."""
    context = feature_context("pixels", 10.0, rate=0.5)
    lengths: list[int] = []
    add_products = GaussianSumMechanism.add_products

    def spy(self: GaussianSumMechanism, products: Any, sample: Any = None) -> None:
        lengths.append(len(products))
        add_products(self, products, sample)

    monkeypatch.setattr(GaussianSumMechanism, "add_products", spy)
    sizes = set()
    for _ in range(6):
        lengths.clear()
        step_sum(context, labelled(images(200)))
        sizes.add(sum(lengths))
    assert all(50 < size < 150 for size in sizes)
    assert len(sizes) > 1
