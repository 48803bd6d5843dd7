"""The LSTM for tokens and time series: torch's LSTM, and the gradients of single examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.layers import DPLSTM
from torch import nn

from fedsynth.data.registry import custom_spec, dataset_spec
from fedsynth.errors import SettingError
from fedsynth.models.registry import ModelSettings, build_model, build_network, parameter_count
from fedsynth.models.text import Lstm
from fedsynth.privacy import dpsgd
from tests.privacy.test_dpsgd import loop_gradients
from tests.raising import raises

SPEC = custom_spec("tokens", (1, 1, 9), "abcd", source="a test", vocabulary=11)


def twin_of(network: Any, kind: type[Any] = nn.LSTM) -> Any:
    """Returns torch's LSTM, or another of the same form, with the weights of a network."""
    first, width = network.layers[0].inputs, network.embedding_size
    lstm = kind(first.in_features, width, 2, batch_first=True)
    for number, layer in enumerate(network.layers):
        values = layer.inputs.weight, layer.recurrent.weight, layer.inputs.bias
        names = "weight_ih", "weight_hh", "bias_ih"
        state = {f"{name}_l{number}": v for name, v in zip(names, values, strict=True)}
        state[f"bias_hh_l{number}"] = torch.zeros_like(layer.inputs.bias)
        lstm.load_state_dict(state, strict=False)
    return lstm


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(11, (6, 1, 1, 9), generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize(
    ("name", "width", "parameters"),
    [
        # 80·8 + (8 + 256 + 1)·1024 + (256 + 256 + 1)·1024 + (256 + 1)·80
        ("shakespeare", 256, 817_872),
        ("shakespeare", 100, 132_720),
        # (300 + 256 + 1)·1024 + (256 + 256 + 1)·1024 + (256 + 1)·2
        ("sent140-glove", 256, 1_096_194),
        # 10,000·100 + 2·(100 + 100 + 1)·400 + (100 + 1)·2
        ("sent140", 100, 1_161_002),
    ],
)
def test_sizes_are_those_of_the_papers(name: str, width: int, parameters: int) -> None:
    spec = dataset_spec(name)
    model = build_network(ModelSettings("lstm", width=width), spec, 0)
    assert parameter_count(model) == parameters
    assert model(torch.zeros(2, *spec.image_shape)).shape == (2, spec.classes)


@pytest.mark.parametrize("vocabulary", [11, 0])
def test_cells_equal_torchs_lstm(
    vocabulary: int, tokens: torch.Tensor, device: torch.device
) -> None:
    """With and without a watched layer, which determines whether the cells are computed one by one."""
    shape = (1, 1, 9) if vocabulary else (3, 1, 9)
    model = Lstm(shape, 4, 7, vocabulary).to(device)
    x = (tokens if vocabulary else torch.rand(6, *shape)).to(device)
    sequence = x[:, :, 0].transpose(1, 2)
    if vocabulary:
        sequence = model.embedding(x.flatten(1).long())
    expected = twin_of(model).to(device)(sequence)[0][:, -1]
    torch.testing.assert_close(model.embed(x), expected, atol=1e-6, rtol=0)
    calls: list[Any] = []
    for layer in model.layers:
        layer.recurrent.register_forward_hook(lambda *call: calls.append(call))  # type: ignore[union-attr]
    torch.testing.assert_close(model.embed(x), expected, atol=1e-6, rtol=0)
    assert len(calls) == 2 * 9


def test_any_numbers_are_tokens() -> None:
    model = Lstm((1, 1, 9), 4, 7, 11)
    x = torch.tensor([-1e30, -1, 0.4, 10.4, 11, 1e30, float("nan"), float("inf"), 3.0])
    assert torch.isfinite(model(x.expand(2, 1, 1, 9))).all()


def test_example_gradients_equal_those_of_single_records(
    tokens: torch.Tensor, device: torch.device
) -> None:
    """And those of Opacus' LSTM."""
    model: Any = build_model(ModelSettings("lstm", width=5), SPEC, 4, 0).to(device)
    x, y = tokens.to(device), torch.arange(6, device=device) % 4
    rows = dpsgd.example_gradients(model, x, y)
    torch.testing.assert_close(rows, loop_gradients(model, x, y), atol=1e-6, rtol=0)
    dpsgd.check_example_gradients(model, x, y)
    opacus = GradSampleModule(twin_of(model, DPLSTM).to(device), loss_reduction="sum")
    sequence = model.embedding(x.flatten(1).long()).detach().requires_grad_()
    logits = model.classifier(opacus(sequence)[0][:, -1])
    nn.functional.cross_entropy(logits, y, reduction="sum").backward()
    expected = {name: p.grad_sample for name, p in opacus.named_parameters()}
    parts = rows.split([p.numel() for p in model.parameters()], dim=1)
    named = dict(zip(dict(model.named_parameters()), parts, strict=True))
    for number in range(2):
        for ours, theirs in (("inputs", "ih"), ("recurrent", "hh")):
            gradient = named[f"layers.{number}.{ours}.weight"]
            sample = next(
                g for n, g in expected.items() if n.endswith(f"weight_{theirs}_l{number}")
            )
            torch.testing.assert_close(gradient, sample.flatten(1), atol=1e-6, rtol=0)


def test_networks_and_records_must_fit() -> None:
    for settings, spec, code in (
        (ModelSettings("mlp"), SPEC, "model.name"),
        (ModelSettings("linear", features="pixels"), SPEC, "model.name"),
        (ModelSettings("lstm"), dataset_spec("digits"), "model.name"),
        (ModelSettings("lstm"), dataset_spec("synthetic(1,1)"), "model.name"),
    ):
        with raises(SettingError, code):
            build_network(settings, spec, 0)
