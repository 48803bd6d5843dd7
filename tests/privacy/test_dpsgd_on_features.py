"""DP-SGD of models on fixed feature maps: the same mechanism, ledger and bound as of any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth import resolve, simulate
from fedsynth.core.client import PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.method import charge_for
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.features import FeatureMap, feature_map, register_features
from fedsynth.methods.fedavg import FedAvg
from fedsynth.models.registry import ModelSettings, build_network
from fedsynth.privacy import dpsgd
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.products import Outer, clipped_product
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from tests.privacy.support import guard

SPEC = dataset_spec("digits")
PIXELS = feature_map("pixels", SPEC.image_shape)
NOMINAL = 24.0


def images(n: int, seed: int = 0, kind: int | None = None) -> np.ndarray:
    made = np.random.default_rng(seed).integers(0, 256, (n, 1, 8, 8)).astype(np.uint8)
    if kind is not None:
        made[:, 0, 0, 0] = kind
    return made


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
    charged = charge_for(method, context, [0], [guard()], [SecretGenerator()])
    parts = [torch.arange(len(data))]
    clients = PrivateClientView(
        [0], data, parts, charged, nominal_size=NOMINAL, network=context.architecture
    )
    start = {name: scale * value for name, value in context.architecture.state_dict().items()}
    message = method.broadcast(method.initial_state(start), context)
    ((upload, _),) = method.client_step(message, clients, [{}], context)
    found: Any = upload
    steps = [(start[k] - found.parameters[k]).double().flatten() for k in start]
    return torch.cat(steps) * NOMINAL


def test_a_step_is_the_sum_of_clipped_gradients_by_hand() -> None:
    """Σ clip((p − y) ⊗ z), most of them above the clip, in NumPy."""
    data = from_arrays(images(12), np.arange(12) % 10, SPEC)
    context = setting("pixels", clip=0.3)
    w = context.architecture.state_dict()["classifier.weight"].double().numpy()
    phi = PIXELS(data.images).double().numpy() / PIXELS.radius
    z = phi / np.maximum(1, np.linalg.norm(phi, axis=1, keepdims=True))
    p = np.exp(z @ w.T)
    residual = p / p.sum(axis=1, keepdims=True) - np.eye(10)[data.labels.numpy()]
    rows = np.einsum("nc,nd->ncd", residual, z).reshape(12, -1)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    assert (norms > 0.3).all()
    expected = (rows * np.minimum(1, 0.3 / norms)).sum(axis=0)
    np.testing.assert_allclose(moved(context, data), expected, atol=1e-4)


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
    without = from_arrays(images(12), np.arange(12) % 10, SPEC)
    pixels = np.concatenate([images(12), HOSTILE[extra]]).astype(np.uint8)
    with_it = from_arrays(pixels, np.array([*(np.arange(12) % 10), label]), SPEC)
    return float((moved(context, with_it, scale) - moved(context, without, scale)).norm())


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
    data = from_arrays(images(40), np.arange(40) % 10, SPEC)
    context = setting("pixels", clip)
    short = moved(context, data)
    architecture: Any = context.architecture
    monkeypatch.setattr(type(architecture), "linear", property(lambda self: False))
    monkeypatch.setattr(type(architecture), "embed", lambda self, x: x)
    torch.testing.assert_close(short, moved(context, data), atol=1e-4, rtol=1e-4)


def test_samples_are_poisson_and_reach_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """At q = 1/2 about half of the records take part, others in each step."""
    data = from_arrays(images(200), np.arange(200) % 10, SPEC)
    context = setting("pixels", 10.0, rate=0.5)
    taken: list[int] = []
    add = GaussianSumMechanism.add_products

    def spy(self: GaussianSumMechanism, products: Any, sample: Any = None) -> None:
        taken.append(len(products))
        add(self, products, sample)

    monkeypatch.setattr(GaussianSumMechanism, "add_products", spy)
    sizes = []
    for _ in range(6):
        taken.clear()
        moved(context, data)
        sizes.append(sum(taken))
    assert all(50 < size < 150 for size in sizes)
    assert len(set(sizes)) > 1


def test_noise_is_the_charged_one() -> None:
    """With a clip that leaves next to nothing of the gradients the model is noise of σ·clip."""
    data = from_arrays(images(10), np.arange(10) % 10, SPEC)
    context = setting("pixels", 1e-3, noise=5.0)
    deviation = float(moved(context, data).std())
    assert 4.2e-3 < deviation < 5.8e-3  # 640 coordinates: 2.8 % standard error, and the gradients


PRIVACY = {"noise_multiplier": 1e-6, "clip": 0.3, "sample_rate": 1.0}


def test_full_steps_do_not_depend_on_the_partition() -> None:
    """Three rounds of one step on all records: those of one client that has everything."""
    data = from_arrays(images(60), np.arange(60) % 10, SPEC)
    found = []
    for partition in ({"clients": 1}, {"clients": 3, "alpha": 0.1, "min_size": 1}):
        run = resolve(
            {
                "run": {"method": "fedavg", "rounds": 3},
                "partition": partition,
                "method": {"local_steps": 1, "lr": 5.0, "momentum": 0.0},
                "model": {"features": "pixels"},
                "privacy": {**PRIVACY, "nominal_size": 60 / partition["clients"]},
            }
        )
        model = simulate(run, data=(data, None)).model
        found.append(model.state_dict()["classifier.weight"])
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)
