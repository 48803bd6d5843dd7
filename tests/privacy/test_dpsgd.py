"""DP-SGD: per-example gradients through our mechanism, of any network and of models on fixed
features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    check_model,
    cross_entropies,
    dp_sgd,
    example_gradients,
    group_norm_twin,
)
from fedsynth.privacy.errors import ForbiddenLayerError
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.products import Outer, clipped_product
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
    """Trains one step with next to no noise, and eight as the expected batch."""
    size = sum(p.numel() for p in model.parameters())
    given = {"noise_multiplier": 1e-9, "sensitivity": 1.0, "dimension": size}
    more = {name: values.pop(name) for name in ("penalty", "loss") if name in values}
    charged = series(**{**given, **values})
    settings = DpSgdSettings(MomentumSgd(lr), 8.0)
    dp_sgd(model, lambda i: x[i], y, charged, 1, settings, **more)
    assert charged.steps_left == 0
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in model.modules())


X8 = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_one_step_equals_numpy() -> None:
    """w ← w − lr · Σ_i clip(∇ℓ_i) / expected batch size: by hand for softmax regression, σ → 0."""
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


def test_large_networks_take_few_examples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on the per-example gradients that are held, by the public number of parameters."""
    x, y = torch.randn(7, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 3
    seen, whole, pieces = [], linear(), linear()
    run(whole, x, y)
    original = dpsgd._per_example_gradients

    def noted(*args: Any) -> Any:
        seen.append(len(args[2]))
        return original(*args)

    monkeypatch.setattr(dpsgd, "PHYSICAL_BYTES", 2 * 4 * 15 * 3)  # 15 parameters, three examples
    monkeypatch.setattr(dpsgd, "_per_example_gradients", noted)
    run(pieces, x, y)
    assert seen == [2, 2, 2, 2]  # a power of two within the bound, the last one filled up
    torch.testing.assert_close(whole[1].weight, pieces[1].weight)


def test_an_empty_sample_still_gets_noise_and_the_public_divisor() -> None:
    """Catches: empty batch skipped, division by the realised batch size."""
    moved = []
    nothing = torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64)
    for _ in range(200):
        model = linear()
        run(model, *nothing, noise_multiplier=2.0, sample_rate=0.5)
        moved.append((flatten(model) - flatten(linear())).detach())
    assert torch.stack(moved).std() == pytest.approx(0.5 * 2.0 / 8, rel=0.05)


