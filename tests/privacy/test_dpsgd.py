"""Tests of DP-SGD: per-example gradients, clipping, noise, and models that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.errors import ForbiddenLayerError, PrivacyError
from fedsynth.models.convnet import ConvNet, channels_last
from fedsynth.models.flat import flatten
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy import dpsgd
from fedsynth.privacy.passes import Units
from fedsynth.seeding import forked_rng
from fedsynth.training.sgd import MomentumSgd
from tests.digits import convnet
from tests.privacy.support import mechanism
from tests.raising import raises


def linear() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    for i, p in enumerate(model.parameters()):
        p.data = torch.linspace(-1, 1, p.numel()).view_as(p) * (i + 1)
    return model


def trained(model: nn.Module, x: Tensor, y: Tensor, lr: float = 0.5, **values: Any) -> Tensor:
    """Returns the change of the weights in a step with negligible noise, of 8 expected examples."""
    start = flatten(model)
    defaults = {"noise_multiplier": 1e-9, "sensitivity": 1.0, "dimension": len(start)}
    options = {name: values.pop(name) for name in ("penalty", "loss") if name in values}
    charged = mechanism(**{**defaults, **values})
    settings = dpsgd.DpSgdSettings(MomentumSgd(lr), 8.0, **options)
    dpsgd.dp_sgd(model, lambda i: (x[i], y[i]), charged, settings, Units(len(y)))
    assert charged.steps_left == 0
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in model.modules())
    return (flatten(model) - start).detach()


X8 = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
X4 = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
Y4 = torch.zeros(4, dtype=torch.int64)


def test_single_step_equals_numpy() -> None:
    """w ← w − lr · Σ_i clip(∇ℓ_i) / expected batch size for softmax regression, σ → 0."""
    rng = np.random.default_rng(0)
    x, y, clip = rng.normal(size=(5, 4)), np.array([0, 1, 2, 1, 0]), 0.8
    model = linear()
    w, b = (p.detach().numpy().astype(float) for p in (model[1].weight, model[1].bias))
    total = np.zeros(15)
    for xi, yi in zip(x, y, strict=True):
        logits = w @ xi + b
        p = np.exp(logits - logits.max())
        residual = p / p.sum() - np.eye(3)[yi]
        gradient = np.concatenate([np.outer(residual, xi).ravel(), residual])
        total += gradient * min(1, clip / np.linalg.norm(gradient))
    images = torch.tensor(x, dtype=torch.float32).view(5, 1, 2, 2)
    step = trained(model, images, torch.tensor(y), sensitivity=clip)
    np.testing.assert_allclose(step, -0.5 * total / 8, atol=1e-5)


def test_large_networks_use_small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of parameters limits the per-example gradients in memory."""
    x, y, sizes = X8[:7, :, :2, :2], torch.arange(7) % 3, []
    full = trained(linear(), x, y)
    original = dpsgd.ExampleGradients.__call__

    def recorded(self: dpsgd.ExampleGradients, x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return original(self, x, y)

    monkeypatch.setattr(dpsgd, "PHYSICAL_BYTES", 2 * 4 * 15 * 3)  # 15 parameters, three examples
    monkeypatch.setattr(dpsgd.ExampleGradients, "__call__", recorded)
    split = trained(linear(), x, y)
    assert sizes == [2, 2, 2, 2]  # a power of two within the bound, the last one filled up
    torch.testing.assert_close(full, split)


def test_empty_samples_receive_noise_and_nominal_divisor() -> None:
    """A broken version would skip empty batches or divide by the realised batch size."""
    empty = torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64)
    steps = [trained(linear(), *empty, noise_multiplier=2.0, sample_rate=0.5) for _ in range(200)]
    assert torch.stack(steps).std() == pytest.approx(0.5 * 2.0 / 8, rel=0.1)


def test_steps_use_poisson_samples() -> None:
    """Each of the equal records moves the model by lr · clip / 8."""
    records = torch.ones(200, 1, 2, 2), torch.zeros(200, dtype=torch.int64)
    steps = [trained(linear(), *records, sensitivity=0.1, sample_rate=0.5) for _ in range(6)]
    sizes = [float(step.norm()) / (0.5 * 0.1 / 8) for step in steps]
    assert sizes == pytest.approx([round(size) for size in sizes], abs=0.01)
    assert all(50 < size < 150 for size in sizes)
    assert len({round(size) for size in sizes}) > 1


