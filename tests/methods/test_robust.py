"""Robust aggregation: each rule against a few lines of NumPy, what liars can move, and who refuses.

Plain averaging is here too: what it holds beside the uploads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from fedsynth.methods.shared.aggregation import (
    AveragingState,
    average,
    middle_mean,
    robust_uploads,
    update_cache,
)
from tests.digits import round_context
from tests.families import by_family

FloatArray = npt.NDArray[np.float64]


def context_with(
    rule: str, network: nn.Module, clients: int = 5, share: float = 0.2
) -> RoundContext:
    rules = {"robust": rule, "robust_share": share}
    return round_context(network=network, nominal=100.0, clients=clients, **rules)


def network_with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def uploads_of(network: nn.Module, count: int, seed: int = 0) -> dict[int, ModelParameters]:
    """Networks near this one, as clients send them, with weights that no rule may look at."""
    draws = torch.Generator().manual_seed(seed)
    made = {}
    for client in range(count):
        parameters = {
            name: value + torch.randn(value.shape, generator=draws)
            if value.is_floating_point()
            else value + 10 * (client + 1)
            for name, value in network.state_dict().items()
        }
        made[client] = ModelParameters(parameters, 10.0**client)
    return made


def oracle(rule: str, rows: FloatArray, center: FloatArray, percent: int) -> FloatArray:
    """Of rows [m, P]; `clip` is of their norms about `center`, the others by coordinates."""
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
def test_the_rules_are_numpys(count: int, seed: int, percent: int) -> None:
    network = network_with_batch_norm()
    sent = uploads_of(network, count, seed)
    trained = [name for name, _ in network.named_parameters()]

    def flat(parameters: Mapping[str, Tensor], names: Sequence[str]) -> FloatArray:
        return np.concatenate([parameters[n].double().numpy().ravel() for n in names])

    for rule in ("median", "trimmed", "clip"):
        context = context_with(rule, network, share=percent / 100)
        made = robust_uploads(sent, network.state_dict(), context)
        assert list(made) == list(sent)
        assert all(u is made[0] for u in made.values())
        assert made[0].weight == 1.0
        of_buffers = "median" if rule == "clip" else rule
        for names, kind in ((trained, rule), (["1.running_mean", "1.running_var"], of_buffers)):
            rows = np.stack([flat(u.parameters, names) for u in sent.values()])
            expected = oracle(kind, rows, flat(network.state_dict(), names), percent)
            actual = flat(made[0].parameters, names)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        assert int(made[0].parameters["1.num_batches_tracked"]) == 10 * ((count - 1) // 2 + 1)


def test_a_share_of_clients_that_is_whole_is_not_rounded_up() -> None:
    """0.07 · 100 is 7.000000000000001, of which the ceiling would be 8."""
    network = nn.Linear(1, 1)
    rows = torch.arange(100.0).square()
    sent = {k: ModelParameters({"weight": row.view(1, 1)}, 1.0) for k, row in enumerate(rows)}
    context = context_with("trimmed", network, clients=100, share=0.07)
    made = robust_uploads(sent, {"weight": torch.zeros(1, 1)}, context)
    assert float(made[0].parameters["weight"]) == pytest.approx(float(rows[7:93].mean()))


def test_sorting_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(1)))
    complete = middle_mean(rows, 1)
    monkeypatch.setattr(robust, "BLOCK", 11)  # two columns at a time
    assert torch.equal(middle_mean(rows, 1), complete)


@pytest.mark.parametrize("rule", ["median", "trimmed", "clip"])
def test_a_malicious_fifth_keeps_coordinates_in_the_honest_range(rule: str) -> None:
    network = network_with_batch_norm()
    before = network.state_dict()
    sent = uploads_of(network, 10)
    honest = {k: u for k, u in sent.items() if k > 1}
    for k in (0, 1):
        lie = {n: v * -10000 for n, v in sent[k].parameters.items()}
        sent[k] = replace(sent[k], parameters=lie, weight=1e9)
    made = robust_uploads(sent, before, context_with(rule, network))[0].parameters
    trained = [name for name, _ in network.named_parameters()]
    for name, value in made.items():
        each = torch.stack([u.parameters[name] for u in honest.values()])
        if rule != "clip" or name not in trained:
            assert bool(((each.amin(0) <= value) & (value <= each.amax(0))).all()), name

    def moved(parameters: Mapping[str, Tensor]) -> float:
        return sum(float((parameters[n] - before[n]).square().sum()) for n in trained)

    assert moved(made) <= max(moved(u.parameters) for u in honest.values())


def test_what_else_is_sent_goes_by_the_rule_too() -> None:
    """SCAFFOLD's controls around zero, FedNova's norms by their median; no weight is believed."""
    network = nn.Linear(2, 1)
    before = network.state_dict()
    control = [torch.full((1, 2), x) for x in (1.0, 2.0, 3.0, 4.0, 1e9)]
    sent = {
        k: ControlUp(before, 1.0, {"weight": c, "bias": torch.zeros(1)})
        for k, c in enumerate(control)
    }
    context = context_with("median", network)
    assert robust_uploads(sent, before, context)[4].control["weight"].tolist() == [[3.0, 3.0]]
    state = Scaffold().server_step(ControlState(before), sent, context)
    assert isinstance(state, ControlState)
    assert state.control["weight"].tolist() == [[3.0, 3.0]]  # 5 of 5 clients: their rule's mean
    norms = {k: NormalisedModel(before, 1.0, norm) for k, norm in enumerate((1.0, 2.0, 1e9))}
    assert robust_uploads(norms, before, context)[0].norm == 2.0


def test_the_average_of_all_last_models_goes_by_the_rule() -> None:
    network = nn.Linear(2, 1)
    before = AveragingState(network.state_dict())
    sent = uploads_of(network, 5)
    sent[0] = replace(sent[0], parameters={n: v * 1e6 for n, v in sent[0].parameters.items()})
    overall = update_cache(before, before, sent, context_with("median", network)).overall
    for name, value in overall.items():
        each = np.stack([u.parameters[name].double().numpy() for u in sent.values()])
        np.testing.assert_allclose(value.numpy(), np.median(each, axis=0), rtol=1e-5)


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.bytes = max(self.bytes, out.nbytes)
        return out


def test_averaging_holds_no_more_than_one_tensor_of_one_upload() -> None:
    """Stacked, fifty uploads would make tensors of fifty times as many numbers."""
    network = nn.Linear(20, 10)
    network.register_buffer("batches", torch.tensor(3))
    sent = {k: replace(u, weight=k + 1.0) for k, u in uploads_of(network, 50).items()}
    with _Largest() as largest:
        made = average(sent)
    assert largest.bytes == 8 * 200  # in float64
    assert made["batches"] == sent[0].parameters["batches"]
    shares = np.arange(1, 51) / np.arange(1, 51).sum()
    each = np.stack([u.parameters["weight"].double().numpy() for u in sent.values()])
    np.testing.assert_allclose(made["weight"], np.tensordot(shares, each, 1), rtol=1e-6)
    start = AveragingState(network.state_dict())
    with _Largest() as largest:
        update_cache(start, start, sent, context_with("none", network, clients=50))
    assert largest.bytes == 4 * 50 * 200  # the cache itself, in its precision


@pytest.mark.parametrize("name", by_family(METHODS))
def test_every_method_runs_with_a_rule_or_refuses_it(name: str) -> None:
    sections: dict[str, dict[str, Any]] = {
        "run": {"method": name, "rounds": 1, "robust": "clip"},
        "partition": {"clients": 3, "alpha": 10.0},
        "model": {"width": 4, "depth": 2, **({"norm": "batch"} if name == "fedbn" else {})},
    }
    if method_class(name).robust_refusal:
        with pytest.raises(SettingError, match=rf"run.robust must be none with {name}"):
            resolve(sections)
        return
    result = simulate(resolve({**sections, "method": {"local_steps": 2, "batch": 64}}))
    assert all(bool(torch.isfinite(p).all()) for p in result.model.parameters())


def test_the_settings() -> None:
    method = FedAvg()
    clients = PartitionSettings(clients=10)
    with pytest.raises(SettingError, match=r"run\.robust needs at least 3 clients.*got 2"):
        RunSettings(method, robust="median", participation=0.2, partition=clients)
    with pytest.raises(SettingError, match=r"run\.robust_share"):
        RunSettings(method, robust="trimmed", robust_share=0.5)
    with pytest.raises(UnknownNameError, match="did you mean median"):
        RunSettings(method, robust="medain")