def test_one_bad_example_does_not_poison_the_others() -> None:
    x = torch.ones(3, 1, 2, 2)
    good, bad = linear(), linear()
    run(good, x[:2], torch.tensor([0, 1]))
    x[2] = float("nan")
    run(bad, x, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(bad[1].weight, good[1].weight)


def test_the_group_norm_twin_can_be_trained_and_keeps_the_other_weights() -> None:
    model = ConvNet((1, 8, 8), 10, width=8, depth=2, norm="batch")
    with pytest.raises(ForbiddenLayerError, match=r"'features\.1' is BatchNorm2d.*group_norm_twin"):
        check_model(model)
    twin = group_norm_twin(model)
    check_model(twin)
    assert twin(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert torch.equal(twin.classifier.weight, model.classifier.weight)  # type: ignore[arg-type,union-attr]
    assert isinstance(model.features[1], nn.BatchNorm2d)  # the model itself is as it was


def test_a_penalty_adds_its_gradient_and_belongs_to_no_example() -> None:
    """A penalised step differs from a plain one by lr times the penalty's gradient, unclipped."""

    def penalty(network: nn.Module) -> Tensor:
        squares = sum(p.square().sum() for p in network.parameters())
        total: Tensor = 100 * squares + 0 * network(X8).sum()
        return total

    start, plain, penalised = convnet(), convnet(), convnet()
    run(plain, X8, torch.arange(8), lr=0.01)
    run(penalised, X8, torch.arange(8), lr=0.01, penalty=penalty)
    moved = flatten(penalised) - flatten(plain)
    torch.testing.assert_close(moved, -0.01 * 200 * flatten(start), atol=1e-5, rtol=1e-4)


def test_a_custom_loss_is_clipped_per_example() -> None:
    """Against a loop over examples."""
    x, y = X8[:5], torch.arange(5)
    model = convnet()
    before = flatten(model)

    def loss(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        z = network.embed(images)  # type: ignore[operator]
        plain = nn.functional.cross_entropy(network.classifier(z), labels, reduction="none")  # type: ignore[operator]
        return plain + 3 * z.square().mean(dim=1)  # type: ignore[no-any-return]

    rows = one_by_one(model, x, y, loss)
    total = (rows * (0.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    run(model, x, y, sensitivity=0.5, loss=loss)
    torch.testing.assert_close(flatten(model) - before, -0.5 * total / 8, atol=1e-5, rtol=1e-3)


def one_by_one(network: nn.Module, x: Tensor, y: Tensor, loss: Any = cross_entropies) -> Tensor:
    """Returns autograd's gradient of one example after another, [N, P]."""
    weights = [p.requires_grad_() for p in network.train().parameters()]
    rows = []
    for k in range(len(x)):
        gradients = torch.autograd.grad(loss(network, x[k : k + 1], y[k : k + 1]).sum(), weights)
        rows.append(torch.cat([g.reshape(-1) for g in gradients]))
    return torch.stack(rows)


class ChannelsLast(nn.Module):
    """A network of one's own that works channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 5, 3)
        self.classifier = nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(torch.relu(self.conv(channels_last(x))))
        z: Tensor = self.classifier(h.mean(dim=(2, 3)))
        return z


@pytest.mark.parametrize(
    "name", ["convnet", "lenet5", "cnn1", "cnn2", "resnet8", "linear", "mlp", "own"]
)
def test_each_row_is_that_examples_gradient(name: str) -> None:
    """Catches: Opacus unfolding channels-last inputs by the strides of plain ones."""
    shape = (1, 28, 28) if name in ("cnn1", "cnn2") else (3, 32, 32)
    with forked_rng(0, "a network"):
        network: nn.Module = ChannelsLast()
        x = torch.randn(4, *shape)
    if name != "own":
        settings = ModelSettings(name, width=8, norm="group" if shape[0] == 1 else "")
        network = build_model(settings, shape, 10, seed=0)
    y = torch.arange(4)
    expected = one_by_one(network, x, y)
    torch.testing.assert_close(example_gradients(network, x, y), expected, atol=1e-5, rtol=1e-4)


# ----------------------------------------------------------------- models on fixed feature maps

PIXELS = feature_map("pixels", SPEC.image_shape)
NOMINAL = 24.0


def images(n: int, seed: int = 0, kind: int | None = None) -> np.ndarray:
    made = np.random.default_rng(seed).integers(0, 256, (n, 1, 8, 8)).astype(np.uint8)
    if kind is not None:
        made[:, 0, 0, 0] = kind
    return made


def labelled(pixels: np.ndarray, last: int | None = None) -> ImageData:
    """The images with labels in turn, the last one with its own."""
    labels = np.arange(len(pixels)) % 10
    if last is not None:
        labels[-1] = last
    return from_arrays(pixels, labels, SPEC)


def hostile(shape: tuple[int, int, int]) -> FeatureMap:
    """A map that makes enormous, infinite or undefined values of some images."""

    def function(x: Tensor) -> Tensor:
        flat = x.flatten(1) - 0.5
        kind = (255 * x[:, 0, 0, 0]).round()[:, None]
        flat = torch.where(kind == 1, 1e30 * flat, flat)
        flat = torch.where(kind == 2, torch.full_like(flat, float("inf")), flat)
        return torch.where(kind == 3, torch.full_like(flat, float("nan")), flat)

    return replace(PIXELS, name="own-hostile", function=function)


register_features("own-hostile", hostile)


def setting(
    features: str, clip: float, model: str = "", noise: float = 1e-9, rate: float = 1.0
) -> RoundContext:
    network = build_network(ModelSettings(model, 5, features=features), SPEC, 0)
    privacy = PrivacySettings(noise_multiplier=noise, clip=clip, sample_rate=rate)
    return RoundContext(1, 0, torch.device("cpu"), SPEC, network, NOMINAL, privacy, clients=1)


def moved(context: RoundContext, data: ImageData, scale: float = 1.0) -> Tensor:
    """The sum of one full step, from the model that a client sends: (w₀ − w)·n, at rate 1."""
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


def move(
    model: str, clip: float, extra: int, label: int, scale: float, features: str = "own-hostile"
) -> float:
    """How far the sum of a step moves with one image more."""
    context = setting(features, clip, model)
    without = labelled(images(12))
    more = labelled(np.concatenate([images(12), HOSTILE[extra]]).astype(np.uint8), label)
    return float((moved(context, more, scale) - moved(context, without, scale)).norm())


@given(
    extra=st.integers(0, len(HOSTILE) - 1),
    label=st.integers(0, 9),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_an_image_more_moves_the_step_by_at_most_the_clip(
    model: str, extra: int, label: int, scale: float
) -> None:
    """Also where the map makes 1e30, infinities or NaN of it, and of large weights."""
    rounding = 1e-4 + 1e-6 * scale * NOMINAL  # of weights in float32, which the step is read from
    assert move(model, 0.05, extra, label, scale) <= 0.05 + rounding


def test_without_the_clip_the_bound_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unclipped(left: Tensor, right: Tensor, clip: float) -> Outer:
        made = clipped_product(left, right, 1e6)
        return Unclipped(made.column, made.row, clip)

    class Unclipped(Outer):
        def part(self, taken: slice | Tensor) -> Outer:
            return Unclipped(self.column[taken], self.row[taken], self.bound)

        def sums(self, shares_N: Tensor | None = None) -> Tensor:
            return (self.column.T @ self.row).flatten()

    assert 0.04 < move("linear", 0.05, 1, 3, 1.0, "pixels") < 0.0502
    monkeypatch.setattr(dpsgd, "clipped_product", unclipped)
    assert move("linear", 0.05, 1, 3, 1.0, "pixels") > 0.5


@pytest.mark.parametrize("clip", [0.3, 5.0])
def test_factors_give_the_sums_of_written_out_gradients(
    clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = labelled(images(40))
    context = setting("pixels", clip)
    short = moved(context, data)
    architecture: Any = context.architecture
    monkeypatch.setattr(type(architecture), "linear", property(lambda self: False))
    monkeypatch.setattr(type(architecture), "embed", lambda self, x: x)
    torch.testing.assert_close(short, moved(context, data), atol=1e-4, rtol=1e-4)


def test_samples_are_poisson_and_reach_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """At q = 1/2 about half of the records take part, others in each step."""
    context = setting("pixels", 10.0, rate=0.5)
    taken: list[int] = []
    add = GaussianSumMechanism.add_products

    def spy(self: GaussianSumMechanism, products: Any, sample: Any = None) -> None:
        taken.append(len(products))
        add(self, products, sample)

    monkeypatch.setattr(GaussianSumMechanism, "add_products", spy)
    sizes = set()
    for _ in range(6):
        taken.clear()
        moved(context, labelled(images(200)))
        sizes.add(sum(taken))
    assert all(50 < size < 150 for size in sizes)
    assert len(sizes) > 1
