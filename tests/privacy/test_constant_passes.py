"""A record moves no other's row, not by one bit: passes have a public length, and rows do not
depend on where they stand in one.

Rounding alone would be harmless, were it not for a server that sends weights under which all but
the rounding cancels. So two things are held here: which shapes reach the kernels does not depend on
how many records there are, and at one shape a row's bits depend on its own record alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedsynth.core.charging import charge_for
from fedsynth.core.client import PrivateClients
from fedsynth.core.context import RoundContext
from fedsynth.data.images import ImageData, from_arrays, normalise
from fedsynth.data.registry import dataset_spec
from fedsynth.federation.terms.resolve import resolve
from fedsynth.methods import method_class
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.dpsgd import example_gradients
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums, Released
from fedsynth.privacy.passes import padded, pass_length, power_of_two
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.loop import NetworkFeatures
from fedsynth.synthesizer.condensation.matchers import per_example_gradients

SPEC = dataset_spec("digits")
KERNELS = ("convolution", "mm", "bmm", "addmm", "baddbmm", "einsum", "norm", "pool", "softmax")


def digits(records: int, device: torch.device | str = "cpu") -> ImageData:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (records, 1, 8, 8)).astype(np.uint8)
    return from_arrays(images, np.arange(records) % 10, SPEC).to(torch.device(device))


def cancelling(seed: int) -> nn.Module:
    """Weights of a hostile server: the second layer subtracts channels that instance norm has made
    equal, so that features are what rounding left over, times 1e9."""
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


# ------------------------------------------------------------------------------------ lengths


@given(st.floats(0, 1e7), st.floats(1e-3, 1e5), st.integers(1, 5000))
def test_lengths_are_powers_of_two_within_what_memory_allows(
    expected: float, start: float, most: int
) -> None:
    length = pass_length(expected, start, most)
    assert length & (length - 1) == 0
    assert 1 <= length <= most
    assert pass_length(None, start, most) == power_of_two(most) > most / 2


def test_the_length_is_about_what_costs_least() -> None:
    """Brute force over all powers of two, with a last pass that is half empty."""
    for expected, start in ((256, 4.0), (3000, 0.5), (3000, 64.0), (32, 20.0)):
        cost = {p: expected / p * start + p / 2 for p in (2**k for k in range(12))}
        assert cost[pass_length(expected, start, 2048)] < 1.25 * min(cost.values())


def test_rows_are_filled_up_and_full_passes_stay() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert padded(rows, 3) is rows
    assert padded(rows, 5, fill=-1)[3:].tolist() == [[-1, -1]] * 2
    assert padded(rows[:0], 2).shape == (2, 2)


# ----------------------------------------------------------- what reaches the kernels, whole steps


class Shapes(TorchDispatchMode):
    """All (kernel, shapes) that floats below float64 go through; float64 is the mechanism's own sum
    of rows that are clipped already."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
        floats = [t for t in tensors if t.is_floating_point() and t.dtype != torch.float64]
        if floats and any(word in str(func) for word in KERNELS):
            self.seen.add((str(func), *(tuple(t.shape) for t in floats)))
        return func(*args, **(kwargs or {}))


STEPS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("feddm", {"iterations": 2, "ipc": 2}, {"mechanism": "residual"}),
    ("feddm", {"iterations": 2, "ipc": 2}, {"mechanism": "gradient"}),
    ("feddm", {"iterations": 2, "ipc": 2, "networks": 2}, {"mechanism": "features"}),
    ("fedaf", {"iterations": 2, "ipc": 2}, {}),
    ("fedavg", {"local_steps": 2}, {}),
    ("fedfm", {"local_steps": 1, "weight": 0.5}, {}),
    ("fedfm-lite", {"local_steps": 1, "weight": 0.5}, {}),
    ("moon", {"local_steps": 1}, {}),
    ("fedgen", {"local_steps": 1}, {}),
    ("fedgkd", {"local_steps": 1}, {}),
    ("scaffold", {"local_steps": 1}, {}),
]


