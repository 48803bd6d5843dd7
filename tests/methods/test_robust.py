"""Robust aggregation: rules against NumPy, refusals, and the memory of averaging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedsynth import FedAvg, PartitionSettings, RunSettings, resolve, simulate
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fednova import NormalisedModel
from fedsynth.methods.scaffold import ControlState, ControlUp, Scaffold
from fedsynth.methods.shared import aggregation as robust
from tests.digits import round_context
from tests.quick_runs import by_family, quick_sections

FloatArray = npt.NDArray[np.float64]


def context_with(rule: str, network: Any, clients: int = 5, share: float = 0.2) -> RoundContext:
    return round_context(network=network, clients=clients, robust=rule, robust_share=share)


def random_uploads(network: nn.Module, count: int, seed: int = 0) -> dict[int, ModelParameters]:
    """Returns clients' networks near this one, with weights that rules must ignore."""
    draws = torch.Generator().manual_seed(seed)
    uploads = {}
    for client in range(count):
        parameters = {
            name: value + torch.randn(value.shape, generator=draws)
            if value.is_floating_point()
            else value + 10 * (client + 1)
            for name, value in network.state_dict().items()
        }
        uploads[client] = ModelParameters(parameters, 10.0**client)
    return uploads


def expected_aggregate(rule: str, rows: FloatArray, center: FloatArray, percent: int) -> FloatArray:
    if rule == "median":
        return np.asarray(np.median(rows, axis=0))
    if rule == "trimmed":
        cut = min((len(rows) - 1) // 2, -(-percent * len(rows) // 100))
        return np.asarray(np.sort(rows, axis=0)[cut : len(rows) - cut].mean(axis=0))
    offsets = rows - center
    norms = np.sqrt((offsets**2).sum(axis=1))
    scales = np.minimum(1, np.median(norms) / norms)
    return np.asarray(center + (offsets * scales[:, None]).mean(axis=0))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(0, 9), st.integers(0, 49))
def test_robust_rules_equal_numpy(count: int, seed: int, percent: int) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    uploads, start = random_uploads(network, count, seed), network.state_dict()
    trained = [name for name, _ in network.named_parameters()]

    def flat(parameters: Mapping[str, Tensor], names: Sequence[str]) -> FloatArray:
        return np.concatenate([parameters[n].double().numpy().ravel() for n in names])

    for rule in ("median", "trimmed", "clip"):
        context = context_with(rule, network, share=percent / 100)
        with patch.object(robust, "BLOCK", 2 * count if seed % 2 else robust.BLOCK):
            aggregated = robust.robust_uploads(uploads, start, context)
        assert list(aggregated) == list(uploads)
        assert all(u is aggregated[0] for u in aggregated.values())
        assert aggregated[0].weight == 1.0
        buffer_rule = "median" if rule == "clip" else rule
        for names, kind in ((trained, rule), (["1.running_mean", "1.running_var"], buffer_rule)):
            rows = np.stack([flat(u.parameters, names) for u in uploads.values()])
            expected = expected_aggregate(kind, rows, flat(start, names), percent)
            actual = flat(aggregated[0].parameters, names)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        assert int(aggregated[0].parameters["1.num_batches_tracked"]) == 10 * ((count - 1) // 2 + 1)


def test_exact_share_of_clients_is_not_rounded_up() -> None:
    """0.07 · 100 is 7.000000000000001, of which the ceiling would be 8."""
    rows = torch.arange(100.0).square()
    uploads = {k: ModelParameters({"weight": row.view(1, 1)}, 1.0) for k, row in enumerate(rows)}
    context = context_with("trimmed", nn.Linear(1, 1), clients=100, share=0.07)
    aggregated = robust.robust_uploads(uploads, {"weight": torch.zeros(1, 1)}, context)
    assert float(aggregated[0].parameters["weight"]) == pytest.approx(float(rows[7:93].mean()))


def test_rules_apply_to_all_parts_of_uploads() -> None:
    network = nn.Linear(2, 1)
    start = network.state_dict()
    control = [torch.full((1, 2), x) for x in (1.0, 2.0, 3.0, 4.0, 1e9)]
    uploads = {
        k: ControlUp(start, 1.0, {"weight": c, "bias": torch.zeros(1)})
        for k, c in enumerate(control)
    }
    context = context_with("median", network)
    assert robust.robust_uploads(uploads, start, context)[4].control["weight"].tolist() == [
        [3.0, 3.0]
    ]
    state = Scaffold().server_step(ControlState(start), uploads, context)
    assert isinstance(state, ControlState)
    assert state.control["weight"].tolist() == [[3.0, 3.0]]  # 5 of 5 clients: their rule's mean
    norms = {k: NormalisedModel(start, 1.0, norm) for k, norm in enumerate((1.0, 2.0, 1e9))}
    assert robust.robust_uploads(norms, start, context)[0].norm == 2.0
    models, all_models = random_uploads(network, 5), robust.AveragingState(start)
    for name, value in robust.update_cache(all_models, all_models, models, context).overall.items():
        values = np.stack([u.parameters[name].double().numpy() for u in models.values()])
        np.testing.assert_allclose(value.numpy(), np.median(values, axis=0), rtol=1e-5)


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.bytes = max(self.bytes, out.nbytes)
        return out


def test_averaging_needs_memory_of_one_tensor() -> None:
    """Stacking fifty uploads would need fifty times the memory."""
    network = nn.Linear(20, 10)
    network.register_buffer("batches", torch.tensor(3))
    uploads = {k: replace(u, weight=k + 1.0) for k, u in random_uploads(network, 50).items()}
    with _LargestTensor() as largest:
        averaged = robust.average(uploads)
    assert largest.bytes == 8 * 200  # in float64
    assert averaged["batches"] == uploads[0].parameters["batches"]
    shares = np.arange(1, 51) / np.arange(1, 51).sum()
    values = np.stack([u.parameters["weight"].double().numpy() for u in uploads.values()])
    np.testing.assert_allclose(averaged["weight"], np.tensordot(shares, values, 1), rtol=1e-6)
    start = robust.AveragingState(network.state_dict())
    with _LargestTensor() as largest:
        robust.update_cache(start, start, uploads, context_with("none", network, clients=50))
    assert largest.bytes == 4 * 50 * 200  # the cache itself, in its precision


@pytest.mark.parametrize("name", by_family(METHODS))
def test_methods_support_or_refuse_robust_rules(name: str) -> None:
    sections = quick_sections(name, run={"rounds": 1, "robust": "clip"})
    if method_class(name).robust_refusal:
        with pytest.raises(SettingError, match=rf"run.robust must be .none. with {name}"):
            resolve(sections)
        return
    result = simulate(resolve(sections))
    assert all(bool(torch.isfinite(p).all()) for p in result.model.parameters())


def test_invalid_robust_settings_are_rejected() -> None:
    clients = {"participation": 0.2, "partition": PartitionSettings(clients=10)}
    for values, message in (
        ({"robust": "median", **clients}, r"run\.robust needs at least 3 clients.*got 2"),
        ({"robust": "trimmed", "robust_share": 0.5}, r"run\.robust_share"),
        ({"robust": "medain"}, "did you mean median"),
    ):
        with pytest.raises((SettingError, UnknownNameError), match=message):
            RunSettings(FedAvg(), **values)
