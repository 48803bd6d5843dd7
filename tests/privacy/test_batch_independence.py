"""Tests of user code that mixes examples of a batch: it is rejected before a private run opens a
ledger, or named in the report."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth import TrainsLocally, register_model, resolve, simulate
from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.registry import register_features
from fedsynth.methods.shared.client_training import LocalObjective
from fedsynth.privacy.batch_independence import dependence_on_batch
from tests.quick_settings import quick_settings

CPU = torch.device("cpu")
SHAPE = (1, 8, 8)
Mix = Callable[[Tensor], Tensor]
CALLS = {"number": 0}
GENERATOR = torch.Generator().manual_seed(0)


def scaled_by_calls(x: Tensor) -> Tensor:
    CALLS["number"] += 1
    return x * (1 + CALLS["number"] % 3)


def from_index(first: int) -> Mix:
    return lambda x: torch.cat([x[:first], x[first:] - x[first:].mean(0)]) if len(x) > first else x


def unseeded_noise(x: Tensor) -> Tensor:
    return x * float(np.random.default_rng().random())


def noise_by_position(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.default_rng(0).normal(size=tuple(x.shape))).to(x)


DEPENDENT: dict[str, Mix] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "randn_like": lambda x: x + torch.randn_like(x),
    "python's random": lambda x: x * random.random(),
    "numpy's global": lambda x: x * float(np.random.rand()),  # noqa: NPY002
    "fresh generator": unseeded_noise,
    "seeded, by position": noise_by_position,
    "global generator per pass": lambda x: x * torch.rand((), generator=GENERATOR),
    "uninitialised": lambda x: x + torch.empty_like(x) * 0 + torch.empty(x.shape),
    "counter": scaled_by_calls,
    "by position": lambda x: x * (1 + torch.arange(len(x))[:, None] % 3),
    "odd lengths": lambda x: x * 2 if len(x) % 2 else x,
    "long batches": lambda x: x - x.mean(0) if len(x) > 6 else x,
    "from index 6": from_index(6),
    "pairs": lambda x: x + 0.1 * x.roll(2, 0),
    "rank": lambda x: x.sort(0)[0],
    "softmax over examples": lambda x: x.softmax(0),
    "if a maximum is reached": lambda x: x - x.mean(0) if x.max() > 1e6 else x,
    "where a maximum is reached": lambda x: torch.where(x.max() > 1e6, x - x.mean(0), x),
    "small multiple of the mean": lambda x: x + 1e-6 * x.mean(0),
}
INDEPENDENT: dict[str, Mix] = {
    "nothing": lambda x: x,
    "loop": lambda x: torch.stack([row - row.mean() for row in x]),
    "chunks": lambda x: torch.cat([part * 2 for part in x.split(3)]),
    "masked": lambda x: x.masked_fill(x > 0.5, 0.0),
    "inactive dropout": lambda x: F.dropout(x, 0.5, training=False),
    "attention": lambda x: F.scaled_dot_product_attention(*3 * [x.view(-1, 8, 8)]).flatten(1),
}


@pytest.mark.parametrize("name", [*DEPENDENT, *INDEPENDENT])
def test_dependence_on_batch_is_detected(name: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    mix = {**DEPENDENT, **INDEPENDENT}[name]
    finding = dependence_on_batch(lambda x: mix(x.flatten(1)), SHAPE, CPU)
    assert bool(finding) == (name in DEPENDENT)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002


class Net(nn.Module):
    """A hidden layer on pixels that go through `mix` first."""

    mix: ClassVar[Any] = staticmethod(INDEPENDENT["nothing"])

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 16)
        self.classifier = nn.Linear(16, classes)
        self.scale = torch.rand(64, generator=torch.Generator().manual_seed(1))

    def embed(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(self.mix(x.flatten(1)) * self.scale))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(x))
        return logits


class CallCounter(Net):
    """Counts its calls and changes its result after 1000 calls."""

    calls = 0

    def embed(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().embed(x) * (2 if self.calls > 1000 else 1)


def private_run(name: str, tmp_path: Path, **sections: Any) -> Any:
    method_settings = quick_settings(name) if name == "fedsum" else {"local_steps": 2, "batch": 128}
    run_settings = {
        "run": {"method": name, "rounds": 1, "device": "cpu"},
        "partition": {"clients": 2},
        "method": method_settings,
        "privacy": {"noise_multiplier": 3.0},
        **sections,
    }
    return simulate(resolve(run_settings), output=tmp_path, quiet=True)


MODELS = {
    **{name: type("MixedNet", (Net,), {"mix": staticmethod(DEPENDENT[name])}) for name in ("dropout", "pairs")},
    "from index 20": type("MixedNet", (Net,), {"mix": staticmethod(from_index(20))}),
    "call counter": CallCounter,
}  # fmt: skip


@pytest.mark.parametrize(("name", "method"), [*zip(MODELS, ("fedavg", "fedsum") * 2, strict=True)])
def test_dependent_models_are_rejected_before_charging(
    name: str, method: str, tmp_path: Path
) -> None:
    register_model("own-dependent", MODELS[name])
    with pytest.raises(
        SettingError, match=r"model\.name.*(influence of one example is not|cannot be private)"
    ):
        private_run(method, tmp_path, model={"name": "own-dependent"})
    assert not list(tmp_path.iterdir())


def test_inactive_dropout_is_accepted(tmp_path: Path) -> None:
    """FedSum evaluates its networks; DP-SGD trains them."""

    class Dropping(Net):
        def embed(self, x: Tensor) -> Tensor:
            return F.dropout(super().embed(x), 0.5, self.training)

    register_model("own-dropping", Dropping)
    report = private_run("fedsum", tmp_path, model={"name": "own-dropping"}).privacy
    assert report["verdict"]["warnings"] == []
    with pytest.raises(SettingError, match="draws random numbers"):
        private_run("fedavg", tmp_path, model={"name": "own-dropping"})


def losses(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(network(x), y, reduction="none")


METHODS: dict[str, Any] = {
    "mixup": lambda n, x, y: losses(n, (x + x.flip(0)) / 2, y),
    "class sizes": lambda n, x, y: losses(n, x, y) / torch.bincount(y, minlength=10)[y],
    "from index 40": lambda n, x, y: losses(n, x, y) * (1 + (torch.arange(len(x)) > 40)),
}


def run_with_task(task: LocalObjective) -> Any:
    @dataclass(frozen=True)
    class OwnTask(TrainsLocally):
        """Trains with a given loss or penalty."""

        name: ClassVar[str] = "own-task"

        def task(self, client: int, message: Any, memory: Any, context: Any) -> LocalObjective:
            return task

    base = {"run": {"rounds": 1}, "partition": {"clients": 2}, "privacy": {"noise_multiplier": 3}}
    settings = resolve({**base, "model": {"name": "linear"}})
    method = OwnTask(local_steps=1, batch=128)
    return simulate(replace(settings, method=method), quiet=True).privacy


@pytest.mark.parametrize("name", METHODS)
def test_dependent_method_losses_are_rejected(name: str) -> None:
    with pytest.raises(SettingError, match=r"run\.method cannot be private.*the method own-task"):
        run_with_task(LocalObjective(loss=METHODS[name]))


def test_random_penalties_without_data_are_accepted() -> None:
    report = run_with_task(
        LocalObjective(
            loss=lambda n, x, y: losses(n, x, y) + n(x).square().mean(1),
            penalty=lambda n: torch.rand(()) * n.classifier.weight.square().sum(),
        )
    )
    assert report["verdict"]["warnings"] == []
    assert "the method own-task" in report["own_code"]


def test_dependent_feature_maps_are_rejected(tmp_path: Path) -> None:
    def build(shape: tuple[int, int, int]) -> FeatureMap:
        mix = from_index(30)
        return FeatureMap("", shape, 64, 8.0, 4.0, "pixels", lambda x: mix(x.flatten(1)))

    register_features("own-map", build)
    with pytest.raises(SettingError, match="cannot be private, because"):
        private_run("fedavg", tmp_path, model={"features": "own-map"})
    assert not list(tmp_path.iterdir())
