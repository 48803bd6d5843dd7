"""The ConvNet: the papers' parameter counts, shapes, initialisation."""

from __future__ import annotations

import pytest
import torch

from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.models.convnet import WIDE, ConvNet, InstanceNorm
from fedsynth.models.flat import FlatNetwork, flatten, load_flat
from fedsynth.models.registry import ModelSettings, build_model, parameter_count


@pytest.mark.parametrize(
    ("shape", "classes", "count"),
    [((1, 28, 28), 10, 317_706), ((3, 32, 32), 10, 320_010), ((3, 32, 32), 100, 504_420)],
)
def test_parameter_counts_are_those_of_feddm_table_3(
    shape: tuple[int, int, int], classes: int, count: int
) -> None:
    assert parameter_count(build_model(ModelSettings(), shape, classes, seed=0)) == count


def test_parameter_count_of_the_batch_norm_convnet_at_64_pixels() -> None:
    """FedAF's 381,450 for 10 classes at 64×64."""
    assert (
        parameter_count(build_model(ModelSettings(norm="batch"), (3, 64, 64), 10, seed=0))
        == 381_450
    )


def test_logits_are_the_classifier_of_the_embedding() -> None:
    net = ConvNet((1, 28, 28), 10, width=8)
    x = torch.randn(5, 1, 28, 28)
    assert net.embed(x).shape == (5, net.embedding_size) == (5, 8 * 4 * 4)
    torch.testing.assert_close(net(x), net.classifier(net.embed(x)))


def test_instance_norm_ignores_the_rest_of_the_batch() -> None:
    net = ConvNet((3, 32, 32), 10, width=8)
    x = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(net(x)[:1], net(x[:1]), atol=1e-5, rtol=1e-4)


def test_the_seed_decides_and_the_global_generator_is_untouched() -> None:
    before = torch.get_rng_state()
    a, b, c = (
        flatten(build_model(ModelSettings(width=8), (1, 8, 8), 10, seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_bad_architectures_are_one_clear_line() -> None:
    with pytest.raises(SettingError, match="depth=4 halves a 8×8 image to nothing"):
        ConvNet((1, 8, 8), 10, depth=4)
    with pytest.raises(SettingError, match="at least 1"):
        ConvNet((1, 8, 8), 10, width=0)
    with pytest.raises(UnknownNameError, match="did you mean batch"):
        ConvNet((1, 8, 8), 10, norm="bach")
    with pytest.raises(UnknownNameError, match="convnet"):
        build_model(ModelSettings(name="convnett"), (1, 8, 8), 10, 0)


def test_flat_network_is_a_view() -> None:
    model = ConvNet((1, 8, 8), 10, width=4, depth=1)
    network = FlatNetwork(model, requires_grad=True)
    network.flat.zero_()
    assert all((p == 0).all() for p in network.module.parameters())
    assert any((p != 0).any() for p in model.parameters())
    network.module(torch.randn(2, 1, 8, 8)).sum().backward()
    assert network.grad.abs().sum() > 0
    load_flat(model, torch.ones_like(network.flat))
    assert all((p == 1).all() for p in model.parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("channels", [8, WIDE])
def test_fast_instance_norm_is_group_norm(
    dtype: torch.dtype, tolerance: float, offset: float, channels: int
) -> None:
    """Also where the mean is far from zero, where E[x²] − E[x]² would cancel."""
    norm = InstanceNorm(channels)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, channels))
        norm.bias.copy_(torch.linspace(0, 1, channels))
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, channels, 16, 16, generator=generator) + offset).to(dtype)
    expected = torch.nn.functional.group_norm(x.float(), channels, norm.weight, norm.bias)
    with torch.no_grad():
        fast = norm.to(dtype)(x.to(memory_format=torch.channels_last))
    assert fast.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(fast.float(), expected, atol=tolerance, rtol=tolerance)
    if channels < WIDE:  # in float32 but for the weights, and rounded once at the end
        weight = norm.weight.float()
        bias = norm.bias.float()
        exact = torch.nn.functional.group_norm(x.float(), channels, weight, bias).to(dtype)
        torch.testing.assert_close(fast.float(), exact.float(), atol=1e-4, rtol=0.008)
