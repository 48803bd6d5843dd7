"""A record moves no other's vector, not by one bit: feature maps, and what is summed of vectors.

A server may send weights under which all but the rounding of other records cancels. One record
more, placed first, moves every other to another place in memory; where a kernel's sums depend on
that, all rows change. `fedsynth.features.row_products` is what keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.core.charging import charge_for
from fedsynth.core.client import PrivateClients
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.data.images import from_arrays, normalise
from fedsynth.data.registry import dataset_spec
from fedsynth.features.registry import feature_map
from fedsynth.features.row_products import LANES, row_product, two_sided
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.fedstats import FedStats
from fedsynth.methods.statistics.class_moments import step_rows
from fedsynth.models.feature_linear import Root, embedded
from fedsynth.models.on_features import OnFeatures
from fedsynth.models.registry import ModelSettings, build_network
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums, Released
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings

SPEC = dataset_spec("mnist")
CPU = torch.device("cpu")
MAPS = ("whitened-scattering", "whitened-scattering+random-process")
KNOWN = 130
"""Records that the server knows; more than one pass has."""


def pixels(records: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (records, 1, 28, 28)).astype(np.uint8)


def test_products_are_those_of_numpy() -> None:
    """Catches: zeros that are filled in at the wrong side, or not taken off again."""
    rng = np.random.default_rng(1)
    for d, c in ((1, 1), (16, 16), (33, 7)):
        rows = rng.normal(size=(5, d))
        weight = rng.normal(size=(c, d))
        found = row_product(torch.from_numpy(rows), torch.from_numpy(weight))
        np.testing.assert_allclose(found, rows @ weight.T, atol=1e-12)
    left, middle, right = (rng.normal(size=s) for s in ((3, 17), (5, 17, 9), (9, 9)))
    made = two_sided(*(torch.from_numpy(one) for one in (left, middle, right)))
    np.testing.assert_allclose(made, left @ middle @ right, atol=1e-12)


def row_functions() -> dict[str, Callable[[Tensor], Tensor]]:
    """Of vectors [N, 1233], or of pixels [N, 1, 28, 28]."""
    vectors = {f"map {name}": feature_map(name, SPEC.image_shape) for name in MAPS}
    on = feature_map(MAPS[1], SPEC.image_shape)
    weight = torch.randn(10, on.dimension, generator=torch.Generator().manual_seed(0))
    linear = OnFeatures(on, SPEC)
    hidden = OnFeatures(on, SPEC, hidden=33)

    draws = torch.Generator().manual_seed(1)
    roots = [
        Root(*(1e4 * torch.randn(size, size, generator=draws) for size in block))
        for block in on.blocks
    ]

    def step(x: Tensor) -> Tensor:
        z = embedded(on(x), torch.zeros(on.dimension), on.radius)
        return step_rows(z, torch.zeros(len(x), dtype=torch.int64), 1e6 * weight, 0.7).left

    return {
        **vectors,
        "step": step,
        "whitened": lambda x: embedded(on(x), 0.0, on.radius, roots),
        "linear": lambda x: linear.gradient_factors(
            linear.vectors(on(x)), torch.zeros(len(x), dtype=torch.int64)
        )[0],
        "mlp": lambda x: hidden.from_features(on(x)).detach(),
    }


def test_a_rows_bits_depend_on_its_own_record_alone() -> None:
    """Catches, with products of 9, 81, 729 or 1233 numbers that are not filled up: other bits after
    a shift by one place."""
    images = torch.from_numpy(pixels(24)).float() / 255
    for name, rows in row_functions().items():
        first = rows(images)
        for shift in (1, 3, 7):
            assert torch.equal(first, rows(images.roll(shift, 0)).roll(-shift, 0)), name


def cancelling(z_Nd: Tensor) -> Tensor:
    """A hostile server's weights: ±10⁹·w, with w orthogonal to what it knows."""
    turns, _ = torch.linalg.qr(z_Nd.double().T, mode="complete")
    weight = torch.zeros(10, z_Nd.shape[1])
    weight[0] = (1e9 * turns[:, -1]).float()
    weight[1] = -weight[0]
    return weight


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("method", [FedAvg(local_steps=1, lr=1.0, momentum=0.0), FedStats()])
def test_hostile_weights_do_not_let_a_record_move_others(
    method: Method, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Un-noised sums with and without one record differ by one clip at most. (By four to ten, where
    rows depend on their place.)"""
    images = pixels(KNOWN + 1)
    on = feature_map(name, SPEC.image_shape)
    network: torch.nn.Module
    if isinstance(method, FedStats):
        method = FedStats(features=name)
        network = method.network(ModelSettings(), SPEC, 0)
        privacy = PrivacySettings(noise_multiplier=3.0)
        clip = method.step_clip
        number = 2
    else:
        network = build_network(ModelSettings(features=name), SPEC, 0)
        clip = 0.5
        privacy = PrivacySettings(noise_multiplier=3.0, sample_rate=1.0, clip=clip)
        number = 1
    z = embedded(
        on(torch.from_numpy(images[1:]).float() / 255), torch.zeros(on.dimension), on.radius
    )
    parameters = {**network.state_dict(), "classifier.weight": cancelling(z)}
    context = RoundContext(number, 0, CPU, SPEC, network, 200.0, privacy, clients=1, rounds=16)
    assert moved(method, parameters, images, context, monkeypatch) <= clip * (1 + 1e-6)


@pytest.mark.parametrize(("height", "width"), [(9, 9), (15, 15), (27, 27), (9, 10), (28, 28)])
def test_hostile_weights_of_a_linear_model_on_pixels(
    height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(By three to five clips, where rows of the image's size are multiplied as they are.)"""
    spec = replace(SPEC, height=height, width=width)
    images = np.random.default_rng(0).integers(0, 256, (51, 1, height, width)).astype(np.uint8)
    network = build_network(ModelSettings(name="linear"), spec, 0)
    z = network.embed(normalise(torch.from_numpy(images[1:]), spec))  # type: ignore[operator]
    weight = cancelling(z[:, : height * width])
    weight = torch.nn.functional.pad(weight, (0, z.shape[1] - height * width))
    parameters = {"classifier.weight": weight, "classifier.bias": torch.zeros(10)}
    privacy = PrivacySettings(noise_multiplier=3.0, sample_rate=1.0, clip=0.5)
    context = RoundContext(1, 0, CPU, spec, network, 200.0, privacy, clients=1, rounds=1)
    method = FedAvg(local_steps=1, lr=1.0, momentum=0.0)
    assert moved(method, parameters, images, context, monkeypatch) <= 0.5 * (1 + 1e-6)


def moved(
    method: Method,
    parameters: dict[str, Tensor],
    images: np.ndarray,
    context: RoundContext,
    monkeypatch: pytest.MonkeyPatch,
) -> float:
    """How far a client's un-noised sum moves by the first image."""
    message = method.broadcast(method.initial_state(parameters), context)
    sums: list[Tensor] = []

    def release(self: GaussianSums) -> Released:
        assert self._sums is not None
        sums.append(self._sums.clone())
        self._sums = None
        self.steps_left -= 1
        return Released(torch.zeros_like(sums[-1], dtype=torch.float32))

    monkeypatch.setattr(GaussianSums, "release", release)
    for some in (images, images[1:]):
        data = from_arrays(some, np.full(len(some), 5), context.spec)
        guard = Guard(Ledger("0"), 1e-5, None)
        charged = charge_for(method, context, [0], [guard], [SecretGenerator()])
        parts = [torch.arange(len(some))]
        architecture = context.architecture
        clients = PrivateClients(
            [0], data, parts, charged, nominal_size=200.0, network=architecture
        )
        method.client_step(message, clients, [{}], context)
    assert len(sums) == 2
    return float((sums[0] - sums[1]).norm())


def test_widths_of_a_hidden_layer_are_filled_up() -> None:
    hidden = OnFeatures(feature_map(MAPS[0], SPEC.image_shape), SPEC, hidden=33)
    for layer in (hidden.hidden, hidden.classifier):
        assert isinstance(layer, torch.nn.Linear)
        assert layer.in_features % LANES == 0