def test_nan_example_does_not_affect_others() -> None:
    x, y = torch.ones(3, 1, 2, 2), torch.arange(3)
    x[2] = float("nan")
    torch.testing.assert_close(trained(linear(), x, y), trained(linear(), x[:2], y[:2]))


def test_group_norm_twin_is_trainable_and_keeps_weights() -> None:
    model = ConvNet((1, 8, 8), 10, width=8, depth=2, norm="batch")
    with raises(ForbiddenLayerError, "model.mixes_examples"):
        dpsgd.check_model(model)
    twin: Any = dpsgd.group_norm_twin(model)
    dpsgd.check_model(twin)
    assert twin(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert torch.equal(twin.classifier.weight, model.classifier.weight)
    assert isinstance(model.features[1], nn.BatchNorm2d)  # the model is unchanged


def test_penalty_gradient_is_added_unclipped() -> None:
    """The penalty changes a step by lr times its unclipped gradient."""

    def penalty(network: nn.Module) -> Tensor:
        squares = sum(p.square().sum() for p in network.parameters())
        return 100 * squares + 0 * network(X8).sum()

    plain = trained(convnet(), X8, torch.arange(8), lr=0.01)
    penalised = trained(convnet(), X8, torch.arange(8), lr=0.01, penalty=penalty)
    expected = -0.01 * 200 * flatten(convnet())
    torch.testing.assert_close(penalised - plain, expected, atol=1e-5, rtol=1e-4)


def test_custom_loss_is_clipped_per_example() -> None:
    """The reference is a loop over the examples."""
    x, y = X8[:5], torch.arange(5)

    def loss(network: Any, images: Tensor, labels: Tensor) -> Tensor:
        z = network.embed(images)
        with torch.no_grad():
            target = network.embed(0.5 * images)
        plain = F.cross_entropy(network.classifier(z), labels, reduction="none")
        return plain + 3 * (z - target).square().mean(dim=1)

    rows = loop_gradients(convnet(), x, y, loss)
    total = (rows * (0.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    step = trained(convnet(), x, y, sensitivity=0.5, loss=loss)
    torch.testing.assert_close(step, -0.5 * total / 8, atol=1e-5, rtol=1e-3)


def loop_gradients(network: Any, x: Tensor, y: Tensor, loss: Any = dpsgd.cross_entropies) -> Tensor:
    """Returns the gradient of each example by autograd, [N, P]."""
    weights = [p.requires_grad_() for p in network.train().parameters()]
    losses = (loss(network, *example) for example in zip(x.split(1), y.split(1), strict=True))
    rows = [torch.autograd.grad(value.sum(), weights) for value in losses]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


class Uses(nn.Module):
    """A network with these layers and parameters, which computes `use(network, x)`."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.use = use
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def channels_last_network() -> nn.Module:
    """Returns a custom network in channels-last layout, with circular padding."""
    circular = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 10))
    layers = nn.Sequential(circular, nn.ReLU(), nn.Conv2d(4, 5, 3), *head)
    return Uses(lambda network, x: network.layers(channels_last(x)), layers=layers)


def unusual_network() -> nn.Module:
    """Returns a network with a layer that is used twice, a linear layer over positions with a hook,
    a recurrent layer, a layer that Opacus has no sampler for and an operation in place."""

    def use(network: Any, x: Tensor) -> Any:
        h = network.recurrent(network.rows(x.flatten(1, 2)).relu_()[:, ::32])[0].mean(dim=1)
        return network.classifier(network.own(network.twice(network.twice(h)).relu_()))

    rows = nn.Linear(32, 4)
    rows.register_forward_hook(lambda layer, inputs, output: 2 * output)
    offset = nn.Parameter(torch.linspace(-1, 1, 4))
    return Uses(
        use,
        rows=rows,
        recurrent=DPLSTM(4, 4, batch_first=True),
        twice=nn.Linear(4, 4),
        own=Uses(lambda layer, x: x + layer.offset.exp(), offset=offset),
        classifier=nn.Linear(4, 10),
    )


def network_of_few_positions() -> nn.Module:
    """Returns a network whose convolutions have outputs of 2×2 and 1×1 pixels, one used twice."""

    def use(network: Any, x: Tensor) -> Any:
        h = network.wide(x).relu()
        return network.classifier(network.last(network.same(network.same(h))).flatten(1))

    return Uses(
        use,
        wide=nn.Conv2d(3, 4, (3, 5), stride=16, dilation=2, padding=(1, 4)),
        same=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        last=nn.Conv2d(4, 6, 2),
        classifier=nn.Linear(6, 10),
    )


NETWORKS = {
    "custom": channels_last_network,
    "unusual": unusual_network,
    "few positions": network_of_few_positions,
}
MODELS = ("convnet", "lenet5", "cnn1", "cnn2", "cnn3", "resnet8", "linear", "mlp")


@pytest.mark.parametrize("name", [*MODELS, *NETWORKS])
def test_rows_equal_example_gradients(name: str) -> None:
    """Regression: Opacus unfolds channels-last inputs by contiguous strides, and ignores
    padding_mode."""
    shape = (1, 28, 28) if name.startswith("cnn") else (3, 32, 32)
    with forked_rng(0, "a network"):
        network = NETWORKS.get(name, unusual_network)()
        x = torch.randn(4, *shape)
    if name not in NETWORKS:
        settings = ModelSettings(name, width=8, norm="group" if shape[0] == 1 else "")
        network = build_model(settings, shape, 10, seed=0)
    y = torch.arange(4)
    expected = loop_gradients(network, x, y)
    rows = dpsgd.example_gradients(network, x, y)
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-4)


def faulty(layer: nn.Module, use: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Returns a network that uses its first layer in a given way, and whose last layer is zero."""
    last = nn.Linear(4, 3)
    nn.init.zeros_(last.weight)
    return Uses(lambda net, x: net.last(use(net.layer, x).flatten(1)), layer=layer, last=last)


SCALE = Uses(lambda layer, x: x.mul_(layer.factor), factor=nn.Parameter(torch.linspace(0.5, 2, 4)))


@pytest.mark.parametrize(
    ("layer", "use", "message"),
    [
        (
            nn.Linear(4, 4),
            lambda layer, x: layer(x.flatten(1)) @ layer.weight,
            "model.mixes_examples",
        ),
        (
            nn.Linear(4, 4),
            lambda layer, x: layer(torch.eye(4)).mean(0) * x.flatten(1),
            "model.calls",
        ),
        (nn.Linear(4, 4), lambda layer, x: layer(torch.ones(1, 4)) + x.flatten(1), "model.calls"),
        (nn.Linear(2, 2), lambda layer, x: layer(x.reshape(-1, 2)).view(4, 4), "model.calls"),
        (SCALE, lambda layer, x: layer(x.flatten(1)), "model.mixes_examples"),
        (nn.GRU(4, 4), lambda layer, x: layer(x.flatten(1))[0], "model.parameter"),
    ],
)
def test_models_with_wrong_gradients_are_refused(layer: nn.Module, use: Any, message: str) -> None:
    """Covers layers with constant inputs, whose rows are no examples."""
    with raises(ForbiddenLayerError, message):
        dpsgd.check_example_gradients(faulty(layer, use), X4, Y4)
    plain = faulty(nn.Linear(4, 4), lambda layer, x: layer(x.flatten(1)))
    dpsgd.check_example_gradients(plain, X4, Y4)
    with torch.autocast("cpu", torch.bfloat16):
        dpsgd.check_example_gradients(plain, X4, Y4)


def test_other_layers_than_for_public_images_are_refused() -> None:
    """A broken version would accept a pass in which all records need the additional layer, but
    refuse it with one other record, which would change the sum by many clips."""

    def use(layer: nn.Module, x: Tensor) -> Tensor:
        h = layer(x.flatten(1))
        return layer(h) if bool((x > 5).all()) else h

    gradients = dpsgd.ExampleGradients(faulty(nn.Linear(4, 4), use))
    gradients(X4, torch.zeros(4, dtype=torch.int64))
    with raises(PrivacyError, "privacy.refused"):
        gradients(10 + X4, torch.zeros(4, dtype=torch.int64))