@pytest.mark.parametrize(("name", "values", "privacy"), STEPS, ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_kernels_shape_depends_on_the_number_of_records(
    name: str, values: dict[str, Any], privacy: dict[str, Any], precision: str
) -> None:
    """20, 70 and 75 records at rate 1: their last passes differ in length, unless they are filled
    up, and all of them, if the length were found from the true number."""
    if precision != "float32" and name != "feddm":
        pytest.skip("of private steps only condensation's real pass has a reduced precision")
    data = digits(80)
    network = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    method = method_class(name).from_mapping(values)
    settings = PrivacySettings(noise_multiplier=1.0, sample_rate=1.0, **privacy)
    context = RoundContext(
        1, 0, torch.device("cpu"), SPEC, network, 72.0, settings,
        precision=getattr(torch, precision),
    )  # fmt: skip
    message = method.broadcast(method.initial_state(network.state_dict()), context)
    seen = []
    for records in (20, 70, 75):
        guard, secret = Guard(Ledger("0"), 1e-5, None), SecretGenerator()
        charged = charge_for(method, context, [0], [guard], [secret])
        clients = PrivateClients([0], data, [torch.arange(records)], charged, nominal_size=72.0)
        with Shapes() as shapes:
            method.client_step(message, clients, [{}], context)
        seen.append(shapes.seen)
    assert seen[0]
    assert seen[0] == seen[1] == seen[2]


def test_the_engine_tells_clients_the_public_size_and_not_the_true_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fedsynth.federation.simulation import simulate

    said = []
    init = PrivateClients.__init__
    monkeypatch.setattr(
        PrivateClients,
        "__init__",
        lambda self, *a, **k: said.append(k.get("nominal_size")) or init(self, *a, **k),
    )
    settings = resolve(
        {"run": {"method": "fedavg", "rounds": 1}, "method": {"local_steps": 1},
         "privacy": {"noise_multiplier": 3.0, "nominal_size": 100}}
    )  # fmt: skip
    simulate(settings)
    assert said
    assert set(said) == {100.0}


# ----------------------------------------------------------- a row's bits, at one shape


def row_functions(device: torch.device) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    """Each network and mechanism as (images [N], labels [N]) -> rows [N, D]; with the hostile
    weights, and with ordinary ones."""
    hostile = cancelling(3).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        features = NetworkFeatures(hostile.requires_grad_(False), 1.0, None, dtype)
        yield f"features {dtype}", lambda x, y, f=features: f.real(x, y)
        start = torch.randn(10, 2, 1, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
        yield (
            f"gradient {dtype}",
            lambda x, y, f=features, s=start: per_example_gradients(f, s, x, y),
        )
        yield (  # of 32 records, four vectors go back together; above it is one
            f"gradient of two classes {dtype}",
            lambda x, y, f=features, s=start[:2]: per_example_gradients(f, s, x, y % 2),
        )
    norms = {"resnet8": "group", "convnet": "instance", "cnn1": "group", "cnn2": "group"}
    for name in ("linear", "lenet5", "cnn1", "cnn2", "resnet8", "convnet"):
        settings = ModelSettings(name=name, width=8, depth=2, norm=norms.get(name, ""))
        network = build_model(settings, (1, 28, 28), 10, 0).to(device)
        yield f"forward {name}", lambda x, y, n=network: n(enlarged(x)).detach()
        yield f"dp-sgd {name}", lambda x, y, n=network: example_gradients(n, enlarged(x), y)
    yield "dp-sgd hostile", lambda x, y: example_gradients(cancelling(3).to(device), x, y)


def enlarged(x: Tensor) -> Tensor:
    return nn.functional.interpolate(x, size=(28, 28))


@pytest.mark.parametrize("length", [8, 32])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_rows_bits_depend_on_its_own_record_alone(length: int, device: str) -> None:
    """Every record is moved through the pass, and its neighbours are exchanged or are zeros: the
    same bits."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    data = digits(3 * length, device)
    x = normalise(data.images, SPEC)
    y = data.labels
    checked = 0
    for name, rows in row_functions(torch.device(device)):
        first = rows(x[:length], y[:length])
        assert torch.isfinite(first).all(), name
        for shift in (1, 3, length - 1):
            moved = rows(x[:length].roll(shift, 0), y[:length].roll(shift, 0)).roll(-shift, 0)
            assert torch.equal(first, moved), name
        others = torch.cat([x[:2], x[length : 2 * length - 2]])
        labels = torch.cat([y[:2], y[length : 2 * length - 2]])
        assert torch.equal(first[:2], rows(others, labels)[:2]), name
        alone = rows(padded(x[:1], length), padded(y[:1], length))
        assert torch.equal(first[:1], alone[:1]), name
        checked += 1
    assert checked == 19


@pytest.mark.parametrize("mechanism", ["residual", "gradient", "dp-sgd"])
@pytest.mark.parametrize("records", [1, 129, 513])
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_hostile_weights_do_not_let_a_record_move_others(
    mechanism: str, records: int, place: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Un-noised sums with and without one record, at a clip that all rows reach: they differ by one
    clip at most."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    data = digits(records + 1, device)
    name = "fedavg" if mechanism == "dp-sgd" else "feddm"
    values = {"local_steps": 1} if name == "fedavg" else {"ipc": 1, "iterations": 1, "radius": 0.0}
    method = method_class(name).from_mapping(values)
    privacy = PrivacySettings(
        noise_multiplier=3.0, sample_rate=1.0, clip=1.0,
        mechanism=None if name == "fedavg" else mechanism,
    )  # fmt: skip
    network = cancelling(records)
    context = RoundContext(1, 0, torch.device(device), SPEC, network, 287.6, privacy)
    message = method.broadcast(method.initial_state(network.to(device).state_dict()), context)
    sums: list[Tensor] = []

    def release(self: GaussianSums) -> Released:
        assert self._sums is not None
        sums.append(self._sums.clone().cpu())
        self._sums, self.steps_left = None, self.steps_left - 1
        return Released(torch.zeros_like(sums[0], dtype=torch.float32, device=device))

    monkeypatch.setattr(GaussianSums, "release", release)
    everyone = torch.arange(records + 1)
    for part in (everyone, everyone[1:] if place == "first" else everyone[:-1]):
        guard = Guard(Ledger("0"), 1e-5, None)
        charged = charge_for(method, context, [0], [guard], [SecretGenerator()])
        clients = PrivateClients([0], data, [part], charged, nominal_size=287.6)
        method.client_step(message, clients, [{}], context)
    assert len(sums) == 2
    assert float((sums[0] - sums[1]).norm()) <= 1 + 1e-9
