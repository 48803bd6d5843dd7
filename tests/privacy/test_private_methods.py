"""Tests of private methods: a row depends on its own record only, to the last bit, and moves a sum by
at most the clip; released statistics have the public scale, and clients reject invalid requests and
settings.

A hostile server can send weights under which everything but the rounding cancels. Passes therefore
have a public length, and at a fixed shape the bits of a row depend only on its record.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedsynth import ModelParameters
from fedsynth.config.resolve import resolve
from fedsynth.core.client import ExactClientView, Group, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.core.uploads import check_numbers
from fedsynth.data.images import ImageData, from_arrays, normalise
from fedsynth.data.partition import partition
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import PrivacySettingError, RequestRefusedError
from fedsynth.evaluation import MEASURES
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.registry import feature_map, register_features
from fedsynth.federation import in_process
from fedsynth.methods import method_class
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.feddm import FedDM
from fedsynth.methods.fedstats import FedStats
from fedsynth.methods.statistics.moments import step_rows
from fedsynth.models.on_features import OnFeatures, embedded
from fedsynth.models.registry import ModelSettings, build_model, build_network
from fedsynth.privacy.dpsgd import ExampleGradients, example_gradients
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.passes import MIN_LENGTH, padded, pass_length, power_of_two
from fedsynth.privacy.products import LayerGradients
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import RECORD, USER
from fedsynth.privacy.row_products import PaddedLinear
from fedsynth.privacy.settings import NO_LEDGER, PrivacySettings
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.condensation.matching import NetworkFeatures
from fedsynth.synthesizer.condensation.private_matchers import per_example_gradients
from fedsynth.training.segmentation import losses, network_losses
from tests.digits import CPU, HOSTILE, SPEC, client_uploads, digits, private_clients, round_context
from tests.quick_runs import folder_of, read_rows
from tests.raising import raises

MNIST = dataset_spec("mnist")
MAPS = ("whitened-scattering", "whitened-scattering+random-process")
KERNELS = ("convolution", "mm", "bmm", "addmm", "baddbmm", "einsum", "norm", "pool", "softmax")
Sums = list[tuple[Tensor, float]]
enlarged = nn.Upsample((28, 28))


@given(st.floats(0, 1e7), st.floats(1e-3, 1e5), st.integers(1, 5000))
def test_pass_lengths_are_limited_powers_of_two(expected: float, start: float, limit: int) -> None:
    length = pass_length(expected, start, limit)
    assert length & (length - 1) == 0
    longest = pass_length(None, start, limit)
    assert MIN_LENGTH <= length <= longest
    assert longest == max(MIN_LENGTH, power_of_two(limit))
    assert limit / 2 < longest <= max(MIN_LENGTH, limit)


def test_pass_length_is_nearly_cheapest() -> None:
    """Searches all powers of two, with a last pass that is half empty."""
    for expected, start in ((256, 4.0), (3000, 0.5), (3000, 64.0), (32, 20.0)):
        cost = {p: expected / p * start + p / 2 for p in (2**k for k in range(12))}
        assert cost[pass_length(expected, start, 2048)] < 1.25 * min(cost.values())
    assert padded(torch.ones(3, 2), 5, fill=-1)[3:].tolist() == [[-1, -1]] * 2


class KernelShapes(TorchDispatchMode):
    """Collects (kernel, shapes) of floats below float64, the type of the mechanism's sums."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
        floats = [t for t in tensors if t.is_floating_point() and t.dtype != torch.float64]
        if floats and any(word in str(func) for word in KERNELS):
            self.seen.add((str(func), *(tuple(t.shape) for t in floats)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unnoised(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Collects the sums without noise and the clip of each release, which becomes zero."""
    sums: Sums = []
    release = GaussianSumMechanism.release

    def release_zeros(self: Any) -> Released:
        self._users.close(self._sums)
        sums.append((self._sums.clone().cpu(), self.sensitivity))
        return Released(torch.zeros_like(release(self), dtype=torch.float32))

    monkeypatch.setattr(GaussianSumMechanism, "release", release_zeros)
    return sums


def private_step(
    method: Method, weights: Any, context: Any, data: Any, part: Any = None, users: Any = None
) -> None:
    """Runs a charged step of a client with these records, from the server's weights."""
    unit, parts = RECORD if users is None else USER, None if part is None else [part]
    view = {"nominal_size": context.nominal_size, "users": users, "network": context.architecture}
    view["isolated"] = context.isolated
    clients = private_clients(method, context, data, parts, unit=unit, **view)
    client_uploads(method, context, clients, state=method.initial_state(weights))


Case = tuple[str, dict[str, Any], dict[str, Any]]  # method, its settings, and those of privacy
METHODS: list[Case] = [
    ("feddm", {"iterations": 2, "ipc": 2}, {"mechanism": "residual", "clip": 0.05}),
    ("feddm", {"iterations": 1, "ipc": 2}, {"mechanism": "gradient", "clip": 0.01}),
    ("feddm", {"iterations": 2, "ipc": 2, "networks": 2}, {"mechanism": "features", "clip": 0.05}),
    ("fedaf", {"iterations": 2, "ipc": 2}, {}),
    ("fedfm", {"local_steps": 1, "weight": 0.5}, {}),
    ("ccvr", {"covariance": "full"}, {}),  # a round of statistics
    ("ccvr", {"covariance": "diagonal"}, {}),
    ("fedkf", {"local_steps": 1, "generator_width": 4, "generator_batch": 8}, {}),
    ("fedcvae-ens", {"local_steps": 1, "width": 4}, {}),
    ("moon", {"local_steps": 1}, {}),
    ("fpl", {"local_steps": 1}, {}),
    ("scaffold", {"local_steps": 1}, {}),
]


def step_of(case: Case, nominal: float, **context: Any) -> Callable[..., Any]:
    """Returns a client's step in the first round as a function of its data, records and users."""
    name, values, privacy = case
    method = method_class(name).from_mapping(values)
    settings = PrivacySettings(noise_multiplier=1.0, sample_rate=1.0, **privacy)
    ctx = round_context(settings, nominal=nominal, **context)
    return lambda *records: private_step(method, ctx.architecture.state_dict(), ctx, *records)


@pytest.mark.parametrize("case", METHODS, ids=str)
def test_kernel_shapes_are_independent_of_record_count(case: Case) -> None:
    """The last passes of 20, 70 and 75 records have different lengths unless padded."""
    precision = torch.bfloat16 if case[2].get("mechanism") == "gradient" else torch.float32
    step = step_of(case, 72.0, precision=precision)
    seen = []
    for records in (20, 70, 75):
        with KernelShapes() as shapes:
            step(digits(np.arange(80) % 10), torch.arange(records))
        seen.append(shapes.seen)
    assert seen[0] == seen[1] == seen[2] != set()


@pytest.mark.parametrize("case", METHODS, ids=str)
def test_user_influence_on_methods_is_at_most_clip(case: Case, unnoised: Sums) -> None:
    """One user has 50 of 90 records, of all classes."""
    step = step_of(case, 1.0)
    data, indices = digits(np.random.default_rng(1).integers(0, 10, 90)), torch.arange(90)
    sums = []
    for part in (indices, indices[:40], indices[1:]):  # without the large user, or a small one
        unnoised.clear()
        step(data, part, indices.clamp(max=40))
        sums.append(list(unnoised))
    for reduced in sums[1:]:
        for (a, clip), (b, _) in zip(sums[0], reduced, strict=True):
            assert float((a - b).norm()) <= clip * (1 + 1e-6)


def cancelling_network(seed: int) -> nn.Module:
    """Returns a hostile server's network: its second layer subtracts channels that instance norm
    made equal, so that its features are rounding errors times 1e9."""
    net = build_model(ModelSettings(width=8, depth=2), SPEC.image_shape, 10, 0)
    rng = torch.Generator().manual_seed(seed)
    first, second = net.features[0], net.features[4]
    with torch.no_grad():
        first.weight[0::2] = 1e6 * torch.randn(4, 1, 3, 3, generator=rng)
        first.weight[1::2] = 3 * first.weight[0::2]
        half = 1e9 * torch.randn(8, 4, 3, 3, generator=rng)
        second.weight[:, 0::2] = half
        second.weight[:, 1::2] = -half
        net.classifier.weight.mul_(1e4)
        for layer in (first, second, net.classifier):
            layer.bias.zero_()
    return net


def cancelling_weight(z_Nd: Tensor) -> Tensor:
    """Returns a hostile server's weights ±10⁹·w, with w orthogonal to the known rows."""
    turns, _ = torch.linalg.qr(z_Nd.double().T, mode="complete")
    weight = torch.zeros(10, z_Nd.shape[1])
    weight[0] = (1e9 * turns[:, -1]).float()
    weight[1] = -weight[0]
    return weight


Rows = Callable[[Tensor, Tensor], Tensor]


def row_functions() -> Iterator[tuple[str, Rows]]:
    """Yields networks and mechanisms as (images [N], labels [N]) -> rows [N, D]."""
    hostile = cancelling_network(3)
    start = torch.randn(10, 2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        features = NetworkFeatures(hostile.requires_grad_(False), 1.0, None, dtype)
        yield f"features {dtype}", lambda x, y, f=features: f.real(x, y)
        yield f"gradient {dtype}", lambda x, y, f=features: per_example_gradients(f, start, x, y)
        yield (  # for 32 records, backward passes take four vectors, above one
            f"gradient of two classes {dtype}",
            lambda x, y, f=features: per_example_gradients(f, start[:2], x, y % 2),
        )
    norms = {
        "resnet8": "group",
        "convnet": "instance",
        "cnn1": "group",
        "cnn2": "group",
        "cnn3": "group",
    }
    for name in ("linear", "lenet5", "cnn1", "cnn2", "cnn3", "resnet8", "convnet"):
        settings = ModelSettings(name=name, width=8, depth=2, norm=norms.get(name, ""))
        network = build_model(settings, (1, 28, 28), 10, 0)
        yield f"forward {name}", lambda x, y, n=network: n(enlarged(x)).detach()
        yield f"dp-sgd {name}", lambda x, y, n=network: example_gradients(n, enlarged(x), y)
    unet = build_model(ModelSettings("unet", width=2, norm="group"), (1, 16, 16), 2, 0)
    twice = nn.Upsample((16, 16))

    def masked(x: Tensor, y: Tensor) -> Tensor:
        masks = (twice(x)[:, 0] > 0.1 * y[:, None, None]).long()
        return example_gradients(unet, twice(x), masks, network_losses)

    yield "dp-sgd unet", masked
    yield "dp-sgd hostile", lambda x, y: example_gradients(cancelling_network(3), x, y)


def feature_row_functions() -> Iterator[tuple[str, Rows]]:
    """Yields functions of pixels [N, 1, 28, 28] that go through a feature map."""
    mapping = feature_map(MAPS[1], MNIST.image_shape)
    draws = torch.Generator().manual_seed(1)
    weight = 1e6 * torch.randn(10, mapping.dimension, generator=draws)
    linear, hidden = OnFeatures(mapping, MNIST), OnFeatures(mapping, MNIST, hidden=33)
    roots = [tuple(1e4 * torch.randn(n, n, generator=draws) for n in b) for b in mapping.blocks]

    def step(x: Tensor, y: Tensor) -> Tensor:
        z = embedded(mapping(x), torch.zeros(mapping.dimension), mapping.radius)
        return step_rows(z, 0 * y, weight, 0.7).column

    yield "map", lambda x, y: feature_map(MAPS[0], MNIST.image_shape)(x)
    yield "step", step
    yield "whitened", lambda x, y: embedded(mapping(x), 0.0, mapping.radius, roots)
    yield "linear", lambda x, y: example_gradients(linear, linear.vectors(mapping(x)), 0 * y)
    yield "mlp", lambda x, y: hidden.from_features(mapping(x)).detach()


def check_bits_depend_only_on_record(name: str, rows: Rows, x: Tensor, y: Tensor) -> None:
    """Moves records within a pass, and replaces their neighbours by others or zeros."""
    length = len(x) // 2
    first = rows(x[:length], y[:length])
    assert torch.isfinite(first).all(), name
    for shift in (1, 3):
        moved = rows(x[:length].roll(shift, 0), y[:length].roll(shift, 0)).roll(-shift, 0)
        assert torch.equal(first, moved), name
    replaced = [torch.cat([tensor[:2], tensor[length : 2 * length - 2]]) for tensor in (x, y)]
    assert torch.equal(first[:2], rows(*replaced)[:2]), name
    padded_rows = rows(padded(x[:1], length), padded(y[:1], length))
    assert torch.equal(first[:1], padded_rows[:1]), name


def test_row_bits_depend_only_on_record() -> None:
    """Not on GPUs, which only the trial before a run covers: on an H100, gradients of `cnn2` depend
    on the position."""
    data = digits(np.arange(64) % 10)
    for name, rows in row_functions():
        check_bits_depend_only_on_record(name, rows, normalise(data.images, SPEC), data.labels)


def test_feature_row_bits_depend_only_on_record() -> None:
    """Regression: products of 9, 81, 729 or 1233 numbers were not padded."""
    images = torch.rand(24, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for name, rows in feature_row_functions():
        check_bits_depend_only_on_record(name, rows, images, torch.arange(24))
    hidden = OnFeatures(feature_map(MAPS[0], MNIST.image_shape), MNIST, hidden=33)
    assert type(hidden.hidden) is type(hidden.classifier) is PaddedLinear


def influence(
    sums: Sums, method: Method, parameters: Any, context: RoundContext, data: ImageData, row: int
) -> float:
    """Returns how much a record changes the sums of a step with these parameters, in clips."""
    indices = torch.arange(len(data))
    sums.clear()
    for kept_indices in (indices, indices[indices != row]):
        private_step(method, parameters, context, data, kept_indices)
    (full, clip), (without, _) = sums
    return float((full - without).norm()) / clip


@pytest.mark.parametrize("mechanism", ["residual", "gradient", "dp-sgd"])
@pytest.mark.parametrize(("records", "position"), [(1, "first"), (129, "first"), (513, "last")])
def test_influence_under_hostile_weights_is_at_most_clip(
    mechanism: str, records: int, position: str, device: torch.device, unnoised: Sums
) -> None:
    """The clip is small enough that every row reaches it."""
    data = digits(np.arange(records + 1) % 10, device=device)
    method: Method = FedDM(ipc=1, iterations=1, radius=0.0)
    mechanism_settings = {"mechanism": mechanism}
    if mechanism == "dp-sgd":
        method, mechanism_settings = FedAvg(local_steps=1), {}
    privacy = PrivacySettings(noise_multiplier=3.0, sample_rate=1.0, clip=1.0, **mechanism_settings)
    network = cancelling_network(records).to(device)
    context = round_context(privacy, network=network, device=device, nominal=287.6)
    removed = 0 if position == "first" else records
    assert influence(unnoised, method, network.state_dict(), context, data, removed) <= 1 + 1e-6


@pytest.mark.parametrize("mechanism", ["residual", "gradient", "dp-sgd"])
def test_isolated_records_have_no_influence_on_moving_kernels(
    mechanism: str, unnoised: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitates a processor that sums every other row differently, as an AMD EPYC did in products of
    1,233 numbers. With full passes a record then has an influence of several clips."""

    def moving(compute: Any) -> Any:
        def computed(*args: Any, **kwargs: Any) -> Tensor:
            rows = compute(*args, **kwargs)
            rows[1::2] *= -1.0
            return rows

        return computed

    monkeypatch.setattr(ExampleGradients, "__call__", moving(ExampleGradients.__call__))
    monkeypatch.setattr(NetworkFeatures, "real", moving(NetworkFeatures.real))
    method: Method = FedDM(ipc=1, iterations=1, radius=0.0)
    mechanism_settings = {"mechanism": mechanism}
    if mechanism == "dp-sgd":
        method, mechanism_settings = FedAvg(local_steps=1), {}
    privacy = PrivacySettings(noise_multiplier=3.0, sample_rate=1.0, clip=1.0, **mechanism_settings)
    data = digits(np.arange(65) % 10)
    context = round_context(privacy, network=cancelling_network(3), nominal=60.0)
    weights, influences = context.architecture.state_dict(), []
    for isolated in (False, True):
        ctx = replace(context, isolated=isolated)
        influences.append(influence(unnoised, method, weights, ctx, data, 0))
    assert influences[0] > 2
    assert influences[1] <= 1 + 1e-6


@pytest.mark.parametrize("case", METHODS, ids=str)
def test_isolated_steps_release_the_same_sums(case: Case, unnoised: Sums) -> None:
    sums = []
    for isolated in (False, True):
        unnoised.clear()
        step_of(case, 30.0, isolated=isolated)(digits(np.arange(30) % 10), torch.arange(30))
        sums.append(list(unnoised))
    for (full, clip), (single, _) in zip(*sums, strict=True):
        assert float((full - single).norm()) < 1e-3 * clip


FEDAVG = FedAvg(local_steps=1, lr=1.0, momentum=0.0)


def feature_context(network: nn.Module, spec: Any, number: int = 1, **values: Any) -> RoundContext:
    values = values or {"sample_rate": 1.0, "clip": 0.5}
    privacy = PrivacySettings(noise_multiplier=3.0, **values)
    return RoundContext(number, 0, CPU, spec, network, 200.0, privacy, clients=1, rounds=16)


def random_images(count: int, height: int = 28, width: int = 28) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 1, height, width)).astype(np.uint8)


@pytest.mark.parametrize("method", [FEDAVG, FedStats(features=MAPS[1])])
def test_influence_on_features_is_at_most_clip(method: Method, unnoised: Sums) -> None:
    """The server knows 130 records, more than the length of a pass."""
    images = random_images(131)
    features = feature_map(MAPS[1], MNIST.image_shape)
    network: nn.Module = build_network(ModelSettings(features=MAPS[1]), MNIST, 0)
    context = feature_context(network, MNIST)
    if isinstance(method, FedStats):
        network = method.network(MNIST)
        context = feature_context(network, MNIST, 2, clip=None)
    known_features = features(torch.from_numpy(images[1:]).float() / 255)
    z = embedded(known_features, torch.zeros(features.dimension), features.radius)
    parameters = context.architecture.state_dict() | {"classifier.weight": cancelling_weight(z)}
    data = from_arrays(images, np.full(131, 5), MNIST)
    assert influence(unnoised, method, parameters, context, data, 0) <= 1 + 1e-6


@pytest.mark.parametrize("users", [None, torch.tensor([0, 0, 0, 1, 2, 2, 3])])
def test_sums_on_masks_equal_a_loop_over_images(users: Tensor | None, unnoised: Sums) -> None:
    """A broken version computes the Dice coefficient over all pixels of a batch, as public codes do."""
    rng = np.random.default_rng(0)
    masks = torch.from_numpy(rng.integers(0, 2, (7, 32, 32)))
    data = from_arrays(random_images(7, 32, 32), masks.numpy())
    network = build_network(ModelSettings("unet", width=2, norm="group"), data.spec, 0)
    context = feature_context(network, data.spec)
    gradients = []
    for x, mask in zip(normalise(data.images, data.spec)[:, None], masks[:, None], strict=True):
        loss = losses(network(x), mask).sum()
        parts = torch.autograd.grad(loss, list(network.parameters()))
        gradients.append(torch.cat(list(map(torch.flatten, parts))))
    rows = torch.stack(gradients)
    if users is not None:
        rows = torch.stack([rows[users == user].mean(dim=0) for user in range(4)])
    factors = (0.5 / rows.norm(dim=1, keepdim=True)).clamp_max(1)
    assert (factors < 1).any()
    private_step(FEDAVG, network.state_dict(), context, data, users=users)
    ((sums, clip),) = unnoised
    torch.testing.assert_close(sums[0].float(), (rows * factors).sum(dim=0), rtol=1e-4, atol=1e-5)
    if users is None:
        assert clip == 0.5
        assert influence(unnoised, FEDAVG, network.state_dict(), context, data, 0) <= 1 + 1e-6


@pytest.mark.parametrize(("height", "width"), [(9, 9), (27, 27), (9, 10)])
def test_influence_on_linear_model_is_at_most_clip(height: int, width: int, unnoised: Sums) -> None:
    """Regression: without padding a record moved the sums by three to five clips."""
    spec = replace(MNIST, height=height, width=width)
    images = random_images(51, height, width)
    network = build_network(ModelSettings(name="linear"), spec, 0)
    z = network.embed(normalise(torch.from_numpy(images[1:]), spec))  # type: ignore[operator]
    weight = cancelling_weight(z[:, : height * width])
    weight = nn.functional.pad(weight, (0, z.shape[1] - height * width))
    parameters = {"classifier.weight": weight, "classifier.bias": torch.zeros(10)}
    data = from_arrays(images, np.full(51, 5), spec)
    context = feature_context(network, spec)
    assert influence(unnoised, FEDAVG, parameters, context, data, 0) <= 1 + 1e-6


def hostile_map(shape: tuple[int, int, int]) -> FeatureMap:
    """Returns a feature map with huge, infinite or undefined values for some images."""

    def function(x: Tensor) -> Tensor:
        flat = x.flatten(1) - 0.5
        kind = (255 * x[:, 0, 0, 0]).round()[:, None]
        for number, factor in ((1, 1e30), (2, float("inf")), (3, float("nan"))):
            flat = torch.where(kind == number, factor * flat, flat)
        return flat

    return replace(feature_map("pixels", shape), name="own-hostile", function=function)


register_features("own-hostile", hostile_map)
KINDS = [np.where(np.arange(64).reshape(1, 1, 8, 8) == 0, kind, HOSTILE[2]) for kind in (1, 2, 3)]


def image_influence(
    sums: Sums, model: str, features: str, image: np.ndarray, label: int, scale: float
) -> float:
    network = build_network(ModelSettings(model, 5, features=features), SPEC, 0)
    parameters = {name: scale * value for name, value in network.state_dict().items()}
    data = digits([*range(10), 0, 1, label], image)
    context = feature_context(network, SPEC, sample_rate=1.0, clip=0.05)
    return influence(sums, FEDAVG, parameters, context, data, 12)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_influence_of_hostile_images_is_bounded(model: str, scale: float, unnoised: Sums) -> None:
    """Covers feature values of 1e30, infinity and NaN, and large weights."""
    for image, label in itertools.product((*HOSTILE, *KINDS), range(0, 10, 3)):
        change = image_influence(unnoised, model, "own-hostile", image, label, scale)
        assert change <= 1 + 1e-6, (image, label)


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_influence_exceeds_clip_without_clipping(
    model: str, unnoised: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0.8 < image_influence(unnoised, model, "pixels", HOSTILE[1], 3, 1.0) < 1 + 1e-6
    ones = torch.ones
    monkeypatch.setattr(LayerGradients, "_factors", lambda self, blocks: ones(len(self)).double())
    assert image_influence(unnoised, model, "pixels", HOSTILE[1], 3, 1.0) > 10


# -------------------------------------------------------------------------- from end to end


START = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
ONE_STEP = FedDM(ipc=2, iterations=1, image_lr=1.0, min_examples=1)
ONE_EPOCH = FedAvg(local_epochs=1, batch=100, lr=0.1, momentum=0.0)


@pytest.mark.parametrize(
    ("method", "privacy", "client_state"),
    [
        *((ONE_STEP, {"mechanism": name}, {"images": START}) for name in ("residual", "gradient")),
        (ONE_EPOCH, {}, {}),
    ],
)
def test_updates_are_divided_by_nominal_size(
    method: Method, privacy: Any, client_state: Any
) -> None:
    """Compares an exact client with a private one at 4 times its size."""
    data = digits(np.arange(60) % 10)
    settings = PrivacySettings(noise_multiplier=1e-12, clip=1e6, sample_rate=1.0, **privacy)
    results = []
    for ctx in (round_context(None, nominal=240.0), round_context(settings, nominal=240.0)):
        clients: Group = ExactClientView([0], data, [torch.arange(60)])
        if ctx.privacy is not None:
            clients = private_clients(method, ctx, data)
        weights = ctx.architecture.state_dict()
        (upload,) = client_uploads(method, ctx, clients, [client_state])
        arrays = dict(upload.arrays())
        start = client_state or {f"parameters.{name}": value for name, value in weights.items()}
        results.append(torch.cat([(arrays[name] - start[name]).flatten() for name in start]))
    exact, private = results
    torch.testing.assert_close(private, exact * 60 / 240, atol=1e-5, rtol=1e-3)


def private_run(method: str = "feddm", **privacy: Any) -> Any:
    """Returns the settings of a run with empty clients, and 200 records."""
    condensation = {"iterations": 2, "ipc": 1, "server_epochs": 1, "batch": 3}
    training = {"local_epochs": 1, "batch": 100}
    sections = {
        "run": {"method": method, "rounds": 2, "device": "cpu"},
        "partition": {"kind": "dirichlet-plain", "clients": 4, "alpha": 0.01, "seed": 9},
        "model": {"width": 4},
        "method": condensation if method == "feddm" else training,
        "privacy": {"noise_multiplier": 3.0, **privacy},
    }
    return resolve(sections), digits(np.arange(200) % 10)


def test_executed_releases_match_charges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken versions would skip empty clients, miscount steps, derive q from len(train) or use one
    key for all clients of a run."""
    draws: list[tuple[int, Tensor]] = []
    original, view = SecretGenerator.normal, Mock(wraps=PrivateClientView)

    def spy(self: SecretGenerator, *args: Any) -> Tensor:
        noise = original(self, *args)
        if self.is_secret:  # not of the trial
            draws.append((id(self), noise.flatten() / noise.std()))
        return noise

    monkeypatch.setattr(SecretGenerator, "normal", spy)
    monkeypatch.setattr(in_process, "PrivateClientView", view)
    for method, steps, rate, privacy in (
        ("feddm", 2, 30 / 100, {"nominal_size": 100}),
        ("feddm", 2 + 1, 1.0, {"mechanism": "features"}),  # two networks, and the counts
        ("fedavg", 4, 100 / 359.5, {}),
        ("fedfm", 4 + 2, 100 / 359.5, {}),  # and the anchors' sums and counts
    ):
        draws.clear()
        view.reset_mock()
        run_settings, data = private_run(method, **privacy)
        parts = partition(data.labels.numpy(), run_settings.resolved_partition, 10)
        assert min(map(len, parts)) == 0
        report: Any = simulate(run_settings, data=(data, data)).privacy
        assert len(draws) == 4 * 2 * steps
        assert rate in [pytest.approx(row["sample_rate"]) for row in report["ledger"]]
        nominal_sizes = {call.kwargs["nominal_size"] for call in view.call_args_list}
        assert nominal_sizes == {privacy.get("nominal_size", 359.5)}
        assert len({key for key, _ in draws}) == 4
        wide = torch.stack([noise for _, noise in draws if len(noise) > 200][:32])
        correlations = torch.corrcoef(wide) - torch.eye(len(wide))
        assert correlations.abs().max() < 0.4  # of 260 numbers: 5 deviations are 0.31


def test_private_runs_write_only_public_values(tmp_path: Path) -> None:
    """A broken version would log clean losses, counts or timings."""
    run_settings, data = private_run()
    folder = folder_of(simulate(run_settings, data=(data, data), output=tmp_path))
    rows = read_rows(folder)
    assert {key for row in rows for key in row} == {
        "round", "test_accuracy", "epsilon", "upload_floats", "upload_bytes", "client_upload_bytes",
        *MEASURES,
    }  # fmt: skip
    # equal, also for empty clients
    assert {tuple(row["client_upload_bytes"]) for row in rows} == {(10 * (64 * 4 + 8),) * 4}
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == {
        "method", "dataset", "rounds", "test_accuracy", "upload_bytes", "upload_floats_per_round", "device", "seed",
        "differential_privacy", "folder", "settings", *MEASURES, "confusion_matrix",
    }  # fmt: skip
    texts = [p for p in folder.rglob("*") if p.suffix in (".json", ".jsonl", ".md", ".toml")]
    outside = [p for p in texts if "simulation_only" not in p.parts]
    assert len(outside) == 10
    start = json.loads((folder / "privacy_start.json").read_text())
    assert set(start) == {
        *("schema_version", "noise_multiplier", "data_set", "test_images", "ledgers"),
        *(
            "simulated",
            "warnings",
            "run",
            "charge_id",
            "selected",
        ),  # known before the data are read
    }
    # the true number of records, as a number and not inside a hash or a fraction
    count = re.compile(r"(?<![\w.])200(?![\w.])")
    assert not any(count.search(p.read_text().replace(str(tmp_path), "")) for p in outside)


def test_numbers_of_requests_are_checked() -> None:
    arrays = [("a", torch.full((9,), 2.0)), ("b", torch.full((16,), 2.0)), ("n", torch.tensor([7]))]
    check_numbers(arrays, 10.0)  # sqrt(36 + 64)
    with raises(RequestRefusedError, "request.norm"):
        check_numbers(arrays, 9.99)
    with raises(RequestRefusedError, "request.norm"):  # no overflow
        check_numbers([("a", torch.full((2,), 3.4e38))], 1e38)
    for value in (float("nan"), float("inf")):
        with raises(RequestRefusedError, "request.finite"):
            check_numbers([("parameters.w", torch.tensor([1.0, value]))], None)
    with raises(RequestRefusedError, "request.finite"):
        check_numbers(ModelParameters({}, float("nan")).numbers(), None)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("epsilon", {"epsilon": "8"}),
        ("max_request_norm", {"noise_multiplier": 1.0, "max_request_norm": 0.0}),
        ("clip", {"epsilon": 1.0, "clip": float("inf")}),
        ("sample_rate", {"epsilon": 1.0, "sample_rate": 0.0}),
        ("unit", {"epsilon": 1.0, "unit": "user"}),  # the number of users is missing
        ("mechanism", {"epsilon": 1.0, "mechanism": "paper"}),  # no guarantee, so no ε
        ("ledger", {"epsilon": 1.0, "ledger": "a\0b"}),
        ("ledger", {"epsilon": 1.0, "ledger": "\ud800"}),
        ("ledger", {"epsilon": 1.0, "ledger": "~nobody-of-that-name/ledgers"}),
        ("epsilon", {"epsilon": True}),
        ("noise_multiplier", {}),  # or a budget
    ],
)
def test_invalid_privacy_settings_are_named(key: str, values: dict[str, Any]) -> None:
    with pytest.raises(PrivacySettingError) as caught:
        PrivacySettings(**values)
    assert (caught.value.section, caught.value.key) == ("privacy", key)
    assert "\n" not in str(caught.value)


def test_ledger_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert PrivacySettings(epsilon=1.0, ledger="kept").ledger_folder == tmp_path / "kept"
    assert PrivacySettings(epsilon=1.0, ledger=NO_LEDGER).ledger_folder is None


@pytest.mark.parametrize("drop", [False, True])
def test_control_variates_of_private_stragglers_have_their_charged_steps(drop: bool) -> None:
    """In round 1, Δc_k·K_k·η = x − y. A broken version would divide by the steps of all epochs. A
    straggler that is dropped sends its model, with weight 0, and is charged too."""
    own = {"local_epochs": 4, "lr": 0.5, "stragglers": 0.67, "drop_stragglers": drop}
    sections = {"run": {"method": "scaffold", "rounds": 1}, "partition": {"clients": 3}}
    model, privacy = {"name": "linear"}, {"noise_multiplier": 3.0}
    settings = resolve({**sections, "method": own, "model": model, "privacy": privacy})
    result: Any = simulate(settings, quiet=True)
    x = build_network(settings.model, dataset_spec("digits"), settings.seed).state_dict()
    steps = {name: row["steps"] for row in result.privacy["ledger"] for name in row["clients"]}
    assert len(set(steps.values())) > 1
    late = settings.method.straggler_epochs(round_context(clients=3))  # type: ignore[attr-defined]
    for client, upload in result.uploads.items():
        assert upload.weight == (0.0 if drop and client in late else 1.0)
        for name, change in upload.control_change.items():
            moved = change * steps[f"client-{client:03d}"] * 0.5
            torch.testing.assert_close(moved, x[name] - upload.parameters[name], atol=1e-5, rtol=0)
