"""The warning where rows depend on their place on this machine: of what the method's clients
compute, and of nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsynth import simulate
from fedsynth.data.registry import dataset_spec
from fedsynth.federation.exchange import places
from fedsynth.federation.exchange.places import lengths, place_warnings
from fedsynth.federation.terms.public_context import public_context
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.methods import method_class
from fedsynth.methods.shared import client_training
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.passes import power_of_two
from fedsynth.rows_alone import moves_with_place
from fedsynth.synthesizer.condensation.loop import NetworkFeatures
from tests.small import small_settings

WORDS = "depend on its place"
CPU = torch.device("cpu")


def settings(
    method: str, dataset: str = "digits", private: bool = True, **model: Any
) -> RunSettings:
    given: dict[str, Any] = {
        "run": {"method": method, "rounds": 2},
        "method": {} if method == "fedstats" else small_settings(method),
        "model": model,
        "partition": {"clients": 2},
    }
    privacy = {"privacy": {"noise_multiplier": 1.0}} if private else {}
    return replace(resolve({**given, **privacy}), dataset=dataset)


def warned(run: RunSettings) -> list[str]:
    context = public_context(run, dataset_spec(run.dataset), CPU)
    return place_warnings(run, context, [context.architecture])


def by_place(images: Tensor) -> Tensor:
    """Rows of a machine whose kernels take every other one in another order."""
    found = images.flatten(1)[:, :3].clone()
    found[1::2] *= 1 + 2**-20
    return found


@pytest.mark.parametrize(("private", "times"), [(True, 1), (False, 0)])
def test_a_private_run_says_so_and_an_open_one_has_nothing_to_lose(
    private: bool, times: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client_training, "example_gradients", lambda network, x, y: by_place(x))
    run = settings("fedavg", private=private, width=8, depth=2)
    simulate(run)
    assert capsys.readouterr().err.count(WORDS) == times


@pytest.mark.parametrize("method", ["feddm", "fedaf", "fedsum", "fedavg", "fedstats"])
@pytest.mark.parametrize("moving", ["gradients", "features", "nothing"])
def test_what_the_methods_clients_compute_is_what_is_tried(
    method: str, moving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a try of the plain forward pass, which is no client's: condensing methods sum
    features of channels-last passes, methods that train gradients, FedStats factors of them."""
    if moving == "gradients":
        monkeypatch.setattr(client_training, "example_gradients", lambda network, x, y: by_place(x))
    if moving == "features":
        monkeypatch.setattr(NetworkFeatures, "real", lambda self, x, segment: by_place(x))
    mine = {"fedavg": "gradients", "fedstats": "factors"}.get(method, "features")
    assert len(warned(settings(method, width=8, depth=2))) == (moving == mine)


def test_of_a_mechanism_without_a_guarantee_there_is_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NetworkFeatures, "real", lambda self, x, segment: by_place(x))
    given = {"run": {"method": "feddm"}, "method": small_settings("feddm")}
    run = resolve({**given, "privacy": {"noise_multiplier": 1.0, "mechanism": "paper"}})
    assert not warned(run)


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
@pytest.mark.parametrize(
    ("method", "model"),
    [("fedstats", {}), ("fedavg", {"features": "whitened-scattering", "name": "linear"})],
)
def test_models_on_features_are_tried_as_they_are_summed(
    method: str, model: dict[str, Any], dataset: str
) -> None:
    """Catches a try of their plain forward pass, whose width is no multiple of 16: a warning with
    each run."""
    assert not warned(settings(method, dataset, **model))


@pytest.mark.parametrize("width", [8, 13])
def test_the_try_agrees_with_a_longer_one(width: int) -> None:
    """Of shifts by each number of places. On some machines 13 is warned of, on others it need not
    be."""
    run = settings("feddm", "mnist", width=width, depth=1)
    context = public_context(run, dataset_spec("mnist"), CPU)
    network = context.architecture.requires_grad_(False)
    x = torch.randn(32, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    labels = torch.zeros(32, dtype=torch.int64)
    features = NetworkFeatures(network, 1.0, None)
    first = features.real(x, labels)
    moved = any(
        not torch.equal(first, features.real(x.roll(k, 0), labels).roll(-k, 0)) for k in range(32)
    )
    assert bool(warned(run)) == moved
    if width == 8:
        assert not moved


def test_each_kind_of_network_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a try of the run's own network alone, where clients have others."""
    run = settings("dense", name="linear")
    context = public_context(run, dataset_spec("digits"), CPU)
    tried: list[str] = []

    def gradients(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        tried.append(type(network).__name__)
        return by_place(x) if type(network).__name__ == "Wide" else x.flatten(1)

    class Wide(nn.Linear):
        """Another network."""

    monkeypatch.setattr(client_training, "example_gradients", gradients)
    plain = context.architecture
    assert not place_warnings(run, context, [plain, plain])
    once = len(tried)
    assert place_warnings(run, context, [plain, plain, Wide(4, 2)])
    assert once < len(tried) <= 3 * once


def test_a_try_that_fails_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> bool:
        raise RuntimeError("out of memory\nin a kernel")

    monkeypatch.setattr(places, "moves_with_place", fails)
    simulate(settings("fedavg", width=8, depth=2))
    assert "could not be tried: out of memory\n" in capsys.readouterr().err


def test_large_networks_are_tried_in_short_passes() -> None:
    """As their gradients are made: 11 million numbers each."""
    large = build_model(ModelSettings(name="resnet18", norm="group"), (3, 32, 32), 10, 0)
    assert all(power_of_two(one) == one <= 12 for one in lengths(large))
    assert lengths(nn.Linear(4, 2)) == [8, 32]


@pytest.mark.parametrize("name", ["linear", "convnet"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_even_sides_and_widths_of_eight_are_safe_here(name: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shape = (1, 28, 28)
    network = build_model(ModelSettings(name=name, width=8, depth=2), shape, 10, 0).to(device)
    run = settings("fedavg", "mnist")
    assert run.privacy is not None
    context = public_context(run, dataset_spec("mnist"), torch.device(device))
    [rows] = method_class("fedavg")().private_rows(network, run.privacy, context)
    assert not moves_with_place(rows, shape, torch.device(device), 32)


def test_a_difference_of_the_last_bit_or_by_the_others_is_seen() -> None:
    shape = (1, 4, 4)
    assert moves_with_place(by_place, shape, CPU, 8)
    assert not moves_with_place(lambda x: x.flatten(1), shape, CPU, 8)

    def by_others(images: Tensor) -> Tensor:
        """Which no shift shows."""
        rows = images.flatten(1)
        return rows + 2**-20 * rows.amax()

    assert moves_with_place(by_others, shape, CPU, 8)
